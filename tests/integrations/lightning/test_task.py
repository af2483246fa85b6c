"""Unchanged LightningModules: their numbers under Lightning's Trainer and under ours, hooks, refusals."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torchmetrics
from torch import nn
from torch.nn import functional as F

from drivetrain import CheckpointConfig, ConfigError, EarlyStopping, Trainer
from drivetrain.testing import run_distributed

pl = pytest.importorskip("lightning.pytorch")

from lightning.pytorch import callbacks as theirs_callbacks  # noqa: E402
from tests.integrations.lightning import modules  # noqa: E402
from tests.integrations.lightning.equality import (  # noqa: E402
    EXPLAINED,
    differences,
    made,
    under_lightning,
    under_ours,
    weights_of,
)
from tests.integrations.lightning.recording import ManualRecording, Recording  # noqa: E402

from drivetrain.integrations.lightning import LightningTask, as_data, as_task  # noqa: E402

pytestmark = [pytest.mark.full, pytest.mark.filterwarnings("ignore::Warning")]

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.mark.parametrize("kind", modules.MODULES, ids=lambda kind: kind.__name__)
def test_weights_and_logged_values_equal_lightnings(kind: Any) -> None:
    theirs, ours = made(kind), made(kind)
    logged = under_lightning(theirs, max_epochs=3)
    found, _ = under_ours(ours, max_epochs=3)
    assert torch.equal(weights_of(theirs), weights_of(ours))
    assert differences(logged, found).keys() <= EXPLAINED.get(kind, set())
    assert logged.keys() == found.keys()


@pytest.mark.parametrize("kind", [modules.Classifier, modules.Segmenter, modules.WarmUp])
@pytest.mark.parametrize(
    ("their_options", "our_options"),
    [
        ({"accumulate_grad_batches": 3}, {"gradient_accumulation_steps": 3}),
        ({"precision": "bf16-mixed"}, {"precision": "bf16-mixed"}),
        ({"gradient_clip_val": 0.05}, {"max_grad_norm": 0.05}),
    ],
)
def test_options_of_the_trainer_give_the_same_numbers(
    monkeypatch: pytest.MonkeyPatch, kind: Any, their_options: Any, our_options: Any
) -> None:
    if kind is modules.WarmUp and "gradient_clip_val" in their_options:
        pytest.skip("it clips itself, and Lightning refuses a second limit")
    # Batches and windows of one size: in a shorter window Lightning's gradient is too small.
    monkeypatch.setattr(modules.loader, "__defaults__", (24, 0, 4))
    theirs, ours = made(kind), made(kind)
    logged = under_lightning(theirs, max_epochs=3, **their_options)
    found, _ = under_ours(ours, max_epochs=3, **our_options)
    assert torch.allclose(weights_of(theirs), weights_of(ours), rtol=0, atol=1e-6)
    assert not differences(logged, found)


def _on_two_ranks(kind: Any) -> tuple[Any, Any]:
    torch.set_num_threads(1)
    module = made(kind)
    values, _ = under_ours(module, max_epochs=2, strategy="ddp")
    return values, weights_of(module).tolist()  # a tensor's memory would end with its process


_ON_TWO_RANKS = ["Classifier", "Template", "Autoencoder", "WarmUp", "OneCycle", "Finetuning"]


@pytest.mark.parametrize("kind", [getattr(modules, name) for name in _ON_TWO_RANKS])
def test_two_ranks_equal_lightning_with_the_double_batch(monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(modules.loader, "__defaults__", (24, 0, 4))
    (values, weights), (others, other_weights) = run_distributed(_on_two_ranks, kind, timeout=180)
    assert weights == other_weights
    monkeypatch.setattr(modules.loader, "__defaults__", (24, 0, 8))
    module = made(kind)
    logged = under_lightning(module, max_epochs=2)
    assert torch.allclose(weights_of(module), torch.tensor(weights).double(), rtol=0, atol=1e-6)
    names = {name for name in logged if name.endswith(("_epoch", "loss", "acc", "best"))}
    names -= {"val/loss"}  # their mean of batch means
    if kind is modules.Autoencoder:
        names = {name for name in logged if "reconstruction" in name or "size" in name}
    assert not differences({n: logged[n] for n in names}, {n: values[n] for n in names})
    assert not others  # the first rank logs


class Ranks(pl.LightningModule):
    """Skips a batch on one rank, and gathers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = modules.body()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        gathered = self.all_gather(torch.tensor(float(self.global_rank)))
        assert gathered.tolist() == ([0.0, 1.0] if self.trainer.world_size == 2 else 0.0)
        if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1:
            return None
        return F.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_a_module_that_may_not_skip_is_told() -> None:
    task = as_task(made(modules.Skipping))
    task.may_skip = False
    trainer = Trainer(strategy="cpu", max_epochs=1, checkpoint=False, loggers=(), progress_bar=False)
    with pytest.raises(ConfigError, match=r"Skipping.training_step returned no loss"):
        trainer.fit(task, modules.loader())


