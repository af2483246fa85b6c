"""Pruning: the smallest weights of the digits model become zero while it trains, step by step.

    python examples/prune.py

The masks are those of `torch.nn.utils.prune`, buffers beside the weights, so checkpoints hold them. The
share of zeros rises by the cubic schedule of Zhu and Gupta, "To prune, or not to prune", 2017.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.nn.utils import prune

from digits import Digits, DigitsData
from drivetrain import Callback, CheckpointConfig, Trainer, rank
from drivetrain.checkpoint import export_weights, load_weights


class Pruned(Digits):
    """The digits model with a mask for the weight of each linear layer, at first all ones."""

    def __init__(self, hidden: int = 256, learning_rate: float = 3e-3):
        super().__init__(hidden, learning_rate)
        for layer in self.layers():
            prune.identity(layer, "weight")  # `weight` becomes `weight_orig`, trained, times `weight_mask`

    def layers(self):
        return [each for each in self.net if isinstance(each, nn.Linear)]


class GradualPruning(Callback):
    """Zeroes the smallest weights of each layer, more of them at each time, until `sparsity` is reached.

    Args:
        sparsity: The share of zeros at the end.
        start: The step from which on weights are zeroed.
        until: The step at which `sparsity` is reached; the weights that are left train on after it.
        every: The number of steps between two changes of the masks.
    """

    def __init__(self, sparsity: float = 0.9, start: int = 100, until: int = 600, every: int = 20):
        self.sparsity, self.start, self.until, self.every = sparsity, start, until, every

    @torch.no_grad()
    def on_step_end(self, run):
        steps = run.progress.steps
        is_due = (steps - self.start) % self.every == 0 or steps == self.until
        if not is_due or not self.start <= steps <= self.until:
            return
        left = (self.until - steps) / (self.until - self.start)
        share = self.sparsity * (1 - left**3)
        for layer in run.task.layers():
            size = run.full_tensor(layer.weight_orig).abs()  # whole, under every strategy
            zeroed = round(share * size.numel())
            smallest = size.flatten().topk(zeroed, largest=False, sorted=False).indices
            layer.weight_mask.fill_(1).view(-1)[smallest] = 0

    def on_log(self, run):
        masks = [layer.weight_mask for layer in run.task.layers()]
        run.log("sparsity", 1 - sum(each.sum() for each in masks) / sum(each.numel() for each in masks))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30, help="epochs of each of the two trainings")
    parser.add_argument("--run-dir", type=Path, help="where the runs go; by default they are deleted")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    if (given.devices or 1) > 1 and given.run_dir is None:
        parser.error("several processes share a folder: give --run-dir")
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    data = DigitsData()
    steps = 38 * given.epochs
    with tempfile.TemporaryDirectory() as temporary:
        runs = given.run_dir or Path(temporary)

        def fit(name: str, task: Digits, *callbacks: Callback) -> Trainer:
            """Train a task, and print its accuracy on the test images."""
            trainer = Trainer(
                max_epochs=given.epochs,
                checkpoint=CheckpointConfig(every=f"{max(1, given.epochs // 4)} epochs"),
                callbacks=callbacks,
                run_dir=runs / name,
                loggers="csv",
                progress_bar=False,
                **how,
            )
            result = trainer.fit(task, data)
            accuracy = trainer.test(task, data)["test/accuracy"]
            print(f"{name:7} sparsity {result.metrics.get('sparsity', 0):.1%}, test accuracy {accuracy:.1%}")
            return trainer

        torch.manual_seed(0)
        fit("dense", Digits(hidden=256, learning_rate=3e-3))
        torch.manual_seed(0)
        fit("pruned", Pruned(), GradualPruning(start=steps // 10, until=steps // 2))

        # For use without masks: multiply them into the weights, and take them away.
        task = Pruned.from_checkpoint(runs / "pruned")
        for layer in task.layers():
            prune.remove(layer, "weight")
        file = runs / f"finished-{rank()}.safetensors"  # each process has its own
        export_weights(task.state_dict(), file)

        finished = Digits(hidden=256)
        finished.load_weights(file)
        accuracy = Trainer(progress_bar=False, **how).test(finished, data)["test/accuracy"]
        weights = load_weights(file)
        zeros = sum(int((each == 0).sum()) for name, each in weights.items() if name.endswith("weight"))
        total = sum(each.numel() for name, each in weights.items() if name.endswith("weight"))
        print(f"loaded  {zeros:,} of {total:,} weights are zero, test accuracy {accuracy:.1%}")


if __name__ == "__main__":
    main()
