"""Modules and callbacks as libraries write them: overrides, helpers, optimizers, what they read."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.lightning.equality import (
    both,
    data_of,
    differences,
    made,
    under_lightning,
    under_ours,
    weights_of,
)
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from torch import nn

from drivetrain import CheckpointConfig
from drivetrain.integrations.lightning import as_data, as_task, from_lightning_arguments

modules = Lazy("tests.integrations.lightning.modules")
pl = Lazy("lightning.pytorch")
callbacks = Lazy("lightning.pytorch.callbacks")

pytestmark = pytest.mark.filterwarnings("ignore::Warning")

QUIET: dict[str, Any] = {"logger": False, "enable_progress_bar": False, "accelerator": "cpu", "devices": 1}


def _kind(base: Any, **methods: Any) -> Any:
    return type("Net", (base,), methods)


def _noting(name: str) -> Any:
    def method(self: Any, *args: Any, **options: Any) -> Any:
        self.seen = [*getattr(self, "seen", ()), name]
        return getattr(super(type(self), self), name)(*args, **options)

    return method


def test_overrides_that_call_super_work_as_in_lightning() -> None:
    automatic = ("log", "log_dict", "backward", "on_before_batch_transfer", "transfer_batch_to_device")
    automatic += ("optimizers", "load_state_dict", "on_after_batch_transfer", "on_validation_model_zero_grad")
    manual = ("log", "manual_backward", "optimizers", "toggle_optimizer", "optimizer_step", "backward")
    for base, names in ((modules.Classifier, automatic), (modules.GAN, manual)):
        kind = _kind(base, **{name: _noting(name) for name in names})
        theirs, ours, logged, found = both(kind, {"max_epochs": 2})
        assert ours.seen == theirs.seen
        assert torch.equal(weights_of(theirs), weights_of(ours))
        assert not differences(logged, found)


def test_hooks_set_the_modes_of_evaluations_and_end_epochs() -> None:
    def note(self: Any, *_: Any) -> None:
        self.seen = [*getattr(self, "seen", ()), (self.training, self.net.training, self.global_step)]

    methods = {
        "on_validation_model_eval": lambda self: self.net.eval(),
        "on_validation_model_train": lambda self: self.train(False),
        "on_validation_batch_end": note,
        "on_train_batch_end": note,
        "on_train_epoch_end": note,
        "configure_sharded_model": note,
    }
    ends = {"on_train_batch_start": lambda self, batch, index: -1 if index == 2 else None}
    for kind in (
        _kind(modules.Classifier, **methods),
        _kind(modules.WarmUp, on_train_batch_end=note, **ends),
    ):
        theirs, ours, *_ = both(kind, {"max_epochs": 2})
        assert ours.seen == theirs.seen
        assert torch.equal(weights_of(theirs), weights_of(ours))


def test_helpers_with_names_of_lightning_1_are_left_alone() -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        self.on_epoch_end(batch_idx)
        return modules.Classifier.training_step(self, batch, batch_idx)

    helper = {"on_epoch_end": lambda self, index: setattr(self, "last", index)}
    ours = made(_kind(modules.Classifier, training_step=step, **helper))
    under_ours(ours, max_epochs=1)
    assert ours.last == 5
    with warned("Net.on_batch_end is not called: Lightning 2 has removed"):
        as_task(made(_kind(modules.Classifier, on_batch_end=lambda self: None)))


def test_the_last_value_under_a_name_wins_and_an_epoch_that_is_cut_short_has_its_values() -> None:
    def end(self: Any) -> None:
        self.log("train_loss", 7.0 + float(self.trainer.callback_metrics["train_loss"]))
        self.log("step", float(self.current_epoch))
        self.seen = [*getattr(self, "seen", ()), (self.current_epoch, self.global_step)]

    def stops(self: Any, *_: Any) -> None:
        self.trainer.should_stop = self.trainer.should_stop or self.global_step == 8

    for limits, more in (({"max_steps": 8}, {}), ({"max_epochs": 5}, {"on_train_batch_end": stops})):
        kind = _kind(modules.Classifier, on_train_epoch_end=end, **more)
        theirs, ours = made(kind), made(kind)
        under_lightning(theirs, **{"max_epochs": -1, **limits})
        with warned("sets the x axis of Lightning's loggers"):
            _, result = under_ours(ours, **limits)
        assert ours.seen == theirs.seen
        expected = theirs.trainer.callback_metrics
        assert result.metrics["train_loss"] == pytest.approx(float(expected["train_loss"]), abs=1e-6)


def test_what_libraries_read_of_the_trainer_is_lightnings() -> None:
    def look(self: Any, *_: Any) -> None:
        at = self.trainer
        loop, feeds = at.fit_loop, (at.train_dataloader, at.val_dataloaders)
        self.seen = [
            *getattr(self, "seen", ()),
            (
                at.state.fn,
                at.state.stage,
                type(at.strategy).__name__,
                at.strategy.root_device,
                at.strategy.broadcast(3),
            ),
            (loop.epoch_progress.current.processed, loop.epoch_loop.batch_idx, loop.max_epochs),
            (at.limit_train_batches, at.limit_val_batches, at.val_check_interval, at.check_val_every_n_epoch),
            loop.epoch_loop.val_loop._data_source.is_defined(),
            (at.enable_validation, at.min_epochs, loop.min_epochs, loop.restarting, at.ckpt_path),
            (at.device_ids, at.node_rank, at.overfit_batches, at.early_stopping_callbacks),
            (type(at.accelerator), type(at.strategy.accelerator), at.accelerator.auto_device_count()),
            at.print("said once"),
            setattr(at._evaluation_loop, "_print_results", False),
            ([len(each.dataset) for each in feeds if each], at.checkpoint_callback, at.world_size),
        ]

    hooks = ("on_train_epoch_start", "on_train_batch_end", "on_validation_epoch_end")
    theirs, ours, *_ = both(_kind(modules.Classifier, **dict.fromkeys(hooks, look)), {"max_epochs": 2})
    assert ours.seen == theirs.seen


def _noted(trainer: Any, name: str) -> None:
    trainer.lightning_module.seen.append((name, trainer.current_epoch, trainer.global_step))


def _watcher() -> Any:
    def hook(name: str) -> Any:
        return lambda self, trainer, module, *_, **__: _noted(trainer, name)

    names = [name for name in vars(pl.Callback) if name.startswith("on_") and "exception" not in name]
    methods = {name: hook(name) for name in (*names, "setup", "teardown") if "checkpoint" not in name}

    def logs(self: Any, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        self.count += 1
        module.log("counted", float(self.count))

    methods |= {
        "on_train_batch_end": logs,
        "state_dict": lambda self: {"count": self.count},
        "load_state_dict": lambda self, state: setattr(self, "count", state["count"]),
        "count": 0,
    }
    return type("Watcher", (pl.Callback,), methods)()


def test_callbacks_of_users_are_called_in_lightnings_order_and_resume(tmp_path: Path) -> None:
    own = {"seen": property(lambda self: vars(self).setdefault("_seen", []))}
    own |= {name: lambda self, name=name, **_: self.seen.append(name) for name in ("on_train_start", "setup")}
    kind = _kind(modules.Classifier, **own)
    theirs, ours = made(kind), made(kind)
    logged = under_lightning(theirs, max_epochs=2, callbacks=[_watcher()])
    brings = _kind(kind, configure_callbacks=lambda self: [_watcher()])
    found, _ = under_ours(made(brings), max_epochs=2)
    assert found["counted"] == logged["counted"]
    given = {**QUIET, "default_root_dir": tmp_path, "num_sanity_val_steps": 0}
    for epochs in (1, 2):
        watcher = _watcher()
        mapped = from_lightning_arguments(max_epochs=epochs, callbacks=[watcher], **given)
        mapped.trainer.fit(as_task(made(brings)), *data_of(ours), resume="auto" if epochs == 2 else None)
    assert watcher.count == 12
    mapped.trainer.validate(as_task(ours), data_of(ours)[1])
    assert ours.seen[0] == "setup"
    assert [each for each in ours.seen if each[0] == "on_validation_end"]
    again = made(kind)
    under_ours_task = as_task(again, callbacks=[_watcher()])
    mapped = from_lightning_arguments(max_epochs=2, **{**given, "default_root_dir": tmp_path / "again"})
    mapped.trainer.fit(under_ours_task, *data_of(again))
    assert again.seen == theirs.seen


def test_a_users_early_stopping_and_lightnings_average_are_served() -> None:
    class Mine(callbacks.EarlyStopping):  # type: ignore[name-defined,misc]
        def on_validation_end(self, trainer: Any, module: Any) -> None:
            super().on_validation_end(trainer, module)

    def stopping() -> Any:
        return Mine("val_loss", patience=1, min_delta=10.0)

    values = under_lightning(made(modules.Classifier), max_epochs=9, callbacks=[stopping()])
    mapped = from_lightning_arguments(
        max_epochs=9, callbacks=[stopping()], enable_checkpointing=False, **QUIET
    )
    result = mapped.trainer.fit(as_task(made(modules.Classifier)), *data_of(made(modules.Classifier)))
    assert result.progress.epoch == len(values["val_loss"])
    saver = callbacks.ModelCheckpoint(monitor="epoch", mode="max", save_top_k=3)
    given = [callbacks.EMAWeightAveraging(decay=0.9), saver]
    mapped = from_lightning_arguments(max_epochs=1, callbacks=given, **QUIET)
    assert mapped.trainer.callbacks[0].decays == pytest.approx((0.9,))
    policy = mapped.trainer.checkpoint
    assert (policy.keep_last, policy.by) == (3, None)


def test_a_value_of_training_steps_alone_is_watched_at_the_end_of_short_epochs(tmp_path: Path) -> None:
    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("step_loss", loss)  # no log point comes: there is one every 50 steps, and an epoch has 6
        return loss

    kind = _kind(modules.Classifier, training_step=step)
    saver = callbacks.ModelCheckpoint(tmp_path / "theirs", monitor="step_loss")
    under_lightning(
        made(kind), max_epochs=3, callbacks=[saver], enable_checkpointing=True, log_every_n_steps=50
    )
    watching = [
        callbacks.ModelCheckpoint(monitor="step_loss"),
        callbacks.EarlyStopping("step_loss", patience=9),
    ]
    given = {"max_epochs": 3, "callbacks": watching, "default_root_dir": str(tmp_path / "ours")}
    trainer, _ = from_lightning_arguments(**given, **QUIET, enable_model_summary=False)
    result = trainer.fit(as_task(made(kind)), *data_of(made(kind)))
    assert result.best_value == pytest.approx(float(saver.best_model_score), abs=1e-6)
    assert result.best_checkpoint is not None


def _with(optimizer: Any) -> Any:
    return _kind(modules.OneCycle, configure_optimizers=lambda self: optimizer(self.parameters()))


def _lbfgs(parameters: Any) -> Any:
    return torch.optim.LBFGS(parameters, lr=0.1, max_iter=4)


def test_lbfgs_gives_lightnings_weights_and_resumes(tmp_path: Path) -> None:
    theirs, ours, *_ = both(_with(_lbfgs), {"max_epochs": 2})
    assert torch.equal(weights_of(theirs), weights_of(ours))
    saves = {"checkpoint": CheckpointConfig(every="1 epoch", best=0), "run_dir": tmp_path}
    under_ours(made(_with(_lbfgs)), max_epochs=1, **saves)
    resumed = made(_with(_lbfgs))
    under_ours(resumed, max_epochs=2, resume="auto", **saves)
    assert torch.equal(weights_of(resumed), weights_of(ours))


def _lbfgs_on_ranks() -> Any:
    modules.loader.__defaults__ = (24, 0, 4)
    try:
        module = made(_with(_lbfgs))
        under_ours(module, max_epochs=2, strategy="ddp")
    finally:
        modules.loader.__defaults__ = (22, 0, 4)
    return weights_of(module).tolist()


@pytest.mark.landing
def test_lbfgs_on_two_ranks_equals_the_double_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = on_two_ranks(_lbfgs_on_ranks)
    assert first == second
    monkeypatch.setattr(modules.loader, "__defaults__", (24, 0, 8))
    module = made(_with(_lbfgs))
    under_lightning(module, max_epochs=2)
    assert torch.allclose(weights_of(module), torch.tensor(first).double(), rtol=0, atol=1e-4)


def test_a_modules_hooks_of_checkpoints_have_the_epoch_and_the_step_of_lightnings(tmp_path: Path) -> None:
    def save(self: Any, checkpoint: Any) -> None:
        self.seen = {*getattr(self, "seen", ()), (checkpoint["epoch"], checkpoint["global_step"])}

    def load(self: Any, checkpoint: Any) -> None:
        self.loaded = checkpoint["epoch"], checkpoint["global_step"]

    kind = _kind(modules.Classifier, on_save_checkpoint=save, on_load_checkpoint=load)
    theirs, ours, resumed = made(kind), made(kind), made(kind)
    saver = callbacks.ModelCheckpoint(tmp_path, save_top_k=-1, every_n_train_steps=2)
    saves = {"enable_checkpointing": True, "default_root_dir": tmp_path, "callbacks": saver}
    under_lightning(theirs, max_epochs=2, **saves)
    options = {"checkpoint": CheckpointConfig(every="2 steps"), "run_dir": tmp_path / "ours"}
    under_ours(ours, max_epochs=2, **options)
    assert ours.seen - {(0, 0)} == theirs.seen  # ours is tried out before the first step
    under_ours(resumed, max_epochs=3, resume="auto", **options)
    assert resumed.loaded == max(theirs.seen)
    alone, options["run_dir"] = _kind(modules.Classifier, on_load_checkpoint=load), tmp_path / "alone"
    under_ours(made(alone), max_epochs=2, **options)
    resumed = made(alone)
    under_ours(resumed, max_epochs=3, resume="auto", **options)
    assert resumed.loaded == max(theirs.seen)


def test_a_module_without_an_optimizer_runs_its_epochs(tmp_path: Path) -> None:
    class Bank(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.net, self.rows = nn.Linear(4, 2), 0

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.rows += len(batch[0])
            self.log("rows", float(self.rows))

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_acc", 1.0)

        def configure_optimizers(self) -> None: ...

        def train_dataloader(self) -> Any:
            return modules.loader()

    theirs, ours = made(Bank), made(Bank)
    expected = under_lightning(theirs, max_epochs=2)
    saves = {"checkpoint": CheckpointConfig(every="1 epoch"), "run_dir": tmp_path}
    with warned("Bank.configure_optimizers returned None"):
        found, result = under_ours(ours, max_epochs=2, **saves)
    assert (ours.rows, found, result.best_checkpoint) == (theirs.rows, expected, None)
    assert as_data(ours) is not None


def test_a_loader_that_is_its_own_iterator_begins_anew_in_each_epoch() -> None:
    class Own:
        def __iter__(self) -> Any:
            self.rest = iter(modules.loader())
            return self

        def __next__(self) -> Any:
            return next(self.rest)

        def __len__(self) -> int:
            return len(modules.loader())

    kind = _kind(modules.WarmUp, train_dataloader=lambda self: Own())
    theirs, ours = made(kind), made(kind)
    pl.Trainer(max_epochs=2, enable_checkpointing=False, enable_model_summary=False, **QUIET).fit(theirs)
    under = from_lightning_arguments(max_epochs=2, enable_checkpointing=False, **QUIET).trainer
    under.fit(as_task(ours), as_data(ours))
    assert torch.equal(weights_of(theirs), weights_of(ours))


def test_the_training_loader_is_asked_for_anew_after_some_epochs() -> None:
    class Growing(modules.WarmUp):  # type: ignore[name-defined,misc]
        asked = 0

        def train_dataloader(self) -> Any:
            self.asked += 1
            return modules.loader(24, self.asked)

    theirs, ours = made(Growing), made(Growing)
    off = {"enable_checkpointing": False, "enable_model_summary": False, **QUIET}
    pl.Trainer(max_epochs=5, reload_dataloaders_every_n_epochs=2, **off).fit(theirs)
    trainer = from_lightning_arguments(max_epochs=5, **off).trainer
    trainer.fit(as_task(ours), as_data(ours, reload_every_n_epochs=2))
    assert (ours.asked, theirs.asked) == (3, 3)
    assert torch.equal(weights_of(ours), weights_of(theirs))
