"""transformers' callbacks in a run: the events, the state and the control."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import tqdm
from tests.support.tasks import quiet

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.testing import run_distributed

transformers = pytest.importorskip("transformers")

from tests.integrations.transformers.families import model, padded, rows  # noqa: E402
from transformers import TrainerCallback  # noqa: E402

from drivetrain.integrations.transformers import CallbackAdapter, TransformersTask  # noqa: E402

pytestmark = pytest.mark.full

FAMILY = "llama"
TIMES = re.compile("runtime|per_second")
EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Events(TrainerCallback):
    """Notes every event with the step, the epoch and the names of what it is given."""

    def __init__(self) -> None:
        self.seen: list[tuple[Any, ...]] = []


def _noting(event: str) -> Any:
    def note(self: Events, args: Any, state: Any, control: Any, **given: Any) -> None:
        values = {**given.get("logs", {}), **given.get("metrics", {})}
        objects = {name for name in given if name not in ("logs", "metrics")}
        missing = {name for name in objects if given[name] is None} - {"processing_class", "eval_dataloader"}
        self.seen.append(
            (event, state.global_step, round(state.epoch or 0.0, 6), sorted(values), sorted(objects), missing)
        )

    return note


for _event in EVENTS:
    if _event != "on_push_begin":
        setattr(Events, _event, _noting(_event))


def task(**options: Any) -> TransformersTask:
    return TransformersTask(model(FAMILY), **{"optimizer": OptimizerConfig("sgd", lr=0.1), **options})


def even(count: int) -> Any:
    """Samples of one length: all updates have the same weight."""
    return rows(FAMILY, 4 * count)[::4]


def batches(count: int, size: int = 2) -> Any:
    return torch.utils.data.DataLoader(even(count), batch_size=size, collate_fn=padded)


def theirs(directory: Path, callback: Any) -> Any:
    """A fit of transformers' own Trainer."""
    args = transformers.TrainingArguments(
        str(directory),
        num_train_epochs=3,
        per_device_train_batch_size=2,
        per_device_eval_batch_size=2,
        gradient_accumulation_steps=2,
        learning_rate=0.1,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=1.0,
        include_num_input_tokens_seen="non_padding",
        logging_steps=4,
        eval_strategy="epoch",
        save_strategy="epoch",
        train_sampling_strategy="sequential",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )

    trainer = transformers.Trainer(
        model(FAMILY),
        args,
        data_collator=padded,
        train_dataset=even(8),
        eval_dataset=even(6),
        callbacks=[callback],
    )
    trainer.train()
    trainer.predict(even(3))
    return trainer


def ours(directory: Path, *callbacks: Any, **options: Any) -> CallbackAdapter:
    args = options.pop("args", None)
    adapter = CallbackAdapter(callbacks, args)
    trainer = {
        "max_epochs": 3,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
        "log_every": 4,
        "run_dir": directory,
        "checkpoint": CheckpointConfig(every="1 epoch", by=None),
        **options,
    }
    made = task(count_tokens="no" if args is None else args.include_num_input_tokens_seen)
    quiet(callbacks=[adapter], **trainer).fit(made, batches(8), batches(6))
    return adapter


@pytest.fixture
def same_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets now what transformers' own Trainer sets and leaves."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")


@pytest.mark.usefixtures("same_environment")
def test_the_events_and_the_history_are_those_of_transformers(tmp_path: Path) -> None:
    right, found = Events(), Events()
    own = theirs(tmp_path / "theirs", right)
    adapter = ours(tmp_path / "ours", found, args=own.args)
    quiet(callbacks=[adapter]).test(task(count_tokens="non_padding"), batches(3))
    is_end = [each[0] == "on_epoch_end" for each in right.seen]
    assert [each for each in found.seen if each[0] != "on_epoch_end"] == [
        each for each, end in zip(right.seen, is_end, strict=True) if not end
    ]
    assert [each for each in found.seen if each[0] == "on_epoch_end"] == [
        each for each, end in zip(right.seen, is_end, strict=True) if end
    ]
    for one, other in zip(adapter.state.log_history, own.state.log_history, strict=True):
        assert one.keys() == other.keys()
        assert {k: v for k, v in one.items() if not TIMES.search(k)} == pytest.approx(
            {k: v for k, v in other.items() if not TIMES.search(k)}, rel=1e-5
        )