def _skips(manual: bool) -> tuple[Any, int, Any]:
    torch.set_num_threads(1)
    module = made(modules.GAN if manual else Ranks)
    _, result = under_ours(module, max_epochs=1, strategy="ddp")
    return weights_of(module).tolist(), result.progress.skipped, result.progress.updates


def test_a_rank_whose_step_returns_none_weighs_nothing() -> None:
    (weights, skipped, updates), (others, _, _) = run_distributed(_skips, False, timeout=180)
    assert weights == others
    assert (skipped, updates) == (0, 3)
    module = made(Ranks)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x, y = modules.loader().dataset.tensors
    # Two ranks with 4 samples each, at last 2 and 0; of the second update the second rank's part is left out.
    for part in (slice(0, 8), slice(8, 12), slice(16, 22)):
        F.cross_entropy(module.net(x[part]), y[part]).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert torch.allclose(weights_of(module), torch.tensor(weights).double(), rtol=0, atol=1e-6)


def test_manual_optimization_on_two_ranks_keeps_them_equal() -> None:
    (weights, _, updates), (others, _, _) = run_distributed(_skips, True, timeout=180)
    assert weights == others
    assert updates == 3


class _Stop:
    def __init__(self, at: int) -> None:
        self.at = at

    def on_step_end(self, run: Any) -> None:
        if run.progress.updates == self.at:
            run.stop("interrupted")


@pytest.mark.parametrize("kind", modules.MODULES, ids=lambda kind: kind.__name__)
def test_a_resumed_run_is_bitwise_the_uninterrupted_one(kind: Any, tmp_path: Path) -> None:
    saves = CheckpointConfig(every="1 step", keep_last=1, best=0)
    whole, resumed = made(kind), made(kind)
    values, _ = under_ours(whole, max_epochs=3, checkpoint=saves, run_dir=tmp_path / "whole")
    at = 9 if kind is not modules.Skipping else 6
    parts = {"checkpoint": saves, "run_dir": tmp_path / "parts"}
    before, _ = under_ours(made(kind), max_epochs=3, callbacks=[_Stop(at)], **parts)
    after, _ = under_ours(resumed, max_epochs=3, resume="auto", **parts)
    assert torch.equal(weights_of(whole), weights_of(resumed))
    joined = {name: [*before.get(name, []), *after.get(name, [])] for name in before.keys() | after.keys()}
    unequal = {name: each for name, each in values.items() if joined[name] != each}
    # What a module collects in lists of its own is in no checkpoint.
    assert unequal.keys() <= ({"train_steps"} if kind is modules.Segmenter else set())
    if kind is modules.Finetuning:
        assert resumed.best == whole.best


# In Lightning training_step, backward and their hooks run inside of the optimizer's step, and so inside of
# optimizer_step. Each hook still comes in the same order.


@pytest.mark.parametrize("accumulation", [1, 2])
def test_hooks_come_in_lightnings_order(accumulation: int) -> None:
    theirs, ours = made(Recording), made(Recording)
    under_lightning(theirs, max_epochs=2, accumulate_grad_batches=accumulation)
    under_ours(ours, max_epochs=2, gradient_accumulation_steps=accumulation)
    assert ours.calls == theirs.calls


