"""transformers' callbacks in a run: the events, the state and the control."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model, padded, rows
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig
from drivetrain.core.errors import ConfigError, StrategyError

hf = Lazy("drivetrain.integrations.transformers")
transformers = Lazy("transformers")

FAMILY = "llama"
TIMES = re.compile("runtime|per_second")


def noting(seen: list[Any]) -> Any:  # notes every event with its step and objects
    def noter(event: str) -> Any:
        def note(self: Any, args: Any, state: Any, control: Any, **given: Any) -> None:
            values = {**given.get("logs", {}), **given.get("metrics", {})}
            objects = {name for name in given if name not in ("logs", "metrics")}
            missing = {name for name in objects if given[name] is None}
            missing -= {"processing_class", "eval_dataloader"}
            now = (state.global_step, round(state.epoch or 0.0, 6))
            seen.append((event, *now, sorted(values), sorted(objects), missing))

        return note

    names = [each for each in vars(transformers.TrainerCallback) if each.startswith("on_")]
    methods = {each: noter(each) for each in names if each != "on_push_begin"}
    return type("Events", (transformers.TrainerCallback,), methods)()


def timeless(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: each for name, each in row.items() if not TIMES.search(name)} for row in history]


def task(**options: Any) -> Any:
    return hf.TransformersTask(model(FAMILY), **{"optimizer": OptimizerConfig("sgd", lr=0.1), **options})


def even(count: int) -> Any:  # samples of one length: all steps have the same weight
    return rows(FAMILY, 4 * count)[::4]


def batches(count: int, size: int = 2) -> Any:
    return torch.utils.data.DataLoader(even(count), batch_size=size, collate_fn=padded)


def theirs(directory: Path, callback: Any) -> Any:
    options: dict[str, Any] = {"num_train_epochs": 3, "gradient_accumulation_steps": 2, "logging_steps": 4}
    options |= {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "max_grad_norm": 1.0}
    options |= {"learning_rate": 0.1, "lr_scheduler_type": "constant", "optim": "sgd", "report_to": "none"}
    options |= {"eval_strategy": "epoch", "save_strategy": "epoch", "train_sampling_strategy": "sequential"}
    options |= {"include_num_input_tokens_seen": "non_padding", "disable_tqdm": True, "use_cpu": True}
    args = transformers.TrainingArguments(str(directory), **options)
    trainer = transformers.Trainer(model(FAMILY), args, padded, even(8), even(6), callbacks=[callback])
    trainer.train()
    trainer.predict(even(3))
    return trainer


def ours(directory: Path, *callbacks: Any, **options: Any) -> Any:
    args = options.pop("args", None)
    adapter = hf.CallbackAdapter(callbacks, args)
    trainer: dict[str, Any] = {"max_epochs": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    trainer |= {"log_every": 4, "run_dir": directory}
    trainer |= {"checkpoint": CheckpointConfig(every="1 epoch", by=None), **options}
    made = task(count_tokens="no" if args is None else args.include_num_input_tokens_seen)
    quiet(callbacks=[adapter], **trainer).fit(made, batches(8), batches(6))
    return adapter


def test_the_events_and_the_history_are_those_of_transformers(tmp_path: Path) -> None:
    right, found = list[Any](), list[Any]()
    own = theirs(tmp_path / "theirs", noting(right))
    adapter = ours(tmp_path / "ours", noting(found), args=own.args)
    quiet(callbacks=[adapter]).test(task(count_tokens="non_padding"), batches(3))
    for seen in (found, right):  # an epoch's end comes at another place among the others
        seen.sort(key=lambda each: each[0] == "on_epoch_end")
    assert found == right
    histories = (timeless(each.state.log_history) for each in (adapter, own))
    for one, expected in zip(*histories, strict=True):
        assert one == pytest.approx(expected, rel=1e-5)


def setting(event: str, flag: str, step: int) -> Any:  # sets a flag at a step, and notes what is done
    def note(self: Any, name: str, state: Any) -> None:
        self.done.append((name.removeprefix("on_"), state.global_step))

    def set_flag(self: Any, args: Any, state: Any, control: Any, **_: Any) -> Any:
        if event != "on_step_end":
            note(self, event, state)
        changed = transformers.TrainerControl(**vars(control))
        if state.global_step == step:
            setattr(changed, flag, True)
        return changed  # another object, which replaces the control

    def on_log(self: Any, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        note(self, "log" if "loss" in logs else "", state)

    def noter(name: str) -> Any:
        return lambda self, args, state, control, **_: note(self, name, state)

    noted = ("on_evaluate", "on_save", "on_epoch_end", "on_train_end")
    methods = {**{name: noter(name) for name in noted}, "on_log": on_log, event: set_flag}
    made = type("Sets", (transformers.TrainerCallback,), methods)()
    made.done = []
    return made


FAR = {"log_every": None, "validate_every": "1000 steps", "checkpoint": CheckpointConfig(every=None, by=None)}


def test_what_a_callback_sets_in_its_control_is_done(tmp_path: Path) -> None:
    flags = {"should_log": "log", "should_evaluate": "evaluate", "should_save": "save"}
    flags |= {"should_epoch_stop": "epoch_end", "should_training_stop": "train_end"}
    cases = [("on_step_end", flag, (name, 1)) for flag, name in flags.items()]
    cases += [("on_epoch_end", f"should_{name}", (name, 4)) for name in ("log", "save")]
    for number, (event, flag, done) in enumerate(cases):
        sets = setting(event, flag, 4 if event == "on_epoch_end" else 1)
        ours(tmp_path / str(number), sets, **{**FAR, "max_epochs": 2, "gradient_accumulation_steps": 1})
        assert sets.done.count(done) == 1, (event, flag)
        if done[0] not in ("epoch_end", "train_end"):
            at_the_end = {"log": [], "evaluate": [], "save": [("save", 8)]}[done[0]]
            assert [each for each in sets.done if each[0] == done[0]] == [done, *at_the_end], (event, flag)


def test_early_stopping_stops_and_its_count_survives_a_resume(tmp_path: Path) -> None:
    class Worse(hf.TransformersTask):
        def validation_step(self, batch: Any) -> Any:
            output = super().validation_step(batch)
            return output._replace(loss=output.loss * 0 + float(self.steps))

    def fit(stop: int, name: str) -> tuple[Any, Any]:
        made = Worse(model(FAMILY), optimizer=OptimizerConfig("sgd", lr=0.1))
        made.steps = 0
        early = transformers.EarlyStoppingCallback(4)
        adapter = hf.CallbackAdapter([early])

        def count(run: Any) -> None:
            made.steps = run.progress.steps

        options = {"checkpoint": True, "run_dir": tmp_path / name, "log_every": 1, "validate_every": 1}
        trainer = quiet(max_steps=stop, callbacks=[LambdaCallback(on_step_end=count), adapter], **options)
        return adapter, trainer.fit(made, batches(8), batches(4), resume="auto")

    whole, result = fit(20, "whole")
    assert result.progress.steps == 5  # the first was the best
    assert result.stop_reason == "EarlyStoppingCallback.on_evaluate set control.should_training_stop"
    assert (whole.state.best_metric, whole.state.best_global_step) == (1.0, 1)
    assert whole.state.best_model_checkpoint == result.best_checkpoint
    fit(3, "parts")
    parts, result = fit(20, "parts")
    assert result.progress.steps == 5
    unsummed = [each for each in timeless(parts.state.log_history) if "train_loss" not in each]
    assert unsummed == timeless(whole.state.log_history[:-1])  # but the summary
    assert parts.state.total_flos == whole.state.total_flos


def test_transformers_own_callbacks_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    writer = transformers.integrations.TensorBoardCallback()
    writer.logging_dir = str(tmp_path / "board")
    given = (transformers.PrinterCallback, transformers.ProgressCallback(), writer)
    ours(tmp_path / "run", *given, max_epochs=1, log_every=1)
    assert "'eval_loss': '4." in capsys.readouterr().out
    assert list((tmp_path / "board").iterdir())


def test_refusals() -> None:
    def adapted(*callbacks: Any, **options: Any) -> Any:
        return quiet(max_steps=1, callbacks=[hf.CallbackAdapter(callbacks)], **options)

    def fit(callback: Any) -> Any:
        return quiet(max_steps=1, callbacks=[callback]).fit(task(), batches(4), batches(4))

    events, misspelt = noting([]), type("Misspelt", (transformers.TrainerCallback,), {"on_batch_end": print})
    named = transformers.TrainingArguments("unused", metric_for_best_model="f1", use_cpu=True)
    best = hf.CallbackAdapter([events], named)
    wandb = object.__new__(transformers.integrations.WandbCallback)
    cases: dict[str, Any] = {
        "misspelt": (lambda: adapted(misspelt()), "Did you mean 'on_epoch_end'"),
        "a service": (lambda: adapted(wandb), "WandbCallback", "loggers='wandb'"),
        "no such metric": (lambda: fit(best), "metric_for_best_model='f1'", "no 'eval_f1'"),
    }
    assert_refused((ConfigError, StrategyError), cases)
