"""Arguments of a Trainer and of its verbs that are refused, with the word that helps."""

import dataclasses
from collections.abc import Iterator
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from drivetrain import (
    Callback,
    CheckpointConfig,
    EarlyStopping,
    Engine,
    FSDPConfig,
    LambdaCallback,
    MemoryConfig,
    OptimizerConfig,
    TaskModule,
    TorchSchedule,
    Trainer,
)
from drivetrain.core.errors import CheckpointError, ConfigError, DataError, StrategyError

COUNT = ((0, ""), (1.5, ""), (True, ""))  # no words: the name of the argument
SHARE = ((0, ""), (1.0, ""), ("0.5", ""))
WRONG: dict[str, tuple[tuple[Any, ...], ...]] = {
    **dict.fromkeys(("max_steps", "min_steps", "batch_size", "evaluation_batch_size"), COUNT),
    **dict.fromkeys(("gradient_accumulation_steps", "sanity_validation"), COUNT),
    "dry_run": ((0, ""), (1.5, ""), ("overfit", "islice")),
    **{f"limit_{stage}_batches": SHARE for stage in ("train", "validation", "test", "predict")},
    **dict.fromkeys(("num_nodes", "max_grad_value", "hang_timeout"), ((0, ""),)),
    **dict.fromkeys(("on_bad_batch", "on_save_error", "on_nonfinite"), (("ignore", ""),)),
    **dict.fromkeys(("data_seed", "num_workers"), ((-1, ""),)),
    **dict.fromkeys(("log_first_step", "train_metrics"), ((1, ""),)),
    "max_epochs": ((-0.5, ""), (float("inf"), "")),
    "max_tokens": ((0, ""), ("2 epochs", "'10M tokens'"), ("0.5 tokens", "not a whole number")),
    "max_time": (("3 steps", "positive time"), ("3 parsecs", "max_time must"), (timedelta(0), "positive")),
    "strategy": (("cup", "did you mean 'cpu'"), ("fsdp2", "called 'fsdp'"), ("npu", "ascend"), (3, "")),
    "devices": (("two", ""), ([0, 2], "CUDA_VISIBLE_DEVICES")),
    "precision": (("bf16", "called 'bf16-mixed'"), (8, "'8'", "'bf16-mixed'")),
    "max_grad_norm": ((0, ""), ("1", "")),
    "micro_batch": ((2.5, ""), ("automatic", "'auto'")),
    "validate_every": ((0, "positive"), ("1 epok", "did you mean 'epochs'"), ("2.5 steps", "'0.5 epochs'")),
    "validate_from": ((0, "positive"),),
    "log_every": ((-1, "log_every: an interval"), ("Auto", "'auto' is allowed"), ([3, 3], "increasing")),
    "checkpoint": (("yes", "checkpoint must be"), ("asynchronous", "'async'")),
    "run_dir": (("s3://bucket/run", "CheckpointConfig(directory="), (3, "")),
    "assets": (("vocabulary.txt", "put the asset into a list"),),
    "callbacks": (("early_stopping", ""), ([LambdaCallback], ""), ([3], "callback")),
    "loggers": (("tensorbord", "did you mean 'tensorboard'"), ([print], "no logger")),
    "progress_bar": (("no", ""),),
    "compile": (("yes", ""),),
    "memory": ((True, "MemoryConfig"),),
    "deterministic": (("false", ""),),
    "seed": ((-1, ""), (None, "")),
    "collate": (("pad", "function"),),
    "group_by_length": ((True, "column or a function"), ("", "column or a function")),
    "run_name": (("a/b", ""), ("..", ""), ("a\0b", "control"), ("\x1b[2J", "control"), ("é" * 101, "200")),
    "preemption": (("SIGTERM", ""),),
}


def test_wrong_arguments_are_refused_when_the_trainer_is_made() -> None:
    assert WRONG.keys() == {field.name for field in dataclasses.fields(Trainer)}  # a later one is checked too
    table: dict[str, tuple[Any, ...]] = {}
    for name, rows in WRONG.items():
        for value, *words in rows:
            words = [each or name for each in words]
            table[f"{name}={value!r}"] = (partial(Trainer, **{"max_epochs": 1, name: value}), *words)
    assert_refused((ConfigError, StrategyError), table)


def test_the_text_of_a_trainer_hides_a_password() -> None:
    policy = CheckpointConfig(directory="ftp://me:mine@host")
    assert all("me:<hidden>@host" in repr(each) for each in (policy, quiet(checkpoint=policy)))


