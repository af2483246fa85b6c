"""`find_learning_rate` and `find_batch_size`, which train copies of the task."""

import copy
import random

import numpy as np
import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant
from torch.utils.data import TensorDataset

from drivetrain import EarlyStopping, LambdaCallback, OptimizerConfig, ParameterGroup, TorchSchedule
from drivetrain.testing.benchmark.turn import BlockClock, turn

BIAS = ParameterGroup("*.bias", lr=0.5)


def samples(count=64):
    features = torch.randn(count, 4, generator=torch.Generator().manual_seed(0))
    return TensorDataset(features, features.sum(1, keepdim=True))


def states():
    return [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist()]


def test_the_range_test_leaves_the_task_and_all_streams_untouched_and_suggests_a_rate():
    task = Regression(OptimizerConfig("sgd", lr=0.1, groups=BIAS, schedule="cosine"), dropout=0.1)
    before, streams = copy.deepcopy(task.state_dict()), states()
    trainer = quiet(max_epochs=1, batch_size=4)
    curve = trainer.find_learning_rate(task, samples(), lowest=1e-4, highest=100.0, steps=60)
    assert streams == states()
    assert all(torch.equal(value, before[name]) for name, value in task.state_dict().items())
    assert (
        trainer.fit(task, samples()).metrics
        == trainer.fit(Regression(task.optimizer, 0.1), samples()).metrics
    )
    assert curve.rates[0] == 1e-4
    assert 20 < len(curve.rates) == len(curve.losses) < 60
    assert curve.smoothed[-1] < 100 * min(curve.smoothed)  # it ended as it diverged, before a NaN
    assert 1e-3 < curve.suggestion < 1.0
    assert repr(curve).startswith(
        f"LearningRateCurve(suggestion={curve.suggestion}, {len(curve.rates)} rates from 0.0001 to "
    )
    lowest = curve.rates[min(range(len(curve.smoothed)), key=curve.smoothed.__getitem__)]
    assert curve.suggestion < lowest
    pytest.importorskip("matplotlib", reason="the extra plots is not installed")
    assert len(curve.plot().axes[0].lines) == 3


def lossy(change):
    return variant(loss=lambda self, outputs, batch: change(Regression.loss(self, outputs, batch)))()


def test_a_negative_loss_has_not_diverged_as_long_as_it_falls():
    curve = quiet(max_epochs=1, batch_size=4).find_learning_rate(
        lossy(lambda loss: loss - 100), samples(), steps=60
    )
    assert len(curve.rates) > 30
    assert curve.suggestion is not None


def curve_of_rank():
    trainer = quiet(max_epochs=1, strategy="fsdp", devices=2)
    curve = trainer.find_learning_rate(Regression(), pairs(16), steps=20, lowest=1e-3, highest=0.1)
    return curve.losses, curve.suggestion


def test_the_range_test_runs_under_a_sharding_strategy():
    (losses, _), second = on_two_ranks(curve_of_rank)
    whole = quiet(max_epochs=1).find_learning_rate(
        Regression(), pairs(16, batch_size=4), steps=20, lowest=1e-3, highest=0.1
    )
    assert losses == pytest.approx(whole.losses, rel=1e-5)
    assert losses == second[0]


@pytest.mark.heavy("a fit for each batch size that is tried")
def test_the_largest_batch_is_found_by_the_memory_of_a_step_and_by_running_out_of_it():
    task, trainer = Regression(OptimizerConfig("adamw")), quiet(max_epochs=1)
    limit = 500
    found = trainer.find_batch_size(task, samples(), memory=limit, largest=24)
    assert 1 < found.batch_size < 24
    assert found.peaks[found.batch_size] <= limit < found.peaks[found.batch_size + 1]

    def loss(self, outputs, batch):
        if len(outputs) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return Regression.loss(self, outputs, batch)

    found = trainer.find_batch_size(variant(loss=loss)(), samples(), memory="1 GiB", largest=9)
    assert (found.batch_size, found.peaks[7], found.limit) == (6, None, 2**30)
    assert trainer.find_batch_size(task, samples(), memory="1 GiB", largest=5).batch_size == 5


class FollowsValidations(Regression):
    def __init__(self, optimizer):
        super().__init__(optimizer)
        self.watching = [LambdaCallback(on_epoch_end=lambda run: run.metrics["validation/loss"])]
        self.norm = torch.nn.BatchNorm1d(4)

    def forward(self, features):
        if len(features) > 6:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.line(self.norm(features))

    def configure_callbacks(self, stage):
        return [EarlyStopping("validation/loss"), *self.watching]


def by_factory(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
    return optimizer, TorchSchedule(plateau, metric="validation/loss")


@pytest.mark.parametrize("optimizer", [OptimizerConfig(schedule="reduce_on_plateau"), by_factory])
def test_finders_and_benchmarks_take_tasks_that_follow_validations_and_have_batch_norms(optimizer, tmp_path):
    task, trainer = FollowsValidations(optimizer), quiet(max_epochs=1, batch_size=4, strategy="cpu")
    assert trainer.find_batch_size(task, samples(16), memory="1 GiB").batch_size == 6
    assert trainer.find_learning_rate(task, samples(16), steps=20).rates
    task.watching.clear()  # a benchmark leaves out early stopping alone
    watching = quiet(batch_size=4, callbacks=[EarlyStopping("validation/loss")])
    assert turn(watching, task, samples(), (), BlockClock(0.0), str(tmp_path))["step_seconds"] > 0


def test_mistakes_of_the_finders():
    def rate(task=None, **options):
        return lambda: quiet(max_epochs=1).find_learning_rate(task or Regression(), pairs(8), **options)

    def size(data=None, trainer=(), **options):
        made = quiet(max_epochs=1, **dict(trainer))
        return lambda: made.find_batch_size(Regression(), data or samples(), **options)

    rows = {
        "a wrong range": (rate(lowest=1.0, highest=0.1), "highest"),
        "few steps": (rate(steps=5), "steps", "20"),
        "no rate": (rate(Regression(OptimizerConfig("sgd", lr=0.0))), "OptimizerConfig(lr=1e-3)"),
        "a wrong name": (rate(metric="train/los"), "Did you mean 'train/loss'"),
        "no number": (rate(lossy(lambda loss: loss * float("nan"))), "of the first step is not finite"),
        "a loader": (size(pairs(8), memory="1 GiB"), "is a DataLoader", "dataset"),
        "no limit": (size(), "memory='4 GiB'"),
        "no bytes": (size(memory="much"), "must be a number of bytes", "'much'"),
        "parts": (size(trainer={"micro_batch": 2}, memory="1 GiB"), "splits a batch of any size"),
        "too little": (size(memory=10), "not even one sample fits"),
    }
    assert_refused(ValueError, rows)
