"""Unchanged LightningModules: their numbers under Lightning's Trainer and under ours, hooks, refusals."""

import functools
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.lightning import equality
from tests.integrations.lightning.equality import both, differences, made, under_ours, weights_of
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import nn
from torch.nn import functional as F

from drivetrain import Callback, CheckpointConfig, ConfigError, EarlyStopping
from drivetrain.integrations.lightning import LightningTask, as_data, as_task
from drivetrain.testing import run_distributed

modules = Lazy("tests.integrations.lightning.modules")
pl = Lazy("lightning.pytorch")
theirs_callbacks = Lazy("lightning.pytorch.callbacks")

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

BARE: dict[str, Any] = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
BARE |= {"accelerator": "cpu", "devices": 1, "enable_model_summary": False}


class _Stop(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, run: Any) -> None:
        if run.progress.steps == self.at:
            run.stop("interrupted")


@pytest.mark.parametrize("name", equality.MODULES)
def test_weights_and_logged_values_equal_lightnings_and_resume_is_bitwise(name: str, tmp_path: Path) -> None:
    kind = getattr(modules, name)
    theirs, ours, logged, found = both(kind, {"max_epochs": 2})
    assert torch.equal(weights_of(theirs), weights_of(ours))
    assert differences(logged, found).keys() <= equality.EXPLAINED.get(name, set())
    assert logged.keys() == found.keys()
    saves = CheckpointConfig(every="1 step", keep_last=1, best=0)
    whole, resumed, at = made(kind), made(kind), 6 if name == "Skipping" else 9  # within an epoch
    values, _ = under_ours(whole, max_epochs=2, checkpoint=saves, run_dir=tmp_path / "whole")
    parts = {"checkpoint": saves, "run_dir": tmp_path / "parts"}
    before, _ = under_ours(made(kind), max_epochs=2, callbacks=[_Stop(at)], **parts)
    after, _ = under_ours(resumed, max_epochs=2, resume="auto", **parts)
    assert torch.equal(weights_of(whole), weights_of(resumed))
    for name, expected in values.items():  # an epoch that was cut short has its values, and again whole
        first, rest = before.get(name, []), after.get(name, [])
        assert [*(first[:-1] if len(first) + len(rest) > len(expected) else first), *rest] == expected
    assert getattr(resumed, "best", None) == getattr(whole, "best", None)


OPTIONS: dict[str, tuple[dict[str, Any], ...]] = {"bf16": ({"precision": "bf16-mixed"},) * 2}
OPTIONS["accumulation"] = {"accumulate_grad_batches": 3}, {"gradient_accumulation_steps": 3}
OPTIONS["clipping"] = {"gradient_clip_val": 0.05}, {"max_grad_norm": 0.05}


@pytest.mark.parametrize("option", OPTIONS)
def test_options_of_the_trainer_give_lightnings_numbers(monkeypatch: pytest.MonkeyPatch, option: str) -> None:
    # Batches and windows of one size: in a shorter window Lightning's gradient is too small.
    monkeypatch.setattr(modules.loader, "__defaults__", (24, 0, 4))
    their_options, our_options = ({"max_epochs": 2, **each} for each in OPTIONS[option])
    for kind in (modules.Classifier, modules.OneCycle):
        theirs, ours, logged, found = both(kind, their_options, our_options)
        assert torch.allclose(weights_of(theirs), weights_of(ours), rtol=0, atol=1e-6)
        assert not differences(logged, found)


def _on_two_ranks(name: str) -> tuple[Any, Any]:
    modules.loader.__defaults__ = (24, 0, 4)
    try:
        module = made(getattr(modules, name))
        values, _ = under_ours(module, max_epochs=2, strategy="ddp")
    finally:
        modules.loader.__defaults__ = (22, 0, 4)
    return values, weights_of(module).tolist()  # a tensor's memory would end with its process


