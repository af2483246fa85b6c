"""Other libraries' names are never accepted, and answered with ours; one table has them all."""

from __future__ import annotations

import ast
import copy
import importlib.util
import inspect
import logging
import os
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet
from tests.support.transformers_names import ARGUMENTS, CONSTRUCTOR, EVENTS, MEMBERS, OVERRIDDEN, STATE
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import (
    Callback,
    CheckpointConfig,
    CompileConfig,
    ConfigError,
    DDPConfig,
    EarlyStopping,
    Engine,
    Float8,
    FSDPConfig,
    MemoryConfig,
    MemoryReport,
    OptimizerConfig,
    PreemptionConfig,
    Throughput,
    Trainer,
)
from drivetrain.cli.main import main
from drivetrain.core.synonyms import PLACES, SYNONYMS, row
from drivetrain.loggers.base import LOGGERS
from drivetrain.run.hooks import HOOKS
from drivetrain.run.run import Run
from drivetrain.strategies.precision.registry import PRECISIONS
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.task.optim.config import OPTIMIZERS

PARTS = {
    "Trainer": Trainer,
    "fit": Trainer.fit,
    "test": Trainer.test,
    "predict": Trainer.predict,
    "CheckpointConfig": CheckpointConfig,
    "CompileConfig": CompileConfig,
    "MemoryConfig": MemoryConfig,
    "PreemptionConfig": PreemptionConfig,
    "DDPConfig": DDPConfig,
    "FSDPConfig": FSDPConfig,
    "DeepSpeedConfig": drivetrain.DeepSpeedConfig,
    "Float8": Float8,
    "EarlyStopping": EarlyStopping,
    "OptimizerConfig": OptimizerConfig,
    "DataLoader": DataLoader,
}


def refusal(call: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        call()
    return str(caught.value)


# The table.


def rows(kind: str) -> Iterator[tuple[str, str]]:
    for names, ours in SYNONYMS[kind].items():
        for name in names.split():
            yield name, ours


def test_no_name_has_two_rows() -> None:
    for kind in SYNONYMS:
        names = [name for name, _ in rows(kind)]
        assert sorted(set(names)) == sorted(names)


def test_each_argument_of_ours_in_the_table_is_one() -> None:
    assert PARTS.keys() == PLACES.keys()
    options = {"betas", "eps"}  # of the optimizers themselves
    for name, ours in rows("argument"):
        for part in ours.split(" | "):
            place, _, rest = part.partition(".")
            if place in PLACES:
                argument = rest.partition("; ")[0].partition("=")[0]
                taken = inspect.signature(PARTS[place]).parameters.keys()
                assert argument in taken or argument in options, name


def test_what_the_table_calls_the_same_is_the_same_here() -> None:
    same = {name for kind in ("argument", "hook", "name") for name, ours in rows(kind) if ours[:4] == "same"}
    taken = {name for part in PARTS.values() for name in inspect.signature(part).parameters}
    assert same <= {*taken, *HOOKS, *drivetrain.__all__}
    arguments = {name for name, ours in rows("argument") if ours[:4] != "same"}
    assert not arguments & inspect.signature(Trainer).parameters.keys()


def test_the_page_and_the_table_give_the_same_answers() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "from-other-libraries.md"
    rows = {name: ours for names, ours in SYNONYMS["argument"].items() for name in names.split()}
    checked = 0
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        there, here = line.strip("| ").split(" | ", 1)
        for name in re.findall(r"`([a-z_0-9]+)(?:=[^`]*)?`", there):
            ours = rows.get(name, "same")
            if not ours.startswith("same"):
                words = set(re.findall(r"\w{2,}", ours)) - {
                    "Trainer",
                    "none",
                    "the",
                    "and",
                    "for",
                    "in",
                    "is",
                }
                assert any(each in here for each in words), (name, ours, here)
                checked += 1
    assert checked > 50


def test_values_and_hooks_of_the_table_exist() -> None:
    for kind, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("logger", LOGGERS)):
        for name, ours in rows(kind):
            assert name not in known
            assert ours in known or ours.startswith("none: ")
    for _, ours in rows("strategy"):
        assert ours in STRATEGIES or ours.startswith(("DDPConfig(", "FSDPConfig("))
    for _, ours in rows("hook"):
        assert not ours.startswith("on_") or ours.partition(",")[0] in HOOKS


