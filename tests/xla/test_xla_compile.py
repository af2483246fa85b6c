"""torch.compile under XLA: by the one backend that can, and refused where it would compute something else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.support.xla import QUIET, apart, trainer
from torch.utils.data import DataLoader

from drivetrain import StrategyError, Trainer
from drivetrain.testing.strategy_tasks import Sequences, Tokens


@pytest.mark.parametrize("name", ["xla_fsdp", "xla_fsdp_v2"])
def test_the_sharded_strategies_refuse_it_when_the_trainer_is_made(name: str) -> None:
    with pytest.raises(StrategyError, match=f"compile=True with strategy '{name}'.*compile=False"):
        Trainer(strategy=name, compile=True, **QUIET)


def test_another_backend_than_openxla_is_refused_when_the_trainer_is_made() -> None:
    with pytest.raises(StrategyError, match=r"'xla'.*the backend 'openxla' alone.*compile=True"):
        Trainer(strategy="xla", compile={"backend": "inductor"}, **QUIET)


def test_a_compiled_run_has_the_numbers_of_the_cpu() -> None:
    def run() -> None:
        data = DataLoader(Sequences(14), batch_size=4)  # the last of two
        numbers = []

        def fit(made: Trainer) -> Any:
            task = Tokens()
            found = made.fit(task, data, data)
            assert task._compiled_call_impl is None
            numbers.append((found.metrics["train/loss"], found.metrics["validation/loss"]))

        options: dict[str, Any] = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
        fit(trainer("xla", compile=True, **options))
        fit(Trainer(strategy="cpu", **{**QUIET, **options}))
        assert numbers[0] == pytest.approx(numbers[1], rel=1e-5)

    apart(run)