def test_arguments_that_exclude_each_other_are_refused() -> None:
    graphs = {"mode": "reduce-overhead"}
    rows: tuple[tuple[dict[str, Any], str], ...] = (
        ({"validate_every": None, "validate_from": "1 epoch"}, "no validation to delay"),
        ({"validate_every": None, "sanity_validation": 2}, "cannot try a validation first"),
        ({"max_grad_norm": 1.0, "max_grad_value": 1.0}, "two ways to clip"),
        ({"log_every": None, "log_first_step": True}, "log_every=None"),
        ({"gradient_accumulation_steps": {0: 1, "2 epochs": 4}, "compile": graphs}, "with CUDA graphs"),
        ({"micro_batch": "auto", "compile": {"mode": "max-autotune"}}, "micro_batch='auto' with CUDA graphs"),
        ({"micro_batch": 2, "compile": {"options": {"triton.cudagraphs": True}}}, "with CUDA graphs"),
        ({"max_epoch": 3}, "did you mean 'max_epochs'"),
    )
    table = {str(given): (partial(Trainer, **{"max_epochs": 1, **given}), words) for given, words in rows}
    assert_refused(ConfigError, {**table, "by position": (lambda: Trainer(3), "by name")})  # type: ignore[misc]


class Stream(IterableDataset[Any]):  # a data set without a length
    def __iter__(self) -> Iterator[Any]:
        return iter(pairs().dataset)


BARE = type("Bare", (), {"__len__": lambda self: 6, "__getitem__": lambda self, index: None})


def test_data_that_do_not_fit_the_trainer_are_refused() -> None:
    def fit(*data: Any, task: Any = None, **options: Any) -> Any:
        return lambda: quiet(**{"max_epochs": 1, **options}).fit(task or Regression(), *data)

    half = SimpleNamespace(train_data=pairs)
    bare = TensorDataset(torch.zeros(9, 4), torch.zeros(9, 1))
    big = {"evaluation_batch_size": 5, "batch_size": 4}
    table: dict[str, tuple[Any, ...]] = {
        "no limit": (fit(pairs(), max_epochs=None), "how long to train"),
        "no tokens": (fit(pairs(), max_tokens=9), "'9 tokens' cannot be counted", "tokens(self, batch)"),
        "only zeros": (
            fit(pairs(), max_tokens=9, task=variant(tokens=lambda self, batch: 0)()),
            "counted none in the first step",
        ),
        "tokens of an interval": (fit(pairs(), log_every="9 tokens"), "tokens(self, batch)"),
        "tokens of no validation": (fit(pairs(), validate_from="9 tokens"), "tokens(self, batch)"),
        "part of a run": (fit(Stream(), batch_size=2, log_every="0.5"), "'0.5' is a part of the run"),
        "epochs": (lambda: quiet(min_epochs=2), "EarlyStopping(..., min_epochs=3)", "min_steps="),
        "a class": (fit(pairs(), task=Regression), "pass an instance", "Regression("),
        "a module": (fit(pairs(), task=nn.Linear(2, 2)), "drivetrain.TaskModule"),
        "half a module": (lambda: quiet().predict(Regression(), half), "has no predict_data()"),
        "collate of a loader": (fit(pairs(), collate=list), "collate=", "collate_fn"),
        "evaluation of a loader": (fit(bare, pairs(), **big), "evaluation_batch_size=5", "batch_size=5"),
        "read once": (fit(pairs(), iter(list(pairs())), sanity_validation=2), "sanity_validation=2"),
    }
    listed = DataLoader(bare, batch_sampler=[[0, 1], [2]])
    table["batches of a sampler"] = (
        fit(listed, batch_size=8),
        "batch_size=8",
        "batch_sampler",
        "Leave batch",
    )
    uneven = (torch.ones(3, 4), torch.ones(2))
    table["uneven columns"] = (fit(uneven, batch_size=2), "different lengths: 3, 2", "tensors of one length")
    for name, value in (("batch_size", 16), ("num_workers", 2)):
        table[f"{name} of batches"] = (fit(list(pairs()), **{name: value}), f"{name}={value}", "ready")
        words = (f"{name}={value}", "is a DataLoader with", "DataLoader(")
        table[f"{name} of a loader"] = (fit(pairs(), {"one": pairs(4)}, **{name: value}), *words)
    assert_refused(ConfigError, table)
    wrong: dict[str, tuple[Any, ...]] = {
        "a tensor": (fit(torch.ones(3, 4)), "a tuple, (x, y)"),
        "batch size": (fit(bare), "Trainer(batch_size=32)"),
        "indexed": (fit(BARE()), "Bare", "Trainer(batch_size=32)"),
        "list of columns": (
            fit([torch.ones(3, 4), torch.ones(3)]),
            "look like the inputs",
            "a tuple, (x, y)",
        ),
        "columns, no size": (fit((torch.ones(3, 4), torch.ones(3))), "Trainer(batch_size=32)", "list(data)"),
        "columns, odd": (fit({"x": torch.ones(3, 4), "y": torch.ones(2)}), "'x' has 3, 'y' has 2"),
        "empty": (fit([]), "training data is empty"),
        "dropped": (fit(pairs(3, 4, drop_last=True)), "training data is empty"),
    }
    assert_refused(DataError, wrong)


