"""Other libraries' names are never accepted, and answered with ours; one table has them all."""

import inspect
import re
import tomllib
from collections.abc import Callable, Iterator
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet
from tests.support.transformers_names import ARGUMENTS, CONSTRUCTOR, EVENTS, MEMBERS, STATE
from torch.utils.data import DataLoader

import drivetrain
from drivetrain import Callback, CompileConfig, ConfigError, Engine, OptimizerConfig, Trainer
from drivetrain.core.synonyms import OWNERS, row
from drivetrain.loggers.base import LOGGERS
from drivetrain.run.hooks import HOOKS
from drivetrain.run.run import Run
from drivetrain.strategies.precision.registry import PRECISIONS
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.task.optim.config import OPTIMIZERS

VERBS = {"fit": Trainer.fit, "test": Trainer.test, "predict": Trainer.predict, "DataLoader": DataLoader}
PARTS = {owner: VERBS[owner] if owner in VERBS else getattr(drivetrain, owner) for owner in OWNERS}
ANSWERED = re.compile(r"Here it is |It has no counterpart(?: here: )?")
SYNONYMS = tomllib.loads(resources.files("drivetrain.core").joinpath("other_names.toml").read_text("utf-8"))
STOPPED = set(re.findall(r"\w+", "Trainer none the and for in is"))
RECOMPUTED = "Trainer(memory=MemoryConfig(activation_checkpointing=True))"


def refusal(call: Callable[[], object], *, kind: type[Exception] = ConfigError) -> str:
    with pytest.raises(kind) as caught:
        call()
    return str(caught.value)


def rows(*kinds: str) -> Iterator[tuple[str, str]]:
    for kind in kinds:
        for names, ours in SYNONYMS[kind].items():
            for name in names.split():
                yield name, ours


def test_each_row_of_the_table_is_one_and_names_an_argument_of_ours() -> None:
    wrong, of_optimizers = [], {"betas", "eps"}
    for kind in SYNONYMS:
        names = [name for name, _ in rows(kind)]
        wrong += [f"{name}: two rows" for name in set(names) if names.count(name) > 1]
    for name, ours in rows("argument"):
        for part in ours.split(" | "):
            owner, _, rest = part.partition(".")
            argument = rest.partition("; ")[0].partition("=")[0]
            known = inspect.signature(PARTS[owner]).parameters.keys() if owner in PARTS else {argument}
            wrong += [] if argument in {*known, *of_optimizers} else [f"{name}: {part}"]
    same = {name for name, ours in rows("argument", "hook", "name") if ours[:4] == "same"}
    taken = {name for part in PARTS.values() for name in inspect.signature(part).parameters}
    wrong += [f"{name}: not the same" for name in same - {*taken, *HOOKS, *drivetrain.__all__}]
    others = {name for name, ours in rows("argument") if ours[:4] != "same"}
    wrong += [f"{name}: the same" for name in others & inspect.signature(Trainer).parameters.keys()]
    for kind, known in (("precision", PRECISIONS), ("optimizer", OPTIMIZERS), ("logger", LOGGERS)):
        for name, ours in rows(kind):
            if name in known or not (ours in known or ours.startswith("none: ")):
                wrong.append(f"{kind} {name}: {ours}")
    strategies = {ours for _, ours in rows("strategy")} - {*STRATEGIES}
    wrong += [each for each in strategies if not each.startswith(("DDPConfig(", "FSDPConfig(", "none: "))]
    hooks = {ours.partition(",")[0] for _, ours in rows("hook") if ours.startswith("on_")}
    assert not wrong + sorted(hooks - {*HOOKS})


def test_the_page_from_other_libraries_gives_the_answers_of_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "how-to" / "from-other-libraries.md"
    table, wrong, checked = dict(rows("argument")), [], 0
    for line in page.read_text(encoding="utf-8").splitlines():
        if not line.startswith("| `"):
            continue
        there, here = line.strip("| ").split(" | ", 1)
        for name in re.findall(r"`([a-z_0-9]+)(?:=[^`]*)?`", there):
            ours = table.get(name, "same")
            if not ours.startswith("same"):
                checked += 1
                words = set(re.findall(r"\w{2,}", ours)) - STOPPED
                wrong += [] if any(each in here for each in words) else [f"{name}: {ours} / {here}"]
    assert not wrong
    assert checked > 50


