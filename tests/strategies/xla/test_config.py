"""XLA's strategies before torch_xla is loaded: options, precisions, and what cannot run."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from drivetrain import ConfigError, StrategyError, Trainer, XLAFSDPConfig, XLAFSDPv2Config
from drivetrain.strategies import STRATEGIES, Hardware
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.registry import XLA

HERE = importlib.util.find_spec("torch_xla") is not None
NAMES = list(XLA)


def made(name: str, **options: Any) -> Any:
    kind: Any = STRATEGIES[name]
    return kind(**options)


@pytest.mark.skipif(HERE, reason="torch_xla is installed")
@pytest.mark.parametrize("devices", ["auto", 2])
@pytest.mark.parametrize("name", NAMES)
def test_without_torch_xla_the_extra_is_named(name: str, devices: int | str) -> None:
    with pytest.raises(
        StrategyError, match=rf"'{name}' cannot run here: the package .torch_xla. is not installed: pip"
    ):
        Trainer(strategy=name, max_epochs=1, devices=devices)


@pytest.mark.skipif(not HERE, reason="torch_xla is not installed")
@pytest.mark.parametrize("name", NAMES)
def test_a_gpu_is_left_idle_only_by_somebody_who_says_so(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind: Any = STRATEGIES[name]
    monkeypatch.delenv("PJRT_DEVICE", raising=False)
    assert (
        "Set PJRT_DEVICE=CPU to train on the CPU and leave the GPU idle"
        in kind.available(Hardware(cuda=1)).reason
    )
    assert kind.available(Hardware())
    assert kind.available(Hardware(cuda=1, tpu=1))
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert kind.available(Hardware(cuda=1))


@pytest.mark.parametrize("name", NAMES)
def test_when_programs_run_is_one_of_two(name: str) -> None:
    kind: Any = STRATEGIES[name]
    assert kind.config_type().run_after == "micro_batch"
    with pytest.raises(ConfigError, match=r"run_after='updates'.*Did you mean 'update'"):
        kind.config_type(run_after="updates")


@pytest.mark.parametrize("name", NAMES)
def test_several_processes_are_refused(name: str) -> None:
    with pytest.raises(StrategyError, match=rf"'{name}' runs 1 process, not 2: .*'xla_fsdp_v2' uses all"):
        made(name, world_size=2)


@pytest.mark.parametrize("name", NAMES)
def test_precisions_that_xla_does_not_have_are_refused_with_the_reason(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = made(name)
    for each in ("32", "bf16-mixed"):
        assert strategy.supports(as_precision(each))
    for each in ("16-mixed", "16-true"):
        assert "bf16-mixed" in strategy.supports(as_precision(each)).reason
    for each in ("bf16-true", "bf16-true-master"):
        wanted = "float32 only" if name == "xla_fsdp" else "bf16-true-nearest"
        assert wanted in strategy.supports(as_precision(each)).reason
    for each in ("bf16-true-nearest", "64"):
        found = strategy.supports(as_precision(each))
        assert "float32 only" in found.reason if name == "xla_fsdp" else found
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    assert "float" in strategy.supports(as_precision("64")).reason


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (XLAFSDPConfig, {"wrap": 0}, r"XLAFSDPConfig\(wrap=...\) must be 'auto', names of classes, a number"),
        (XLAFSDPConfig, {"wrap": "all"}, r"XLAFSDPConfig\(wrap=...\) must be 'auto'.*not 'all'"),
        (
            XLAFSDPConfig,
            {"activation_checkpointing": "selective"},
            "must be False, 'full' or names of classes",
        ),
        (XLAFSDPConfig, {"xla_fsdp_settings": 1}, "must be a mapping of names to values, not 1"),
        (XLAFSDPConfig, {"xla_fsdp_settings": {"flatten_parameters": True}}, "have parameters by name"),
        (XLAFSDPConfig, {"xla_fsdp_settings": {"compute_dtype": "bf"}}, "'bf'.*torch has no such dtype"),
        (XLAFSDPv2Config, {"wrap": None}, r"XLAFSDPv2Config\(wrap=...\) must be 'auto'"),
        (
            XLAFSDPv2Config,
            {"activation_checkpointing": True},
            "must be False, 'full' or names of classes, not True",
        ),
        (XLAFSDPv2Config, {"replicas": 0}, "replicas must be a number of groups of devices, not 0"),
        (XLAFSDPv2Config, {"replicas": True}, "replicas must be a number of groups of devices, not True"),
    ],
)
def test_options_that_are_none_are_refused(kind: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        kind(**options)
