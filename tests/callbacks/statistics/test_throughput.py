"""Throughput: speeds, what the time went to, operations."""

from types import SimpleNamespace

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import pairs, quiet, variant
from torch import nn
from torch.nn import functional as F

from drivetrain import MemoryConfig, TaskModule
from drivetrain.callbacks import LambdaCallback, LearningRateMonitor, Throughput
from drivetrain.callbacks.statistics import flops, throughput
from drivetrain.callbacks.statistics.peaks import peak_flops

# Of Linear(16, 8) and Linear(8, 1) on one sample, a multiplication and an addition each: forward, the
# gradient of the weights, and that of the inputs, which the first layer does not need.
FLOPS_PER_SAMPLE = 2 * (2 * 16 * 8) + 3 * (2 * 8 * 1)


def values(point):
    return {name[11:]: value for name, value in point.items() if name.startswith("throughput/")}


def test_speeds_and_shares_are_those_of_the_clock_and_validation_slows_no_speed_down(monkeypatch):
    now, spent = SimpleNamespace(seconds=0.0), {"data": 0.0, "save": 0.0, "evaluation": 0.0}
    monkeypatch.setattr(throughput, "time", SimpleNamespace(perf_counter=lambda: now.seconds))

    def spend(run, **seconds):
        now.seconds += sum(seconds.values())
        for part in spent:
            spent[part] += seconds.get(part, 0.0)
        run.timing.update(spent)

    step = lambda run: spend(run, training=0.375, data=0.125, save=0.25)  # noqa: E731
    hooks = LambdaCallback(on_step_start=step, on_evaluation_start=lambda run: spend(run, evaluation=1.5))
    for tokens in (10, 0):
        points = []
        note = LambdaCallback(on_log=lambda run, points=points: points.append(values(run.logged)))
        options = {"validate_every": "6 steps", "callbacks": [hooks, Throughput(), note]}
        task = variant(tokens=lambda self, batch, tokens=tokens: tokens)()
        quiet(max_steps=12, log_every=6, **options).fit(task, pairs(24), pairs(2))
        first, validation, after, _ = points
        assert validation == {}
        assert (first["evaluation_share"], first["evaluation_seconds"]) == (0, 0)
        for point in (first, after):
            assert point["steps_per_second"] == pytest.approx(2)
            assert point["samples_per_second"] == pytest.approx(4)
            assert point.get("tokens_per_second") == (20 if tokens else None)  # None: they are not counted
        for part, seconds in {"data": 0.75, "save": 1.5, "evaluation": 1.5}.items():
            assert after[f"{part}_seconds"] == pytest.approx(seconds)
            assert after[f"{part}_share"] == pytest.approx(seconds / 6)


def test_operations_are_counted_in_the_first_step_or_given(drive, monkeypatch):
    run = drive(Throughput(peak_flops=1e6), LearningRateMonitor(), steps_per_epoch=6).fit()
    assert [point["lr"] for point in run.history] == [0.05] * 3
    point = values(run.history[-1])
    assert point["model_flops_per_second"] == pytest.approx(FLOPS_PER_SAMPLE * point["samples_per_second"])
    assert point["model_flops"] == FLOPS_PER_SAMPLE * run.progress.samples
    assert point["model_flops_utilisation"] == pytest.approx(point["model_flops_per_second"] / 1e6)
    point = values(drive(Throughput(flops_per_sample=100.0), steps_per_epoch=4).fit().history[-1])
    assert point["model_flops_per_second"] == pytest.approx(100 * point["samples_per_second"])
    assert "model_flops_utilisation" not in point  # no peak is known
    point = values(drive(Throughput(measure_flops=False), steps_per_epoch=4).fit().history[-1])
    assert "model_flops_per_second" not in point
    late = Throughput()  # a first step without an optimizer's step is not the one that counts
    run, left = drive(late, steps_per_epoch=3), [0.0, 1.0, 1.0]
    with monkeypatch.context() as patch:
        patch.setattr(type(run.task), "loss_weight", lambda self, batch: left.pop(0))
        assert run.fit().progress.steps == 2
    assert late.state_dict()["flops"] == FLOPS_PER_SAMPLE
    wide = nn.Linear(16, 100)  # another fit counts again
    run = drive(late, steps_per_epoch=2, net=wide).fit()
    assert late.state_dict()["flops"] == 2 * (2 * 16 * 100)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(16, 9)

    def forward(self, x):
        heads = x.unflatten(2, (2, 8)).transpose(1, 2)
        return self.out(F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).flatten(2))


