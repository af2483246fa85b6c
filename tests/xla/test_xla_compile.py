"""torch.compile under XLA is refused: it failed, or computed something else."""

from __future__ import annotations

import pytest
from tests.support.xla import QUIET

from drivetrain import CompileConfig, StrategyError, Trainer


@pytest.mark.parametrize("name", ["xla", "xla_fsdp", "xla_fsdp_v2"])
@pytest.mark.parametrize("asked", [True, CompileConfig(backend="openxla")])
def test_it_is_refused_when_the_trainer_is_made(name: str, asked: object) -> None:
    with pytest.raises(
        StrategyError, match=f"compile=.* with strategy '{name}': XLA compiles.*compile=False"
    ):
        Trainer(strategy=name, compile=asked, **QUIET)
