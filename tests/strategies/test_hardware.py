"""What a machine is found to have: TPUs, Intel's GPUs and Apple's Metal, told without them."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import LambdaCallback, StrategyError, Trainer
from drivetrain.strategies import Hardware, SingleDevice
from drivetrain.strategies.hardware import tpu_chips

TWO = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}


def test_tpu_chips_are_told_from_googles_other_devices(tmp_path: Path) -> None:
    devices = [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x10de", "0x0063")]
    for number, (vendor, device) in enumerate(devices):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "vendor").write_text(f"{vendor}\n", encoding="ascii")
        (tmp_path / str(number) / "device").write_text(f"{device}\n", encoding="ascii")
    (tmp_path / "going").mkdir()
    (tmp_path / "going" / "vendor").write_text("0x1ae0\n", encoding="ascii")  # and its number is gone
    assert tpu_chips(str(tmp_path)) == 2
    assert tpu_chips(str(tmp_path / "nowhere")) == 0


@pytest.fixture
def intel(monkeypatch: pytest.MonkeyPatch) -> None:  # two Intel GPUs
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    monkeypatch.setattr(torch.xpu, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in TWO:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("intel")
def test_intel_gpu_trains_in_one_process() -> None:
    for strategy in ("auto", "single", "xpu"):
        found = Trainer(max_epochs=1, strategy=strategy).select_strategy()
        assert (found.name, str(found.device), found.world_size) == ("single", "xpu:0", 1)
    assert str(SingleDevice("xpu:1").device) == "xpu:1"
    assert str(Hardware.here()).endswith("and 2 Intel GPUs")
    cases: dict[str, Any] = {
        "several": (lambda: Trainer(strategy="xpu", devices=2), "1 process on xpu", "strategy='cpu'"),
        "float64": (lambda: Trainer(strategy="xpu", precision="64"), "XPU has no float64"),
        "index": (lambda: SingleDevice("xpu:5"), "torch sees 2 GPU", "the last is 'xpu:1'"),
    }
    assert_refused(StrategyError, cases)


@pytest.fixture
def mac(monkeypatch: pytest.MonkeyPatch) -> None:  # Metal alone
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

    def absent() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(torch.backends.mps, "is_available", lambda: False)
            Trainer(max_epochs=1, strategy="mps")

    cases: dict[str, Any] = {
        "float64": (of(precision="64"), "MPS has no float64; allowed are '32', 'b"),
        "processes": (of(devices=2), "1 process on mps, not 2", "strategy='cpu' for several"),
        "no Metal": (absent, "'mps' cannot run here: this machine has", "no Metal", "'auto'"),
    }
    assert_refused(StrategyError, cases)


on_a_mac = pytest.mark.skipif(not torch.backends.mps.is_available(), reason="needs a Mac with Metal")


def trained(strategy: str, resume: str | None = None, **options: Any) -> list[float]:
    task = Regression()
    quiet(strategy=strategy, max_epochs=3, **options).fit(task, pairs(16, shuffle=True), resume=resume)
    return task.line.weight.detach().float().cpu().flatten().tolist()


@on_a_mac
def test_training_on_metal_is_that_on_the_cpu() -> None:
    for precision, tolerance in {"32": 1e-5, "bf16-mixed": 2e-2, "16-mixed": 2e-2, "bf16-true": 5e-2}.items():
        expected = trained("cpu", precision=precision)  # with as many skipped steps
        assert trained("mps", precision=precision) == pytest.approx(expected, rel=tolerance, abs=tolerance)


@on_a_mac
def test_training_on_metal_is_resumed_bit_for_bit() -> None:
    leave = LambdaCallback(on_step_end=lambda run: run.stop("left") if run.progress.steps == 3 else None)
    whole = trained("mps")
    trained("mps", run_dir="run", checkpoint=True, callbacks=[leave])
    assert trained("mps", run_dir="run", checkpoint=True, resume="auto") == whole
