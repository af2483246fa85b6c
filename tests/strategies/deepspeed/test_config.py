"""DeepSpeed's configuration: read, filled in, and held against what the Trainer asks for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import warned
from torch import nn

from drivetrain import ConfigError, DeepSpeedConfig, StrategyError, Trainer
from drivetrain.core.registry import is_installed
from drivetrain.strategies.base import Settings
from drivetrain.strategies.deepspeed.config import check_contradictions, realise
from drivetrain.strategies.deepspeed.ds_config import NAMES
from drivetrain.strategies.deepspeed.errors import translated_errors
from drivetrain.strategies.deepspeed.library import library
from drivetrain.strategies.deepspeed.optimizer import configured
from drivetrain.strategies.precision.registry import PRECISIONS

ASKED = Settings(batch_size=4, gradient_accumulation_steps=2, max_grad_norm=1.0, world_size=2)


OFF = {"device": "none"}


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
        ({"bf16": {"enabled": "false"}}, r"bf16\.enabled=false, which contradicts precision='32'"),
        ({"zero_optimization": {"compute_grad_norm": False}}, r"=false, which.*max_grad_norm=1\.0"),
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


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"gradient_accumulation_steps": 3}, r"=3, which contradicts .*steps=\{0: 2, '4 epochs': 1\}"),
        (
            {"train_batch_size": 16},
            r"=16, which contradicts \{0: 4, '8 steps': 6\} x \{0: 2, '4 epochs': 1\} x 2",
        ),
        (
            {"train_micro_batch_size_per_gpu": 4},
            r"=4, which contradicts the data's batch size \{0: 4, '8 steps': 6\}",
        ),
        (
            {"curriculum_learning": {"enabled": True}},
            r"SequenceLength\(ramp\(...\)\), which cuts the batches",
        ),
    ],
)
def test_numbers_that_change_contradict_any_single_one(given: dict[str, Any], message: str) -> None:
    asked = ASKED._replace(batch_size={0: 4, "8 steps": 6}, gradient_accumulation_steps={0: 2, "4 epochs": 1})
    with pytest.raises(ConfigError, match=message):
        realised(given, asked=asked)
    made = realised({"train_batch_size": "auto"}, asked=asked)
    assert (made["train_micro_batch_size_per_gpu"], made["gradient_accumulation_steps"]) == (6, 1)


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
        ({"stage": 4}, "must be 0, 1, 2 or 3, not 4"),
        ({"stage": True}, "not True"),
        ({"offload_optimizer": "nvme"}, "None or 'cpu', not 'nvme'"),
        ({"stage": 2, "offload_parameters": "cpu"}, "offload_parameters needs stage=3"),
        ({"stage": 0, "offload_optimizer": "cpu"}, "stage 0 shards nothing"),
        ({"stage": 1, "config": {"zero_optimization": {"stage": 2}}}, r"stage=1\) differs.*has 2"),
        ({"config": {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}}, "only 'cpu' is"),
        (
            {"offload_optimizer": "cpu", "config": {"zero_optimization": {"offload_optimizer": OFF}}},
            r"offload_optimizer='cpu'\) differs.*has 'none'",
        ),
        ({"config": {"zero_optimization": 3}}, "zero_optimization=3; it must be a mapping"),
        ({"config": {"tensor_parallel": {"autotp_size": 2}}}, r"FSDPConfig\(tensor_parallel"),
        ({"config": {"zero_optimization": {"round_robin_gradients": True}}}, "be mixed up in checkpoints"),
        ({"config": 3}, "not a int"),
        ({"timeout": -1.0}, "positive number"),
    ],
)
def test_an_option_that_is_of_no_use_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        DeepSpeedConfig(**options)


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stage": 5}}, r"stage must be 0, 1, 2 or 3, not 5"),
    ({"zero_optimization": {"stage": "3"}}, "stage must be 0, 1, 2 or 3, not '3'"),
    ({"zero_optimization": {"stage": True}}, "stage must be 0, 1, 2 or 3, not True"),
    ({"zero_optimization": {"stage": 3, "offload_param": {"device": "gpu"}}}, r"on 'gpu': only 'cpu' is"),
    ({"zero_optimization": {"cpu_offload": True}}, r'today that is "offload_optimizer": {"device": "cpu"}'),
    ({"bfloat16": {"enabled": True}}, "'bfloat16', which is called 'bf16' today"),
    ({"zero_optimisation": {"stage": 3}}, "Did you mean 'zero_optimization'"),
    ({"gradient_acumulation_steps": "auto"}, "Did you mean 'gradient_accumulation_steps'"),
    ({"wall_clock_breakdown": "False"}, "wall_clock_breakdown='False'; write false"),
    (
        {"bf16": {"bf16_master_weights_and_grads": True}},
        "bf16_master_weights_and_grads, which keeps no float32",
    ),
    ({"optimizer": {"params": None}}, "optimizer.params=None; it must be a mapping"),
    ({"optimizer": {"type": "AdamV"}}, "the optimizer 'AdamV'. Did you mean 'Adam"),
    ({"optimizer": {"type": "OneBitAdam"}}, "return it from the task's configure_optimizers"),
    ({"optimizer": {}, "scheduler": {"type": "WarmUpLR"}}, "Did you mean 'WarmupLR'"),
    ({"scheduler": {"type": "WarmupLR"}}, "a scheduler without an optimizer"),
    ({"prescale_gradients": True}, "prescale_gradients=True, which DeepSpeed only supports with stage"),
    ({"gradient_predivide_factor": 2.0}, r"gradient_predivide_factor=2\.0, which.*not with stage=2"),
    ({"gradient_allreduce_op": "sum"}, "'gradient_allreduce_op', which would sum the gradients"),
    ({"managed_gradient_accumulation": False}, "each window's last micro-batch"),
    ({"compile": {"deepcompile": True}}, r"Trainer\(compile=True\)"),
]
"""What a file may say that is wrong by itself."""


def test_a_file_that_is_wrong_by_itself_is_refused_by_name() -> None:
    for config, message in WRONG:
        with pytest.raises(ConfigError, match=message):
            DeepSpeedConfig(config=config)


def test_sections_that_are_off_are_no_matter_and_are_not_given_to_deepspeed_which_refuses_some() -> None:
    made = realised(
        {
            "torch_autocast": {"enabled": False},
            "bfloat16": {"enabled": False},
            "sequence_parallel_size": 1,
            "steps_per_print": None,
            "zero_optimization": {
                "round_robin_gradients": False,
                "cpu_offload": False,
                "offload_optimizer": None,
                "offload_param": {"pin_memory": True},
            },
        }
    )
    assert made["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": None,
        "offload_param": {"pin_memory": True},
    }
    assert not made.keys() & {"torch_autocast", "bfloat16", "sequence_parallel_size", "steps_per_print"}


def test_what_others_use_and_notes_are_left_alone() -> None:
    mine = {
        "_comment": "mine",
        "//": ["about this file"],
        "comment on the stage": 2,
        "author": "somebody",
        "wandb": {"enabled": False, "project": "mine"},
        "flops_profiler": {"enabled": False, "profile_step": 5},
        "activation_checkpointing": {"partition_activations": False},
        "steps_per_print": float("inf"),
    }
    made = realised(mine)
    assert {key: made[key] for key in mine} == mine


ASSERTED: list[tuple[dict[str, Any], str]] = [
    ({"zero_optimization": {"stag": 3}}, r"'zero_optimization\.stag', which.*Did you mean 'stage'"),
    (
        {"zero_optimization": {"stage": 3, "stage3_param_persistance_threshold": 0}},
        "Did you mean 'stage3_param_persistence_threshold'",
    ),
    (
        {"zero_optimization": {"offload_optimizer": {"devise": "cpu"}}},
        r"'zero_optimization\.offload_optimizer\.devise', which.*Did you mean 'device'",
    ),
    ({"zero_optimization": {"reduce_bucket_size": -1}}, r"reduce_bucket_size=-1: .*greater than 0"),
    ({"zero_optimization": {"offload_optimizer": "cpu"}}, "offload_optimizer='cpu': .*dictionary"),
    ({"flops_profiler": True}, "DeepSpeed refuses its configuration"),
    ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, r"enabled=True, which contradicts"),
    ({"sparse_gradients": True}, "DeepSpeed refuses its configuration: .*sparse=True"),
    ({"fp16": {"loss_scale": -1}}, r"fp16\.loss_scale=-1"),
    ({"wandb": {"projekt": "mine"}}, "'wandb.projekt', which.*Did you mean 'project'"),
    ({"communication_data_type": "int8"}, "Invalid communication_data_type.*int8"),
    ({"checkpoint": {"tag_validation": "perhaps"}}, "tag_validation.*PERHAPS"),
    ({"optimizer": {"params": {"lr": "fast"}}}, "the parameter lr='fast'; it must be a number"),
    (
        {"optimizer": {}, "scheduler": {"type": "WarmupLR", "params": {"warmup_steps": 3}}},
        "no parameter 'warmup_steps'. Did you mean 'warmup_num_steps'",
    ),
    ({"optimizer": {"type": "Lion"}}, "offload it to the CPU"),
]
"""What DeepSpeed, or the sections of the optimizer, would refuse when a run begins."""


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_what_deepspeed_would_refuse_is_refused_when_the_trainer_is_made() -> None:
    for config, message in ASSERTED:
        with pytest.raises(ConfigError, match=message):
            Trainer(max_epochs=1, strategy=DeepSpeedConfig(config=config), devices=2, precision="32")


@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_all_names_of_deepspeed_are_known() -> None:
    library("cpu")
    from deepspeed.runtime import config, constants

    their_own = {"data_parallel_group", "global_rank"}  # of its loader's, and no settings
    inner = {"param_dtype", "buffer_dtype"}
    sources = "\n".join(Path(each.__file__).read_text(encoding="utf-8") for each in (config, constants))
    read = re.findall(r"get_scalar_param\(param_dict, ([A-Z_]+),", sources)
    read += re.findall(r"param_dict\.get\(([A-Z_]+),", sources)
    names = {getattr(config, each) for each in read if hasattr(config, each)}
    names |= set(re.findall(r"param_dict\.get\(['\"](\w+)['\"]", sources))
    names |= config._REMOVED_TOP_LEVEL_CONFIG_KEYS.keys()
    assert len(names) > 30, "this test no longer finds what DeepSpeed reads"
    assert names - their_own - inner <= NAMES


@pytest.mark.parametrize(
    ("config", "name"),
    [
        ({"bf16": {"enabled": True}}, "bf16-mixed"),
        ({"fp16": {"enabled": "auto"}}, None),
    ],
)
def test_it_may_choose_the_precision(config: dict[str, Any], name: str | None) -> None:
    assert DeepSpeedConfig(config=config).asked_precision == name


def test_an_optimizers_name_is_read_as_deepspeed_does_without_its_capitals() -> None:
    config = DeepSpeedConfig(config={"optimizer": {"type": "adamw", "params": {"lr": 0.5}}})
    found = configured(config, nn.Linear(2, 2), 10)
    assert found is not None
    assert (found.name, found.lr) == (torch.optim.AdamW, 0.5)


def test_a_warm_up_that_is_longer_than_the_run_is_told() -> None:
    scheduler = {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}
    config = DeepSpeedConfig(config={"optimizer": {}, "scheduler": scheduler})
    with warned("warms up over 1000 updates, but this run has 88"):
        configured(config, nn.Linear(2, 2), 88)
    configured(config, nn.Linear(2, 2), 1000)


def test_what_accelerate_launch_was_told_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    strategy = DeepSpeedConfig(config={"gradient_clipping": 0.5})
    with pytest.raises(ConfigError, match=r"=0.5 \(set by accelerate launch in ACCELERATE_GRADIENT"):
        Trainer(max_epochs=1, strategy=strategy, devices=1, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (AssertionError("no bucket"), "with this configuration and task: no bucket"),
        (NotImplementedError(), "and task: NotImplementedError without a message; the traceback says where"),
    ],
)
def test_what_deepspeed_asserts_when_it_begins_is_told_in_its_words(error: Exception, told: str) -> None:
    with pytest.raises(StrategyError, match=told) as found, translated_errors():
        raise error
    assert found.value.__cause__ is error
