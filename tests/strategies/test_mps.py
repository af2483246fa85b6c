"""Apple's Metal: what is chosen and refused there, told without a Mac; a real training where there is one."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import ConfigError, LambdaCallback, StrategyError, Trainer, enable_mps_fallback
from drivetrain.cli.main import main
from drivetrain.core.mps_fallback import FALLBACK

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Metal and no CUDA GPU, as far as it is asked."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in TWO:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("mac")
def test_mac_trains_on_mps_in_one_process_and_on_its_cpu_when_it_is_named() -> None:
    for strategy in ("auto", "single", "mps"):
        found = Trainer(max_epochs=1, strategy=strategy).select_strategy()
        assert (found.name, found.device.type, found.world_size) == ("single", "mps", 1)
    several = Trainer(max_epochs=1, strategy="cpu", devices=2).select_strategy()
    assert (several.name, several.device.type, several.world_size) == ("ddp", "cpu", 2)
    for precision in ("32", "bf16-mixed", "16-mixed", "bf16-true", "16-true"):
        trainer = Trainer(max_epochs=1, strategy="mps", precision=precision)
        assert trainer.select_strategy().device.type == "mps"


@pytest.mark.usefixtures("mac")
def test_mps_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def of(**options: Any) -> Any:
        return lambda: Trainer(max_epochs=1, **{"strategy": "mps", **options})

    def launched() -> None:
        with monkeypatch.context() as patch:
            for name, value in TWO.items():
                patch.setenv(name, value)
            Trainer(max_epochs=1)

    def absent() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.mps, "is_available", lambda: False)
            Trainer(max_epochs=1, strategy="mps")

    assert_refused(
        StrategyError,
        {
            "float64": (of(precision="64"), "MPS has no float64; allowed are '32', 'b"),
            "processes": (of(devices=2), "1 process on mps, but devices=2", "strategy='cpu' for several"),
            "launcher": (launched, "1 process on mps, but torchrun has started 2"),
            "no Metal": (absent, "'mps' cannot run here: this machine has", "no Metal", "'auto'"),
        },
    )


@pytest.mark.landing
def test_mps_fallback_is_set_before_torch_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK, raising=False)
    program = Path(__file__).parent / "programs" / "mps_fallback.py"
    for how in ("library", "command"):
        done = subprocess.run([sys.executable, program, how], capture_output=True, text=True)
        assert done.stdout == "1\n", done.stderr


def test_mps_fallback_is_refused_once_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FALLBACK, raising=False)
    with pytest.raises(ConfigError, match=f"too late: torch reads the setting.*{FALLBACK}=1"):
        enable_mps_fallback()
    assert main(["fit", "--mps-fallback", "--task", "nowhere.Task"]) == 2
    assert "was called too late" in capsys.readouterr().err
    monkeypatch.setenv(FALLBACK, "1")
    enable_mps_fallback()  # it is set, so there is nothing to do


on_a_mac = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs a Mac with Metal")


def trained(strategy: str, resume: str | None = None, **options: Any) -> list[float]:
    task = Regression()
    quiet(strategy=strategy, max_epochs=3, **options).fit(task, pairs(16, shuffle=True), resume=resume)
    return task.line.weight.detach().float().cpu().flatten().tolist()


@on_a_mac
def test_training_on_metal_is_that_on_the_cpu() -> None:
    for precision, tolerance in {"32": 1e-5, "bf16-mixed": 2e-2, "16-mixed": 2e-2, "bf16-true": 5e-2}.items():
        expected = trained("cpu", precision=precision)  # with as many skipped updates
        assert trained("mps", precision=precision) == pytest.approx(expected, rel=tolerance, abs=tolerance)


@on_a_mac
def test_training_on_metal_is_resumed_bit_for_bit() -> None:
    leave = LambdaCallback(on_step_end=lambda run: run.stop("left") if run.progress.updates == 3 else None)
    whole = trained("mps")
    trained("mps", run_dir="run", checkpoint=True, callbacks=[leave])
    assert trained("mps", run_dir="run", checkpoint=True, resume="auto") == whole
