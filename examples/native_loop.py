"""A hand-written loop: the engine trains a plain module on the digits, saves it, and resumes from the file.

    python examples/native_loop.py

`Engine` gives device, precision, clipping, resumable data and checkpoints; the loop, the schedule and the
evaluation are written out here. The second half of the training starts only from the checkpoint, and ends
with the same weights as without the interruption.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from digits import DigitsData
from drivetrain import Engine


def build(engine: Engine):
    """Return the digits model, its optimizer, and a schedule that halves the rate every 15 epochs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 10))
    model, optimizer = engine.prepare(net, lambda parameters: torch.optim.AdamW(parameters, lr=3e-3))
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, step_size=15, gamma=0.5)


def train(directory: Path, until: int, resume: Path | None = None, **how) -> Path:
    """Train up to epoch `until`, from the start or from the checkpoint `resume`; return the new one."""
    engine = Engine(seed=0, **how)
    model, optimizer, schedule = build(engine)
    if resume is not None:
        engine.load(str(resume), model=model, optimizer=optimizer, schedule=schedule)
        print(f"resumed at epoch {engine.progress.epoch}, step {engine.progress.steps}")
    digits = DigitsData()
    batches = engine.prepare_data(digits.train_data())
    while engine.progress.epoch < until:
        for batch in batches:  # one epoch; after a load it begins at the checkpoint's position
            loss = F.cross_entropy(model(batch["image"]), batch["label"])
            engine.backward(loss, weight=len(batch["label"]))  # what the loss is a mean over
            engine.step(optimizer, max_grad_norm=1.0)
        schedule.step()
    checkpoint = directory / f"epoch-{engine.progress.epoch}"
    engine.save(str(checkpoint), model=model, optimizer=optimizer, schedule=schedule)
    accuracy = evaluate(engine, model, digits.test_data())
    print(f"epoch {engine.progress.epoch}: last loss {loss.item():.4f}, test accuracy {accuracy:.1%}")
    return checkpoint


@torch.no_grad()
def evaluate(engine: Engine, model: nn.Module, data) -> float:
    """Return the share of digits that the model classifies correctly."""
    model.eval()
    right = count = 0
    for batch in engine.prepare_data(data, training=False):
        right += (model(batch["image"]).argmax(-1) == batch["label"]).sum().item()
        count += len(batch["label"])
    model.train()
    return right / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=60, help="half before and half after the resume")
    parser.add_argument("--run-dir", type=Path, help="for checkpoints; by default they are deleted")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    if (given.devices or 1) > 1 and given.run_dir is None:
        parser.error("several processes share a folder: give --run-dir")
    epochs = given.epochs
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    if epochs < 2:
        parser.error("--epochs must be at least 2: one before and one after the resume")
    with tempfile.TemporaryDirectory() as temporary:
        directory = given.run_dir or Path(temporary)
        half = train(directory, until=epochs // 2, **how)
        train(directory, until=epochs, resume=half, **how)


if __name__ == "__main__":
    main()