# The installed packages.


def source(package: str, *path: str) -> ast.Module:
    """The syntax of a package's file. Importing Lightning or transformers takes ten seconds and more."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    return ast.parse(Path(found.submodule_search_locations[0], *path).read_text(encoding="utf-8"))


def classes(tree: ast.Module) -> dict[str, ast.ClassDef]:
    return {each.name: each for each in ast.walk(tree) if isinstance(each, ast.ClassDef)}


def public_members(kind: ast.ClassDef) -> set[str]:
    names = {each.name for each in kind.body if isinstance(each, ast.FunctionDef)}
    for each in kind.body:
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            names.add(each.target.id)
    return {name for name in names if not name.startswith("_")}


def arguments_of(kind: ast.ClassDef, method: str = "__init__") -> set[str]:
    found = next(each for each in kind.body if isinstance(each, ast.FunctionDef) and each.name == method)
    return {each.arg for each in (*found.args.args, *found.args.kwonlyargs)} - {"self"}


def exported(tree: ast.Module) -> set[str]:
    lists = [
        each.value
        for each in tree.body
        if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "__all__"
    ]
    return set(ast.literal_eval(lists[0]))


def without_row(names: set[str], *kinds: str) -> set[str]:
    return {name for name in names if not any(row(name, kind) for kind in kinds)}


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_every_public_name_of_lightning_has_a_row(package: str) -> None:
    inner = ("pytorch",) if package == "lightning" else ()
    for folder in ((), ("callbacks",), ("loggers",), ("profilers",), ("strategies",), ("plugins",)):
        assert not without_row(exported(source(package, *inner, *folder, "__init__.py")), "name"), folder


def test_every_argument_of_lightnings_trainer_and_callbacks_has_a_row() -> None:
    trainer = classes(source("lightning", "pytorch", "trainer", "trainer.py"))["Trainer"]
    given = set[str]().union(
        *(arguments_of(trainer, each) for each in ("__init__", "fit", "test", "predict"))
    )
    assert not without_row(given, "argument")
    for module, name in (("model_checkpoint", "ModelCheckpoint"), ("early_stopping", "EarlyStopping")):
        kind = classes(source("lightning", "pytorch", "callbacks", f"{module}.py"))[name]
        assert not without_row(arguments_of(kind), "argument")


def test_every_member_of_lightnings_modules_and_callbacks_has_a_row() -> None:
    files = [
        ("core", "module.py"),
        ("core", "hooks.py"),
        ("core", "datamodule.py"),
        ("core", "mixins", "hparams_mixin.py"),
        ("callbacks", "callback.py"),
    ]
    found = {
        name: each for file in files for name, each in classes(source("lightning", "pytorch", *file)).items()
    }
    wanted = {
        "LightningModule",
        "ModelHooks",
        "DataHooks",
        "CheckpointHooks",
        "LightningDataModule",
        "Callback",
    }
    assert wanted <= found.keys()
    members = set[str]().union(*map(public_members, found.values())) - {
        "forward",
        "load_state_dict",
        "state_dict",
    }
    assert len(members) > 90
    assert not without_row(members, "hook", "common hook", "attribute", "method")


def test_a_new_release_of_transformers_has_no_name_without_an_answer() -> None:
    fields = {
        each.target.id
        for module in ("training_args", "training_args_seq2seq")
        for kind in classes(source("transformers", f"{module}.py")).values()
        if kind.name.endswith("TrainingArguments")
        for each in kind.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
    }
    assert len(fields) > 100
    # What transformers computes for itself stands between its fields.
    assert {name for name in fields if not name.startswith("_")} <= {*ARGUMENTS}
    trainer = classes(source("transformers", "trainer.py"))["Trainer"]
    assert arguments_of(trainer) <= {*CONSTRUCTOR}
    generating = classes(source("transformers", "trainer_seq2seq.py"))["Seq2SeqTrainer"]
    ours = {"predict"}
    assert public_members(trainer) | public_members(generating) <= {*MEMBERS} | ours
    found = classes(source("transformers", "trainer_callback.py"))
    events = public_members(found["TrainerCallback"])
    assert events - {*HOOKS} <= {*EVENTS}
    state = public_members(found["TrainerState"]) | public_members(found["TrainerControl"])
    assert state - {"compute_steps", "init_training_references", "state"} <= {*STATE}


@pytest.mark.parametrize("name", sorted({*ARGUMENTS, *CONSTRUCTOR}))
def test_an_argument_of_transformers_is_answered_with_ours(name: str) -> None:
    ours = row(name, "argument", "Trainer")
    assert ours is not None
    if name in inspect.signature(Trainer).parameters:
        assert ours.startswith("same")
        return
    told = refusal(lambda: Trainer(**{name: True}))
    assert told.startswith(f"Trainer has no argument {name!r}. ")
    assert ("Here it is " in told) == (not ours.startswith("none: "))
    assert ("It has no counterpart here: " in told) == ours.startswith("none: ")


@pytest.mark.parametrize("name", MEMBERS)
def test_a_member_of_their_trainer_is_answered_with_ours(name: str) -> None:
    with pytest.raises(AttributeError, match=r"Here it is |It has no counterpart here: "):
        getattr(Trainer(max_steps=1), name)


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_of_theirs_is_refused_with_ours(name: str) -> None:
    callback = type("Theirs", (Callback,), {name: lambda self, args, state, control, **more: None})()
    told = refusal(lambda: quiet(max_steps=1, callbacks=[callback]))
    assert told.startswith(f"Theirs.{name} is no hook. ")
    assert "Here it is " in told or "It has no counterpart here: " in told


def test_what_their_events_are_given_is_found_in_the_run() -> None:
    unanswered: list[str] = []

    def look(run: Run) -> None:
        for name in STATE:
            try:
                getattr(run, name)
            except AttributeError as error:
                answered = re.search(r"Here it is |It has no counterpart here: ", str(error))
                unanswered.extend(() if answered else (name,))
            else:
                unanswered.append(name)

    quiet(max_steps=1, callbacks=[drivetrain.LambdaCallback(on_fit_start=look)]).fit(Regression(), pairs(4))
    assert unanswered == []


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_a_method_that_their_subclasses_override_is_warned_of_in_a_task(name: str) -> None:
    task = type("Moved", (Regression,), {name: lambda self, *given: None})()
    with pytest.warns(UserWarning, match=rf"- Moved\.{name}: (Here it is|It has no counterpart)"):
        quiet(max_steps=1).fit(task, pairs(4))


# What is answered.


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


RECOMPUTED = "Trainer(memory=MemoryConfig(activation_checkpointing=True))"


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        *((each, "micro_batch") for each in ("auto_scale_batch_size", "auto_find_batch_size", "microbatch")),
        ("device_train_microbatch_size", "called 'micro_batch'"),
        ("activation_checkpointing", RECOMPUTED),
        ("gradient_checkpointing", RECOMPUTED),
        ("offload_activations", "MemoryConfig(offload_activations=True)"),
        ("release_gradients", "MemoryConfig(release_gradients=True)"),
        *(
            (each, "Here it is OptimizerConfig(")
            for each in ("warmup_steps", "learning_rate", "optim", "optimizer")
        ),
        ("lr_scheduler_type", "OptimizerConfig(schedule=...), returned by"),
        ("profiler", "callbacks=[Profile()]"),
        ("fast_dev_run", 'try_out="batches"'),
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
        ("steps", "datamodule", "called 'train_data', an object with train_data() and validation_data()"),
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
            "Trainer has no argument 'accelerator'. Here it is called 'strategy'.",
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


# Recipes of the table do what it says.


def weights(task: torch.nn.Module) -> list[float]:
    return [float(value) for each in task.parameters() for value in each.detach().flatten()]


def test_a_table_alone_is_shown_as_the_table_says() -> None:
    with heard("line", logging.INFO) as shown:
        quiet(max_steps=1, callbacks=[drivetrain.ModelSummary()]).fit(Regression(), pairs())
    assert shown


def test_a_checkpoint_of_the_end_alone_is_what_the_table_says(tmp_path: Path) -> None:
    config = CheckpointConfig(every=None)
    result = quiet(max_epochs=2, checkpoint=config, run_dir=tmp_path).fit(Regression(), pairs())
    assert Path(str(result.model_path)).name == "model.safetensors"
    assert len(os.listdir(tmp_path / "checkpoints")) <= 2


def test_every_wrong_argument_is_in_one_error() -> None:
    told = refusal(lambda: Trainer(max_epochs=1, model=1, args=2, gradient_clip_val=1.0))
    assert told.startswith("Trainer has no arguments\n- 'model'. Here it is trainer.fit(task=...)")
    assert (
        "\n- 'gradient_clip_val'. Here it is called 'max_grad_norm'. \nAllowed: 'assets', 'batch_size'"
        in told
    )


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("ModelCheckpoint", "Here it is CheckpointConfig, for Trainer(checkpoint=...)."),
        ("Timer", "Here it is Trainer(max_time=...)."),
        ("WandbLogger", "see docs/how-to/loggers.md"),
        ("LightningModule", "Here it is drivetrain.TaskModule"),
        ("TQDMProgressBar", "Here it is called 'ProgressBar'."),
        ("TrainingArguments", "Here it is the arguments of Trainer"),
    ],
)
def test_a_public_name_of_another_library_is_answered_where_it_is_looked_for(name: str, ours: str) -> None:
    with pytest.raises(AttributeError, match=f"drivetrain has no '{name}'") as caught:
        getattr(drivetrain, name)
    assert ours in str(caught.value)
    assert not hasattr(drivetrain, name)
    with pytest.raises(ImportError, match=f"drivetrain has no '{name}'") as imported:
        exec(f"from drivetrain import {name}")
    assert str(imported.value) == str(caught.value)


@pytest.mark.parametrize(
    ("hook", "ours"),
    [
        ("on_load_checkpoint", "Here it is on_checkpoint_loaded, and"),
        ("on_save_checkpoint", r"Here it is state_dict\(\), whose value is in each checkpoint"),
        ("on_test_end", "Here it is called 'on_evaluation_end'"),
        ("on_test_epoch_end", "Here it is called 'on_evaluation_end'"),
        ("on_predict_batch_end", "Here it is called 'on_evaluation_step_end'"),
        ("on_sanity_check_start", "It has no counterpart here"),
    ],
)
def test_a_callbacks_hook_of_another_library_is_answered_with_ours(hook: str, ours: str) -> None:
    ported = type("Ported", (Callback,), {hook: lambda self, run: None})()
    with pytest.raises(ConfigError, match=rf"Ported\.{hook} is no hook\. {ours}"):
        quiet(max_steps=1, callbacks=[ported])


# A task that was written for another library.


class Ported(Regression):
    automatic_optimization = False

    def on_train_epoch_end(self) -> None:
        """Never called."""

    def configure_gradient_clipping(self, optimizer: Any, value: float) -> None:
        """Never called."""

    def on_step_end(self, run: Any) -> None:
        """Ours, but a callback's."""

    def on_checkpoint_saved(self, run: Any) -> None:
        """Ours alone, and a callback's too."""

    def train_dataloader(self) -> Any:
        """Never called."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:  # type: ignore[override]
        return super().training_step(batch)

    def predict_step(self, batch: Any, stage: str) -> Any:  # type: ignore[override]
        return super().predict_step(batch)

    def validation_step(self, batch: Any, batch_idx: int = 0, *, scale: float = 1.0) -> Any:
        return super().validation_step(batch)


def test_a_ported_task_is_refused_with_all_that_nobody_would_call(tmp_path: Path) -> None:
    verbs = [
        lambda: quiet(max_steps=1, run_dir=tmp_path).fit(Ported(), pairs()),
        lambda: next(quiet(max_steps=1).steps(Ported(), pairs())),
        lambda: quiet().validate(Ported(), pairs()),
        lambda: quiet().predict(Ported(), pairs()),
        lambda: quiet(max_steps=1).plan(Ported(), pairs()),
    ]
    assert len({refusal(verb) for verb in verbs}) == 1
    lines = refusal(verbs[0]).splitlines()
    assert lines[0].startswith("Ported is written for another library; change this first")
    assert [line.split()[1] for line in lines[1:]] == [
        "Ported.automatic_optimization",
        "Ported.configure_gradient_clipping",
        "Ported.on_checkpoint_saved",
        "Ported.on_step_end",
        "Ported.on_train_epoch_end",
        "Ported.predict_step",
        "Ported.train_dataloader",
        "Ported.training_step",
        "Ported.validation_step",
    ]
    assert "is never called. Here it is a callback's on_epoch_end." in lines[5]
    assert "takes 'stage', but is given the batch alone" in lines[6]
    assert "takes 'batch_idx', but is given the batch alone" in lines[8]


def test_an_attribute_of_the_object_counts_too() -> None:
    task = Regression()
    task.automatic_optimization = True
    quiet(max_steps=1).fit(task, pairs())
    task.automatic_optimization = False
    assert "Regression.automatic_optimization is never called" in refusal(
        lambda: quiet(max_steps=1).fit(task, pairs())
    )


def test_steps_may_have_arguments_of_their_own() -> None:
    class Scaled(Regression):
        def training_step(self, batch: Any, scale: float = 1.0, *more: Any, **options: Any) -> Any:
            return super().training_step(batch)

    assert quiet(max_steps=1).fit(Scaled(), pairs()).progress.updates == 1


def test_a_common_name_is_warned_of_once_for_a_class() -> None:
    class Own(Regression):
        def setup(self, stage: str) -> None:
            """Perhaps the user calls it."""

        def log(self, name: str, value: float) -> None:
            """A helper that nobody but the user calls."""

    class Watching(Callback):
        def teardown(self) -> None:
            """Likewise."""

    with pytest.warns(
        UserWarning, match=r"(?s)If Own calls them, all is well:\n- Own\.setup: Here it is"
    ) as told:
        quiet(max_steps=1).fit(Own(), pairs())
    assert "log" not in str(told[0].message)
    quiet(max_steps=1).fit(Own(), pairs())
    with pytest.warns(UserWarning, match=r"Watching\.teardown: Here it is a callback's on_fit_end"):
        quiet(max_steps=1, callbacks=[Watching()])
    quiet(max_steps=1, callbacks=[Watching()])


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("log", "the mapping that a step or loss returns"),
        ("log_dict", "the mapping that a step or loss returns"),
        ("trainer", "the run, which callbacks are given"),
        ("device", r"next\(self.parameters\(\)\).device"),
        ("current_epoch", "run.progress.epoch"),
        ("global_step", "run.progress.updates"),
        ("logger", "run.log"),
        ("save_hyperparameters", "self.hparams"),
        ("load_from_checkpoint", "from_checkpoint"),
        ("optimizers", "a generator step"),
        ("manual_backward", "a generator step"),
        ("train_dataloader", "trainer.fit"),
    ],
)
def test_an_attribute_of_lightnings_module_is_answered_with_ours(name: str, ours: str) -> None:
    with pytest.raises(
        AttributeError, match=f"'Regression' object has no attribute '{name}'. Here it is .*{ours}"
    ):
        getattr(Regression(), name)
    assert not hasattr(Regression(), name)
    assert getattr(Regression(), name, 3) == 3


def test_a_class_without_load_from_checkpoint_says_what_ours_is() -> None:
    with pytest.raises(AttributeError, match=r"Here it is from_checkpoint\(path\)"):
        Regression.load_from_checkpoint("x.ckpt")
    assert not hasattr(Regression, "load_from_checkpoint")


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("train", r"trainer\.fit\(task, train_data"),
        ("evaluate", r"trainer\.validate\(task, data\)"),
        ("save_checkpoint", r"CheckpointConfig\(every="),
        ("save_model", r"model\.safetensors"),
        ("global_step", r"run\.progress"),
    ],
)
def test_an_attribute_of_other_trainers_is_answered_with_ours(name: str, ours: str) -> None:
    trainer = Trainer(max_epochs=1)
    with pytest.raises(
        AttributeError, match=f"'Trainer' object has no attribute '{name}'. Here it is .*{ours}"
    ):
        getattr(trainer, name)
    assert not hasattr(trainer, "manual_backward")
    assert getattr(trainer, "absent", 3) == 3


@pytest.mark.parametrize(
    ("access", "ours"),
    [
        (lambda run: run.trainer, "the run itself"),
        (lambda run: run.current_epoch, r"run\.progress\.epoch"),
        (lambda run: run.should_stop, r"run\.stop\(reason\)"),
        (lambda run: setattr(run, "should_stop", True), r"run\.stop\(reason\)"),
        (lambda run: setattr(run, "should_training_stop", True), r"run\.stop\(reason\)"),
    ],
)
def test_a_hook_that_uses_another_trainers_names_is_told_ours(
    access: Callable[[Run], object], ours: str
) -> None:
    class Ported(Callback):
        def on_step_end(self, run: Run) -> None:
            access(run)

    trainer = quiet(max_steps=1, callbacks=[Ported()])
    with pytest.raises(AttributeError, match=f"'Run' object has no attribute '.*'. Here it is .*{ours}"):
        trainer.fit(Regression(), pairs())


def test_any_other_missing_attribute_reads_as_in_torch() -> None:
    with pytest.raises(AttributeError) as ours:
        Regression().absent  # noqa: B018
    with pytest.raises(AttributeError) as torchs:
        torch.nn.Module.__getattr__(Regression(), "absent")
    assert str(ours.value) == str(torchs.value)
    with pytest.raises(AttributeError, match="no attribute 'line'"):
        Regression.__new__(Regression).line  # noqa: B018


class Attributes(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("offset", torch.ones(1))
        self.scale = torch.nn.Parameter(torch.full((1,), 2.0))
        self.logger = torch.nn.Linear(1, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        return self.logger(self.line(features) * self.scale + self.offset)


def test_a_task_copies_pickles_traces_and_compiles_as_other_modules_do() -> None:
    task, features = Attributes().eval(), torch.ones(2, 4)
    expected = task(features)
    assert torch.equal(copy.deepcopy(task)(features), expected)
    assert torch.equal(pickle.loads(pickle.dumps(task))(features), expected)
    compiled = torch.compile(task, backend="eager", fullgraph=True)
    assert torch.equal(compiled(features), expected)
    with warnings.catch_warnings():  # torch.jit is deprecated
        warnings.simplefilter("ignore")
        assert torch.equal(torch.jit.trace(task, features)(features), expected)


# Objects of other libraries, known by the classes of their bases.


def a_class(name: str, package: str, *bases: type, **members: Any) -> type:
    """A class of the user's on one that another package has by that name."""
    base = type(name, bases, {"__module__": f"{package}.inner"})
    return type("Mine", (base,), members)


