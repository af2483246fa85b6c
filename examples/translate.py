"""Translation with a T5: Korean syllables to Latin letters, and what the model writes is compared whole.

    python examples/translate.py --steps 400

The 11,172 syllables and their names are those of Unicode, as Python's `unicodedata` has them.
"""

from __future__ import annotations

import argparse
import random
import unicodedata

import numpy as np
import torch
import transformers
from datasets import Dataset
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from drivetrain import OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask


def syllables() -> list[tuple[str, str]]:
    """Return all pairs, such as (한, han), in a random order."""
    pairs = [(chr(code), unicodedata.name(chr(code)).split()[-1].lower()) for code in range(0xAC00, 0xD7A4)]
    return random.Random(0).sample(pairs, len(pairs))


def letters(pairs: list[tuple[str, str]]) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer of letters, which takes a syllable apart into its two or three."""
    known = sorted(set(unicodedata.normalize("NFD", "".join(text for pair in pairs for text in pair))))
    words = ["<pad>", "</s>", "<unk>", *known]
    tokenizer = Tokenizer(models.WordLevel(dict(zip(words, range(len(words)), strict=True)), "<unk>"))
    tokenizer.normalizer = normalizers.NFD()
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing("$A </s>", special_tokens=[("</s>", 1)])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", unk_token="<unk>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400, help="optimizer steps")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    pairs = syllables()
    tokenizer = letters(pairs)
    samples = [{**tokenizer(source), "labels": tokenizer(target)["input_ids"]} for source, target in pairs]
    train, test = Dataset.from_list(samples[1000:]), Dataset.from_list(samples[:1000])

    def exact(prediction: transformers.EvalPrediction) -> dict[str, float]:
        both = [np.where(each < 0, 0, each) for each in (prediction.predictions, prediction.label_ids)]
        written, right = (tokenizer.batch_decode(each, skip_special_tokens=True) for each in both)
        return {"exact": sum(a == b for a, b in zip(written, right, strict=True)) / len(right)}

    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=len(tokenizer), d_model=64, d_kv=16, d_ff=128, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    task = TransformersTask(
        model,
        optimizer=OptimizerConfig("adamw", lr=3e-3, schedule="cosine", warmup_ratio=0.1),
        compute_metrics=exact,
        generate={"max_new_tokens": 10},
    )
    collate = transformers.DataCollatorForSeq2Seq(tokenizer)
    options = {"checkpoint": False, "loggers": (), "collate": collate, "max_grad_norm": 1.0}
    trainer = Trainer(max_steps=given.steps, batch_size=64, **options, **how)
    trainer.fit(task, train)
    print(f"exactly right of 1,000 syllables: {trainer.validate(task, test)['validation/exact']:.1%}")


if __name__ == "__main__":
    main()
