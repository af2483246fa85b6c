"""What fits, evaluations and their hooks refuse, and the words that say why."""

from pathlib import Path
from typing import Any

import torch
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch import Tensor, nn

from drivetrain import (
    Callback,
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    DataError,
    EarlyStopping,
    Engine,
    LambdaCallback,
    OptimizerConfig,
    PreemptionConfig,
    Run,
    Trainer,
)


def fit(task: Any = None, data: Any = None, validation: Any = None, **options: Any) -> Any:
    return quiet(**{"max_epochs": 1, **options}).fit(task or Regression(), data or pairs(), validation)


def hook(name: str, act: Any) -> dict[str, Any]:
    return {"callbacks": [LambdaCallback(**{name: act})]}


def with_methods(name: str, base: type = object, **methods: Any) -> Any:
    return type(name, (base,), methods)()


def constant() -> Any:  # make a metric that no checkpoint can hold
    nothing: Any = lambda self, *given: None  # noqa: E731
    return with_methods("Constant", update=nothing, reset=nothing, compute=lambda self: 7.0)


def test_a_tensor_that_no_checkpoint_can_hold_is_refused_before_the_first_step(tmp_path: Path) -> None:
    def trained(persistent: bool, made: list[Any], **options: Any) -> Any:
        task = Regression()
        task.register_buffer("phases", torch.ones(3, dtype=torch.complex128), persistent=persistent)
        fit(task, **hook("on_step_end", made.append), **options)

    steps: list[Any] = []
    saves: dict[str, Any] = {"checkpoint": True, "run_dir": tmp_path}
    words = "cannot hold 'phases'", "complex128", "view_as_real", "persistent=False", "checkpoint=False"
    assert_refused(ConfigError, {"complex128": (lambda: trained(True, steps, **saves), *words)})
    assert not steps
    trained(True, steps, checkpoint=False)
    assert steps