def test_objects_of_other_libraries_are_known_without_importing_them() -> None:
    module = a_class("LightningModule", "lightning.pytorch", torch.nn.Module)
    told = refusal(lambda: quiet(max_steps=1).fit(module(), pairs()))
    assert told.startswith("the task is Mine (LightningModule of Lightning). Here it is drivetrain.")
    model = a_class("PreTrainedModel", "transformers", torch.nn.Module)
    told = refusal(lambda: quiet(max_steps=1).fit(model(), pairs()))
    assert "`def forward(self, **batch): return self.model(**batch)`" in told

    data = a_class("LightningDataModule", "pytorch_lightning")
    told = refusal(lambda: quiet(max_steps=1).fit(Regression(), data()))
    assert told.startswith("the training data is Mine (LightningDataModule of Lightning). Here it is as_data")
    sets = a_class("DatasetDict", "datasets", dict)
    assert 'sets["validation"]' in refusal(lambda: quiet(max_steps=1).fit(Regression(), pairs(), sets()))
    ported = type("Ported", (), {"train_dataloader": lambda self: pairs()})
    told = refusal(lambda: quiet(max_steps=1).fit(Regression(), ported()))
    assert told == "Ported has train_dataloader(), which is called train_data() here. Rename it"

    arguments = a_class("TrainingArguments", "transformers")
    told = refusal(lambda: Trainer(torch.nn.Linear(1, 1), arguments()))  # type: ignore[misc]
    assert "not Mine (TrainingArguments of transformers). Here it is the arguments of Trainer" in told
    callback = a_class("EarlyStopping", "lightning.pytorch", on_fit_end=lambda *given: None)
    told = refusal(lambda: quiet(max_steps=1, callbacks=[callback()]))
    assert "Mine (EarlyStopping of Lightning). Here it is drivetrain's class of that name" in told
    logger = a_class("WandbLogger", "lightning.pytorch", a_class("Logger", "lightning.pytorch"))
    told = refusal(lambda: quiet(max_steps=1, loggers=[logger()]))
    assert "Mine (WandbLogger of Lightning). Here it is an object with log_metrics" in told


