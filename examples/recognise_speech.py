"""Speech recognition with a wav2vec2 and CTC: telephone numbers from the tones of their keys.

    python examples/recognise_speech.py --steps 450

The sound is made here: two sines for each key (ITU-T Q.23), of a random length and loudness, with noise.
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import transformers
from torch.utils.data import Dataset

from drivetrain import OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask

RATE, BLANK = 4000, 10
LOW, HIGH = (697, 770, 852, 941), (1209, 1336, 1477)


class Calls(Dataset):
    """Sounds of four keys, each sample from a random stream of its own."""

    def __init__(self, seed: int, count: int) -> None:
        self.seed, self.count = seed, count
        self.extractor = transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE)

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        random = np.random.default_rng([self.seed, index])
        keys, sound, start = random.integers(0, 10, 4), random.normal(0, 0.1, 1200), 0
        for key in keys:
            row, column = (3, 1) if key == 0 else divmod(key - 1, 3)
            turns = 2 * np.pi * np.arange(random.integers(120, 200)) / RATE
            tone = np.sin(LOW[row] * turns) + np.sin(HIGH[column] * turns)
            start += random.integers(40, 100)
            sound[start : start + len(tone)] += tone * random.uniform(0.5, 1)
            start += len(tone)
        return {"input_values": self.extractor(sound, sampling_rate=RATE).input_values[0], "labels": keys}


def numbers(prediction: transformers.EvalPrediction) -> dict[str, float]:
    """Merge equal neighbours, leave out blanks, and compare with the keys."""
    right = 0
    for row, keys in zip(prediction.predictions, prediction.label_ids, strict=True):
        changes = [key for before, key in zip([BLANK, *row], row, strict=False) if key != before]
        right += [key for key in changes if key != BLANK] == keys.tolist()
    return {"right": right / len(prediction.label_ids)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=450, help="optimizer steps")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    torch.manual_seed(0)
    config = transformers.Wav2Vec2Config(
        vocab_size=11, pad_token_id=BLANK, hidden_size=64, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=128, conv_dim=(64, 64), conv_kernel=(40, 5), conv_stride=(10, 4), layerdrop=0.0,
        num_feat_extract_layers=2, num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4,
        feat_extract_norm="layer", do_stable_layer_norm=True, mask_time_prob=0.0, ctc_loss_reduction="mean",
    )  # fmt: skip
    task = TransformersTask(
        transformers.Wav2Vec2ForCTC(config),
        optimizer=OptimizerConfig("adamw", lr=3e-3, schedule="cosine", warmup_ratio=0.1),
        compute_metrics=numbers,
        preprocess_logits_for_metrics=lambda logits, labels: logits.argmax(-1),
    )
    trainer = Trainer(
        max_steps=given.steps, batch_size=16, max_grad_norm=1.0, checkpoint=False, loggers=(), **how
    )
    trainer.fit(task, Calls(0, given.steps * 16))
    print(f"whole numbers right: {trainer.validate(task, Calls(1, 200))['validation/right']:.1%} of 200")


if __name__ == "__main__":
    main()
