"""Throughput: speeds, what the time went to, and floating-point operations."""

import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.tasks import FEATURES, Regression, pairs, quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain.callbacks import LambdaCallback, Throughput
from drivetrain.core.errors import ConfigError
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


def test_speeds_agree_with_the_clock(drive):
    seconds = {"compute": 0.02}
    run = drive(Throughput(), updates_per_epoch=12, log_every=6, tokens=80, seconds=seconds).fit()
    point = values(run.history[-1])
    assert 10 < point["updates_per_second"] <= 50
    assert point["samples_per_second"] == pytest.approx(8 * point["updates_per_second"])
    assert point["tokens_per_second"] == pytest.approx(80 * point["updates_per_second"])


def test_tokens_that_are_not_counted_are_not_logged(drive):
    run = drive(Throughput(), updates_per_epoch=4).fit()
    assert "tokens_per_second" not in values(run.history[-1])
    assert "samples_per_second" in values(run.history[-1])


def test_the_shares_say_what_the_time_went_to(drive):
    seconds = {"data": 0.03, "compute": 0.01, "save": 0.01}
    run = drive(Throughput(measure_flops=False), updates_per_epoch=9, log_every=9, seconds=seconds).fit()
    point = values(run.history[-1])
    # A sleep lasts at least as long as it says, on a busy machine longer. The first batches came before the
    # measurement began.
    for part, pause in seconds.items():
        assert point[f"{part}_seconds"] >= 7 * pause
    assert point["evaluation_share"] == point["evaluation_seconds"] == 0
    wall = [point[f"{part}_seconds"] / point[f"{part}_share"] for part in seconds]
    assert wall == pytest.approx([wall[0]] * 3)
    assert wall[0] >= sum(point[f"{part}_seconds"] for part in seconds)


def test_validation_does_not_slow_the_speed_down(drive):
    seconds = {"compute": 0.01, "evaluation": 0.3}
    run = drive(
        Throughput(measure_flops=False),
        epochs=2,
        updates_per_epoch=5,
        log_every=5,
        seconds=seconds,
        results=[{"loss": 1.0}] * 2,
    ).fit()
    _, validation, after, _ = map(values, run.history)
    assert validation == {}
    assert after["evaluation_seconds"] >= 0.3
    wall = after["evaluation_seconds"] / after["evaluation_share"]
    training = wall - sum(after[f"{part}_seconds"] for part in ("evaluation", "save"))
    assert after["updates_per_second"] == pytest.approx(5 / training)


def test_the_operations_are_counted_in_the_first_update(drive):
    run = drive(Throughput(peak_flops=1e6), updates_per_epoch=6).fit()
    point = values(run.history[-1])
    assert point["model_flops_per_second"] == pytest.approx(FLOPS_PER_SAMPLE * point["samples_per_second"])
    assert point["model_flops"] == FLOPS_PER_SAMPLE * run.progress.samples
    assert point["model_flops_utilisation"] == pytest.approx(point["model_flops_per_second"] / 1e6)


