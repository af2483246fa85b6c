"""Print the tables of docs/explanation/lightning-numbers.md: modules under Lightning's Trainer and ours.

PYTHONPATH=package:. .venv/bin/python benchmarks/lightning_numbers.py
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from tests.integrations.lightning import modules
from tests.integrations.lightning.equality import EXPLAINED, MODULES, both, differences, weights_of


def _table(header: str, rows: list[list[str]]) -> None:
    columns = header.split("|")
    print(f"\n| {' | '.join(each.strip() for each in columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        print(f"| {' | '.join(row)} |")


def _compared(kind: Any) -> list[str]:
    theirs, ours, logged, found = both(kind, {"max_epochs": 3})
    unequal = differences(logged, found).keys()
    assert unequal <= EXPLAINED.get(kind.__name__, set())
    loss = next(
        name for name in logged if "loss" in name or name == "contrastive" or "reconstruction" in name
    )
    others = [name for name in logged if name.startswith("val")] or [*logged]
    value = next((name for name in others if name != loss), loss)
    largest = (weights_of(theirs) - weights_of(ours)).abs().max()
    cells = [f"{name} {logged[name][-1]:.6f} / {found[name][-1]:.6f}" for name in (loss, value)]
    return [kind.__name__, *cells, f"{largest:.1e}", ", ".join(sorted(unequal)) or "none"]


_OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
    "accumulation 3, whole windows": ({"accumulate_grad_batches": 3}, {"gradient_accumulation_steps": 3}, 24),
    "accumulation 4, short windows": ({"accumulate_grad_batches": 4}, {"gradient_accumulation_steps": 4}, 24),
    "bf16-mixed": ({"precision": "bf16-mixed"}, {"precision": "bf16-mixed"}, 24),
    "clipping": ({"gradient_clip_val": 0.05}, {"max_grad_norm": 0.05}, 24),
}


def _under_options() -> list[list[str]]:
    rows = []
    for name, (their_options, our_options, samples) in _OPTIONS.items():
        modules.loader.__defaults__ = (samples, 0, 4)
        row = [name]
        for kind in (modules.Classifier, modules.Template, modules.OneCycle):
            epochs = {"max_epochs": 3}
            theirs, ours, *_ = both(kind, epochs | their_options, epochs | our_options)
            row.append(f"{(weights_of(theirs) - weights_of(ours)).abs().max():.1e}")
        rows.append(row)
    return rows


def _hooks() -> list[list[str]]:
    limits = {"max_epochs": 1, "limit_train_batches": 4}
    their_options = {**limits, "accumulate_grad_batches": 2, "limit_val_batches": 1}
    our_options = {**limits, "gradient_accumulation_steps": 2, "limit_validation_batches": 1}
    theirs, ours, *_ = both(modules.Recording, their_options, our_options)
    return [[f"`{each}`" for each in pair] for pair in zip(theirs.calls, ours.calls, strict=True)]


def main() -> None:
    """Print them."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    _table(
        "module | a loss: Lightning / drivetrain | a value | difference of weights | logged otherwise",
        [_compared(getattr(modules, name)) for name in MODULES],
    )
    _table("difference of weights | Classifier | Template | OneCycle", _under_options())
    _table("Lightning | drivetrain", _hooks())


if __name__ == "__main__":
    main()
