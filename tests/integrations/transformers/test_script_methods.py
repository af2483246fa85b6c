"""What a script's methods read and set between events: the state, the control, the mode, the rate."""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model, rows
from tests.integrations.transformers.test_trainer import arguments, weights
from tests.support.messages import heard, warned
from tests.support.refusals import assert_refused
from torch import nn

from drivetrain.core.errors import ConfigError

hf = Lazy("drivetrain.integrations.transformers")
transformers = Lazy("transformers")

ROWS = [{"x": torch.tensor([n / 8, 3 * n % 8 / 8]), "labels": torch.tensor([1.0])} for n in range(8)]
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 3, "eval_strategy": "steps", "eval_steps": 3}


@pytest.fixture(autouse=True)
def _plain_modules() -> Iterator[None]:  # which the models of these tests are
    with heard("no model of transformers|outside its model"):
        yield


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line, self.drop = nn.Linear(2, 1), nn.Sequential(nn.Dropout(0.0))
        self.modes: list[bool] = []

    def forward(self, x: Any, labels: Any = None) -> Any:
        if torch.is_grad_enabled():
            self.modes.append(self.training and self.drop[0].training)
        line = self.line(self.drop(x))
        return {"loss": (line - labels).square().mean(), "line": line}


class Head(nn.Module):  # a loss with weights of its own, and the model in it
    def __init__(self, of: nn.Module) -> None:
        super().__init__()
        self.model, self.scale, self.norm = of, nn.Parameter(torch.ones(1)), nn.BatchNorm1d(1)

    def forward(self, x: Any, labels: Any) -> Any:
        return (self.norm(self.model.line(x)) * self.scale - labels).square().mean()


def both(folder: Path, methods: Any, read: Any, **options: Any) -> list[Any]:  # of transformers and of ours
    found = []
    for number, kind in enumerate((transformers.Trainer, hf.Trainer)):
        given = {"per_device_train_batch_size": 1, "max_steps": 8, **options}
        own = {name: given.pop(name) for name in ("callbacks", "compute_metrics") if name in given}
        args = arguments(folder / str(number), **given)
        made = type("Scripted", (kind,), methods(kind))(
            Line(), args, train_dataset=ROWS, eval_dataset=ROWS, **own
        )
        made.train()
        found.append(read(made))
    return found


WAYS = ("compute_loss", "log", "evaluate", "_save_checkpoint")


@pytest.mark.parametrize("flag", ["should_training_stop", "should_save", "should_evaluate"])
def test_a_methods_request_is_met_as_in_transformers(flag: str, tmp_path: Path) -> None:
    for way in WAYS:

        def methods(kind: Any, way: str = way) -> Any:
            def method(self: Any, *given: Any, **named: Any) -> Any:
                found = getattr(kind, way)(self, *given, **named)
                if self.state.global_step >= 4 and not vars(self).setdefault("has_asked", False):
                    self.has_asked = True
                    setattr(self.control, flag, True)
                return found

            return {way: method}

        def read(made: Any) -> Any:
            saved = sorted(each.name for each in Path(made.args.output_dir).glob("checkpoint-*"))
            saved = saved if flag == "should_save" else []  # a run that is stopped is saved here
            return saved, [(row["step"], "eval_loss" in row) for row in made.state.log_history]

        theirs, ours = both(tmp_path / way, methods, read, logging_steps=2, **SAVES)
        assert ours == theirs, way


def test_a_method_finds_the_state_of_now(tmp_path: Path) -> None:
    def methods(kind: Any) -> Any:
        def noting(name: str) -> Any:
            def method(self: Any, *given: Any, **named: Any) -> Any:
                seen = vars(self).setdefault("seen", [])
                if name != "compute_loss" or torch.is_grad_enabled():
                    seen.append((name, self.state.global_step, self.state.epoch))
                return getattr(kind, name)(self, *given, **named)

            return method

        return {name: noting(name) for name in ("compute_loss", "training_step", "log", "_save_checkpoint")}

    options: dict[str, Any] = {"logging_steps": 500, "gradient_accumulation_steps": 2, "max_steps": 6}
    theirs, ours = both(tmp_path, methods, lambda made: made.seen, **options, **SAVES)
    assert ours == theirs


