"""What ranks must have in common is compared before they exchange anything; buffers are the same on all."""

import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import nn

from drivetrain import ConfigError, LambdaCallback, OptimizerConfig, StrategyError
from drivetrain.core import version
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.rank_consistency import check_same_call, check_same_optimizers
from drivetrain.engine.updater import build_updaters, optimizer_specs
from drivetrain.run.settings import same_on_all_ranks
from drivetrain.strategies import select_precision, select_strategy
from drivetrain.testing import run_distributed


def error_text(check: Any) -> str:
    try:
        check()
    except (ConfigError, StrategyError) as error:
        return str(error)
    return ""


def changed(task: Any, what: str) -> Any:
    if what == "shape":
        task.line = nn.Linear(3, 2)
    elif what == "frozen":
        next(task.parameters()).requires_grad_(False)
    elif what == "more":
        task.late = nn.Linear(2, 2)
    return task


def call_differs(strategy: Any = "ddp", task: Any = None, verb: str = "fit", **given: Any) -> str:
    """What this rank is told of a call when rank 1 has what is given, and rank 0 has not."""
    rank, options = torch.distributed.get_rank(), given.pop("options", {})
    installed, other = version.__version__, given.pop("version", version.__version__)
    options = {"strategy": strategy, **options} if rank else {"strategy": "ddp"}
    mine = (task or Regression(), verb, given) if rank else (Regression(), "fit", {})
    one = select_strategy(options["strategy"], select_precision("32"), 2, 1)
    one.setup()
    try:
        version.__version__ = other if rank else installed
        settings, gather = same_on_all_ranks(quiet(devices=2, **options)), torch.distributed.all_gather
        exchanges: list[Any] = []

        def note(*given: Any, **named: Any) -> Any:
            exchanges.append(given)
            return gather(*given, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.distributed, "all_gather", note)
            told = error_text(lambda: check_same_call(settings, mine[0], one, mine[1], **mine[2]))
        assert told or len(exchanges) == 1, "all that is compared travels together"
        return told
    finally:
        version.__version__ = installed
        one.teardown()


def optimizers_differ(configured: Any, on_both: bool) -> str:
    """What this rank is told when `configure_optimizers` of rank 1 returns this; of both if on both."""
    task = Regression(configured if on_both or torch.distributed.get_rank() else None)
    ranks = Ranks.of_job()
    updaters = build_updaters(task, optimizer_specs(task.configure_optimizers()), 10, None)
    try:
        return error_text(lambda: check_same_optimizers(task, updaters, 10, ranks))
    finally:
        ranks.close()


def only_the_bias(parameters: Any) -> Any:
    optimizer = torch.optim.SGD(parameters[1:], lr=0.05)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)


CALLS: list[tuple[dict[str, Any], str]] = [
    ({}, ""),
    (
        {"version": "9.9"},
        f"different versions: drivetrain is {version.__version__} on rank 0 and 9.9 on rank 1",
    ),
    ({"options": {"seed": 1}}, "different Trainers: seed is 0 on rank 0 and 1 on rank 1"),
    ({"task": changed(Regression(), "shape")}, "'line.weight' is float32[1, 4] on rank 0 and float32[2, 3]"),
    ({"task": changed(Regression(), "frozen")}, ", frozen on rank 1. Make the same task on all"),
    ({"task": changed(Regression(), "more")}, "'late.weight' is not there on rank 0 and float32[2, 2]"),
    ({"verb": "test", "checkpoint": "best"}, "the verb is fit on rank 0 and test on rank 1"),
    ({"strategy": "fsdp"}, "strategy is ddp on rank 0 and fsdp on rank 1"),
    ({"resume": "auto"}, "different arguments: resume is not there on rank 0 and 'auto' on rank 1"),
]
SGD = {"name": "sgd", "lr": 0.05}
OPTIMIZERS: list[tuple[Any, bool, str]] = [
    (OptimizerConfig("adamw", schedule="cosine"), True, ""),
    (only_the_bias, True, ""),
    (OptimizerConfig("adam", lr=0.05), False, "the kind of optimizer 'default' is SGD on rank 0 and Adam"),
    (OptimizerConfig("sgd", lr=0.5), False, "lr of group 0 of optimizer 'default' is 0.05 on rank 0"),
    (OptimizerConfig(**SGD, schedule="cosine"), False, "the schedule's factor at step 0 of optimizer"),
    (only_the_bias, False, "the group of 'line.weight' is 0 of optimizer 'default' on rank 0"),
]