def test_all_of_transformers_names_are_answered_with_ours() -> None:
    wrong, unanswered, ours = [], list[str](), inspect.signature(Trainer).parameters
    for name in {*ARGUMENTS, *CONSTRUCTOR} - ours.keys():
        answer = row(name, "argument", "Trainer") or ""
        start = "It has no counterpart here: " if answer.startswith("none: ") else "Here it is "
        told = refusal(lambda name=name: Trainer(**{name: True}))
        wrong += [] if told.startswith(f"Trainer has no argument {name!r}. {start}") else [told]
    trainer = Trainer(max_steps=1)
    for name in MEMBERS:
        told = refusal(lambda name=name: getattr(trainer, name), kind=AttributeError)
        wrong += [] if ANSWERED.search(told) else [told]
    for name in EVENTS:
        callback = type("Theirs", (Callback,), {name: lambda self, args, state, control, **more: None})()
        told = refusal(lambda callback=callback: quiet(max_steps=1, callbacks=[callback]))
        wrong += [] if ANSWERED.search(told) and f"Theirs.{name} is no hook" in told else [told]

    def look(run: Run) -> None:
        for name in STATE:
            told = refusal(lambda name=name: getattr(run, name), kind=AttributeError)
            unanswered.extend([] if ANSWERED.search(told) else [told])

    quiet(max_steps=1, callbacks=[drivetrain.LambdaCallback(on_fit_start=look)]).fit(Regression(), pairs(4))
    assert not wrong + unanswered


def test_a_value_of_another_library_is_answered_with_ours() -> None:
    precisions = {
        "32": ("32-true", "fp32", "float32", "no"),
        "64": ("64-true",),
        "bf16-mixed": ("bf16", "bfloat16", "BF16"),
        "16-mixed": (16, "16", "fp16", "float16", "half"),
    }
    for ours, given in precisions.items():
        for each in given:
            assert f"called '{ours}'." in refusal(lambda each=each: Trainer(max_epochs=1, precision=each))
    for each, ours in {"paged_adamw_8bit": "adamw8bit", "adamw_torch_fused": "adamw"}.items():
        assert f"Here it is called '{ours}'." in refusal(lambda each=each: OptimizerConfig(each))
    assert "Did you mean 'adamw8bit'?" in refusal(lambda: OptimizerConfig("AdamW8bit"))


def test_an_argument_of_another_library_is_answered_with_ours() -> None:
    ours = {
        "auto_scale_batch_size": 'micro_batch="auto"',
        "gradient_checkpointing": RECOMPUTED,
        "learning_rate": "Here it is OptimizerConfig(",
        "profiler": "callbacks=[Profile()]",
        "fast_dev_run": "dry_run=True",
        "gpu": 'Here it is strategy="cuda".',
    }
    for name, words in ours.items():
        told = refusal(lambda name=name: Trainer(**{name: 2}))
        assert told.startswith(f"Trainer has no argument {name!r}. Here it is ")
        assert words in told.split(" Allowed: ")[0]
    trainer = quiet(max_epochs=1)
    for verb, name, answer in (
        ("steps", "train_dataloaders", "train_data'"),
        ("steps", "datamodule", "train_data', an object with train_data() and validation_data()"),
        ("test", "ckpt_path", "checkpoint'"),
    ):
        told = refusal(lambda verb=verb, name=name: getattr(trainer, verb)(Regression(), **{name: pairs()}))
        assert told.startswith(f"Trainer.{verb} has no argument {name!r}. Here it is called '{answer}")
    others: dict[str, Any] = {
        "by name": (lambda: CompileConfig("task"), "by name, as in CompileConfig(scope=...), not 'task'"),
        "compile": (lambda: CompileConfig(disable=True), "Here it is compile=False."),
        "memory": (lambda: Trainer(memory={"gradient_checkpointing": True}), "activation_checkpointing"),
        "engine": (lambda: Engine(micro_batch="auto"), "Here it is Trainer("),
        "nearest": (lambda: drivetrain.Throughput(flops=2), "no argument 'flops'. Did you mean"),
        "all": (lambda: drivetrain.MemoryReport(task=2), "no argument 'task'. Allowed: 'show'."),
        "option": (lambda: OptimizerConfig("sgd", learning_rate=1.0), "called 'lr'"),
        "accelerator": (lambda: Trainer(npu=True), "no counterpart here: Ascend"),  # type: ignore[call-arg]
        "of a verb": (
            lambda: trainer.test(Regression(), pairs(), steps=3),  # type: ignore[call-arg]
            "Here it is Trainer(limit_test_batches=...).",
        ),
    }
    assert_refused(ConfigError, others)


