"""One module under Lightning's Trainer and under ours, on the same data. As a program it prints tables:

PYTHONPATH=package .venv/bin/python -m tests.integrations.lightning.equality
"""

from __future__ import annotations

import logging
import warnings
from collections import defaultdict
from typing import Any

import torch
from tests.integrations.lazy import Lazy

from drivetrain import Trainer
from drivetrain.integrations.lightning import as_data, as_task
from drivetrain.integrations.lightning.kinds import is_overridden

modules = Lazy("tests.integrations.lightning.modules")

MODULES = (
    "Classifier",
    "Template",
    "OneCycle",
    "Autoencoder",
    "Teacher",
    "WarmUp",
    "GAN",
    "ManualAccumulation",
)
MODULES += ("Skipping", "Segmenter", "Finetuning", "LanguageModel", "Tabular", "Unfreezing")
# What a module's own trainer logs otherwise, each with the reason.
EXPLAINED = {
    "Skipping": {"loss_step"},  # Lightning logs the value before again where a step returned None
    "Finetuning": {"val/loss_step"},  # ours is the last batch's, which has a place among updates
}


class Recorder:
    """A logger of ours that keeps the values."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = defaultdict(list)

    def log_metrics(self, metrics: Any, step: int) -> None:
        for name, value in metrics.items():
            self.values[name].append(float(value))

    def log_config(self, config: Any) -> None: ...

    def close(self) -> None: ...


def made(kind: Any) -> Any:
    torch.manual_seed(0)
    return kind()


def data_of(module: Any) -> tuple[Any, ...]:
    """Return what Lightning's `fit` is given after the module: loaders, a data module, or nothing."""
    if hasattr(module, "data"):
        return None, None, module.data()
    if is_overridden(module, "train_dataloader"):
        return ()
    if isinstance(module, modules.Segmenter):
        return modules.loader(), [modules.loader(9, 1), modules.loader(6, 2)]
    return modules.loader(), modules.loader(9, 1) if is_overridden(module, "validation_step") else None


def under_lightning(module: Any, **options: Any) -> dict[str, list[float]]:
    """Fit under Lightning, and return the logged values."""
    import lightning.pytorch as pl
    from lightning.pytorch.loggers.logger import Logger

    class Theirs(Logger):
        name, version = "recorder", 0

        def __init__(self) -> None:
            super().__init__()
            self.recorder = Recorder()

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.recorder.log_metrics({k: v for k, v in metrics.items() if k != "epoch"}, step or 0)

        def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    recorder = Theirs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            logger=recorder,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
            **{"enable_checkpointing": False, **options},
        )
        trainer.fit(module, *data_of(module))
    return dict(recorder.recorder.values)


def under_ours(module: Any, resume: str | None = None, **options: Any) -> Any:
    """Fit under ours, and return the logged values and the result."""
    given = data_of(module)
    train, evaluated = given if len(given) == 2 else (as_data(given[2] if given else module), None)
    if isinstance(evaluated, list):
        evaluated = {f"dataloader_idx_{number}": each for number, each in enumerate(evaluated)}
    recorder = Recorder()
    settings = {"strategy": "cpu", "checkpoint": False, "log_every": 1, **options}
    trainer = Trainer(loggers=(recorder,), progress_bar=False, **settings)
    result = trainer.fit(as_task(module), train, evaluated, resume=resume)
    return dict(recorder.values), result


def both(kind: Any, theirs: dict[str, Any], ours: dict[str, Any] | None = None) -> tuple[Any, ...]:
    """Fit under both; return the modules and the logged values, Lightning's first."""
    one, other = made(kind), made(kind)
    logged = under_lightning(one, **theirs)
    return one, other, logged, under_ours(other, **(theirs if ours is None else ours))[0]


def differences(first: dict[str, list[float]], second: dict[str, list[float]]) -> dict[str, Any]:
    """Return the names whose values differ by more than 1e-6."""
    found: dict[str, Any] = {}
    for name in first.keys() | second.keys():
        one, other = first.get(name, []), second.get(name, [])
        if len(one) != len(other) or any(
            abs(a - b) > 1e-6 * max(1, abs(a)) for a, b in zip(one, other, strict=True)
        ):
            found[name] = (one, other)
    return found


def weights_of(module: Any) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1).double() for each in module.state_dict().values()])


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
        for kind in (modules.Classifier, modules.Segmenter, modules.Template, modules.Autoencoder):
            epochs = {"max_epochs": 3}
            theirs, ours, *_ = both(kind, epochs | their_options, epochs | our_options)
            row.append(f"{(weights_of(theirs) - weights_of(ours)).abs().max():.1e}")
        rows.append(row)
    return rows


def _hooks() -> list[list[str]]:
    from tests.integrations.lightning.recording import Recording

    limits = {"max_epochs": 1, "limit_train_batches": 4}
    their_options = {**limits, "accumulate_grad_batches": 2, "limit_val_batches": 1}
    our_options = {**limits, "gradient_accumulation_steps": 2, "limit_validation_batches": 1}
    theirs, ours, *_ = both(Recording, their_options, our_options)
    return [[f"`{each}`" for each in pair] for pair in zip(theirs.calls, ours.calls, strict=True)]


def main() -> None:
    """Print the tables of docs/explanation/lightning-numbers.md."""
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    _table(
        "module | a loss: Lightning / drivetrain | a value | difference of weights | logged otherwise",
        [_compared(getattr(modules, name)) for name in MODULES],
    )
    _table("difference of weights | Classifier | Segmenter | Template | Autoencoder", _under_options())
    _table("Lightning | drivetrain", _hooks())


if __name__ == "__main__":
    main()
