"""Flow matching: a network learns the way from noise to handwritten digits; an average of its weights draws.

    python examples/digits_flow.py --epochs 100
    python examples/digits_flow.py --run-dir run --strategy ddp --devices 2    # killed; the same goes on

Each image moves on a straight line from noise (Lipman et al., arXiv 2210.02747; Liu et al., arXiv
2209.03003). The network learns the velocity, and Euler's steps along it draw new images.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import CheckpointConfig, OptimizerConfig, TaskModule, Trainer, WeightAverage


class Flow(TaskModule):
    """The velocity of an image of `pixels` at a time between 0, which is noise, and 1, given its label."""

    def __init__(self, pixels: int = 64, classes: int = 10, hidden: int = 256, steps: int = 50):
        super().__init__()
        self.steps = steps
        self.register_buffer("frequencies", 2.0 ** torch.arange(6) * torch.pi)
        self.time, self.label = nn.Linear(12, hidden), nn.Embedding(classes, hidden)
        self.inner, self.middle = nn.Linear(pixels, hidden), nn.Linear(hidden, hidden)
        self.outer = nn.Linear(hidden, pixels)

    def forward(self, image, time, label):
        angles = time[:, None] * self.frequencies
        known = self.time(torch.cat([angles.sin(), angles.cos()], dim=1)) + self.label(label)
        x = F.silu(self.inner(image) + known)
        return self.outer(x + F.silu(self.middle(x) + known))

    def velocity_loss(self, image, noise, time, label):
        """Return the squared error of the velocity on the line from noise to an image."""
        between = time[:, None] * image + (1 - time[:, None]) * noise
        return F.mse_loss(self(between, time, label), image - noise)

    def training_step(self, batch):
        image, label = batch
        time = torch.rand(len(image), device=image.device)
        return self.velocity_loss(image, torch.randn_like(image), time, label)

    validation_step = training_step

    def predict_step(self, label):
        image = torch.randn(len(label), self.outer.out_features, device=label.device)
        for number in range(self.steps):
            time = torch.full((len(label),), number / self.steps, device=label.device)
            image = image + self(image, time, label) / self.steps
        return image

    def configure_optimizers(self):
        return OptimizerConfig("adamw", lr=3e-3, schedule="cosine", warmup_steps=20)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    parser.add_argument("--run-dir", help="where files go; a run there is resumed")
    options = parser.parse_args()

    digits = load_digits()
    images = torch.tensor(digits.data, dtype=torch.float32) / 8 - 1
    labels = torch.tensor(digits.target)
    torch.manual_seed(0)
    task = Flow()
    trainer = Trainer(
        max_epochs=options.epochs,
        batch_size=128 // (options.devices or 1),
        validate_every="10 epochs",
        checkpoint=CheckpointConfig(every="10 epochs"),
        callbacks=[WeightAverage(decay=0.99)],  # validated, saved, and what draws after the fit
        run_dir=options.run_dir,
        strategy=options.strategy,
        devices=options.devices or "auto",
        precision=options.precision,
    )
    train, others = (images[:1500], labels[:1500]), (images[1500:], labels[1500:])
    result = trainer.fit(task, train, others, resume=options.run_dir and "auto")
    wanted = torch.arange(10).repeat(20)
    drawn = trainer.predict(task, DataLoader(wanted, batch_size=100), joined=True).float()
    right = (labels[torch.cdist(drawn, images).argmin(dim=1)] == wanted).float().mean()
    print(f"loss {result.metrics['validation/loss']:.4f}; {right:.1%} of the samples look like their digit")


if __name__ == "__main__":
    main()