def test_calls_and_optimizers_that_differ_between_ranks_are_named_and_others_are_not() -> None:
    def all_errors() -> list[str]:
        calls = [call_differs(**dict(given)) for given, _ in CALLS]
        return calls + [optimizers_differ(configured, both) for configured, both, _ in OPTIMIZERS]

    expected = [words for *_, words in (*CALLS, *OPTIMIZERS)]
    for rank in on_two_ranks(all_errors):
        each = zip(rank, expected, strict=True)
        assert not [(found, words) for found, words in each if words not in found or (found and not words)]


def different(what: str, strategy: str) -> None:  # A fit whose rank 1 has another task or rate
    rank = torch.distributed.get_rank()
    optimizer = OptimizerConfig("sgd", lr=0.1 * (1 + rank)) if what == "rate" else None
    task = changed(Regression(optimizer), what if rank else "")
    quiet(max_epochs=1, strategy=strategy, devices=2).fit(task, pairs(8))


WORDS = {"shape": "'line.weight' is float32[1, 4] on rank 0", "rate": "a different model: lr of group 0"}


@pytest.mark.parametrize(("what", "strategy"), [("shape", "fsdp"), ("rate", "ddp")])
def test_fit_refuses_ranks_that_differ(what: str, strategy: str) -> None:
    with pytest.raises(RuntimeError, match=re.escape(WORDS[what])):
        run_distributed(different, what, strategy)


def own_directory(path: str) -> Any:
    """A run whose ranks were given directories of their own; rank 1 must wait for rank 0."""
    rank = torch.distributed.get_rank()
    slow = LambdaCallback(on_fit_end=lambda run: time.sleep(0 if rank else 0.3))
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2, "run_dir": f"{path}/{rank}"}
    trainer = quiet(max_epochs=1, checkpoint=True, callbacks=[slow], **options)
    result = trainer.fit(Regression(), pairs(8), pairs(8))
    is_there = os.path.exists(str(result.model_path))
    trainer.validate(Regression(), pairs(8), checkpoint="best")
    again = quiet(max_epochs=2, **options)
    return is_there, str(result.run_dir), again.fit(Regression(), pairs(8), resume="auto").progress.steps


def test_run_directory_is_that_of_rank_0_and_is_complete_when_fit_returns(tmp_path: Path) -> None:
    assert on_two_ranks(own_directory, str(tmp_path)) == [(True, f"{tmp_path}/0", 4)] * 2
    assert not (tmp_path / "1").exists()


def normed() -> Regression:
    task = Regression()
    task.line = nn.Sequential(nn.BatchNorm1d(4), task.line)  # type: ignore[assignment]
    return task


def running_means(directory: str) -> Any:
    task, options = normed(), {"strategy": "ddp", "devices": 2}
    trainer = quiet(max_epochs=2, run_dir=directory, checkpoint=True, **options)
    result = trainer.fit(task, pairs(12), pairs(12))
    saved = trainer.validate(normed(), pairs(12), checkpoint="last")
    return result.metrics["validation/loss"], saved["validation/loss"], task.line[0].running_mean.tolist()


def test_validation_and_checkpoint_have_the_same_running_means(tmp_path: Path) -> None:
    ranks = on_two_ranks(running_means, str(tmp_path))
    for fitted, saved, _ in ranks:
        assert fitted == pytest.approx(saved, rel=1e-6)
    assert ranks[0][2] == ranks[1][2]
