"""What `accelerate launch` was configured for is understood, or refused by the variable's name."""

from typing import Any

from tests.support.refusals import assert_refused

from drivetrain import AccelerateConfig, ConfigError, StrategyError
from drivetrain.strategies.accelerate.launcher import Request
from drivetrain.strategies.accelerate.options import read_precision, request_of
from drivetrain.strategies.precision.registry import as_precision

# What accelerate 1.15 sets for --use_fsdp and nothing else.
SET = """
ACCELERATE_USE_CPU=False ACCELERATE_MIXED_PRECISION=no ACCELERATE_DYNAMO_BACKEND=no ACCELERATE_USE_FSDP=true
FSDP_VERSION=1 FSDP_SHARDING_STRATEGY=FULL_SHARD FSDP_RESHARD_AFTER_FORWARD=true FSDP_OFFLOAD_PARAMS=false
FSDP_MIN_NUM_PARAMS=100000000 FSDP_FORWARD_PREFETCH=false FSDP_USE_ORIG_PARAMS=true
FSDP_CPU_RAM_EFFICIENT_LOADING=true FSDP_SYNC_MODULE_STATES=true FSDP_ACTIVATION_CHECKPOINTING=false
FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD=false
"""
DEFAULTS = dict(each.split("=") for each in SET.split())
PLAIN = {"sharding": "full_shard", "wrap": (), "timeout": None}
TWO = {"FSDP_VERSION": "2"}
WRAP, CLASSES = "FSDP_AUTO_WRAP_POLICY", "FSDP_TRANSFORMER_CLS_TO_WRAP"

READ: list[tuple[dict[str, str], dict[str, Any]]] = [
    ({}, {}),
    # Both versions have words for sharding.
    ({"FSDP_SHARDING_STRATEGY": "SHARD_GRAD_OP"}, {"sharding": "shard_grad_op"}),
    ({"FSDP_SHARDING_STRATEGY": "HYBRID_SHARD"}, {"sharding": "hybrid"}),
    ({**TWO, "FSDP_RESHARD_AFTER_FORWARD": "false"}, {"sharding": "shard_grad_op"}),
    # In version 2 the old variable is set, and means nothing.
    ({**TWO, "FSDP_SHARDING_STRATEGY": "NO_SHARD"}, {"sharding": "full_shard"}),
    ({WRAP: "NO_WRAP"}, {"wrap": ()}),
    ({WRAP: "TRANSFORMER_BASED_WRAP", CLASSES: "Block, Head"}, {"wrap": ("Block", "Head")}),
    ({WRAP: "SIZE_BASED_WRAP", "FSDP_MIN_NUM_PARAMS": "5e3"}, {"wrap": 5000}),
    ({"FSDP_OFFLOAD_PARAMS": "true"}, {"cpu_offload": True}),
    ({"FSDP_FORWARD_PREFETCH": "1"}, {"forward_prefetch": 1}),
    ({"FSDP_ACTIVATION_CHECKPOINTING": "True"}, {"activation_checkpointing": "full"}),
]


def read_request(variables: dict[str, str]) -> Request:
    return request_of(AccelerateConfig(), variables, as_precision("32"))


def test_fsdp_variables_of_accelerate_launch_are_read() -> None:
    for variables, expected in READ:
        assert read_request({**DEFAULTS, **variables}) == Request("fsdp", {**PLAIN, **expected}), variables


def test_strategy_device_and_precision_of_accelerate_launch_are_read() -> None:
    assert read_request({}) == Request()
    assert read_request({"ACCELERATE_MIXED_PRECISION": "bf16"}) == Request()
    assert read_request({"ACCELERATE_USE_CPU": "True"}) == Request(device="cpu")
    assert read_request({"ACCELERATE_USE_CPU": "False", "ACCELERATE_USE_FSDP": "false"}) == Request()
    assert read_request({**DEFAULTS, "ACCELERATE_USE_CPU": "True"}) == Request("fsdp", PLAIN, "cpu")
    words = {"no": None, "bf16": "bf16-mixed", "FP16": "16-mixed"}
    found = {each: read_precision({"ACCELERATE_MIXED_PRECISION": each}) for each in words}
    assert (found, read_precision({})) == (words, None)


def test_accelerate_launch_refusals() -> None:
    def fsdp(name: str, value: str, *words: str) -> Any:
        told = f"asked for {name}={value}, which is not supported"
        return (lambda: read_request({**DEFAULTS, name: value}), told, *words)

    precision = {"ACCELERATE_MIXED_PRECISION": "fp8"}
    cases: dict[str, Any] = {
        "precision": (lambda: read_precision(precision), "mixed_precision='fp8'", "'no', 'bf16', 'fp16'"),
        "Megatron": fsdp("ACCELERATE_USE_MEGATRON_LM", "true", "tensor_parallel=..."),
        "DeepSpeed": fsdp("ACCELERATE_USE_DEEPSPEED", "true", "DeepSpeedConfig(config=...)"),
        "steps": fsdp(
            "ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4", "Trainer(gradient_accumulation_steps=4)"
        ),
        "word": fsdp("ACCELERATE_USE_FSDP", "perhaps", "must be true or false"),
        "sharding": fsdp("FSDP_SHARDING_STRATEGY", "HYBRID_SHARD_ZERO2", "allowed are FULL_SHARD"),
        "wrap": fsdp(WRAP, "MAGIC", "allowed are TRANSFORMER_BASED_WRAP"),
        "ignored": fsdp("FSDP_IGNORED_MODULES", ".*bias", "FSDPConfig"),
    }
    assert_refused((ConfigError, StrategyError), cases)