REAL = """
import sys, warnings
import torch
from drivetrain import ConfigError, TaskModule, Trainer
assert not {"lightning", "transformers"} & sys.modules.keys()
warnings.simplefilter("ignore")
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
from transformers import BertConfig, BertForSequenceClassification, TrainerCallback, TrainingArguments

quiet = dict(strategy="cpu", checkpoint=False, loggers=(), progress_bar=False, max_steps=1)
batch = {"input_ids": torch.ones(2, 3, dtype=torch.long), "labels": torch.zeros(2, dtype=torch.long)}
bert = BertForSequenceClassification(BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1,
    num_attention_heads=1, intermediate_size=8))

class Task(TaskModule):
    def __init__(self, model):
        super().__init__()
        self.model = model
    def forward(self, **batch):
        return self.model(**batch)

class Moved(BoringModel, TaskModule):
    pass

for attempt in (
    lambda: Trainer(**quiet).fit(BoringModel(), [batch]),
    lambda: Trainer(**quiet).fit(bert, [batch]),
    lambda: Trainer(**quiet).fit(Task(bert), BoringDataModule()),
    lambda: Trainer(**quiet, callbacks=[pl.callbacks.EarlyStopping("loss")]),
    lambda: Trainer(**quiet, callbacks=[TrainerCallback()]),
    lambda: Trainer(**{**quiet, "loggers": [pl.loggers.CSVLogger("x")]}),
    lambda: Trainer(TrainingArguments("x")),
):
    try:
        attempt()
    except ConfigError as error:
        print(str(error)[:60])
print(Trainer(**quiet).fit(Task(bert), [batch]).progress.updates)
"""


@pytest.mark.full
def test_real_objects_of_lightning_and_transformers_are_known(tmp_path: Path) -> None:
    for package in ("lightning", "transformers"):
        pytest.importorskip(package) if importlib.util.find_spec(package) is None else None
    ended = subprocess.run(
        [sys.executable, "-c", REAL], capture_output=True, text=True, timeout=400, cwd=tmp_path, check=False
    )
    assert ended.stdout.splitlines() == [
        "the task is BoringModel (LightningModule of Lightning). Here",
        "the task is BertForSequenceClassification (PreTrainedModel o",
        "the training data is BoringDataModule (LightningDataModule o",
        "EarlyStopping of Lightning. Here it is drivetrain's class of",
        "TrainerCallback of transformers. Here it is drivetrain.Callb",
        "CSVLogger of Lightning. Here it is drivetrain's class of tha",
        "Trainer takes its arguments by name, as in Trainer(max_epoch",
        "1",
    ], ended.stderr
