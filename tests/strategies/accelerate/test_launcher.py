"""What `accelerate launch` was configured for is understood, or refused by the variable's name."""

from __future__ import annotations

from typing import Any

import pytest

from drivetrain import ConfigError, StrategyError
from drivetrain.strategies import Choice, Hardware, choose
from drivetrain.strategies.accelerate.launcher import Request, read_precision, read_request
from drivetrain.strategies.deepspeed.config import DeepSpeedConfig

# What accelerate 1.15 sets for --use_fsdp and nothing else.
DEFAULTS = {
    "ACCELERATE_USE_CPU": "False",
    "ACCELERATE_MIXED_PRECISION": "no",
    "ACCELERATE_DYNAMO_BACKEND": "no",
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "1",
    "FSDP_SHARDING_STRATEGY": "FULL_SHARD",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_OFFLOAD_PARAMS": "false",
    "FSDP_MIN_NUM_PARAMS": "100000000",
    "FSDP_FORWARD_PREFETCH": "false",
    "FSDP_USE_ORIG_PARAMS": "true",
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "true",
    "FSDP_SYNC_MODULE_STATES": "true",
    "FSDP_ACTIVATION_CHECKPOINTING": "false",
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false",
}
PLAIN = {"sharding": "full_shard", "wrap": ()}


def options(**variables: str) -> dict[str, Any]:
    request = read_request({**DEFAULTS, **variables})
    assert request is not None
    assert request.strategy == "fsdp"
    return dict(request.options)


def test_without_accelerate_launch_nothing_is_asked_for() -> None:
    assert read_request({}) is None
    assert read_request({"FSDP_VERSION": "2", "RANK": "0", "WORLD_SIZE": "2"}) is None


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"ACCELERATE_MIXED_PRECISION": "bf16"}, Request()),
        ({"ACCELERATE_USE_CPU": "True"}, Request(device="cpu")),
        ({"ACCELERATE_USE_CPU": "False", "ACCELERATE_USE_FSDP": "false"}, Request()),
        ({"ACCELERATE_USE_FSDP": "true"}, Request("fsdp", PLAIN)),
        (DEFAULTS, Request("fsdp", PLAIN)),
        (
            {**DEFAULTS, "ACCELERATE_USE_CPU": "True"},
            Request("fsdp", PLAIN, "cpu"),
        ),
    ],
)
def test_strategy_and_device_are_read(variables: dict[str, str], expected: Request) -> None:
    assert read_request(variables) == expected


@pytest.mark.parametrize(
    ("told", "name"), [("no", None), ("bf16", "bf16-mixed"), ("FP16", "16-mixed"), (None, None)]
)
def test_the_precision_is_read(told: str | None, name: str | None) -> None:
    assert read_precision({} if told is None else {"ACCELERATE_MIXED_PRECISION": told}) == name


def test_a_precision_that_there_is_not_is_refused() -> None:
    with pytest.raises(StrategyError, match=r"MIXED_PRECISION=fp8.*allowed are 'no', 'bf16', 'fp16'"):
        read_precision({"ACCELERATE_MIXED_PRECISION": "fp8"})


@pytest.mark.parametrize(
    ("variables", "sharding"),
    [
        ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, "shard_grad_op"),
        ({"FSDP_SHARDING_STRATEGY": "no_shard"}, "no_shard"),
        ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, "hybrid"),
        ({"FSDP_VERSION": "2"}, "full_shard"),
        ({"FSDP_VERSION": "2", "FSDP_RESHARD_AFTER_FORWARD": "false"}, "shard_grad_op"),
        # In version 2 the old variable is set, and means nothing.
        ({"FSDP_VERSION": "2", "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, "full_shard"),
    ],
)
def test_both_versions_words_for_sharding_are_read(variables: dict[str, str], sharding: str) -> None:
    assert options(**variables)["sharding"] == sharding


def test_version_1_without_its_own_variable_reads_the_words_of_the_other() -> None:
    variables = {"ACCELERATE_USE_FSDP": "true", "FSDP_RESHARD_AFTER_FORWARD": "SHARD_GRAD_OP"}
    request = read_request(variables)
    assert request is not None
    assert request.options["sharding"] == "shard_grad_op"