def test_checkpoints_that_cannot_be_resumed_are_refused(tmp_path: Path) -> None:
    def fit(*data: Any, resume: Any = None, **options: Any) -> Any:
        data = data or (pairs(),)
        return lambda: quiet(**{"max_epochs": 1, **options}).fit(Regression(), *data, resume=resume)

    run_dir = tmp_path / "run"
    result = quiet(max_epochs=1, run_dir=run_dir, checkpoint=True).fit(Regression(), pairs())
    (tmp_path / "file").write_text("", encoding="utf-8")
    trainer = quiet(max_epochs=1, checkpoint=True, run_dir=run_dir)
    given: dict[str, tuple[Any, ...]] = {
        "no validation": (fit(run_dir=tmp_path / "a", checkpoint=CheckpointConfig(best=1)), "by=None"),
        "weights": (fit(run_dir=tmp_path / "b", resume=result.model_path), "task.load_weights(path)"),
        "a file": (fit(run_dir=tmp_path / "file"), "cannot be made", "is a file"),
        "auto": (fit(resume="auto"), "give the Trainer a run_dir"),
        "used": (fit(run_dir=run_dir, checkpoint=True), "after step 5", "resume='auto'"),
        "true": (lambda: trainer.validate(Regression(), pairs(), checkpoint=True), "'best' or 'last'"),
        "linear": (
            lambda: quiet(max_time=60).plan(Regression(OptimizerConfig("sgd", schedule="linear")), pairs()),
            "must know the number of steps"),
    }  # fmt: skip
    assert_refused(ConfigError, given)
    there: dict[str, tuple[Any, ...]] = {
        "nothing": (fit(resume=str(tmp_path / "nothing")), "no checkpoint found"),
        "no best": (lambda: trainer.validate(Regression(), pairs(), checkpoint="best"), "no best checkpoint"),
    }
    assert_refused(CheckpointError, there)


def test_predictions_that_could_not_be_written_are_not_computed(tmp_path: Path) -> None:
    def never(self: Any, features: Any) -> Any:
        raise AssertionError

    (tmp_path / "file").touch()
    predict = partial(quiet().predict, variant(forward=never)(), pairs(4))
    both = partial(predict, save_to=tmp_path / "outputs", joined=True)
    address = partial(predict, save_to="s3://bucket/outputs")
    table: dict[str, tuple[Any, ...]] = {"joined": (both, "joined=True, save_to=", "Leave one of them out")}
    assert_refused(ConfigError, table | {"an address": (address, "local disk")})
    folder = partial(predict, save_to=tmp_path / "file" / "folder")
    assert_refused(CheckpointError, {"folder": (folder, "cannot create", "Not a directory")})


