"""Throughput: speeds, what the time went to, and floating-point operations."""

from types import SimpleNamespace

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.tasks import FEATURES, pairs, quiet, variant
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.callbacks import LambdaCallback, Throughput
from drivetrain.callbacks.statistics import throughput
from drivetrain.data import Feed, Transfer, as_source

# Of Linear(16, 8) and Linear(8, 1) on one sample, a multiplication and an addition each: forward, the
# gradient of the weights, and that of the inputs, which the first layer does not need.
FLOPS_PER_SAMPLE = 2 * (2 * 16 * 8) + 3 * (2 * 8 * 1)


def values(point):
    return {
        name.removeprefix("throughput/"): value
        for name, value in point.items()
        if name.startswith("throughput/")
    }


def test_speeds_are_those_of_the_clock(monkeypatch):
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now.seconds))

    def pass_time(run):
        now.seconds += 0.5
        run.timing["evaluation"] = run.timing["save"] = 0.0

    callbacks = [LambdaCallback(on_step_start=pass_time), Throughput()]
    for tokens in (10, 0):
        task = variant(tokens=lambda self, batch, tokens=tokens: tokens)()
        trainer = quiet(max_steps=12, log_every=6, callbacks=callbacks)
        point = values(trainer.fit(task, pairs(24)).metrics)
        assert point["updates_per_second"] == pytest.approx(2)
        assert point["samples_per_second"] == pytest.approx(4)
        assert point.get("tokens_per_second") == (20 if tokens else None)  # None: they are not counted


def test_shares_say_what_the_time_went_to_and_validation_slows_no_speed_down(drive):
    seconds = {"data": 0.02, "compute": 0.01, "save": 0.01, "evaluation": 0.1}
    options = {"epochs": 2, "updates_per_epoch": 5, "log_every": 5, "results": [{"loss": 1.0}] * 2}
    run = drive(Throughput(measure_flops=False), seconds=seconds, **options).fit()
    first, validation, after, _ = map(values, run.history)
    assert validation == {}
    assert first["evaluation_share"] == first["evaluation_seconds"] == 0
    # A sleep lasts at least as long as it says. The first batch of an epoch may have come before.
    for part, times in {"data": 4, "compute": 5, "save": 4, "evaluation": 1}.items():
        assert after[f"{part}_seconds"] >= times * seconds[part], part
    wall = [after[f"{part}_seconds"] / after[f"{part}_share"] for part in seconds]
    assert wall == pytest.approx([wall[0]] * len(wall))
    assert wall[0] >= sum(after[f"{part}_seconds"] for part in seconds)
    training = wall[0] - after["evaluation_seconds"] - after["save_seconds"]
    assert after["updates_per_second"] == pytest.approx(5 / training)


def test_operations_are_counted_in_the_first_update_or_given(drive):
    run = drive(Throughput(peak_flops=1e6), updates_per_epoch=6).fit()
    point = values(run.history[-1])
    assert point["model_flops_per_second"] == pytest.approx(FLOPS_PER_SAMPLE * point["samples_per_second"])
    assert point["model_flops"] == FLOPS_PER_SAMPLE * run.progress.samples
    assert point["model_flops_utilisation"] == pytest.approx(point["model_flops_per_second"] / 1e6)
    point = values(drive(Throughput(flops_per_sample=100.0), updates_per_epoch=4).fit().history[-1])
    assert point["model_flops_per_second"] == pytest.approx(100 * point["samples_per_second"])
    assert "model_flops_utilisation" not in point  # no peak is known
    point = values(drive(Throughput(measure_flops=False), updates_per_epoch=4).fit().history[-1])
    assert "model_flops_per_second" not in point
    late = Throughput()  # a first update without an optimizer's step is not the one that counts
    assert drive(late, updates_per_epoch=3, weightless=1).fit().progress.updates == 2
    assert late.state_dict()["flops_per_sample"] == FLOPS_PER_SAMPLE
    wide = nn.Linear(16, 100)  # another fit counts again
    drive(late, updates_per_epoch=2, net=wide).fit()
    assert late.state_dict()["flops_per_sample"] == 2 * (2 * 16 * 100)