@pytest.mark.parametrize(
    ("variables", "wrap"),
    [
        ({}, ()),
        ({"FSDP_AUTO_WRAP_POLICY": "NO_WRAP"}, ()),
        ({"FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}, "auto"),
        (
            {
                "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
                "FSDP_TRANSFORMER_CLS_TO_WRAP": "Block, Head",
            },
            ("Block", "Head"),
        ),
        ({"FSDP_AUTO_WRAP_POLICY": "size_based_wrap"}, 100_000_000),
        ({"FSDP_AUTO_WRAP_POLICY": "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "5e3"}, 5000),
    ],
)
def test_what_is_wrapped_is_read(variables: dict[str, str], wrap: object) -> None:
    assert options(**variables)["wrap"] == wrap


def test_further_options_are_given_only_when_they_are_on() -> None:
    assert options() == PLAIN
    found = options(
        FSDP_OFFLOAD_PARAMS="true", FSDP_ACTIVATION_CHECKPOINTING="True", FSDP_FORWARD_PREFETCH="1"
    )
    further = {"cpu_offload": True, "activation_checkpointing": "full", "forward_prefetch": 1}
    assert found == {**PLAIN, **further}


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("ACCELERATE_USE_MEGATRON_LM", "true", "Megatron-LM is not part of this version"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true", "several parallelisms"),
        ("ACCELERATE_USE_FSDP", "perhaps", "must be true or false"),
        (
            "FSDP_SHARDING_STRATEGY",
            "HYBRID_SHARD_ZERO2",
            "allowed are FULL_SHARD, SHARD_GRAD_OP, NO_SHARD, HY",
        ),
        ("FSDP_SHARDING_STRATEGY", "2", "allowed are FULL_SHARD"),
        ("FSDP_AUTO_WRAP_POLICY", "MAGIC", "allowed are TRANSFORMER_BASED_WRAP"),
        ("FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD", "true", "cannot be kept on the host"),
        ("FSDP_IGNORED_MODULES", ".*bias", "FSDPConfig"),
        ("FSDP_OFFLOAD_PARAMS", "some", "must be true or false"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(name: str, value: str, why: str) -> None:
    with pytest.raises(StrategyError) as caught:
        read_request({**DEFAULTS, name: value})
    assert f"asks for {name}={value}, which is not supported" in str(caught.value)
    assert why in str(caught.value)


DEEPSPEED = {
    "ACCELERATE_MIXED_PRECISION": "bf16",
    "ACCELERATE_CONFIG_DS_FIELDS": "zero_stage,mixed_precision",
    "ACCELERATE_USE_DEEPSPEED": "true",
}


@pytest.mark.parametrize(
    ("variables", "options"),
    [
        ({}, {"stage": 2}),
        ({"ACCELERATE_DEEPSPEED_ZERO_STAGE": "3", "ACCELERATE_DEEPSPEED_ZERO3_INIT": "true"}, {"stage": 3}),
        (
            {
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu",
                "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "CPU",
                "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
            },
            {"stage": 3, "offload_optimizer": "cpu", "offload_parameters": "cpu"},
        ),
        (
            {
                "ACCELERATE_DEEPSPEED_ZERO_STAGE": "1",
                "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "none",
                "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
                "ACCELERATE_GRADIENT_CLIPPING": "1.0",
            },
            {"stage": 1, "config": {"gradient_accumulation_steps": 4, "gradient_clipping": 1.0}},
        ),
        (
            {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "auto", "ACCELERATE_GRADIENT_CLIPPING": "none"},
            {"stage": 2},
        ),
        # A file of DeepSpeed's own says it all.
        (
            {"ACCELERATE_DEEPSPEED_CONFIG_FILE": "zero.json", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            {"config": "zero.json"},
        ),
    ],
)
def test_deepspeed_s_variables_are_read(variables: dict[str, str], options: dict[str, Any]) -> None:
    assert read_request({**DEEPSPEED, **variables}) == Request("deepspeed", options)


def test_the_options_that_are_read_are_those_of_deepspeed_config() -> None:
    request = read_request(
        {
            **DEEPSPEED,
            "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
            "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "cpu",
            "ACCELERATE_GRADIENT_CLIPPING": "1.0",
        }
    )
    assert request is not None
    config = DeepSpeedConfig(**request.options)
    assert (config.stage, config.offload_parameters, config.offload_optimizer) == (3, "cpu", None)
    assert config.mapping == {"gradient_clipping": 1.0}


def test_deepspeed_s_variables_choose_our_strategy() -> None:
    request = read_request({**DEEPSPEED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"})
    found = choose("auto", Hardware(), request=request)
    assert found == Choice("deepspeed", "cpu", 1, 1, DeepSpeedConfig(stage=3))


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("ACCELERATE_DEEPSPEED_ZERO_STAGE", "4", "stage must be 0, 1, 2 or 3, not 4"),
        ("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "nvme", "must be None or 'cpu', not 'nvme'"),
        (
            "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
            "Experts",
            "MOE_LAYER_CLS_NAMES=Experts, which is not supported",
        ),
    ],
)
def test_what_deepspeed_cannot_be_asked_for_is_refused(name: str, value: str, why: str) -> None:
    with pytest.raises((StrategyError, ConfigError), match=why):
        choose("auto", Hardware(), request=read_request({**DEEPSPEED, name: value}))
