"""DeepSpeed's configuration: read, filled in, and held against what the Trainer asks for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drivetrain import ConfigError, DeepSpeedConfig
from drivetrain.precision import PRECISIONS
from drivetrain.strategies.base import Settings
from drivetrain.strategies.deepspeed_config import check_contradictions, realise

ASKED = Settings(batch_size=4, gradient_accumulation_steps=2, max_grad_norm=1.0, world_size=2)


def realised(config: dict[str, Any], precision: str = "32", asked: Settings = ASKED) -> dict[str, Any]:
    options = DeepSpeedConfig(config=config)
    check_contradictions(options, PRECISIONS[precision], asked)
    return realise(options, PRECISIONS[precision], asked)


def test_without_anything_it_is_stage_2_in_float32() -> None:
    made = realised({})
    assert made["zero_optimization"] == {"stage": 2}
    assert made["bf16"] == {"enabled": False}
    assert made["fp16"] == {"enabled": False}


def test_auto_is_filled_in_from_the_trainer_or_left_to_deepspeed() -> None:
    auto: dict[str, Any] = {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": 7},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": False},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto"}},
    }
    made = realised(auto, "bf16-mixed")
    assert made["train_micro_batch_size_per_gpu"] == 4
    assert made["bf16"]["enabled"] is True
    assert made["fp16"] == {"enabled": False, "loss_scale_window": 7}
    assert made["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert "auto" not in json.dumps(made)
    assert auto["gradient_clipping"] == "auto", "what was given is left as it was"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_accumulation_steps": 3}, r"gradient_accumulation_steps=3.*steps=2\)"),
        ({"gradient_clipping": 0.5}, r"gradient_clipping=0\.5.*max_grad_norm=1\.0"),
        ({"train_micro_batch_size_per_gpu": 8}, "=8, which contradicts the data's batch size 4"),
        ({"train_batch_size": 8}, "train_batch_size=8, which contradicts 4 x 2 x 2"),
        ({"bf16": {"enabled": True}}, r"bf16\.enabled=True, which contradicts precision='32'"),
        ({"fp16": {"enabled": True}}, r"fp16\.enabled=True, which contradicts precision='32'"),
    ],
)
def test_what_contradicts_the_trainer_is_refused_by_name(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        realised(given)


def test_what_agrees_with_the_trainer_is_taken() -> None:
    agreeing = {
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "train_micro_batch_size_per_gpu": 4,
        "train_batch_size": 16,
        "bf16": {"enabled": True},
    }
    assert realised(agreeing, "bf16-mixed")["bf16"]["enabled"] is True


def test_a_batch_size_that_is_not_known_contradicts_nothing() -> None:
    asked = ASKED._replace(batch_size=None)
    assert realised({"train_batch_size": 640}, asked=asked)["train_micro_batch_size_per_gpu"] == 1


def test_it_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    config = DeepSpeedConfig(config=path)
    assert (config.stage, config.offload_parameters, config.offload_optimizer) == (3, "cpu", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "cannot be read"), ('{"a": 1, "a": 2}', "it has 'a' twice"), ("[]", "not a list")],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "ds.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        DeepSpeedConfig(config=path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 4}, "is 0, 1, 2 or 3, not 4"),
        ({"stage": True}, "not True"),
        ({"offload_optimizer": "nvme"}, "None or 'cpu', not 'nvme'"),
        ({"stage": 2, "offload_parameters": "cpu"}, "offload_parameters needs stage=3"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "stage 0 divides nothing"),
        ({"stage": 1, "config": {"zero_optimization": {"stage": 2}}}, r"stage=1\) differs.*has 2"),
        ({"config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}}, "only 'cpu' is"),
        ({"config": {"zero_optimization": 3}}, "'zero_optimization' as a int"),
        ({"config": {"tensor_parallel": {"autotp_size": 2}}}, r"FSDPConfig\(tensor_parallel"),
        ({"config": {"amp": {"enabled": True}}}, "precision='16-mixed'"),
        ({"config": {"zero_optimization": {"round_robin_gradients": True}}}, "be mixed up in checkpoints"),
        ({"config": {"zero_optimization": {"mics_shard_size": 2}}}, "sharding='hybrid'"),
        ({"config": 3}, "not a int"),
        ({"timeout": -1.0}, "positive number"),
    ],
)
def test_an_option_that_is_of_no_use_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepSpeedConfig(**options)


def test_sections_that_are_off_are_no_matter() -> None:
    DeepSpeedConfig(config={"amp": {"enabled": False}, "sequence_parallel_size": 1})
    DeepSpeedConfig(config={"zero_optimization": {"round_robin_gradients": False, "mics_shard_size": -1}})


@pytest.mark.parametrize(
    ("config", "name"), [({"bf16": {"enabled": True}}, "bf16-mixed"), ({"fp16": {"enabled": "auto"}}, None)]
)
def test_it_may_choose_the_precision(config: dict[str, Any], name: str | None) -> None:
    assert DeepSpeedConfig(config=config).asked_precision == name
