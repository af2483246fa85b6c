"""Details of a script's Trainer that are transformers': events, callbacks, second trainings, schedules."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model, rows
from tests.integrations.transformers.test_trainer import (
    CLASSES,
    SAVING,
    arguments,
    equal,
    even,
    losses,
    padded,
    trainer,
)

from drivetrain.core.errors import ConfigError

hf = Lazy("drivetrain.integrations.transformers")
transformers = Lazy("transformers")


def _recorder() -> Any:
    class Events(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(("step", state.global_step))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(("epoch", state.epoch))

        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(("save", Path(args.output_dir, f"checkpoint-{state.global_step}").is_dir()))

        def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append("evaluate")

    return Events()


EPOCH: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2}
ORDERS: tuple[dict[str, Any], ...] = (
    SAVING,
    {**SAVING, "eval_strategy": "steps", "eval_steps": 2},
    {"eval_strategy": "epoch", "save_strategy": "epoch"},
    {"eval_strategy": "epoch", "save_strategy": "no", "logging_steps": 3},
)


def test_saves_and_evaluations_come_before_or_after_on_epoch_end_as_in_transformers(tmp_path: Path) -> None:
    for number, options in enumerate(ORDERS):
        found = []
        for kind in (transformers.Trainer, hf.Trainer):
            events, data = _recorder(), even(CLASSES, 4)
            given = {"callbacks": [events], "data": data, "eval_dataset": data}
            trainer(tmp_path / f"{kind.__module__}-{number}", kind, **given, **EPOCH, **options).train()
            found.append(events.seen)
        assert found[0] == found[1]


def test_a_callback_that_evaluates_at_the_end_of_an_epoch_is_heard_after_the_save(tmp_path: Path) -> None:
    class Asks(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_evaluate = True

    data = even(CLASSES, 4)
    found = []
    for kind in (transformers.Trainer, hf.Trainer):
        folder = tmp_path / kind.__module__
        made = trainer(folder, kind, data=data, eval_dataset=data, callbacks=[Asks], **EPOCH, **SAVING)
        made.train()
        found.append([row["step"] for row in made.state.log_history if "eval_loss" in row])
    assert found[0] == found[1] == [2, 4]


def test_the_list_of_callbacks_is_transformers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found, given = [], {"enable_jit_checkpoint": True, "disable_tqdm": False, "max_steps": 1}
    handler = signal.getsignal(signal.SIGTERM)
    for kind in (transformers.Trainer, hf.Trainer):
        made = trainer(tmp_path, kind, callbacks=[_recorder()], **given)
        names = [type(each).__name__ for each in made.callback_handler.callbacks]
        made.callback_handler.callbacks.append(transformers.PrinterCallback())
        assert made.pop_callback(transformers.ProgressCallback) is not None
        made.train()
        shown = capsys.readouterr()
        assert "'loss'" in shown.out
        assert "loss" not in shown.err
        found.append(names)
        assert signal.getsignal(signal.SIGTERM) is handler
    assert sorted(found[0]) == sorted(found[1])
    assert made.callback_handler.on_push_begin(made.args, made.state, made.control) is made.control


def test_states_of_callbacks_are_restored_with_their_arguments_if_asked_for(tmp_path: Path) -> None:
    best: dict[str, Any] = {
        **SAVING,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "eval_dataset": rows(CLASSES, 3),
    }
    best |= {"load_best_model_at_end": True, "max_steps": 2}
    stops = transformers.EarlyStoppingCallback

    class Short(transformers.TrainerCallback, transformers.trainer_callback.ExportableState):  # type: ignore[misc]
        def __init__(self, name: str = "") -> None:
            self.name = name

        def state(self) -> Any:  # without attributes
            return {"args": {"name": self.name}}

    trainer(tmp_path, callbacks=[stops(7), Short("a"), Short("b")], **best).train()
    for restores, patience in ((True, 7), (False, 1)):
        best["restore_callback_states_from_checkpoint"] = restores
        made = trainer(tmp_path, callbacks=[stops(), Short(), Short()], **best)
        made.train(resume_from_checkpoint=True)
        kept = next(each for each in made.callback_handler.callbacks if isinstance(each, stops))
        assert kept.early_stopping_patience == patience
        names = [each.name for each in made.callback_handler.callbacks if isinstance(each, Short)]
        assert names == (["a", "b"] if restores else ["", ""])


def test_a_second_train_goes_on_with_the_optimizers_state(tmp_path: Path) -> None:
    made = []
    for kind in (hf.Trainer, transformers.Trainer):
        made.append(trainer(tmp_path / kind.__module__, kind, max_steps=2))
        for _ in range(2):
            made[-1].train()
    equal(*made, tolerance=1e-5)


def test_a_callback_may_ask_for_a_checkpoint_where_none_is_due(tmp_path: Path) -> None:
    class Asks(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == 2

    whole = trainer(tmp_path / "whole")
    whole.train()
    trainer(tmp_path / "asks", callbacks=[Asks]).train()
    assert [each.name for each in (tmp_path / "asks").glob("checkpoint-*")] == ["checkpoint-2"]
    resumed = trainer(tmp_path / "asks")
    resumed.train(resume_from_checkpoint=str(tmp_path / "asks" / "checkpoint-2"))
    equal(resumed, whole)
    state = json.loads((tmp_path / "asks" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


def test_schedules_that_watch_a_metric_or_the_optimizer_give_their_rates(tmp_path: Path) -> None:
    def scheduled(kind: Any, name: str) -> Any:
        bert, data = model(CLASSES), even(CLASSES, 4)
        if name == "adafactor":
            optimizer = transformers.Adafactor(
                bert.parameters(), relative_step=True, warmup_init=True, lr=None
            )
            schedule = transformers.optimization.AdafactorSchedule(optimizer)
        else:
            optimizer = torch.optim.SGD(bert.parameters(), lr=0.1)
            schedule = transformers.optimization.GreedyLR(optimizer, factor=0.5, patience=0, smooth=False)
        options = {"eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "loss"}
        given = (optimizer, schedule)
        if name == "greedy by its name":
            options |= {"learning_rate": 0.1, "optim": "sgd", "lr_scheduler_type": "greedy"}
            options["lr_scheduler_kwargs"] = {"factor": 0.5, "patience": 0, "max_lr": 0.3}
            given = (None, None)
        args = arguments(tmp_path / kind.__module__, **options)
        return kind(bert, args, padded, data, data, optimizers=given)

    for name in ("greedy by its name", "adafactor", "greedy"):
        made = []
        for kind in (transformers.Trainer, hf.Trainer):
            made.append(scheduled(kind, name))
            made[-1].train()
        assert losses(made[1]) == pytest.approx(losses(made[0]), rel=1e-5)
        if name != "greedy":
            rates = [losses(each, "learning_rate") for each in made]
            assert rates[1] == pytest.approx(rates[0], rel=1e-5)
            assert rates[1][-1] > 0
    made[1].args.lr_scheduler_type = transformers.SchedulerType.REDUCE_ON_PLATEAU
    made[1].optimizer = made[1].lr_scheduler = None
    made[1].train()
    assert isinstance(made[1].lr_scheduler, torch.optim.lr_scheduler.ReduceLROnPlateau)


def test_items_are_tensors_loaders_are_new_and_what_cannot_be_meant_is_said(tmp_path: Path) -> None:
    class Scripted(hf.Trainer):  # type: ignore[name-defined,misc]
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            assert num_items_in_batch.item() in (2, 3)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)

    made = trainer(tmp_path, Scripted, max_steps=1, eval_dataset=rows(CLASSES, 3))
    made.train()
    made.evaluate()
    assert made.get_eval_dataloader() is not made.get_eval_dataloader()
    assert made.accelerator.unwrap_model(torch.nn.DataParallel(made.model)) is made.model
    best = {"save_strategy": "best", "eval_strategy": "steps", "eval_dataset": rows(CLASSES, 3)}
    with pytest.raises(ConfigError, match="metric_for_best_model` must be provided"):
        trainer(tmp_path, **best)
    several = model(CLASSES)
    several.config.problem_type = "multi_label_classification"
    with pytest.warns(UserWarning, match="Label smoothing is not compatible with multi-label"):
        left = hf.Trainer(several, arguments(tmp_path, label_smoothing_factor=0.1), padded, rows(CLASSES, 4))
    assert left.label_smoother is None
    given = {"num_steps": 2, "sync_each_batch": True}
    args = arguments(tmp_path, accelerator_config={"gradient_accumulation_kwargs": given})
    accumulates = hf.Trainer(model(CLASSES), args, padded, rows(CLASSES, 4))
    assert (args.gradient_accumulation_steps, accumulates._settings().gradient_accumulation_steps) == (2, 2)
    assert accumulates.accelerator.gradient_state.plugin_kwargs == given
    with pytest.raises(AttributeError, match="no 'sync_gradients' here, only plugin_kwargs"):
        accumulates.accelerator.gradient_state.sync_gradients  # noqa: B018
