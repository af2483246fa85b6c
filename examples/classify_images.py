"""Image classification with a ViT: scikit-learn's handwritten digits, prepared by an image processor.

python examples/classify_images.py --steps 300
"""

from __future__ import annotations

import argparse

import numpy as np
import torch
import transformers
from sklearn.datasets import load_digits
from torch.utils.data import Dataset

from drivetrain import OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask


class Images(Dataset):
    """A part of the digits; the processor scales each image and normalises it."""

    def __init__(self, indices: np.ndarray, processor: transformers.ViTImageProcessorPil) -> None:
        digits = load_digits()
        self.images, self.labels, self.processor = digits.images[indices], digits.target[indices], processor

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        grey = (self.images[index] * 255 / 16).astype(np.uint8)
        pixels = self.processor(np.stack([grey] * 3, axis=-1), return_tensors="pt").pixel_values[0]
        return {"pixel_values": pixels, "labels": int(self.labels[index])}


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    order = np.random.default_rng(0).permutation(1797)
    size = {"height": 8, "width": 8}
    processor = transformers.ViTImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    train, test = Images(order[:1497], processor), Images(order[1497:], processor)

    torch.manual_seed(0)
    config = transformers.ViTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=128,
        image_size=8, patch_size=2, num_labels=10,
    )  # fmt: skip
    task = TransformersTask(
        transformers.ViTForImageClassification(config),
        processing_class=processor,
        optimizer=OptimizerConfig("adamw", lr=2e-3, weight_decay=0.05, schedule="cosine", warmup_ratio=0.1),
        compute_metrics=accuracy,
    )
    trainer = Trainer(
        max_steps=given.steps, batch_size=64, max_grad_norm=1.0, checkpoint=False, loggers=(), **how
    )
    trainer.fit(task, train)
    print(f"accuracy on 300 other digits: {trainer.test(task, test)['test/accuracy']:.1%}")


if __name__ == "__main__":
    main()
