"""What looking for NaN in every step costs: `python benchmarks/nonfinite.py`.

A step of a perceptron under "raise", under "skip", under `LossSpike("skip")` and with `NonFiniteDetector`,
on this machine's first GPU or its CPU. Runs take turns, and the best of each counts.
"""

from __future__ import annotations

import argparse
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import Callback, LossSpike, NonFiniteDetector, OptimizerConfig, Run, TaskModule, Trainer

WARM_UP = 20


class Perceptron(TaskModule):
    """Layers of one width, with batch norm, whose buffers "skip" has to copy."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        blocks = [(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()) for _ in range(layers)]
        self.net = nn.Sequential(*(each for block in blocks for each in block))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch["x"])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=1e-4)


class Clock(Callback):
    """Seconds from the end of the warm-up to the end."""

    def on_step_end(self, run: Run) -> None:
        if run.progress.steps == WARM_UP:
            self.start = self._now(run)

    def on_fit_end(self, run: Run) -> None:
        self.seconds = self._now(run) - self.start

    def _now(self, run: Run) -> float:
        if run.engine.device.type == "cuda":
            torch.cuda.synchronize()
        return perf_counter()


CASES: dict[str, tuple[str, list[type[Callback]]]] = {
    "raise": ("raise", []),
    "skip": ("skip", []),
    "LossSpike('skip')": ("raise", [LossSpike]),
    "NonFiniteDetector": ("raise", [NonFiniteDetector]),
}


def seconds(case: str, width: int, layers: int, batch: int, steps: int) -> float:
    """What a step takes."""
    choice, callbacks = CASES[case]
    clock = Clock()
    spike = {"action": "skip", "sync": True, "threshold": 1e6}
    made = [each(**(spike if each is LossSpike else {})) for each in callbacks]
    trainer = Trainer(
        max_steps=steps + WARM_UP,
        on_nonfinite=choice,
        callbacks=[*made, clock],
        checkpoint=False,
        loggers=(),
        progress_bar=False,
    )
    torch.manual_seed(0)
    trainer.fit(Perceptron(width, layers), [{"x": torch.randn(batch, width)} for _ in range(10)])
    return clock.seconds / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    for width, layers, batch in ((64, 4, 32), (512, 8, 64)):
        best = dict.fromkeys(CASES, float("inf"))
        for _ in range(arguments.rounds):
            for case in CASES:
                best[case] = min(best[case], seconds(case, width, layers, batch, arguments.steps))
        print(f"{layers} layers of {width}, {batch} samples")
        for case, each in best.items():
            print(f"  {case:20} {1e6 * each:9.0f} us  {each / best['raise'] - 1:+.1%}")


if __name__ == "__main__":
    main()
