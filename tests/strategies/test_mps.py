"""Apple's Metal: what is chosen and refused there, told without a Mac; a real training where there is one."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import Callback, ConfigError, Precision, StrategyError, Trainer, enable_mps_fallback
from drivetrain.cli.main import main
from drivetrain.core.mps_fallback import FALLBACK


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with Metal and no CUDA GPU, as far as it is asked."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("strategy", ["auto", "single", "mps"])
def test_a_mac_trains_on_mps_in_one_process(strategy: str) -> None:
    found = Trainer(max_epochs=1, strategy=strategy).select_strategy()
    assert (found.name, found.device.type, found.world_size) == ("single", "mps", 1)


@pytest.mark.usefixtures("mac")
def test_a_mac_s_cpu_is_taken_when_it_is_named() -> None:
    assert Trainer(max_epochs=1, strategy="cpu").select_strategy().device.type == "cpu"
    several = Trainer(max_epochs=1, strategy="cpu", devices=2).select_strategy()
    assert (several.name, several.device.type, several.world_size) == ("ddp", "cpu", 2)


FP8 = Precision("fp8", torch.float8_e4m3fn, torch.float8_e4m3fn)


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize(
    ("options", "why"),
    [
        (
            {"precision": "64"},
            "precision '64' cannot run on mps: MPS has no float64; allowed are '32', 'b",
        ),
        ({"precision": FP8}, "precision 'fp8' cannot run on mps: MPS has no float8_e4m3fn; allowed are '32'"),
        ({"devices": 2}, "'mps' runs 1 process on mps, but devices=2 .*strategy='cpu' for several"),
        ({"num_nodes": 2}, "'mps' runs 1 process on mps, but devices='auto' on 2 node"),
    ],
)
def test_what_metal_cannot_do_is_refused_when_the_trainer_is_made(options: dict[str, Any], why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        Trainer(max_epochs=1, strategy="mps", **options)


@pytest.mark.usefixtures("mac")
def test_processes_of_a_launcher_are_not_put_on_one_metal(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(StrategyError, match="'auto' runs 1 process on mps, but torchrun has started 2"):
        Trainer(max_epochs=1)


@pytest.mark.usefixtures("mac")
@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "16-mixed", "bf16-true", "16-true"])
def test_precisions_that_metal_has_are_taken(precision: str) -> None:
    assert Trainer(max_epochs=1, strategy="mps", precision=precision).select_strategy().device.type == "mps"


@pytest.mark.skipif(torch.backends.mps.is_available(), reason="this machine has Metal")
def test_without_metal_mps_is_refused_with_what_there_is() -> None:
    with pytest.raises(StrategyError, match=r"'mps' cannot run here: this machine has .*no Metal.*'auto'"):
        Trainer(max_epochs=1, strategy="mps")


# Notes what the variable is at the moment at which torch is first looked for.
NOTING = f"""
import os, sys

class Noting:
    found = []

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            self.found.append(os.environ.get("{FALLBACK}"))

sys.meta_path.insert(0, Noting())
"""

LIBRARY = """
import drivetrain
drivetrain.enable_mps_fallback()
drivetrain.enable_mps_fallback()
import torch
print(Noting.found[0])
"""

COMMAND = """
from drivetrain.cli.main import main
main(["fit", "--mps-fallback", "--task", "nowhere.Task"])
print(Noting.found[0])
"""


@pytest.mark.parametrize("program", [LIBRARY, COMMAND], ids=["library", "command"])
def test_the_fallback_is_set_before_torch_is_imported(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(FALLBACK, raising=False)
    Path("program.py").write_text(NOTING + program, encoding="utf-8")
    done = subprocess.run([sys.executable, "program.py"], capture_output=True, text=True, timeout=240)
    assert done.stdout == "1\n", done.stderr


def test_the_fallback_is_refused_once_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(FALLBACK, raising=False)
    with pytest.raises(ConfigError, match=f"too late: torch reads the setting.*{FALLBACK}=1"):
        enable_mps_fallback()
    assert main(["fit", "--mps-fallback", "--task", "nowhere.Task"]) == 2
    assert "was called too late" in capsys.readouterr().err
    assert FALLBACK not in os.environ
    monkeypatch.setenv(FALLBACK, "1")
    enable_mps_fallback()  # it is set, so there is nothing to do


on_a_mac = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs a Mac with Metal")


class Left(Callback):
    """Ends a run after three updates."""

    def on_step_end(self, run: Any) -> None:
        if run.progress.updates == 3:
            run.stop("left")


def trained(strategy: str, resume: str | None = None, **options: Any) -> list[float]:
    task = Regression()
    trainer = quiet(strategy=strategy, max_epochs=3, **options)
    trainer.fit(task, pairs(16, shuffle=True), resume=resume)
    return task.line.weight.detach().float().cpu().flatten().tolist()


@on_a_mac
@pytest.mark.parametrize(
    ("precision", "tolerance"), [("32", 1e-5), ("bf16-mixed", 2e-2), ("16-mixed", 2e-2), ("bf16-true", 5e-2)]
)
def test_a_training_on_metal_is_that_on_the_cpu(precision: str, tolerance: float) -> None:
    expected = trained("cpu", precision=precision)  # with as many skipped updates
    assert trained("mps", precision=precision) == pytest.approx(expected, rel=tolerance, abs=tolerance)


@on_a_mac
def test_a_training_on_metal_is_resumed_bit_for_bit() -> None:
    whole = trained("mps")
    trained("mps", run_dir="run", checkpoint=True, callbacks=[Left()])
    assert trained("mps", run_dir="run", checkpoint=True, resume="auto") == whole