def test_hooks_of_manual_optimization_come_in_lightnings_order() -> None:
    theirs, ours = made(ManualRecording), made(ManualRecording)
    under_lightning(theirs, max_epochs=2)
    under_ours(ours, max_epochs=2)
    assert ours.calls == theirs.calls


_LOGGING = (
    *("on_fit_start", "on_train_start", "on_train_epoch_start"),
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward"),
    *("on_after_backward", "on_before_optimizer_step", "on_train_batch_end"),
    *("on_train_epoch_end", "on_train_end", "on_fit_end"),
    *("on_validation_start", "on_validation_epoch_start", "on_validation_batch_start"),
    *("on_validation_batch_end", "on_validation_epoch_end", "on_validation_end"),
    *("configure_gradient_clipping", "optimizer_step", "lr_scheduler_step"),
    *("on_after_batch_transfer", "optimizer_zero_grad", "setup"),
    *("configure_optimizers", "teardown", "prepare_data"),
)


class Bare(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = modules.body()
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None: ...

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.parametrize("name", _LOGGING)
def test_every_method_logs_what_it_logs_in_lightning_or_is_refused_in_both(name: str) -> None:
    for options in ({}, {"on_step": True, "on_epoch": True}, {"on_step": False, "on_epoch": True}):

        def logging_method(self: Any, *args: Any, options: Any = options, **kwargs: Any) -> Any:
            self.calls += 1
            self.log("x", float(self.calls), **options)
            return getattr(Bare, name)(self, *args, **kwargs)

        kind = type("Net", (Bare,), {name: logging_method})
        try:
            logged = under_lightning(made(kind), max_epochs=2, limit_train_batches=2, limit_val_batches=2)
        except Exception:
            with pytest.raises(ConfigError, match=r"self.log\('x'"):
                under_ours(made(kind), max_epochs=2)
            continue
        limits = {"limit_train_batches": 2, "limit_validation_batches": 2}
        found, _ = under_ours(made(kind), max_epochs=2, **limits)
        if "validation" in name:  # each batch's value has no place among updates; see EXPLAINED
            logged.pop("x_step", None)
            found.pop("x_step", None)
        assert found == logged


class Numbers(Bare):
    """Logs numbers of several kinds, and the number of its rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.log_dict({"numpy": np.float32(batch_idx), "whole": batch_idx, "tensor": torch.tensor(batch_idx)})
        self.log("first", self.global_rank + 1.0, rank_zero_only=True)
        self.log("first_epoch", self.global_rank + 1.0, rank_zero_only=True, on_step=False, on_epoch=True)
        self.log("mean", self.global_rank + 1.0, sync_dist=True)
        if self.trainer.is_global_zero:
            self.log("only", 5.0, rank_zero_only=True, logger=False)
        return super().training_step(batch, batch_idx)


def _numbers(strategy: str) -> dict[str, float]:
    torch.set_num_threads(1)
    _, result = under_ours(made(Numbers), max_epochs=1, strategy=strategy)
    return dict(result.metrics)


def test_numbers_are_those_of_all_ranks_or_of_the_first() -> None:
    logged = under_lightning(made(Numbers), max_epochs=1)
    found, _ = under_ours(made(Numbers), max_epochs=1)
    assert found == logged
    for values in run_distributed(_numbers, "ddp", timeout=120):
        assert (values["first"], values["first_epoch"], values["mean"], values["only"]) == (1, 1, 1.5, 5)


@pytest.mark.parametrize("verb", ["validate", "test", "predict"])
def test_hooks_of_evaluations_come_in_lightnings_order(verb: str) -> None:
    theirs, ours = made(Recording), made(Recording)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    getattr(pl.Trainer(accelerator="cpu", devices=1, **options), verb)(theirs, modules.loader())
    getattr(Trainer(strategy="cpu", progress_bar=False), verb)(as_task(ours), modules.loader())
    assert ours.calls == theirs.calls


def test_evaluations_and_predictions_give_lightnings_values() -> None:
    module = made(modules.Classifier)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    other = pl.Trainer(accelerator="cpu", devices=1, **options)
    (theirs,) = other.test(module, modules.loader(), verbose=False)
    expected = other.predict(module, modules.loader())
    trainer = Trainer(strategy="cpu", progress_bar=False)
    assert trainer.test(as_task(module), modules.loader()) == pytest.approx(theirs, abs=1e-6)
    predicted = trainer.predict(as_task(module), modules.loader())
    assert all(torch.equal(one, two) for one, two in zip(predicted, expected, strict=True))
    with pytest.raises(RuntimeError, match="not attached to a"):
        _ = module.trainer  # the module is as it was
    assert "log" not in vars(module)


def test_names_of_the_module_steer_early_stopping_and_checkpoints(tmp_path: Path) -> None:
    class Plateaus(modules.OneCycle):
        def on_validation_epoch_end(self) -> None:
            self.outputs.clear()
            self.log("val_score", float(min(self.current_epoch, 2)))

    module = made(Plateaus)
    _, result = under_ours(
        module,
        max_epochs=10,
        run_dir=tmp_path,
        checkpoint=CheckpointConfig(every="1 epoch", best=1, by="val_score", mode="max"),
        callbacks=[EarlyStopping("val_score", mode="max", patience=2)],
    )
    assert result.progress.epoch == 5
    assert result.best_checkpoint.endswith("update-00000018")  # the first with the best value
    again = LightningTask.from_checkpoint(tmp_path, module=made(Plateaus))
    assert torch.equal(weights_of(again.module), weights_of(module))


class Data(pl.LightningDataModule):
    def setup(self, stage: str) -> None:
        self.stages = [*getattr(self, "stages", []), stage]

    def train_dataloader(self) -> Any:
        return modules.loader()

    def val_dataloader(self) -> Any:
        return modules.loader(9, 1)


class ReadsItsData(modules.Classifier):
    def configure_optimizers(self) -> Any:
        self.stages = list(self.trainer.datamodule.stages)
        self.batches = self.trainer.num_training_batches
        return super().configure_optimizers()


def test_a_data_module_is_set_up_and_shown() -> None:
    theirs, ours = made(ReadsItsData), made(ReadsItsData)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, **options).fit(theirs, datamodule=Data())
    trainer = Trainer(
        strategy="cpu", max_epochs=2, checkpoint=False, loggers=(), progress_bar=False, sanity_validation=2
    )
    trainer.fit(as_task(ours), as_data(Data()))
    assert ours.stages == theirs.stages == ["fit"]
    assert ours.batches == 6  # Lightning does not know it yet
    assert torch.equal(weights_of(theirs), weights_of(ours))


class Divided(pl.LightningDataModule):
    """Divides the batch among the processes, as the hydra template does, and changes batches."""

    def setup(self, stage: str) -> None:
        assert self.trainer is not None
        self.size = 8 // self.trainer.world_size

    def train_dataloader(self) -> Any:
        return modules.loader(24, 0, self.size)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        assert self.trainer.lightning_module is not None
        x, y = batch
        return -x, y


def _divided(strategy: str) -> Any:
    torch.set_num_threads(1)
    module, data = made(modules.Skipping), Divided()
    options = {"checkpoint": False, "loggers": (), "progress_bar": False}
    Trainer(strategy=strategy, max_epochs=2, **options).fit(as_task(module), as_data(data))
    assert data.trainer is None
    return weights_of(module).tolist()


def test_a_data_module_knows_its_trainer_and_changes_batches() -> None:
    theirs = made(modules.Skipping)
    options = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    pl.Trainer(accelerator="cpu", devices=1, max_epochs=2, **options).fit(theirs, datamodule=Divided())
    assert _divided("cpu") == weights_of(theirs).tolist()
    for weights in run_distributed(_divided, "ddp", timeout=180):
        assert torch.allclose(weights_of(theirs), torch.tensor(weights).double(), rtol=0, atol=1e-6)


def _with_callbacks(*callbacks: Any) -> Any:
    return type("Net", (modules.Tabular,), {"configure_callbacks": lambda self: list(callbacks)})


def test_a_module_brings_its_callbacks() -> None:
    stopping = theirs_callbacks.EarlyStopping("val_R2Score", mode="max", patience=1, min_delta=10.0)
    theirs, ours = made(_with_callbacks(stopping)), made(_with_callbacks(stopping, _Stop(11)))
    under_lightning(theirs, max_epochs=5)
    _, result = under_ours(ours, max_epochs=5)
    assert result.progress.updates == 11  # by the callback of ours, in the second epoch
    again = made(_with_callbacks(stopping, theirs_callbacks.LearningRateMonitor("step")))
    values, result = under_ours(again, max_epochs=5)
    assert result.progress.updates == 12
    assert torch.equal(weights_of(theirs), weights_of(again))
    assert values["lr"][:12] == [0.05] * 12


def test_callbacks_of_a_module_that_have_no_place_are_refused_with_what_to_write(tmp_path: Path) -> None:
    saver = theirs_callbacks.ModelCheckpoint(tmp_path, monitor="val_R2Score", mode="max", save_top_k=2)
    _ends(
        r"Net.configure_callbacks has a ModelCheckpoint.*checkpoint=CheckpointConfig\(every='1 epochs?',"
        r" keep_last=1, best=2, by='val_R2Score', mode='max', directory=.*leave the ModelCheckpoint out",
        made(_with_callbacks(saver)),
    )
    _ends("has a Timer.*max_time=", made(_with_callbacks(theirs_callbacks.Timer("00:01:00:00"))))
    swa = theirs_callbacks.StochasticWeightAveraging(0.1)
    _ends(
        "Net.configure_callbacks has StochasticWeightAveraging: .*WeightAverage", made(_with_callbacks(swa))
    )
    mine = type("Mine", (pl.Callback,), {})()
    _ends("Net.configure_callbacks has Mine, a subclass of Lightning's Callback", made(_with_callbacks(mine)))


def test_a_run_is_named_after_the_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logged: list[Any] = []

    class Configuration:
        def log_metrics(self, metrics: Any, step: int) -> None: ...

        def log_config(self, config: Any) -> None:
            logged.append(config["task"])

        def close(self) -> None: ...

    trainer = Trainer(
        strategy="cpu", max_epochs=1, checkpoint=True, loggers=[Configuration()], progress_bar=False
    )
    result = trainer.fit(as_task(modules.Classifier(hidden=4)), modules.loader())
    assert Path(result.last_checkpoint).parts[-3].startswith("Classifier-")
    (task,) = logged
    assert task["class"] == "Classifier"
    assert (task["hparams"]["hidden"], task["hparams"]["lr"]) == (4, 0.1)
    again = LightningTask.from_checkpoint(result.last_checkpoint, module=modules.Classifier(hidden=4))
    assert again.hparams["hidden"] == 4


def _unfreezing(strategy: str) -> None:
    torch.set_num_threads(1)
    under_ours(made(modules.Unfreezing), max_epochs=2, strategy=strategy)


def test_a_parameter_that_is_unfrozen_later_is_refused_by_name_where_it_would_not_be_trained() -> None:
    with pytest.raises(RuntimeError, match=r"'backbone.0.weight' was added to Unfreezing, .*or unfrozen"):
        run_distributed(_unfreezing, "ddp", timeout=180)

    class WithoutIt(modules.Unfreezing):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.head.parameters(), lr=0.1)

    _ends("'backbone.0.weight' was added to WithoutIt", made(WithoutIt), max_epochs=2)


def _overriding(name: str, method: Any = lambda self, *_, **__: None) -> Any:
    return type("Net", (modules.OneCycle,), {name: method})()


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("backward", "manual_backward"),
        ("transfer_batch_to_device", "to\\(device\\)"),
        ("on_before_batch_transfer", "collate_fn"),
        ("validation_epoch_end", "on_validation_epoch_end"),
        ("training_step_end", "end of training_step"),
        ("on_validation_model_eval", "modes"),
        ("log", "another name"),
        ("manual_backward", "belongs to the run"),
    ],
)
def test_what_is_never_called_is_refused_by_name(name: str, what: str) -> None:
    with pytest.raises(ConfigError, match=f"Net overrides what is never called here: {name} .*{what}"):
        as_task(_overriding(name))


def test_what_cannot_be_a_task_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"as_task takes a LightningModule .*not a Linear"):
        as_task(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"not the class OneCycle: as_task\(OneCycle\(...\)\)"):
        as_task(modules.OneCycle)
    with pytest.raises(ConfigError, match="parameter 'dataloader_iter'"):
        as_task(_overriding("training_step", lambda self, dataloader_iter: None))
    manual = type("Manual", (modules.GAN,), {"optimizer_step": lambda self, *_: None})()
    with pytest.raises(ConfigError, match=r"optimizer_step .it is called in automatic optimization only"):
        as_task(manual)


def _ends(match: str, module: Any, error: Any = ConfigError, **options: Any) -> None:
    with pytest.raises(error, match=match):
        under_ours(module, **{"max_epochs": 1, **options})


def test_what_a_run_cannot_serve_is_refused() -> None:
    _ends(
        "gradient_accumulation_steps would have no effect", made(modules.GAN), gradient_accumulation_steps=2
    )
    _ends("max_grad_norm and max_grad_value would have no effect", made(modules.GAN), max_grad_norm=1.0)
    _ends("micro_batch runs parts", made(modules.OneCycle), micro_batch=2)
    _ends(
        "'lightning_module'|has no 'strategy' here",
        _overriding("on_fit_start", lambda self: self.trainer.strategy),
        AttributeError,
    )
    _ends("returned -1", _overriding("on_train_batch_start", lambda self, batch, batch_idx: -1))
    _ends("watches 'nothing', which was not logged. Logged: .*'strict': False", _plateau())
    _ends("optimizer_step called its closure twice", _overriding("optimizer_step", _twice))
    _ends("reduce_fx='median'", _logging(reduce_fx="median"))
    _ends("one number, not a tensor of shape", _logging(torch.ones(2)))
    _ends("was given a str", _logging("high"))
    _ends("training_step called self.log.'x', .*with other options", _overriding("training_step", _log_twice))
    _ends("logs nothing", _logging(on_step=False, on_epoch=False))
    by_epoch = _overriding("on_train_epoch_start", lambda self: self.log("step", float(self.current_epoch)))
    _ends("self.log.'step', .*sets the x axis of Lightning's loggers", by_epoch)


def _log_twice(self: Any, batch: Any, batch_idx: int) -> None:
    self.log("x", 1.0)
    self.log("x", 1.0, on_epoch=True)


def _twice(self: Any, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
    optimizer_closure()
    optimizer.step(closure=optimizer_closure)


def _plateau() -> Any:
    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
            "monitor": "nothing",
        }

    return _overriding("configure_optimizers", configure)


def _logging(value: Any = 1.0, **options: Any) -> Any:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.log("value", value, **options)
        return F.cross_entropy(self.net(batch[0]), batch[1])

    return _overriding("training_step", step)


def _sharded(kind: str) -> str:
    torch.set_num_threads(1)
    if kind == "manual":
        under_ours(made(modules.GAN), max_epochs=1, strategy="fsdp")
    norms = [
        under_ours(made(modules.WarmUp), max_epochs=1, strategy=each)[1].metrics["grad_norm"]
        for each in ("fsdp", "ddp")
    ]
    assert norms[0] == pytest.approx(norms[1], abs=1e-6)
    _, result = under_ours(made(modules.Classifier), max_epochs=1, strategy="fsdp")
    return str(result.progress.updates)


def test_a_sharded_run_trains_a_module_and_refuses_manual_optimization() -> None:
    assert run_distributed(_sharded, "automatic", timeout=240) == ["3", "3"]
    with pytest.raises(RuntimeError, match=r"cannot run: it steps them|strategy 'fsdp' cannot run"):
        run_distributed(_sharded, "manual", timeout=240)


def test_a_module_of_the_older_package_trains_alike() -> None:
    older = pytest.importorskip("pytorch_lightning")

    class Older(older.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = modules.body()

        training_step = modules.Skipping.training_step
        configure_optimizers = modules.Skipping.configure_optimizers

    module = made(Older)
    same = made(modules.Skipping)
    same.net.load_state_dict(module.net.state_dict())
    found, result = under_ours(module, max_epochs=2)
    other, _ = under_ours(same, max_epochs=2)
    assert result.progress.updates > 0
    assert torch.equal(weights_of(module), weights_of(same))
    assert found.keys() == other.keys()


class Counting(modules.Classifier):
    """Counts the samples that it validates on, by a sum and by a torchmetrics object."""

    def __init__(self) -> None:
        super().__init__()
        self.counted = torchmetrics.SumMetric()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self(batch[0])
        self.counted.update(len(batch[0]))
        self.log("counted", self.counted)
        self.log("summed", float(len(batch[0])), reduce_fx="sum", on_epoch=True)


def _counted(strategy: str) -> dict[str, float]:
    torch.set_num_threads(1)
    trainer = Trainer(strategy=strategy, progress_bar=False)
    return trainer.validate(as_task(made(Counting)), modules.loader(9, 1, 4))


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_an_evaluation_counts_each_sample_once_where_a_rank_has_fewer_batches(strategy: str) -> None:
    for values in run_distributed(_counted, strategy, timeout=240):
        assert (values["counted"], values["summed"]) == (9.0, 9.0)


@pytest.mark.parametrize(
    "form",
    [
        lambda first, _: first,
        lambda first, _: [first],
        lambda first, _: (first,),
        lambda first, schedule: [[first], [schedule]],
        lambda first, schedule: ([first], schedule),
        lambda first, schedule: {"optimizer": first, "lr_scheduler": schedule},
        lambda first, schedule: {
            "optimizer": first,
            "lr_scheduler": {"scheduler": schedule, "interval": "step"},
        },
        lambda first, schedule: [
            {"optimizer": first, "lr_scheduler": {"scheduler": schedule, "frequency": 2}}
        ],
    ],
)
def test_every_form_of_configure_optimizers_gives_lightnings_rates(form: Any) -> None:
    rates: list[list[float]] = []

    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return form(optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))

    def note(self: Any, *_: Any) -> None:
        rates[-1].append(self.optimizers().param_groups[0]["lr"])

    kind = type("Net", (modules.WarmUp,), {"configure_optimizers": configure, "on_train_batch_end": note})
    for name in ("optimizer_step", "configure_gradient_clipping", "lr_scheduler_step"):
        setattr(kind, name, getattr(pl.LightningModule, name))
    for run in (under_lightning, under_ours):
        rates.append([])
        run(made(kind), max_epochs=3)
    assert rates[0] == rates[1]


@pytest.mark.parametrize("frequency", [3, 6])
def test_a_plateau_may_be_stepped_by_update(frequency: int, tmp_path: Path) -> None:
    def configure(self: Any) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.9)
        schedule = {"scheduler": plateau, "interval": "step", "frequency": frequency, "monitor": "loss"}
        if frequency == 6:
            schedule["monitor"] = "val_mean"
        return {"optimizer": optimizer, "lr_scheduler": schedule}

    kind = type("Net", (modules.OneCycle,), {"configure_optimizers": configure})
    theirs, ours, resumed = made(kind), made(kind), made(kind)
    logged, (found, _) = under_lightning(theirs, max_epochs=4), under_ours(ours, max_epochs=4)
    assert not differences(logged, found)
    assert len(set(found["lr"])) > 2
    assert torch.equal(weights_of(theirs), weights_of(ours))
    saves = {"checkpoint": CheckpointConfig(every="1 step", best=0), "run_dir": tmp_path}
    under_ours(made(kind), max_epochs=4, callbacks=[_Stop(15)], **saves)
    under_ours(resumed, max_epochs=4, resume="auto", **saves)
    assert torch.equal(weights_of(resumed), weights_of(ours))


def test_partial_optimizers_are_given_the_trained_parameters() -> None:
    partial = functools.partial(torch.optim.SGD, lr=0.1)
    module = made(type("Net", (modules.Skipping,), {"configure_optimizers": lambda self: partial}))
    before = weights_of(module)
    under_ours(module, max_epochs=1)
    assert not torch.equal(before, weights_of(module))
