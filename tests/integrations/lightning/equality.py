"""One module under Lightning's Trainer and under ours, on the same data."""

import inspect
import warnings
from collections import defaultdict
from typing import Any

import torch
from tests.integrations.lazy import Lazy

from drivetrain import Trainer
from drivetrain.integrations.lightning import as_task
from drivetrain.integrations.lightning.kinds import is_overridden

modules = Lazy("tests.integrations.lightning.modules")

MODULES = ("Classifier", "Template", "OneCycle", "WarmUp", "GAN", "Skipping", "Finetuning")
# What a module's own trainer logs otherwise, each with the reason.
EXPLAINED = {
    "Skipping": {"loss_step"},  # Lightning logs the value before again where a step returned None
    "Finetuning": {"val/loss_step"},  # ours is the last batch's, which has a place among steps
}


class Recorder:
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


def data_of(module: Any) -> tuple[Any, ...]:  # the loaders
    evaluated = modules.loader(9, 1) if is_overridden(module, "validation_step") else None
    if evaluated is not None and "dataloader_idx" in inspect.signature(module.validation_step).parameters:
        evaluated = {"near": evaluated, "far": modules.loader(6, 2)}
    return modules.loader(), evaluated


def under_lightning(module: Any, **options: Any) -> dict[str, list[float]]:
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
        off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
        more = {"num_sanity_val_steps": 0, "log_every_n_steps": 1, **off, **options}
        trainer = pl.Trainer(accelerator="cpu", devices=1, logger=recorder, **more)
        trainer.fit(module, *data_of(module))
    return dict(recorder.recorder.values)


def under_ours(module: Any, resume: str | None = None, **options: Any) -> Any:
    recorder = Recorder()
    settings = {"strategy": "cpu", "checkpoint": False, "log_every": 1, **options}
    trainer = Trainer(loggers=(recorder,), progress_bar=False, **settings)
    result = trainer.fit(as_task(module), *data_of(module), resume=resume)
    return dict(recorder.values), result


def both(kind: Any, theirs: dict[str, Any], ours: dict[str, Any] | None = None) -> tuple[Any, ...]:
    one, other = made(kind), made(kind)
    logged = under_lightning(one, **theirs)
    return one, other, logged, under_ours(other, **(theirs if ours is None else ours))[0]


def differences(first: dict[str, list[float]], second: dict[str, list[float]]) -> dict[str, Any]:  # over 1e-6
    found: dict[str, Any] = {}
    for name in first.keys() | second.keys():
        one, other = first.get(name, []), second.get(name, [])
        far = (abs(a - b) > 1e-6 * max(1, abs(a)) for a, b in zip(one, other, strict=True))
        if len(one) != len(other) or any(far):
            found[name] = (one, other)
    return found


def weights_of(module: Any) -> torch.Tensor:
    return torch.cat([each.detach().reshape(-1).double() for each in module.state_dict().values()])
