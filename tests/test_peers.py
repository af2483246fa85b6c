"""What other libraries call our arguments and names is never taken, and answered with what it is here."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import pytest
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import (
    CompileConfig,
    ConfigError,
    EarlyStopping,
    Engine,
    Float8,
    FSDPConfig,
    MemoryConfig,
    MemoryReport,
    OptimizerConfig,
    Throughput,
    Trainer,
    peers,
)
from drivetrain.cli.main import main
from drivetrain.optim import OPTIMIZERS
from drivetrain.precision import PRECISIONS


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        *((each, "32") for each in ("32-true", "fp32", "float32", "no")),
        ("64-true", "64"),
        *((each, "bf16-mixed") for each in ("bf16", "bfloat16", "BF16")),
        *((each, "16-mixed") for each in (16, "16", "fp16", "float16", "half")),
    ],
)
def test_another_librarys_precision_is_answered_with_that_which_trains_the_same(
    given: Any, ours: str
) -> None:
    told = refusal(lambda: Trainer(max_epochs=1, precision=given))
    assert told.startswith(f"unknown precision '{given}'. Here it is called '{ours}'. Allowed: '16-mixed', ")


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        *((each, "adamw8bit") for each in ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")),
        *((each, "adamw") for each in ("adamw_torch", "adamw_torch_fused")),
    ],
)
def test_another_librarys_optimizer_is_answered_with_ours(given: str, ours: str) -> None:
    assert f"Here it is called '{ours}'." in refusal(lambda: OptimizerConfig(given))


def test_an_optimizers_own_class_name_is_the_nearest() -> None:
    assert "Did you mean 'adamw8bit'?" in refusal(lambda: OptimizerConfig("AdamW8bit"))


RECOMPUTED = 'memory={"activation_checkpointing": True}'


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        *((each, "micro_batch") for each in ("auto_scale_batch_size", "auto_find_batch_size", "microbatch")),
        ("device_train_microbatch_size", "called 'micro_batch'"),
        ("activation_checkpointing", RECOMPUTED),
        ("gradient_checkpointing", RECOMPUTED),
        ("offload_activations", 'memory={"offload_activations": True}'),
        ("release_gradients", 'memory={"release_gradients": True}'),
        *((each, "OptimizerConfig(...)") for each in ("warmup_steps", "learning_rate", "optim", "optimizer")),
        ("lr_scheduler_type", "schedule, for the OptimizerConfig(...)"),
        ("profiler", "callbacks=[Throughput()]"),
        ("fast_dev_run", "limit_train_batches=2, limit_validation_batches=2"),
        ("bf16", 'precision="bf16-mixed"'),
        *((each, 'precision="16-mixed"') for each in ("fp16", "amp", "half")),
        ("tf32", 'precision="tf32"'),
        ("fp8", 'precision="fp8"'),
        ("dtype", "called 'precision'"),
        ("torch_compile", "called 'compile'"),
        ("dataloader_num_workers", "called 'num_workers'"),
        *((f"dataloader_{each}", "DataLoader") for each in ("pin_memory", "persistent_workers")),
        *(
            (each, "DataLoader")
            for each in ("pin_memory", "persistent_workers", "dataloader_prefetch_factor")
        ),
    ],
)
def test_another_librarys_argument_is_answered_with_ours(given: str, ours: str) -> None:
    told = refusal(lambda: Trainer(**{given: 2}))
    assert told.startswith(f"Trainer has no argument {given!r}. Here it is ")
    assert ours in told.split(" Allowed: ")[0]


def test_no_table_has_a_name_of_ours_and_what_stands_in_quotes_is_one() -> None:
    tables: list[tuple[dict[str, str], Any]] = [
        (peers.ARGUMENTS, Trainer),
        (peers.ENGINE_ARGUMENTS, Engine),
        (peers.MEMORY_ARGUMENTS, MemoryConfig),
        (peers.COMPILE_ARGUMENTS, CompileConfig),
        (peers.FSDP_ARGUMENTS, FSDPConfig),
        (peers.FLOAT8_ARGUMENTS, Float8),
        (peers.EARLY_STOPPING_ARGUMENTS, EarlyStopping),
        (peers.FIT_ARGUMENTS, Trainer.fit),
        (peers.EVALUATION_ARGUMENTS, Trainer.predict),
    ]
    for table, taker in tables:
        names = inspect.signature(taker).parameters
        assert not table.keys() & names.keys()
        assert all(ours in names for ours in table.values() if ours.isidentifier())
    for table, rows in ((peers.PRECISIONS, PRECISIONS), (peers.OPTIMIZERS, OPTIMIZERS)):
        assert set(table.values()) <= set(rows)
        assert table.keys().isdisjoint(rows)


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: CompileConfig("task"), "by name, as in CompileConfig(scope=...), not 'task'"),
        (lambda: CompileConfig(disable=True), "no argument 'disable'. Here it is compile=False."),
        (lambda: MemoryConfig(gradient_checkpointing=True), "called 'activation_checkpointing'"),
        (lambda: Trainer(memory={"gradient_checkpointing": True}), "called 'activation_checkpointing'"),
        (lambda: Engine(micro_batch="auto"), "Engine has no argument 'micro_batch'. Here it is Trainer("),
        (lambda: Engine(mixed_precision="bf16"), "called 'precision'"),
        (lambda: Float8(filter_fqns=["output"]), "Float8 has no argument 'filter_fqns'. Here it is called"),
        (lambda: FSDPConfig(sharding_strategy=1), "called 'sharding'"),
        (lambda: MemoryReport(every=2), "MemoryReport has no argument 'every'. Allowed: 'show'."),
        (lambda: Throughput(flops=2), "Throughput has no argument 'flops'. Did you mean"),
        (lambda: EarlyStopping(monitor="loss"), "EarlyStopping has no argument 'monitor'. Here it is called"),
        (
            lambda: OptimizerConfig("sgd", learning_rate=1.0),
            "no option 'learning_rate'. Here it is called 'lr'",
        ),
    ],
)
def test_what_python_would_call_a_type_error_is_told_with_the_right_name(
    call: Callable[[], object], told: str
) -> None:
    assert told in refusal(call)


@pytest.mark.parametrize(
    ("verb", "given", "ours"),
    [
        ("steps", "train_dataloaders", "called 'train_data'"),
        ("fit", "train_dataloaders", "called 'train_data'"),
        ("steps", "val_dataloaders", "called 'validation_data'"),
        ("steps", "datamodule", "train_data, an object with train_data() and validation_data()"),
        ("steps", "ckpt_path", "called 'resume'"),
        ("plan", "train_dataset", "called 'train_data'"),
        ("validate", "dataloaders", "called 'data'"),
        ("test", "ckpt_path", "called 'checkpoint'"),
        ("predict", "dataloaders", "called 'data'"),
    ],
)
def test_a_verbs_arguments_are_told_too(verb: str, given: str, ours: str) -> None:
    trainer = quiet(max_epochs=1)
    told = refusal(lambda: getattr(trainer, verb)(Regression(), **{given: pairs()}))
    assert told.startswith(f"Trainer.{verb} has no argument {given!r}. Here it is {ours}")


def test_a_signature_is_that_of_the_constructor() -> None:
    assert list(inspect.signature(Engine).parameters)[:2] == ["strategy", "precision"]
    assert next(iter(inspect.signature(MemoryConfig).parameters)) == "activation_checkpointing"
    assert list(inspect.signature(Trainer.fit).parameters)[1:3] == ["task", "train_data"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (
            "--trainer.accelerator gpu",
            "Trainer has no parameter 'accelerator'. Here it is called 'strategy'.",
        ),
        ("--trainer.gradient_clip_val 1", "Here it is called 'max_grad_norm'."),
        ("--trainer.gradient_checkpointing true", f"Here it is {RECOMPUTED}."),
        ("--trainer.memory.gradient_checkpointing true", "Here it is called 'activation_checkpointing'."),
        ("--trainer.checkpoint.monitor loss", "Here it is called 'by'."),
    ],
)
def test_the_command_line_gives_the_same_help(
    line: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *line.split()]) == 2
    assert told in capsys.readouterr().err