def test_common_mistakes_in_a_task_are_named(tmp_path: Path) -> None:
    class NoInit(Regression):
        def __init__(self) -> None:
            self.rate = 1

    class Other(Regression):
        def __init__(self) -> None:
            super().__init__()

    kept = Regression(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
    stopping = EarlyStopping()
    its_own = type("Its", (Regression,), {"configure_callbacks": lambda self, stage: [stopping]})()
    Trainer(max_steps=1, run_dir=tmp_path, loggers=(), progress_bar=False).fit(kept, pairs())

    class Keras(Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            pass

    class NoInitNet(nn.Module):
        def __init__(self) -> None:
            self.rate = 1

    class Assigned(TaskModule):
        def __init__(self) -> None:
            self.net = nn.Linear(1, 1)

    class Renamed(TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, 1)

    def holding(thing: Any) -> Any:
        task = Regression()
        task.net = thing
        return task

    def fit(task: Any, data: Any = None, **options: Any) -> Any:
        return lambda: quiet(max_steps=1, **options).fit(task, data or pairs(), pairs())

    def of_class(thing: type, *given: Any) -> tuple[Any, ...]:
        return (*given, f"has the class {thing.__name__}, where an object", f"write {thing.__name__}(...)")

    def optimizer(**options: Any) -> Any:
        return fit(Regression(**options))

    def attack(self: Any, batch: Any) -> Any:
        batch[0].requires_grad_()
        self.loss(self(batch[0]), batch).backward()
        return self.loss(self(batch[0] + batch[0].grad), batch)

    def attack_and_clear(self: Any, batch: Any) -> Any:
        loss = attack(self, batch)
        self.zero_grad()
        return loss

    metrics = (variant(metrics=lambda self: {"score": SimpleNamespace}), variant(metrics=lambda self: dict))
    arguments = {"callbacks": EarlyStopping, "strategy": FSDPConfig, "memory": MemoryConfig}
    table: dict[str, tuple[Any, ...]] = {
        "no init": (fit(NoInit()), "NoInit does not call super().__init__()"),
        "no init, assigned": (Assigned, "Assigned does not call super().__init__()"),
        "no init, moved": (lambda: NoInit().to("cpu"), "NoInit does not call super().__init__()"),
        "no init of a module": (fit(holding(NoInitNet())), "NoInitNet does not call super().__init__()"),
        "metric": of_class(SimpleNamespace, fit(metrics[0]())),
        "metrics": of_class(dict, fit(metrics[1]())),
        "configuration": of_class(OptimizerConfig, optimizer(optimizer=OptimizerConfig)),
        "configurations": of_class(OptimizerConfig, optimizer(optimizer={"a": OptimizerConfig})),
        "schedule": of_class(TorchSchedule, lambda: OptimizerConfig(schedule=TorchSchedule)),
        "data": of_class(DataLoader, fit(kept, DataLoader)),
        "engine": of_class(FSDPConfig, lambda: Engine(strategy=FSDPConfig)),
        **{name: of_class(kind, lambda n=name, k=kind: quiet(**{n: k})) for name, kind in arguments.items()},
        "part of an epoch": (lambda: quiet(validate_every=0.25), "'0.25 epochs'"),
        "epochs": (lambda: quiet(max_steps="1 epoch"), "For epochs give max_epochs"),
        "part of the run": (lambda: OptimizerConfig(warmup_steps=0.1), "give warmup_ratio"),
        "number": (lambda: OptimizerConfig(warmup_ratio=100), "give warmup_steps"),
        "none": (lambda: quiet(log_every=0), "None"),
        "a directory": (
            lambda: quiet(checkpoint="runs/x"),
            "CheckpointConfig(directory=...)",
            "fit(resume=...)",
        ),
        "a mode": (lambda: quiet(compile="max-autotune"), "CompileConfig(mode=...)"),
        "one callback": (lambda: quiet(callbacks=EarlyStopping()), "[EarlyStopping()]"),
        "one twice": (lambda: quiet(callbacks=[stopping, stopping]), "has one EarlyStopping twice"),
        "also of the task": (fit(its_own, callbacks=[stopping]), "twice"),
        "a hook of Keras": (
            lambda: quiet(callbacks=[Keras()]),
            "is a hook of Keras",
            "on_epoch_end(self, run)",
        ),
        "own backward": (
            fit(variant(training_step=attack)()),
            "Variant.training_step changes the gradient of 'line.weight' by backward()",
            "autograd.grad",
        ),
        "gradients of other micro-batches": (
            fit(variant(training_step=attack_and_clear)(), gradient_accumulation_steps=2),
            "or zero_grad()",
        ),
        "no base": (lambda: quiet(callbacks=[SimpleNamespace()]), "must have the base drivetrain.Callback"),
        "other": (lambda: Other.from_checkpoint(tmp_path), "another task"),
        "other weights": (lambda: quiet().validate(Renamed(), pairs(), checkpoint=tmp_path), "another task"),
        "verb": (lambda: quiet(max_steps=1).fit(kept, pairs(), batch_size=3), "Trainer(batch_size=...)"),
    }
    assert_refused((ConfigError, CheckpointError), table)