def test_training_goes_on_in_training_mode(tmp_path: Path) -> None:
    class Samples(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            (model if state.global_step == 2 else model.drop).eval()

    def methods(kind: Any) -> Any:
        def save_model(self: Any, *given: Any, **named: Any) -> None:
            kind.save_model(self, *given, **named)
            self.model.eval()

        return {"save_model": save_model}

    for options in ({"callbacks": [Samples]}, {"save_strategy": "steps", "save_steps": 3}):
        theirs, ours = both(tmp_path / str(len(options)), methods, lambda made: made.model.modes, **options)
        assert ours == theirs == [True] * 8
    made = hf.Trainer(Line().eval(), arguments(tmp_path, max_steps=2), train_dataset=ROWS)
    made.train()  # as from_pretrained leaves a model
    assert made.model.modes == [True] * 2


def test_steps_may_evaluate_skip_a_batch_and_read_the_rate(tmp_path: Path) -> None:
    def methods(kind: Any) -> Any:
        def training_step(self: Any, model: Any, inputs: Any, *given: Any) -> Any:
            rate = self.lr_scheduler.get_last_lr()[0]
            self.seen = [*vars(self).get("seen", []), round(rate, 9)]
            if self.state.global_step in (1, 4):
                return torch.zeros(())
            if self.state.global_step == 2:
                self.seen.append(round(self.evaluate()["eval_loss"], 5))
            return kind.training_step(self, model, inputs, *given)

        return {"training_step": training_step}

    read = lambda made: (made.seen, [each.tolist() for each in weights(made)])  # noqa: E731
    for steps in (1, 2):
        theirs, ours = both(tmp_path, methods, read, gradient_accumulation_steps=steps)
        assert ours[0] == theirs[0]
        torch.testing.assert_close(ours[1], theirs[1])


def test_the_handler_is_one_object_that_calls_as_a_script_says(tmp_path: Path) -> None:
    class Notes(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_init_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.seen.append(args)

        def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
            self.seen.append((args, given["mine"], state.global_step))
            control.should_training_stop = state.global_step == 2

    found = []
    for kind in (transformers.Trainer, hf.Trainer):
        made = kind(Line(), arguments(tmp_path), train_dataset=ROWS)
        handler, notes = made.callback_handler, Notes()
        handler.mine = "mine"

        def call_event(
            event: str, args: Any, state: Any, control: Any, handler: Any = handler, **_: Any
        ) -> Any:
            for each in handler.callbacks:
                control = getattr(each, event)("own", state, control, mine=handler.mine) or control
            return control

        flow = made.pop_callback(transformers.PrinterCallback)
        assert flow is not None
        handler.call_event = call_event
        made.pop_callback(transformers.DefaultFlowCallback)
        made.add_callback(notes)
        handler.on_init_end(made.args, made.state, made.control)
        made.train()
        found.append(notes.seen)
        assert made.callback_handler is handler
    assert found[0] == found[1] == ["own", ("own", "mine", 1), ("own", "mine", 2)]


def test_parameters_beside_the_model_train_and_resume(tmp_path: Path) -> None:
    class Scripted(hf.Trainer):  # type: ignore[name-defined,misc]
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named)
            self.losses = {"a.b": Head(self.model)}
            self.teacher = Line()  # which is not trained, and in no checkpoint

        def create_optimizer(self, *_: Any) -> Any:
            self.optimizer = torch.optim.SGD(self.losses["a.b"].parameters(), lr=0.1)
            return self.optimizer

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            return self.losses["a.b"](**inputs)

    options: dict[str, Any] = {"max_grad_norm": 0.0, "save_strategy": "steps", "save_steps": 2}
    options["lr_scheduler_type"] = "constant"
    whole = Scripted(Line(), arguments(tmp_path, **options), train_dataset=ROWS)
    head = copy.deepcopy(whole.losses["a.b"])
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    whole.train()
    for n in range(4):
        x, y = (torch.stack([each[name] for each in ROWS[2 * n : 2 * n + 2]]) for name in ("x", "labels"))
        optimizer.zero_grad()
        head(x, y).backward()
        optimizer.step()
    expected = {name: each for name, each in head.state_dict().items() if not name.startswith("model.drop")}
    torch.testing.assert_close(dict(whole.losses["a.b"].state_dict()), dict(expected))
    resumed = Scripted(Line(), arguments(tmp_path, **options), train_dataset=ROWS)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    for name, each in resumed.losses["a.b"].state_dict().items():
        assert torch.equal(each, whole.losses["a.b"].state_dict()[name]), name


def test_a_generation_config_is_for_one_evaluation(tmp_path: Path) -> None:
    given = {"decoder_start_token_id": 0, "pad_token_id": 1, "num_beams": 2, "max_new_tokens": 3}
    config = transformers.GenerationConfig(num_return_sequences=2, **given)
    args = arguments(tmp_path, transformers.Seq2SeqTrainingArguments, predict_with_generate=True)
    counts = lambda prediction: {"rows": len(prediction.predictions), "all": torch.tensor(True)}  # noqa: E731
    made = hf.Seq2SeqTrainer(model("t5"), args, eval_dataset=rows("t5", 3)[:1] * 5, compute_metrics=counts)
    assert made.evaluate(generation_config=config)["eval_rows"] == 10
    assert made.predict(rows("t5", 3)[:1] * 5, generation_config=config, num_beams=3).predictions.shape == (
        10,
        4,
    )
    found = made.evaluate(max_new_tokens=3)
    assert repr([found[f"eval_{each}"] for each in ("rows", "all")]) == "[5, True]"


def test_accelerates_state_is_there_and_late_changes_are_said(tmp_path: Path) -> None:
    from accelerate.state import AcceleratorState

    class Late(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert AcceleratorState().deepspeed_plugin is None
            args.max_grad_norm, state.logging_steps = 0.1, 7

    made = hf.Trainer(Line(), arguments(tmp_path), train_dataset=ROWS, callbacks=[Late])
    with warned("max_grad_norm was 1.0 when train.. began, and is 0.1 now|logging_steps was 1"):
        made.train()
    assert made.accelerator.state.num_processes == 1


def test_methods_move_a_teacher_read_predictions_and_take_the_weights(tmp_path: Path) -> None:
    def methods(kind: Any) -> Any:
        def evaluation_loop(self: Any, *given: Any, **named: Any) -> Any:
            self._move_model_to_device(teacher, self.args.device)
            output = kind.evaluation_loop(self, *given, **named)
            self.read = [*self.accelerator.get_state_dict(self.model)], output.predictions.shape
            return output

        return {"evaluation_loop": evaluation_loop}

    teacher = Line()
    theirs, ours = both(tmp_path, methods, lambda made: made.read, compute_metrics=lambda _: {}, **SAVES)
    assert theirs == ours


def test_what_cannot_be_followed_is_refused(tmp_path: Path) -> None:
    class Divides(hf.Trainer):  # type: ignore[name-defined,misc]
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = self.compute_loss(model, inputs)
            loss /= self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach()

    class Adds(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            made.callback_handler.add_callback(Adds)

    made = hf.Trainer(Line(), arguments(tmp_path), train_dataset=ROWS, callbacks=[Adds])
    twice = arguments(tmp_path, gradient_accumulation_steps=2)
    config = transformers.GenerationConfig(do_sample=False, top_p=0.9)
    seq2seq = arguments(tmp_path, transformers.Seq2SeqTrainingArguments, generation_config=config)
    cases: dict[str, Any] = {
        "a step that divides": (lambda: Divides(Line(), twice), "Divides.training_step", "Do not divide"),
        "a callback in training": (made.train, "before train(), not while it runs"),
        "a configuration": (lambda: hf.Seq2SeqTrainer(model("t5"), seq2seq), "generation_config", "top_p"),
    }
    assert_refused((ConfigError,), cases)