class Odd(torch.optim.SGD):  # its slots hold what no checkpoint can
    def __init__(self, parameters: Any, slot: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.slot = slot

    def step(self, closure: Any = None) -> Any:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["odd"] = self.slot
        return super().step(closure)


def test_a_state_that_no_checkpoint_can_hold_is_refused_after_the_first_step(tmp_path: Path) -> None:
    steps: list[int] = []

    def fit_with(**options: Any) -> Any:
        steps.clear()
        recorder = LambdaCallback(on_step_end=lambda run: steps.append(run.progress.steps))
        callbacks = [recorder, *options.pop("callbacks", ())]
        policy = CheckpointConfig(every="3 steps")
        fit(callbacks=callbacks, max_steps=3, max_epochs=None, run_dir=tmp_path, checkpoint=policy, **options)

    def slot(value: Any) -> Any:
        return lambda: fit_with(task=Regression(optimizer=lambda given: Odd(given, value)))

    def state(value: Any) -> Any:
        holder = with_methods("Holder", Callback, state_dict=lambda self: {"v": value}, load_state_dict=id)
        return lambda: fit_with(callbacks=[holder])

    wide = torch.ones(2, dtype=torch.complex128)
    table = {
        "a set": (slot({1}), "/odd' is a set", "Allowed: tensors"),
        "a dtype": (slot(wide), "/odd': dtype torch.complex128"),
        "a callback": (state({1}), "callbacks.Holder.v: a 'set'", "allowed are"),
    }
    for name, row in table.items():
        assert_refused(CheckpointError, {name: row})
        assert steps[1:] == []


def test_callbacks_that_are_none_are_refused() -> None:
    def of(callback: Any) -> Any:
        return lambda: Trainer(max_epochs=1, callbacks=[callback])

    ported = with_methods("Ported", on_epoch_end=lambda self, trainer, pl_module: None)
    other = with_methods("Other", on_train_batch_end=lambda self, run: None, on_log=lambda self, run: None)
    misspelt = with_methods("Misspelt", Callback, on_step_ends=lambda self, run: None)
    table: dict[str, tuple[Any, ...]] = {
        "misspelt hook": (of(misspelt), "Misspelt.on_step_ends is no hook", "'on_step_end'"),
        "another library's hook": (of(other), "on_train_batch_end", "here it is called 'on_step_end'"),
        "a hook that asks for more": (of(ported), "Ported.on_epoch_end(trainer, pl_module)"),
        "a hook that asks for nothing": (
            lambda: of(LambdaCallback(on_log=lambda: None))(),  # type: ignore[misc, arg-type]
            "`def on_log(self, run)`",
        ),
        "a name": (of("early_stopping"), "callback"),
        "a launcher's argument": (
            lambda: Trainer(max_restarts=3),  # type: ignore[call-arg]
            "drivetrain launch --max-restarts",
        ),
    }
    assert_refused(ConfigError, table)


def test_data_that_a_fit_or_an_evaluation_cannot_use_is_refused() -> None:
    stream = (each for each in pairs(4))
    table: dict[str, tuple[Any, ...]] = {
        "empty validation": (lambda: quiet().validate(Regression(), []), "validation data is empty"),
        "empty prediction": (lambda: quiet().predict(Regression(), []), "predict data is empty"),
        "joined without batches": (
            lambda: quiet().predict(Regression(), iter(()), joined=True),
            "gave no batch",
        ),
        "joined means": (
            lambda: quiet().predict(
                variant(predict_step=lambda self, batch: batch[0].mean())(), pairs(4), joined=True
            ),
            "joined=True cannot join the outputs: the output of 2 samples is a Tensor of shape ()",
            "without joined",
        ),
        "a text": (lambda: quiet().predict(Regression(), ["text"]), "batch 0 of epoch 0", "a str"),
        "a list of loaders": (lambda: fit(validation=[pairs(), pairs()]), '{"first": loader'),
    }
    assert_refused(DataError, table)
    length = "needs training data of known length"
    wrong: dict[str, tuple[Any, ...]] = {
        "part of a stream": (lambda: fit(data=stream, max_epochs=1.5), "max_epochs=1.5", length),
        "limit of a stream": (lambda: fit(data=stream, limit_train_batches=0.7), "0.7", "known length"),
    }
    assert_refused(ConfigError, wrong)


def test_losses_metrics_and_logged_values_that_cannot_be_are_refused(tmp_path: Path) -> None:
    detached = variant(loss=lambda self, outputs, batch: outputs.detach().mean())
    named = lambda self, outputs, batch: {"loss": outputs.mean(), "constant": outputs.mean()}  # noqa: E731
    measured = variant(metrics=lambda self: {"constant": constant()}, loss=named)
    kept = variant(metrics=lambda self: {"constant": constant()})
    skips = variant(training_step=lambda self, batch: None)
    table: dict[str, tuple[Any, ...]] = {
        "no graph": (lambda: fit(detached()), "depends on no parameter"),
        "no loss": (lambda: fit(skips()), "returned no loss"),
        "name in training": (lambda: fit(measured(), log_every=1), "value 'constant'", "metrics() declares"),
    }
    assert_refused(ConfigError, table)
    unstorable = (lambda: fit(kept(), run_dir=tmp_path, checkpoint=True), "'constant'", "no state_dict")
    assert_refused(CheckpointError, {"a metric that cannot be stored": unstorable})


def test_metric_names_that_meet_are_refused() -> None:
    same = variant(metric_name=lambda self, stage, loader, name: name)
    counts = variant(
        metric_name=lambda self, stage, loader, name: name,
        loss=lambda self, outputs, batch: {"loss": outputs.mean(), "step": torch.ones(())},
    )

    escapes = variant(loss=lambda self, outputs, batch: {"loss": outputs.mean(), "\x1b[2J": torch.ones(())})

    def logs(name: str, key: str, **more: Any) -> Any:
        return lambda: fit(**hook(name, lambda run: run.log(key, 1.0)), **more)

    table: dict[str, tuple[Any, ...]] = {
        "of two stages": (lambda: fit(same(), validation=pairs(2)), "of train and 'loss' of validation"),
        "logged": (logs("on_log", "train/loss"), "run.log('train/loss'", "'loss' of train"),
        "the tables' count": (lambda: fit(counts()), "metric_name gave 'step'"),
        "an escape of a step": (lambda: fit(escapes()), r"train/\x1b[2J", "without control characters"),
        "an escape of a hook": (logs("on_log", "a\x07"), r"'a\x07'", "without control characters"),
        "watched by nobody's name": (
            lambda: fit(validation=pairs(2), log_every=3, callbacks=[EarlyStopping("validation/los")]),
            "'validation/los'",
            "did you mean 'validation/loss'",
        ),
    }
    assert_refused(ConfigError, table)


def test_what_a_hook_cannot_ask_a_run_for_is_refused() -> None:
    left: list[set[str]] = []

    def asks(ask: Any) -> Any:
        def act(run: Run) -> None:
            try:
                ask(run)
            finally:
                left.append(set(run.requests))

        return lambda: fit(**hook("on_step_end", act))

    def outside(ask: Any) -> Any:
        return lambda: quiet(**hook("on_evaluation_end", ask)).validate(Regression(), pairs(4))

    where = "this run is a validation run"
    cases = {
        "save": (asks(Run.save), "run.save() in a fit that saves nothing"),
        "validate": (asks(Run.validate), "run.validate() in a fit that has no validation data"),
    }
    assert_refused(ConfigError, cases)
    assert left == [set(), set()]
    every = (Run.save, Run.validate, Run.end_epoch, Run.log_now)
    assert_refused(ConfigError, {each.__name__: (outside(each), where) for each in every})


def test_limits_and_preemption_options_that_cannot_be_are_refused() -> None:
    def preempts(**options: Any) -> Any:
        return lambda: PreemptionConfig(**options)

    table: dict[str, tuple[Any, ...]] = {
        "no minimum": (lambda: fit(min_steps=0), "min_steps", "at least 1"),
        "minimum over the limit": (lambda: fit(min_steps=9, max_steps=5), "min_steps=9 with max_steps=5"),
        "misspelt signal": (preempts(requeue="SIGTREM"), "'SIGTERM'"),
        "signal in both": (preempts(stop=["TERM"]), "SIGTERM is in requeue and stop"),
        "a text": (preempts(deadline="soon"), "'2 hours'", "'auto'"),
        "misspelt option": (lambda: Trainer(preemption={"dead_line": 3}), "no argument 'dead_line'"),
    }
    assert_refused(ConfigError, table)


class Wider(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 2)
        self.more = nn.Linear(2, 1)

    def forward(self, features: Tensor) -> Tensor:
        return self.more(self.line(features))


def test_a_resume_into_another_run_is_refused(tmp_path: Path) -> None:
    options: dict[str, Any] = {"checkpoint": True, "run_dir": tmp_path}
    quiet(max_epochs=3, seed=1, **options).fit(Regression(), pairs())
    Engine("cpu").save(str(tmp_path / "weights"), model=Regression())

    def resume(task: Any = None, **more: Any) -> Any:
        trainer = quiet(**{"max_epochs": 4, "seed": 1, **options, **more})
        return lambda: trainer.fit(task or Regression(), pairs(), resume="auto")

    table: dict[str, tuple[Any, ...]] = {
        "seed": (resume(seed=2), "this Trainer has seed=2", "Use Trainer(seed=1)"),
        "data_seed": (resume(data_seed=2), "another data_seed", "order of the data would differ"),
        "optimizer": (resume(Regression(OptimizerConfig("adamw", lr=0.1))), "SGD", "AdamW"),
        "architecture": (resume(Wider()), "missing 'more.bias'", "shape (1,) there, (2,) here"),
        "past the end": (resume(max_epochs=2), "past the end", "step 15 in epoch 3", "max_epochs=2"),
        "weights alone": (
            lambda: quiet(max_epochs=1).fit(Regression(), pairs(), resume=str(tmp_path / "weights")),
            "no checkpoint of a Trainer",
        ),
    }
    assert_refused(CheckpointError, table)


def test_batches_by_a_schedule_that_do_not_fit_are_refused() -> None:
    data: Any = pairs().dataset
    grows: Any = {"batch_size": {0: 2, 4: 3}}

    by_samples: Any = {"batch_size": {0: 2, "4 samples": 3}, "on_bad_batch": "skip"}
    table: dict[str, tuple[Any, ...]] = {
        "a loader": (lambda: fit(data=pairs(), **grows), "with a length", "DataLoader"),
        "a fraction": (lambda: fit(data=data, limit_train_batches=0.5, **grows), "a fraction"),
        "bad batches": (lambda: quiet(**by_samples), "on_bad_batch='skip' leaves some out"),
    }
    assert_refused(ConfigError, table)