class Sets(TrainerCallback):
    """Sets a flag of the control in an event at a step, and notes what is done."""

    def __init__(self, event: str, flag: str, step: int) -> None:
        self.done: list[tuple[str, int]] = []
        setattr(self, event, lambda *given, **objects: self._set(event, flag, step, *given, **objects))

    def _set(self, event: str, flag: str, step: int, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self._note(event, state)
        changed = transformers.TrainerControl(**vars(control))
        if state.global_step == step:
            setattr(changed, flag, True)
        return changed  # another object, which replaces the control

    def _note(self, event: str, state: Any) -> None:
        if event != "on_step_end":
            self.done.append((event.removeprefix("on_"), state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.done.append(("log" if "loss" in logs else "", state.global_step))

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("on_evaluate", state)

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("on_save", state)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("on_epoch_end", state)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self._note("on_train_end", state)


FAR = {"log_every": None, "validate_every": "1000 steps", "checkpoint": CheckpointConfig(every=None, by=None)}


@pytest.mark.parametrize(
    ("event", "flag", "done"),
    [
        ("on_step_end", "should_log", ("log", 1)),
        ("on_step_end", "should_evaluate", ("evaluate", 1)),
        ("on_step_end", "should_save", ("save", 1)),
        ("on_step_end", "should_epoch_stop", ("epoch_end", 1)),
        ("on_step_end", "should_training_stop", ("train_end", 1)),
        ("on_optimizer_step", "should_save", ("save", 2)),
        ("on_epoch_end", "should_log", ("log", 4)),
        ("on_epoch_end", "should_evaluate", ("evaluate", 4)),
        ("on_epoch_end", "should_save", ("save", 4)),
    ],
)
def test_what_a_callback_sets_in_its_control_is_done(
    tmp_path: Path, event: str, flag: str, done: tuple[str, int]
) -> None:
    sets = Sets(event, flag, 4 if event == "on_epoch_end" else 1)
    ours(tmp_path, sets, **{**FAR, "max_epochs": 2, "gradient_accumulation_steps": 1})
    assert sets.done.count(done) == 1
    if done[0] not in ("epoch_end", "train_end"):
        at_the_end = {"log": [], "evaluate": [], "save": [("save", 8)]}[done[0]]
        assert [each for each in sets.done if each[0] == done[0]] == [done, *at_the_end]


def test_early_stopping_stops_and_its_count_survives_a_resume(tmp_path: Path) -> None:
    class Worse(TransformersTask):
        def validation_step(self, batch: Any) -> Any:
            output = super().validation_step(batch)
            return output._replace(loss=output.loss * 0 + float(self.updates))

    def fit(stop: int, **options: Any) -> tuple[CallbackAdapter, Any]:
        made = Worse(model(FAMILY), optimizer=OptimizerConfig("sgd", lr=0.1))
        made.updates = 0
        early = transformers.EarlyStoppingCallback(4)
        adapter = CallbackAdapter([early])

        def count(run: Any) -> None:
            made.updates = run.progress.updates

        trainer = quiet(
            max_steps=stop,
            log_every=1,
            validate_every=1,
            checkpoint=True,
            run_dir=tmp_path / options.pop("name"),
            callbacks=[LambdaCallback(on_step_end=count), adapter],
        )
        return adapter, trainer.fit(made, batches(8), batches(4), resume="auto")

    whole, result = fit(20, name="whole")
    assert result.progress.updates == 5  # the first was the best
    assert result.stop_reason == "EarlyStoppingCallback.on_evaluate set control.should_training_stop"
    assert (whole.state.best_metric, whole.state.best_global_step) == (1.0, 1)
    assert whole.state.best_model_checkpoint == result.best_checkpoint
    fit(3, name="parts")
    parts, result = fit(20, name="parts")
    assert result.progress.updates == 5
    assert [
        {name: value for name, value in each.items() if not TIMES.search(name)}
        for each in parts.state.log_history
        if "train_loss" not in each
    ] == [
        {name: value for name, value in each.items() if not TIMES.search(name)}
        for each in whole.state.log_history[:-1]  # but the summary
    ]
    assert parts.state.total_flos == whole.state.total_flos


def on_a_rank(directory: Path) -> tuple[Any, ...]:
    sets = Sets("on_step_end", "should_save", 2)
    adapter = CallbackAdapter([sets])
    quiet(
        max_steps=2, strategy="ddp", devices=2, callbacks=[adapter], run_dir=directory, log_every=1,
        checkpoint=CheckpointConfig(every=None, by=None),
    ).fit(task(), batches(8), batches(3))  # fmt: skip
    history = [
        {name: value for name, value in each.items() if not TIMES.search(name)}
        for each in adapter.state.log_history
    ]
    return history, sets.done, adapter.state.is_world_process_zero


def test_ranks_share_the_history(tmp_path: Path) -> None:
    first, second = run_distributed(on_a_rank, tmp_path / "two")
    assert (first[2], second[2]) == (True, False)
    assert first[:2] == second[:2]
    alone = ours(tmp_path / "one", max_steps=2, max_epochs=None, log_every=1, checkpoint=False)
    assert first[0][-1]["total_flos"] == alone.state.total_flos
    assert first[0][0]["loss"] == pytest.approx(alone.state.log_history[0]["loss"], rel=1e-5)


def test_transformers_own_callbacks_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tqdm.tqdm, "monitor_interval", 0)  # the monitor is a thread, which stays
    writer = transformers.integrations.TensorBoardCallback()
    writer.logging_dir = str(tmp_path / "board")
    ours(
        tmp_path / "run",
        transformers.PrinterCallback,
        transformers.ProgressCallback(),
        transformers.DefaultFlowCallback(),
        writer,
        max_epochs=1,
        log_every=1,
    )
    assert "'eval_loss': '4." in capsys.readouterr().out
    assert list((tmp_path / "board").iterdir())


def test_what_cannot_be_called_is_refused() -> None:
    class Misspelt(TrainerCallback):
        def on_batch_end(self, *given: Any, **objects: Any) -> None:
            pass

    class Pushes(TrainerCallback):
        def on_push_begin(self, *given: Any, **objects: Any) -> None:
            pass

    class Returns(TrainerCallback):
        def on_train_begin(self, *given: Any, **objects: Any) -> bool:
            return True

    with pytest.raises(
        ConfigError, match=r"Misspelt.on_batch_end is never called. Did you mean 'on_epoch_end'"
    ):
        CallbackAdapter([Misspelt()])
    with pytest.raises(ConfigError, match=r"Pushes.on_push_begin is never called: a run pushes nothing"):
        CallbackAdapter([Pushes()])
    with pytest.raises(ConfigError, match=r"WandbCallback cannot be used here. It writes to a service"):
        CallbackAdapter([object.__new__(transformers.integrations.WandbCallback)])
    with pytest.raises(ConfigError, match=r"not a LambdaCallback. Give a callback of drivetrain"):
        CallbackAdapter([LambdaCallback(on_log=print)])
    with pytest.raises(ConfigError, match=r"Returns.on_train_begin returned a bool"):
        quiet(max_steps=1, callbacks=[CallbackAdapter([Returns()])]).fit(task(), batches(4))
    with pytest.raises(ConfigError, match=r"release_gradients with Events.on_pre_optimizer_step"):
        quiet(max_steps=1, callbacks=[CallbackAdapter([Events()])], memory={"release_gradients": True})
    with pytest.raises(ConfigError, match=r"Events.on_substep_end with micro_batch=1"):
        quiet(max_steps=1, callbacks=[CallbackAdapter([Events()])], micro_batch=1)
    with pytest.raises(StrategyError, match=r"Events.on_pre_optimizer_step with strategy 'deepspeed'"):
        quiet(max_steps=1, callbacks=[CallbackAdapter([Events()])], strategy="zero2")
    named = transformers.TrainingArguments("unused", metric_for_best_model="f1", use_cpu=True)
    adapter = CallbackAdapter([Events()], named)
    with pytest.raises(ConfigError, match="metric_for_best_model='f1': the evaluation gave no 'eval_f1'"):
        quiet(max_steps=1, callbacks=[adapter]).fit(task(), batches(4), batches(4))
