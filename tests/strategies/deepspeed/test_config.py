"""DeepSpeed's configuration: read, filled in, and held against what the Trainer asks for."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.refusals import assert_refused

from drivetrain import ConfigError, DeepSpeedConfig, Trainer
from drivetrain.core.registry import is_installed
from drivetrain.strategies.base import SharedSettings
from drivetrain.strategies.deepspeed.config import check_contradictions, realise
from drivetrain.strategies.precision.registry import PRECISIONS

ASKED = SharedSettings(batch_size=4, gradient_accumulation_steps=2, max_grad_norm=1.0, world_size=2)


def realised(config: dict[str, Any], precision: str = "32", asked: SharedSettings = ASKED) -> dict[str, Any]:
    options = DeepSpeedConfig(config=config)
    check_contradictions(options, PRECISIONS[precision])
    return realise(options, PRECISIONS[precision], asked)


def test_auto_is_filled_in_from_the_trainer_or_left_to_deepspeed() -> None:
    numbers = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    auto: dict[str, Any] = {
        **dict.fromkeys((*numbers, "gradient_clipping"), "auto"),
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": "auto", "loss_scale_window": 7},
        "zero_optimization": {"stage": 3, "reduce_bucket_size": "auto", "overlap_comm": False},
    }
    made = realised(auto, "bf16-mixed")
    assert made["train_micro_batch_size_per_gpu"] == 4
    assert made["bf16"]["enabled"] is True
    assert made["fp16"] == {"enabled": False, "loss_scale_window": 7}
    assert made["zero_optimization"] == {"stage": 3, "overlap_comm": False}
    assert "auto" not in json.dumps(made)
    assert auto["gradient_clipping"] == "auto", "what was given is left as it was"


def test_configuration_that_contradicts_the_trainer_is_refused_by_name() -> None:
    def of(config: dict[str, Any], asked: SharedSettings = ASKED) -> Any:
        return lambda: realised(config, asked=asked)

    changing = ASKED._replace(batch_size={0: 4, "8 steps": 6})
    no_norm = {"zero_optimization": {"compute_grad_norm": False}}
    cases: dict[str, Any] = {
        "steps": (of({"gradient_accumulation_steps": 1}), "gradient_accumulation_steps=1", '"auto" there'),
        "clipping": (of({"gradient_clipping": 1.0}), "gradient_clipping=1.0", "max_grad_norm="),
        "batch": (of({"train_batch_size": 16}), "train_batch_size=16", "follows from the data"),
        "norm": (of(no_norm), "compute_grad_norm=false, which the engine needs"),
        "bf16": (of({"bf16": {"enabled": "false"}}), "bf16.enabled=false", "precision='32'"),
        "fp16": (of({"fp16": {"enabled": True}}), "fp16.enabled=True", "precision='32'"),
        "curriculum": (of({"curriculum_learning": {"enabled": True}}, changing), "SequenceLength("),
    }
    assert_refused(ConfigError, cases)
    made = realised({"train_batch_size": "auto"}, asked=changing)
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (6, 1)


def test_configuration_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"

    def read(text: str) -> DeepSpeedConfig:
        path.write_text(text)
        return DeepSpeedConfig(config=path)

    config = read(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    assert (config.stage, config.offload_parameters, config.offload_optimizer) == (3, "cpu", None)
    cases: dict[str, Any] = {
        "JSON": (lambda: read("{"), "cannot be read"),
        "twice": (lambda: read('{"a": 1, "a": 2}'), "it has 'a' twice"),
        "list": (lambda: read("[]"), "not a list"),
    }
    assert_refused(ConfigError, cases)


def test_option_and_configuration_refusals() -> None:
    def of(**options: Any) -> Any:
        return lambda: DeepSpeedConfig(**options)

    def file(**config: Any) -> Any:
        return lambda: DeepSpeedConfig(config=config)

    def zero(**options: Any) -> Any:
        return file(zero_optimization=options)

    cases: dict[str, Any] = {
        "stage": (of(stage=4), "must be 0, 1, 2 or 3, not 4"),
        "NVMe": (of(offload_optimizer="nvme"), "None or 'cpu', not 'nvme'"),
        "parameters": (of(stage=2, offload_parameters="cpu"), "offload_parameters needs stage=3"),
        "other": (of(stage=1, config={"zero_optimization": {"stage": 2}}), "stage=1) differs", "has 2"),
        "tensors": (file(tensor_parallel={"autotp_size": 2}), "FSDPConfig(tensor_parallel"),
        "mixed up": (zero(round_robin_gradients=True), "be mixed up in checkpoints"),
        "device": (zero(stage=3, offload_param={"device": "gpu"}), "must be None or 'cpu', not 'gpu'"),
        "old name": (file(bfloat16={"enabled": True}), "'bfloat16', which is called 'bf16' today"),
        "spelling": (file(zero_optimisation={"stage": 3}), "Did you mean 'zero_optimization'"),
        "master": (file(bf16={"bf16_master_weights_and_grads": True}), "which keeps no float32"),
        "optimizer": (file(optimizer={"type": "AdamW"}), "'optimizer'", "OptimizerConfig('adamw', lr=...)"),
        "schedule": (file(scheduler={"type": "WarmupLR"}), "'scheduler'", "warmup_steps=..."),
        "sum": (file(gradient_allreduce_op="sum"), "which would sum the gradients"),
        "compile": (file(compile={"deepcompile": True}), "Trainer(compile=True)"),
    }
    assert_refused(ConfigError, cases)


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_configuration_that_deepspeed_refuses_is_refused_when_the_trainer_is_made() -> None:
    def of(**config: Any) -> Any:
        strategy = DeepSpeedConfig(config=config)
        return lambda: Trainer(max_epochs=1, strategy=strategy, devices=2, precision="32")

    def zero(**options: Any) -> Any:
        return of(zero_optimization=options)

    cases: dict[str, Any] = {
        "name": (zero(stag=3), "DeepSpeed refuses DeepSpeedZeroConfig.stag=3: Extra inputs"),
        "inner": (zero(offload_optimizer={"devise": "cpu"}), "Config.offload_optimizer.devise='cpu': Extra"),
        "negative": (zero(reduce_bucket_size=-1), "reduce_bucket_size=-1: ", "greater than 0"),
        "sparse": (of(sparse_gradients=True), "DeepSpeed refuses its configuration", "sparse=True"),
    }
    assert_refused(ConfigError, cases)


def test_configuration_chooses_the_precision() -> None:
    assert DeepSpeedConfig(config={"bf16": {"enabled": True}}).asked_precision == "bf16-mixed"
    assert DeepSpeedConfig(config={"fp16": {"enabled": "auto"}}).asked_precision is None