@pytest.mark.heavy("Lightning is imported in two ranks")
@pytest.mark.parametrize("name", ["Classifier", "Template", "WarmUp"])
def test_two_ranks_equal_lightning_with_the_double_batch(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    (values, weights), (others, other_weights) = on_two_ranks(_on_two_ranks, name)
    assert weights == other_weights
    monkeypatch.setattr(modules.loader, "__defaults__", (24, 0, 8))
    module = made(getattr(modules, name))
    logged = equality.under_lightning(module, max_epochs=2)
    assert torch.allclose(weights_of(module), torch.tensor(weights).double(), rtol=0, atol=1e-6)
    names = {name for name in logged if name.endswith(("_epoch", "loss", "acc", "best"))}
    names -= {"val/loss"}  # their mean of batch means
    assert not differences({n: logged[n] for n in names}, {n: values[n] for n in names})
    assert not others  # the first rank logs


def _skips(name: str) -> tuple[Any, int, Any]:
    module = made(getattr(modules, name))
    _, result = under_ours(module, max_epochs=1, strategy="ddp")
    return weights_of(module).tolist(), result.progress.skipped, result.progress.steps


@pytest.mark.landing
def test_a_step_that_returns_none_on_one_rank_weighs_nothing_and_manual_steps_keep_ranks_equal() -> None:
    (weights, skipped, steps), (others, _, _) = on_two_ranks(_skips, "Ranks")
    assert weights == others
    assert (skipped, steps) == (0, 3)
    module = made(modules.Ranks)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = modules.loader().dataset.tensors
    # Two ranks with 4 samples each, at last 2 and 0; of the second step the second rank's part is left out.
    for part in (slice(0, 8), slice(8, 12), slice(16, 22)):
        F.cross_entropy(module.net(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(weights_of(module), torch.tensor(weights).double(), rtol=0, atol=1e-6)
    (weights, _, steps), (others, _, _) = on_two_ranks(_skips, "GAN")
    assert weights == others
    assert steps == 3


def _numbers() -> tuple[Any, ...]:
    _, result = under_ours(made(modules.Numbers), max_epochs=1, strategy="ddp")
    trainers = (quiet(strategy=each) for each in ("ddp", "fsdp"))
    counted = [each.validate(as_task(made(modules.Counting)), modules.loader(9, 1, 4)) for each in trainers]
    return dict(result.metrics), *((each["counted"], each["summed"]) for each in counted)


def test_numbers_of_several_kinds_are_logged_as_in_lightning() -> None:
    _, _, logged, found = both(modules.Numbers, {"max_epochs": 1})
    assert found == logged


@pytest.mark.landing
def test_logged_numbers_are_those_of_all_ranks_or_of_the_first_and_each_sample_counts_once() -> None:
    for values, *counted in on_two_ranks(_numbers):
        assert (values["first"], values["first_epoch"], values["mean"], values["only"]) == (1, 1, 1.5, 5)
        assert (values["min"], values["max"]) == (1, 2)
        assert counted == [(9.0, 9.0)] * 2


# In Lightning training_step, backward and their hooks run inside of the optimizer's step, and so inside of
# optimizer_step. Each hook still comes in the same order.


def test_hooks_come_in_lightnings_order() -> None:
    for accumulation in (1, 2):
        their_options = {"max_epochs": 2, "accumulate_grad_batches": accumulation}
        our_options = {"max_epochs": 2, "gradient_accumulation_steps": accumulation}
        theirs, ours, *_ = both(modules.Recording, their_options, our_options)
        assert ours.calls == theirs.calls, accumulation
    for verb in ("validate", "test", "predict"):
        theirs, ours = made(modules.Recording), made(modules.Recording)
        getattr(pl.Trainer(**BARE), verb)(theirs, modules.loader())
        getattr(quiet(), verb)(as_task(ours), modules.loader())
        assert ours.calls == theirs.calls, verb


_LOGGING = "on_train_start on_train_epoch_start on_train_batch_start on_before_zero_grad on_before_backward"
_LOGGING += " on_after_backward on_before_optimizer_step on_train_batch_end on_train_epoch_end optimizer_step"
_LOGGING += " on_validation_start on_validation_epoch_start on_validation_batch_start optimizer_zero_grad"
_LOGGING += " on_validation_batch_end on_validation_epoch_end configure_gradient_clipping lr_scheduler_step"
_LOGGING += " on_fit_start on_train_end on_fit_end on_validation_end on_after_batch_transfer setup teardown"
_LOGGING += " configure_optimizers prepare_data"


def test_every_hook_logs_what_it_logs_in_lightning_or_is_refused_as_there() -> None:
    from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator

    def logging(names: Iterable[str], **options: Any) -> Any:
        def hook(name: str) -> Any:
            def method(self: Any, *arguments: Any, **named: Any) -> Any:
                self.calls[name] += 1
                self.log(name, float(self.calls[name]), **options)
                return getattr(modules.Noted, name)(self, *arguments, **named)

            return method

        return type("Net", (modules.Noted,), {name: hook(name) for name in names})

    rules = {name: _FxValidator.functions[name] for name in _LOGGING.split()}
    allowed = [name for name, rule in rules.items() if rule]
    of_batches = [name for name in allowed if True in rules[name]["allowed_on_step"]]
    by_epoch = {"on_step": False, "on_epoch": True}
    for names, options in ((allowed, {}), (allowed, by_epoch), (of_batches, {**by_epoch, "on_step": True})):
        *_, logged, found = both(logging(names, **options), {"max_epochs": 2})
        for name in {*logged} if options.get("on_step") else ():
            if name.startswith("on_validation") and name.endswith("_step"):  # no place among steps
                del logged[name], found[name]
        assert not differences(logged, found)
    for name in rules.keys() - {*allowed}:
        with pytest.raises(ConfigError, match=f"self.log.'{name}'"):
            under_ours(made(logging([name])), max_epochs=1)


def test_evaluations_and_predictions_give_lightnings_values() -> None:
    module = made(modules.Classifier)
    other = pl.Trainer(**BARE)
    (theirs,) = other.test(module, modules.loader(), verbose=False)
    expected = other.predict(module, modules.loader())
    assert quiet().test(as_task(module), modules.loader()) == pytest.approx(theirs, abs=1e-6)
    predicted = quiet().predict(as_task(module), modules.loader())
    assert all(torch.equal(one, two) for one, two in zip(predicted, expected, strict=True))
    with pytest.raises(RuntimeError, match="not attached to a"):
        _ = module.trainer  # the module is as it was
    assert "log" not in vars(module)


def test_a_schedule_that_is_shorter_than_the_fit_is_refused() -> None:
    class Short(modules.Classifier):  # type: ignore[name-defined,misc]
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=2)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    with pytest.raises(ConfigError, match="OneCycleLR can take 2 steps") as raised:
        quiet(max_epochs=2).fit(as_task(made(Short)), modules.loader())
    assert "estimated_stepping_batches" in raised.value.__notes__[0]


def test_names_that_the_module_logs_steer_early_stopping_and_checkpoints(tmp_path: Path) -> None:
    class Plateaus(modules.OneCycle):  # type: ignore[name-defined,misc]
        def on_validation_epoch_end(self) -> None:
            self.outputs.clear()
            self.log("val_score", float(min(self.current_epoch, 2)))

    module = made(Plateaus)
    saves = CheckpointConfig(every="1 epoch", best=1, by="val_score", mode="max")
    stops = [EarlyStopping("val_score", mode="max", patience=2)]
    _, result = under_ours(module, max_epochs=10, run_dir=tmp_path, checkpoint=saves, callbacks=stops)
    assert result.progress.epoch == 5
    assert result.best_checkpoint.endswith("step-00000018")  # the first with the best value
    again = LightningTask.from_checkpoint(tmp_path, module=made(Plateaus))
    assert torch.equal(weights_of(again.module), weights_of(module))


def _divided(strategy: str) -> Any:
    module, data = made(modules.Classifier), modules.Divided()
    quiet(strategy=strategy, max_epochs=2).fit(as_task(module), as_data(data))
    assert data.trainer is None
    assert data.stages == ["fit"]
    return weights_of(module).tolist()


def test_a_data_module_is_set_up_knows_its_trainer_and_changes_batches() -> None:
    class ReadsItsData(modules.Classifier):  # type: ignore[name-defined,misc]
        def configure_optimizers(self) -> Any:
            self.stages = list(self.trainer.datamodule.stages)
            self.batches = self.trainer.num_training_batches
            return super().configure_optimizers()

    theirs, ours = made(modules.Classifier), made(ReadsItsData)
    pl.Trainer(max_epochs=2, **BARE).fit(theirs, datamodule=modules.Divided())
    quiet(max_epochs=2, sanity_validation=2).fit(as_task(ours), as_data(modules.Divided()))
    assert (ours.stages, ours.batches) == (["fit"], 3)  # Lightning does not know the number of batches yet
    assert torch.equal(weights_of(theirs), weights_of(ours))


def test_a_data_module_that_divides_the_batch_by_the_ranks_gives_the_same_weights() -> None:
    alone = torch.tensor(_divided("cpu")).double()
    for weights in on_two_ranks(_divided, "ddp"):
        assert torch.allclose(alone, torch.tensor(weights).double(), rtol=0, atol=1e-6)


def _with_callbacks(*callbacks: Any) -> Any:
    return type("Net", (modules.Template,), {"configure_callbacks": lambda self: list(callbacks)})


def test_a_module_brings_its_callbacks() -> None:
    stopping = theirs_callbacks.EarlyStopping("val/acc_best", mode="max", patience=1, min_delta=10.0)
    theirs, ours = made(_with_callbacks(stopping)), made(_with_callbacks(stopping, _Stop(11)))
    equality.under_lightning(theirs, max_epochs=5)
    _, result = under_ours(ours, max_epochs=5)
    assert result.progress.steps == 11  # by the callback of ours, in the second epoch
    again = made(_with_callbacks(stopping, theirs_callbacks.LearningRateMonitor("step")))
    values, result = under_ours(again, max_epochs=5)
    assert result.progress.steps == 12
    assert torch.equal(weights_of(theirs), weights_of(again))
    assert values["lr"][:6] == [0.05] * 6


def _overriding(name: str, method: Any = lambda self, *_, **__: None) -> Any:
    return type("Net", (modules.OneCycle,), {name: method})()


def _logging(value: Any = 1.0, **options: Any) -> Any:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("value", value, **options)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    return _overriding("training_step", step)


def test_refusals_of_modules() -> None:
    of_old, hook = "validation_epoch_end", "on_validation_epoch_end"
    adds = _overriding("state_dict", lambda self, *_, **__: {"ema": torch.zeros(1)})
    cases: dict[str, Any] = {
        "no module": (lambda: as_task(nn.Linear(1, 1)), "LightningModule", "Linear"),
        "Lightning 1": (lambda: as_task(_overriding(of_old)), f"never called here: {of_old}", hook),
        "a state that is lost": (lambda: under_ours(adds, max_epochs=1), "adds 'ema', which no checkpoint"),
    }
    assert_refused(ConfigError, cases)


def test_refusals_of_runs(tmp_path: Path) -> None:
    def ends(module: Any, **options: Any) -> Any:
        return lambda: under_ours(module, **{"max_epochs": 1, **options})

    class WithoutIt(modules.Finetuning):  # type: ignore[name-defined,misc]
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    def brings(callback: Any) -> Any:
        return ends(made(_with_callbacks(callback)))

    reads = _overriding("on_fit_start", lambda self: self.trainer.predict_loop)
    hides = _overriding("on_fit_start", lambda self: self.found)
    type(hides).found = property(lambda self: self.trainer.strategy.cluster)
    peeks = _overriding("on_fit_start", lambda self: self.trainer.fit_loop._combined_loader)
    tunes = theirs_callbacks.StochasticWeightAveraging(0.1)
    saver = theirs_callbacks.ModelCheckpoint(tmp_path, monitor="val/acc", mode="max", save_top_k=2)
    policy = ("CheckpointConfig(every='1 epoch", "keep_last=1, best=2, by='val/acc', mode='max', directory=")
    cases: dict[str, Any] = {
        "clipping": (ends(made(modules.GAN), max_grad_norm=1.0), "max_grad_norm", "no effect"),
        "a part of their Trainer": (ends(reads), "has no 'predict_loop' here"),
        "a private part": (ends(peeks), "has no '_combined_loader' here. It is private to Lightning's loop"),
        "a property that hides it": (ends(hides), "found cannot be read", "has no 'cluster' here"),
        "reduce_fx": (ends(_logging(reduce_fx="median")), "reduce_fx='median'"),
        "a tensor": (ends(_logging(torch.ones(2))), "one number, not a tensor of shape"),
        "unfrozen later": (ends(made(WithoutIt), max_epochs=2), "'backbone.0.weight' was added to WithoutIt"),
        "a saver": (brings(saver), *policy, "leave the ModelCheckp"),
        "a callback of the loop": (brings(tunes), "StochasticWeightAveraging", "WeightAverage"),
    }
    assert_refused((ConfigError, AttributeError), cases)


def _refused_on_ranks(strategy: str, name: str) -> None:
    under_ours(made(getattr(modules, name)), max_epochs=2, strategy=strategy)


def _sharded() -> int:
    runs = (("fsdp", modules.WarmUp), ("ddp", modules.WarmUp), ("fsdp", modules.Classifier))
    one, other, third = (under_ours(made(kind), max_epochs=1, strategy=each)[1] for each, kind in runs)
    assert one.metrics["grad_norm"] == pytest.approx(other.metrics["grad_norm"], abs=1e-6)
    return int(third.progress.steps)


@pytest.mark.landing
def test_a_sharded_run_trains_a_module_and_refuses_what_it_cannot() -> None:
    assert on_two_ranks(_sharded) == [3, 3]
    added = r"'backbone.0.weight' was added to Finetuning, .*or unfrozen"
    refused = (("fsdp", "GAN", "strategy 'fsdp' cannot run"), ("ddp", "Finetuning", added))
    for strategy, name, told in refused:
        with pytest.raises(RuntimeError, match=told):
            run_distributed(_refused_on_ranks, strategy, name)


def test_every_form_of_configure_optimizers_gives_lightnings_rates() -> None:
    forms: tuple[Any, ...] = (
        lambda first, _: first,
        lambda first, _: [first],
        lambda first, schedule: ([first], schedule),
        lambda first, schedule: {"optimizer": first, "lr_scheduler": schedule},
        lambda first, own: {"optimizer": first, "lr_scheduler": {"scheduler": own, "interval": "step"}},
        lambda first, own: [{"optimizer": first, "lr_scheduler": {"scheduler": own, "frequency": 2}}],
    )
    for number, form in enumerate(forms):
        rates: list[list[float]] = []

        def configure(self: Any, form: Any = form) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return form(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))

        def note(self: Any, *_: Any, rates: Any = rates) -> None:
            rates[-1].append(self.optimizers().param_groups[0]["lr"])

        methods = {"configure_optimizers": configure, "on_train_batch_end": note}
        kind = type("Net", (modules.Noted,), methods)
        for run in (equality.under_lightning, under_ours):
            rates.append([])
            run(made(kind), max_epochs=3)
        assert rates[0] == rates[1], number
    partial = {"configure_optimizers": lambda self: functools.partial(torch.optim.SGD, lr=0.1)}
    plain = {"configure_optimizers": lambda self: torch.optim.SGD(self.parameters(), lr=0.1)}
    kinds = [made(type("Net", (modules.Noted,), each)) for each in (partial, plain)]
    for each in kinds:
        under_ours(each, max_epochs=1)
    assert torch.equal(*map(weights_of, kinds))


def test_a_schedule_that_is_never_stepped_or_of_another_kind_is_named(tmp_path: Path) -> None:
    def stepped(make: Any, **when: Any) -> Any:
        def configure(self: Any) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": make(optimizer, 2), **when}}

        return made(type("Net", (modules.Noted,), {"configure_optimizers": configure}))

    rates, saves = torch.optim.lr_scheduler, {"checkpoint": CheckpointConfig(best=0), "run_dir": tmp_path}
    with warned("StepLR has interval='step' and frequency=1000, and an epoch has .* is never stepped"):
        under_ours(stepped(rates.StepLR, interval="step", frequency=1000), max_epochs=1, **saves)
    short = functools.partial(rates.OneCycleLR, total_steps=2)  # three of the six batches of an epoch step it
    with pytest.raises(ConfigError, match=r"OneCycleLR can take 2 steps, and .* 6 times"):
        under_ours(stepped(short, interval="step", frequency=2), max_epochs=2)
    with pytest.raises(ConfigError, match="CosineAnnealingLR, and the checkpoint the states of StepLR"):
        under_ours(stepped(rates.CosineAnnealingLR), max_epochs=2, resume="auto", **saves)


def test_a_plateau_may_be_stepped_by_step(tmp_path: Path) -> None:
    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        options = {"interval": "step", "frequency": 3, "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, **options}}

    kind = type("Net", (modules.OneCycle,), {"configure_optimizers": configure})
    theirs, ours, logged, found = both(kind, {"max_epochs": 4})
    assert not differences(logged, found)
    assert len(set(found["lr"])) > 2
    assert torch.equal(weights_of(theirs), weights_of(ours))
    saves = {"checkpoint": CheckpointConfig(every="1 step", best=0), "run_dir": tmp_path}
    under_ours(made(kind), max_epochs=4, callbacks=[_Stop(15)], **saves)
    resumed = made(kind)
    under_ours(resumed, max_epochs=4, resume="auto", **saves)
    assert torch.equal(weights_of(resumed), weights_of(ours))