def test_an_argument_given_to_the_wrong_place_is_answered_with_the_right_one() -> None:
    configs = {
        "keep_last": (lambda: quiet(keep_last=3), "Trainer(checkpoint=CheckpointConfig(keep_last=...))"),
        "sharding": (lambda: quiet(sharding="hybrid"), "Trainer(strategy=FSDPConfig(sharding=...))"),
        "resume": (lambda: quiet(resume="auto"), "trainer.fit(resume=...)"),
        "schedule": (lambda: quiet(schedule="cosine"), "OptimizerConfig(schedule=...)"),
        "max_epochs": (
            lambda: quiet().fit(Regression(), pairs(), max_epochs=3),  # type: ignore[call-arg]
            "Trainer(max_epochs=...)",
        ),
        "ckpt_path": (lambda: quiet(ckpt_path="x"), "trainer.fit(resume=...)"),
        "save": (lambda: quiet().predict(Regression(), pairs(), save="x"), "Here it is called 'save_to'"),
        "restore": (
            lambda: drivetrain.EarlyStopping("validation/loss", restore_best_weights=True),
            "restore_best=True",
        ),
        "direction": (lambda: drivetrain.CheckpointConfig(direction="max"), 'mode="max"'),
        "every": (lambda: drivetrain.CheckpointConfig(every=True), "CheckpointConfig: every: True"),
        "clipnorm": (lambda: drivetrain.OptimizerConfig(clipnorm=1.0), "each weight by its own norm"),
        "misspelt": (lambda: quiet(max_epoch=3), "Did you mean 'max_epochs'?"),
    }
    assert_refused(ConfigError, configs)


def test_an_import_or_a_hook_of_another_library_is_answered_with_ours() -> None:
    for name, ours in {
        "ModelCheckpoint": "Here it is CheckpointConfig, for Trainer(checkpoint=...).",
        "WandbLogger": "see docs/how-to/trackers.md",
        "DeviceStats": "It is drivetrain.callbacks.DeviceStats",
    }.items():
        told = refusal(lambda name=name: getattr(drivetrain, name), kind=AttributeError)
        assert told.startswith(f"drivetrain has no '{name}'")
        assert ours in told
        assert not hasattr(drivetrain, name)
        assert refusal(lambda name=name: exec(f"from drivetrain import {name}"), kind=ImportError) == told
    for hook, ours in {
        "on_save_checkpoint": "Here it is state_dict(), whose value is in each checkpoint",
        "on_test_epoch_end": "Here it is called 'on_evaluation_end'",
    }.items():
        ported = type("Ported", (Callback,), {hook: lambda self, run: None})()
        told = refusal(lambda ported=ported: quiet(max_steps=1, callbacks=[ported]))
        assert told.startswith(f"Ported.{hook} is no hook. {ours}")


class Ported(Regression):
    automatic_optimization = False
    on_step_end = train_dataloader = lambda self, *given: None  # the first is ours, but a callback's

    def predict_step(self, batch: Any, stage: str) -> Any:  # type: ignore[override]
        return super().predict_step(batch)

    def validation_step(self, batch: Any, batch_idx: int = 0, *, scale: float = 1.0) -> Any:
        return super().validation_step(batch)

    def setup(self, stage: str) -> None: ...

    def compute_loss(self, outputs: Any) -> None: ...  # a task's own


