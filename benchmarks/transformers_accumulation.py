"""The loss and the gradient of one step over two micro-batches: by hand, by transformers' Trainer, by ours.

    PYTHONPATH=package .venv/bin/python benchmarks/transformers_accumulation.py

Eight samples of different lengths are one batch by hand and two micro-batches of four for the Trainers. The
optimizer is plain gradient descent with a rate of 1, so that the change of the weights is the gradient.
Prints a table in Markdown.
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.utils.data import DataLoader

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.integrations.transformers.families import model, padded, rows

from drivetrain import OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask

NAMES = {
    "bert, classes": "BERT, sequence classification",
    "bert, tags": "BERT, token classification",
    "bert, masked": "BERT, masked language model",
    "gpt2": "GPT-2",
    "llama": "Llama",
    "t5": "T5",
    "vit": "ViT",
    "whisper": "Whisper",
}
COUNT, SIZE = 8, 4


class Data(torch.utils.data.Dataset):
    """The samples of a family."""

    def __init__(self, family: str) -> None:
        self.samples = rows(family, COUNT)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        return self.samples[index]


def by_hand(net: Any, family: str) -> float:
    """Make the step with one batch."""
    loss = net.train()(**padded(rows(family, COUNT))).loss
    loss.backward()
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.grad is not None:
                parameter -= parameter.grad
    return loss.item()


def by_transformers(net: Any, family: str) -> float:
    """Make the step with transformers' Trainer."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder, max_steps=1, per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=COUNT // SIZE, max_grad_norm=0.0, lr_scheduler_type="constant",
            train_sampling_strategy="sequential", logging_steps=1, save_strategy="no", report_to="none",
            disable_tqdm=True, use_cpu=True,
        )  # fmt: skip
        optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
        trainer = transformers.Trainer(
            net, arguments, train_dataset=Data(family), data_collator=padded, optimizers=(optimizer, None)
        )
        trainer.remove_callback(transformers.PrinterCallback)
        trainer.train()
    return float(trainer.state.log_history[0]["loss"])


def by_ours(net: Any, family: str) -> float:
    """Make the step with our Trainer."""
    data: Any = rows(family, COUNT)
    trainer = Trainer(
        max_steps=1, gradient_accumulation_steps=COUNT // SIZE, checkpoint=False, loggers=(), log_every=1,
        progress_bar=False, strategy="cpu",
    )  # fmt: skip
    task = TransformersTask(net, optimizer=OptimizerConfig("sgd", lr=1.0))
    return trainer.fit(task, DataLoader(data, batch_size=SIZE, collate_fn=padded)).metrics["train/loss"]


def update(make: Callable[[Any, str], float], family: str) -> tuple[float, float]:
    """Return the loss and the norm of the gradient of a step."""
    net = model(family)
    before = [each.detach().clone() for each in net.parameters()]
    loss = make(net, family)
    changes = [old - new.detach() for old, new in zip(before, net.parameters(), strict=True)]
    return loss, torch.cat([each.flatten() for each in changes]).norm().item()


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    print(f"transformers {transformers.__version__}; loss / norm of the gradient, and their ratios\n")
    print("| model | one batch, by hand | transformers' Trainer | | drivetrain | |")
    print("| --- | --- | --- | --- | --- | --- |")
    for family, name in NAMES.items():
        right = update(by_hand, family)
        cells = [f"{right[0]:.6f} / {right[1]:.6f}"]
        for make in (by_transformers, by_ours):
            found = update(make, family)
            ratios = [each / other for each, other in zip(found, right, strict=True)]
            cells += [f"{found[0]:.6f} / {found[1]:.6f}", f"x {ratios[0]:.4f} / {ratios[1]:.4f}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
