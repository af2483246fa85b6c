"""The pictures of the report and of a notebook's result: `python docs/site/draw_report.py` writes them.

It searches 200 trials of a small task, which takes minutes, and photographs the pages with Chromium.
It needs the extra "search".
"""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import nn

import drivetrain
from drivetrain.cli.main import main

HOW_TO = Path(__file__).parents[1] / "how-to"
TRIALS = 200
REPORT, RESULT = (1280, 1500), (640, 350)
"""The windows' sizes in pixels."""

NOTEBOOK = """<!doctype html><meta charset="utf-8"><style>
body { margin: 24px; font: 14px system-ui, sans-serif; color: #1f2328 } table { border-collapse: collapse }
td, th { padding: 4px 10px; text-align: right } tr:nth-child(even) { background: #f6f8fa }
pre { padding: 10px 14px; background: #f6f8fa; border: 1px solid #d0d7de; border-radius: 4px }
</style><pre>trainer.fit(task, train, held_out)</pre>"""


class Waves(drivetrain.TaskModule):
    def __init__(self, hidden: int, lr: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))
        self.lr = lr

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)

    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        return nn.functional.mse_loss(outputs, batch["y"])

    def configure_optimizers(self) -> drivetrain.OptimizerConfig:
        return drivetrain.OptimizerConfig("adamw", lr=self.lr, schedule="cosine")


def batches(seed: int, count: int) -> list[dict[str, torch.Tensor]]:
    x = torch.rand(count * 32, 1, generator=torch.Generator().manual_seed(seed)) * 6 - 3
    return [{"x": each, "y": torch.sin(2 * each)} for each in x.split(32)]


def photograph(page: Path, picture: Path, size: tuple[int, int]) -> None:
    """Write the top of a page as a small WebP."""
    chromium = next(filter(None, map(shutil.which, ("chromium", "google-chrome"))), None)
    if chromium is None:
        sys.exit("no chromium")
    shot = page.with_suffix(".png")
    window = [f"--window-size={size[0]},{size[1]}", "--hide-scrollbars", "--virtual-time-budget=4000"]
    options = ["--headless", "--no-sandbox", "--disable-gpu", *window, f"--screenshot={shot}"]
    subprocess.run([chromium, *options, page.resolve().as_uri()], check=True, capture_output=True)
    with Image.open(shot) as image:
        image.convert("RGB").save(picture, quality=70, method=6)
    print(f"{picture}: {picture.stat().st_size // 1000} kB")


def draw() -> None:
    """Write both pictures; the runs are in the current directory."""
    data = (batches(0, 20), batches(1, 4))
    options: dict[str, Any] = {"max_epochs": 8, "log_every": "4 steps", "progress_bar": False}
    drivetrain.Trainer(**options, checkpoint=False, run_dir="runs/warm").fit(Waves(8, 0.01), *data)
    drivetrain.search(
        lambda each: Waves(**each),
        data,
        {"lr": (1e-4, 1e-1, "log"), "hidden": [8, 16, 32, 64]},
        trainer=drivetrain.Trainer(**options, loggers="csv", run_dir="runs/waves"),
        trials=TRIALS,
        sampler="random",
        pruner="median",
    )
    main(["search", "show", "runs/waves", "--html", "report.html"])
    photograph(Path("report.html"), HOW_TO / "report.webp", REPORT)
    result = drivetrain.Trainer(**options, run_dir="runs/one").fit(Waves(32, 0.02), *data)
    cell = Path("cell.html")
    cell.write_text(NOTEBOOK + result._repr_html_(), encoding="utf-8")
    photograph(cell, HOW_TO / "result.webp", RESULT)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        draw()