def test_attempts_that_ran_out_of_memory_are_not_counted():
    def forward(self, features):
        outputs = self.line(features)
        if len(features) > limit[0]:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return outputs

    limit = []
    for limit[:] in ([99], [4]):
        task = variant(forward=forward)()
        callback = Throughput()
        quiet(max_epochs=1, micro_batch="auto", callbacks=[callback]).fit(task, pairs(32, 16))
        assert callback.state_dict() == {"flops_per_sample": 4 * FEATURES}


def test_a_compiled_task_is_counted_and_still_compiled_afterwards(drive):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(lambda task, features: task(features).square().mean(), backend=backend)
    callback = Throughput()
    drive(callback, step=compiled, updates_per_epoch=3).fit()
    assert callback.state_dict() == {"flops_per_sample": FLOPS_PER_SAMPLE}
    assert graphs
    torch._dynamo.reset()


def modes_of(*callbacks, drive, **options):
    """In which updates operations were counted, and the run."""
    modes = []
    watch = LambdaCallback(
        on_before_optimizer_step=lambda run: modes.append(torch._C._len_torch_dispatch_stack())
    )
    resume = options.pop("resume", None)
    run = drive(*callbacks, watch, **options).fit(resume=resume)
    return modes, run


def test_a_count_comes_from_the_checkpoint_or_is_made_once(drive, tmp_path):
    drive(Throughput(), updates_per_epoch=2, run_dir=tmp_path).fit()
    options = {"epochs": 3, "updates_per_epoch": 2, "run_dir": tmp_path, "resume": "auto"}
    modes, resumed = modes_of(Throughput(), drive=drive, **options)
    assert modes == [0, 0, 0, 0]
    point = values(resumed.history[-1])
    assert point["model_flops_per_second"] == pytest.approx(FLOPS_PER_SAMPLE * point["samples_per_second"])

    def step(task, features):  # without matrix products
        return sum(each.square().sum() for each in task.parameters())

    modes, run = modes_of(Throughput(), drive=drive, step=step, updates_per_epoch=4)
    assert modes == [1, 0, 0, 0]
    assert "model_flops_per_second" not in values(run.history[-1])


def test_an_exception_in_the_counted_update_ends_the_counting(drive):
    def fail(task, features):
        task(features)
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        drive(Throughput(), step=fail).fit()
    assert torch._C._len_torch_dispatch_stack() == 0
    drive(Throughput(), updates_per_epoch=2).fit()


def test_long_waits_for_data_are_hinted_at_once_unless_nobody_asks(drive):
    for hint, waits, hinted in ((0.2, 1000.0, True), (None, 1000.0, False), (0.2, 0.0, False)):

        def wait(run, seconds=waits):  # as if it had taken that long
            run.timing["data"] += seconds

        callbacks = Throughput(data_hint=hint), LambdaCallback(on_step_end=wait)
        with (warned if hinted else heard)("waiting for the training data") as lines:
            drive(*callbacks, updates_per_epoch=8, log_every=2).fit()
        assert ["num_workers" in each for each in lines] == [True] * hinted


def test_advice_for_data_can_be_followed():
    data = TensorDataset(torch.zeros(4, 2))
    for changes in (False, True):
        advice = as_source(data, "training", 0, changes=changes, batch_size=2, num_workers=2).advice
        assert ("start anew" in advice) == ("a DataLoader with persistent_workers=True" in advice) == changes
    for given, advised in (
        ({}, "num_workers=2 or more"),
        ({"num_workers": 2}, "persistent_workers=True"),
        ({"num_workers": 2, "persistent_workers": True}, "More than num_workers=2"),
    ):
        feed = Feed(as_source(DataLoader(data, **given), "training", 0), Transfer(torch.device("cpu")))
        assert advised in feed.advice