def test_a_ported_task_is_refused_with_all_that_nobody_would_call(tmp_path: Path) -> None:
    verbs = [
        lambda: quiet(max_steps=1, run_dir=tmp_path).fit(Ported(), pairs()),
        lambda: next(quiet(max_steps=1).steps(Ported(), pairs())),
        lambda: quiet().validate(Ported(), pairs()),
        lambda: quiet().predict(Ported(), pairs()),
        lambda: quiet(max_steps=1).plan(Ported(), pairs()),
    ]
    (told,) = {refusal(verb) for verb in verbs}
    lines = told.splitlines()
    assert lines[0].startswith("Ported is written for another library; change this first")
    names = "automatic_optimization on_step_end predict_step setup train_dataloader validation_step"
    assert [line.split()[1] for line in lines[1:]] == [f"Ported.{name}" for name in names.split()]
    assert "is never called. Here it is a callback's on_step_end." in lines[2]
    assert "takes 'stage', but is given the batch alone" in lines[3]
    assert "is never called. Here it is the constructor" in lines[4]
    assert "takes 'batch_idx', but is given the batch alone" in lines[6]


def test_attributes_of_other_libraries_are_answered_with_ours() -> None:
    task, trainer, wrong = Regression(), Trainer(max_epochs=1), []
    table = {
        (task, "log"): "the mapping that training_step or loss returns",
        (task, "device"): "next(self.parameters()).device",
        (task, "save_hyperparameters"): "self.hparams",
        (trainer, "train"): "trainer.fit(task, train_data",
        (trainer, "global_step"): "run.progress",
    }
    for (owner, name), ours in table.items():
        told = refusal(lambda owner=owner, name=name: getattr(owner, name), kind=AttributeError)
        start = f"'{type(owner).__name__}' object has no attribute '{name}'. Here it is "
        wrong += [] if told.startswith(start) and ours in told and not hasattr(owner, name) else [told]
        assert getattr(owner, name, 3) == 3
    assert not wrong
    with pytest.raises(AttributeError, match=r"Here it is from_checkpoint\(path\)"):
        Regression.load_from_checkpoint("x.ckpt")

    def look(run: Run) -> None:
        for name, ours in (("trainer", "the run itself"), ("current_epoch", "run.progress.epoch")):
            assert ours in refusal(lambda name=name: getattr(run, name), kind=AttributeError)
        for name in ("should_stop", "should_training_stop"):
            told = refusal(lambda name=name: setattr(run, name, True), kind=AttributeError)
            assert "Here it is run.stop(reason)" in told
        seen.append(run)

    seen: list[Run] = []
    quiet(max_steps=1, callbacks=[drivetrain.LambdaCallback(on_step_end=look)]).fit(Regression(), pairs())
    assert seen


def an_object(name: str, package: str, *bases: type, **members: Any) -> Any:  # of a user's class on theirs
    return type("Mine", (type(name, bases, {"__module__": f"{package}.inner"}),), members)()


def test_objects_of_other_libraries_are_known_without_importing_them() -> None:
    module = an_object("LightningModule", "lightning.pytorch", torch.nn.Module)
    model = an_object("PreTrainedModel", "transformers", torch.nn.Module)
    data = an_object("LightningDataModule", "pytorch_lightning")
    sets = an_object("DatasetDict", "datasets", dict)
    renamed = type("Ported", (), {"train_dataloader": lambda self: pairs()})()
    options = an_object("TrainingArguments", "transformers")
    callback = an_object("EarlyStopping", "lightning.pytorch", on_fit_end=lambda *given: None)
    logger = an_object("CometLogger", "lightning.pytorch")
    trainer, task = quiet(max_steps=1), Regression()
    table: dict[str, Any] = {
        "module": (lambda: trainer.fit(module, pairs()), "the task is Mine (LightningModule of Lightning)"),
        "model": (lambda: trainer.fit(model, pairs()), "forward(self, **batch): return self.model(**batch)"),
        "data": (lambda: trainer.fit(task, data), "LightningDataModule of Lightning", "as_data"),
        "sets": (lambda: trainer.fit(task, pairs(), sets), 'sets["validation"]'),
        "renamed": (lambda: trainer.fit(task, renamed), "train_dataloader()", "called train_data() here"),
        "options": (lambda: Trainer(task, options), "TrainingArguments of", "the arguments of Trainer"),
        "callback": (lambda: quiet(callbacks=[callback]), "Here it is drivetrain's class of that name"),
        "logger": (lambda: quiet(loggers=[logger]), 'Here it is Trainer(loggers="comet")'),
    }
    assert_refused(ConfigError, table)