class Tokens(TaskModule):
    def __init__(self):
        super().__init__()
        self.embedding, self.block = nn.Embedding(9, 16), Block()

    def training_step(self, batch):
        return self.block(self.embedding(batch["input_ids"])).mean()

    def tokens(self, batch):
        return batch["input_ids"].numel()


def test_operations_grow_with_the_tokens_and_leave_out_what_is_computed_again():
    """Of a token: the output layer's three products, and of attention two forward and four backward."""
    lengths = [16, 16, 16, 40, 8]
    data = [{"input_ids": torch.randint(9, (2, each))} for each in lengths]
    of_token = 3 * 2 * 16 * 9 + 6 * 2 * 16 * 16
    for memory in (None, MemoryConfig(activation_checkpointing=("Block",))):
        counted = []
        note = LambdaCallback(on_log=lambda run, counted=counted: counted.append(values(run.logged)))
        quiet(max_steps=5, log_every=1, callbacks=[Throughput(), note], memory=memory).fit(Tokens(), data)
        assert [each.get("model_flops") for each in counted][2:] == pytest.approx(
            [2 * of_token * sum(lengths[: number + 1]) for number in range(2, 5)]
        )


def test_counting_never_ends_a_training(drive, monkeypatch):
    def penalised(task, batch):  # the input of a module is a leaf, whose gradient the step asks for
        leaf = batch.clone().requires_grad_()
        (slope,) = torch.autograd.grad(task(leaf).sum(), leaf, create_graph=True)
        return slope.square().mean()

    assert "model_flops" in values(drive(Throughput(), step=penalised).fit().history[-1])
    monkeypatch.setitem(flops.flop_registry, torch.ops.aten.addmm, lambda *_, **__: 1 / 0)
    with heard("cannot be counted .ZeroDivisionError") as told:
        point = values(drive(Throughput(), epochs=2).fit().history[-1])
    assert "samples_per_second" in point
    assert not [name for name in point if "flops" in name]
    assert len(told) == 1


def test_a_resumed_run_has_the_count_of_its_checkpoint(drive, tmp_path):
    drive(Throughput(), steps_per_epoch=2, run_dir=tmp_path).fit()
    modes = []
    mode = lambda run: modes.append(torch._C._len_torch_dispatch_stack())  # noqa: E731
    watch = LambdaCallback(on_before_optimizer_step=mode)
    run = drive(Throughput(), watch, epochs=3, steps_per_epoch=2, run_dir=tmp_path).fit(resume="auto")
    assert modes == [0, 0, 0, 0]
    point = values(run.history[-1])
    assert point["model_flops_per_second"] == pytest.approx(FLOPS_PER_SAMPLE * point["samples_per_second"])


def test_a_known_gpu_has_its_peak_and_no_other_takes_a_row_whose_name_it_contains():
    tera = {"NVIDIA H200": 989.5, "NVIDIA H200 NVL": 835.5, "NVIDIA GH200 480GB": 989.5, "NVIDIA A10": 125}
    others = ["NVIDIA A10G", "NVIDIA A1000", "NVIDIA A100-SXM4-40GB MIG 1g.5gb", ""]
    expected = {**{name: each * 1e12 for name, each in tera.items()}, **dict.fromkeys(others)}
    assert {name: peak_flops(name, torch.float16) for name in expected} == expected
    assert peak_flops("NVIDIA H200", torch.float32) == 67e12
    assert peak_flops("NVIDIA H200", torch.float32, tf32=True) == 494.5e12
    assert peak_flops("NVIDIA H200", torch.float64) is None