def test_attention_and_convolutions_are_counted(drive):
    class Attend(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(1, 4, 1)

        def forward(self, features):
            x = self.conv(features[:, None]).mT[:, None]
            return F.scaled_dot_product_attention(x, x, x)

    callback = Throughput()
    drive(callback, net=Attend(), updates_per_epoch=2).fit()
    conv = 2 * (2 * 16 * 4)
    attention = 2 * (2 * 16 * 16 * 4)
    assert callback.state_dict()["flops_per_sample"] > conv + attention


def test_given_operations_are_taken_and_nothing_is_counted(drive):
    run = drive(Throughput(flops_per_sample=100.0), updates_per_epoch=4).fit()
    point = values(run.history[-1])
    assert point["model_flops_per_second"] == pytest.approx(100 * point["samples_per_second"])


def test_without_counting_or_a_peak_there_is_no_such_value(drive):
    run = drive(Throughput(measure_flops=False), updates_per_epoch=4).fit()
    assert "model_flops_per_second" not in values(run.history[-1])
    run = drive(Throughput(), updates_per_epoch=4).fit()
    assert "model_flops_utilisation" not in values(run.history[-1])


def test_counting_moves_neither_the_weights_nor_the_random_stream(drive):
    def step(task, features):
        return F.dropout(task(features), 0.5).square().mean()

    plain = drive(step=step, updates_per_epoch=5).fit()
    counted = drive(Throughput(), step=step, updates_per_epoch=5).fit()
    for ours, theirs in zip(counted.task.parameters(), plain.task.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert [each["train/loss"] for each in counted.history] == [each["train/loss"] for each in plain.history]


@pytest.mark.parametrize("fits", [99, 4])
def test_attempts_that_ran_out_of_memory_are_not_counted(fits):
    class Small(Regression):
        def forward(self, features):
            outputs = super().forward(features)
            if len(features) > fits:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return outputs

    callback = Throughput()
    quiet(max_epochs=1, micro_batch="auto", callbacks=[callback]).fit(Small(), pairs(32, 16))
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


def test_a_resumed_run_takes_the_count_from_the_checkpoint(drive, tmp_path):
    drive(Throughput(), updates_per_epoch=2, run_dir=tmp_path).fit()
    modes = []
    watch = LambdaCallback(
        on_before_optimizer_step=lambda run: modes.append(torch._C._len_torch_dispatch_stack())
    )
    resumed = drive(Throughput(), watch, epochs=3, updates_per_epoch=2, run_dir=tmp_path).fit(resume="auto")
    assert modes == [0, 0, 0, 0]
    point = values(resumed.history[-1])
    assert point["model_flops_per_second"] == pytest.approx(FLOPS_PER_SAMPLE * point["samples_per_second"])


def test_another_fit_counts_again(drive):
    callback = Throughput()
    drive(callback, updates_per_epoch=2).fit()
    wide = nn.Linear(16, 100)
    drive(callback, updates_per_epoch=2, net=wide).fit()
    assert callback.state_dict()["flops_per_sample"] == 2 * (2 * 16 * 100)


def test_an_exception_in_the_counted_update_ends_the_counting(drive):
    def fail(task, features):
        task(features)
        raise RuntimeError("lost")

    with pytest.raises(RuntimeError, match="lost"):
        drive(Throughput(), step=fail).fit()
    assert torch._C._len_torch_dispatch_stack() == 0
    drive(Throughput(), updates_per_epoch=2).fit()


def test_a_first_update_without_an_optimizer_step_is_not_the_one_that_counts(drive):
    callback = Throughput()
    run = drive(callback, updates_per_epoch=3, weightless=1).fit()
    assert run.progress.updates == 2
    assert callback.state_dict()["flops_per_sample"] == FLOPS_PER_SAMPLE


def test_a_task_without_matrix_products_is_counted_once_and_has_no_flops(drive):
    modes = []
    watch = LambdaCallback(
        on_before_optimizer_step=lambda run: modes.append(torch._C._len_torch_dispatch_stack())
    )

    def step(task, features):
        return sum(each.square().sum() for each in task.parameters())

    run = drive(Throughput(), watch, step=step, updates_per_epoch=4).fit()
    assert modes == [1, 0, 0, 0]
    assert "model_flops_per_second" not in values(run.history[-1])


def test_two_of_them_are_refused():
    """What one opens for its count would be closed while the other's, opened later, is still open."""
    with pytest.raises(ConfigError, match=r"callbacks has 2 Throughput.*Give one"):
        quiet(callbacks=[Throughput(), Throughput(measure_flops=False)])
    quiet(callbacks=[Throughput()])


def test_numbers_that_are_not_positive_are_refused():
    with pytest.raises(ConfigError, match="peak_flops must be a finite number above 0, not 0"):
        Throughput(peak_flops=0)
    with pytest.raises(ConfigError, match=r"flops_per_sample .* not -1"):
        Throughput(flops_per_sample=-1)
    with pytest.raises(ConfigError, match=r"measure_flops=\) must be True or False, not 'no'"):
        Throughput(measure_flops="no")


@pytest.mark.parametrize("hint", [20, 1.0, 0, True, "20%", float("nan")])
def test_a_hint_that_would_never_come_is_refused(hint):
    with pytest.raises(ConfigError, match=f"data_hint.* above 0 and below 1, not {hint!r}"):
        Throughput(data_hint=hint)


def test_long_waits_for_data_are_hinted_at_once(drive):
    def wait(run):  # as if it had taken that long
        run.timing["data"] += 1000.0

    with warned("waiting for the training data") as lines:
        drive(Throughput(), LambdaCallback(on_step_end=wait), updates_per_epoch=8, log_every=2).fit()
    assert len(lines) == 1
    assert "num_workers" in lines[0]


@pytest.mark.parametrize("hint", [None, 0.2])
def test_no_hint_where_none_is_asked_for_or_nobody_waits(drive, hint):
    def wait(run):
        run.timing["data"] += 1000.0 if hint is None else 0.0

    watch = LambdaCallback(on_step_end=wait)
    with heard() as warnings:
        drive(Throughput(data_hint=hint), watch, updates_per_epoch=8, log_every=2).fit()
    assert warnings == []


def test_what_is_advised_for_a_dataset_alone_can_be_done():
    data = TensorDataset(torch.zeros(4, 2))
    options = {"batch_size": 2, "num_workers": 2}
    advice = as_source(data, "training", 0, **options).advice
    assert "start anew" not in advice
    assert "prefetch_factor than 2 of a DataLoader" in advice
    advice = as_source(data, "training", 0, changes=True, **options).advice
    assert "start anew" in advice
    assert "a DataLoader with persistent_workers=True" in advice


@pytest.mark.parametrize(
    ("options", "advised"),
    [
        ({}, "num_workers=2 or more"),
        ({"num_workers": 2}, "persistent_workers=True"),
        ({"num_workers": 2, "persistent_workers": True}, "More than num_workers=2"),
    ],
)
def test_what_is_advised_depends_on_the_loader(options, advised):
    data = TensorDataset(torch.zeros(4, 2))
    feed = Feed(as_source(DataLoader(data, **options), "training", 0), Transfer(torch.device("cpu")))
    assert advised in feed.advice
    assert ("start anew" in feed.advice) is ("persistent_workers=True" in advised)
