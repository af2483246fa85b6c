"""The plan says what a fit then does, and does nothing itself."""

import contextlib
import io
import json
import os
import random
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.strategies.fsdp.test_experts import Experts
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Blocks, Regression, quiet, variant
from torch import distributed, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drivetrain import (
    Callback,
    CheckpointConfig,
    ConfigError,
    DDPConfig,
    DeepSpeedConfig,
    FSDPConfig,
    MemoryReport,
    OptimizerConfig,
    TaskModule,
    Term,
    Trainer,
    already_split,
)
from drivetrain.strategies import ExpertParallel
from drivetrain.task import ModelInfo
from drivetrain.trainer.plan.fake_step import StepWatch


class Classifier(TaskModule):
    def __init__(self, optimizer=None, norm=False):
        super().__init__()
        layers = [nn.Linear(4, 8), nn.BatchNorm1d(8) if norm else nn.Dropout(0.1)]
        self.net = nn.Sequential(*layers, nn.ReLU(), nn.Linear(8, 3))
        self.optimizer = optimizer or OptimizerConfig("adamw", lr=0.01)

    def forward(self, features):
        return self.net(features)

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self):
        return self.optimizer


class Unreadable(Dataset):  # has a length and no samples that can be had
    def __init__(self, size, batch_size):
        self.size, self.batch_size = size, batch_size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        assert index == 0, "a plan must fetch one sample at most"
        return torch.zeros(4), torch.tensor(0)


class Recorder(Callback):  # what a real run did, by step
    def __init__(self):
        self.rates, self.samples, self.validated, self.logged, self.saved = [], [], [], [], []

    def on_step_start(self, run):
        self.rates.append(run.learning_rates())
        self.samples.append([each.samples for each in run.window.micro_batches])

    def on_evaluation_end(self, run):
        self.validated.append(run.progress.steps)

    def on_log(self, run):
        if "train/loss" in run.logged:
            self.logged.append(run.progress.steps)

    def on_checkpoint_saved(self, run):
        self.saved.append(run.progress.steps)

    def on_fit_end(self, run):
        states = [each.optimizer.state.values() for each in run.engine.updaters.values()]
        slots = [value for state in states for each in state for value in each.values()]
        self.state = [each for each in slots if isinstance(each, torch.Tensor)]
        self.parameters = list(run.task.parameters())


def samples(count=22, batch_size=4, **options):
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(count, 4, generator=generator)
    data = TensorDataset(features, torch.arange(count) % 3)
    return DataLoader(data, batch_size=batch_size, shuffle=True, **options)


def plan(data=None, validation=None, task=None, **options):
    data = samples() if data is None else data
    return quiet(**options).plan(task or Classifier(), data, validation_data=validation)


def matches(firings, steps):
    ends = (steps[0], steps[-1]) if steps else (None, None)
    return (firings.times, firings.first, firings.last) == (len(steps), *ends)


@pytest.mark.parametrize(
    ("save_every", "options"),
    [
        ("0.5 epochs", {"max_steps": 7}),
        (None, {"max_epochs": 3, "limit_train_batches": 5, "gradient_accumulation_steps": 2}),
        ("0.5 epochs", {"max_epochs": 4, "validate_every": "10 samples", "log_every": "3 steps"}),
    ],
)
def test_a_fit_does_what_its_plan_said(tmp_path, save_every, options):
    recorder = Recorder()
    policy = CheckpointConfig(every=save_every, keep_last=1, best=0)
    runner = quiet(**options, callbacks=[recorder], checkpoint=policy, run_dir=tmp_path)
    config = OptimizerConfig("adamw", lr=0.01, schedule="cosine", warmup_steps=2)
    found = runner.plan(Classifier(config), samples(), samples(5))
    result = runner.fit(Classifier(config), samples(), samples(5))
    assert found.steps == result.progress.steps
    sizes = recorder.samples[: found.steps_per_epoch]
    assert found.samples_per_step == max(map(sum, sizes))
    if result.progress.epoch:
        assert found.last_window == (len(sizes[-1]), sum(sizes[-1]))
    rates, rate = [each["lr"] for each in recorder.rates], found.rates["lr"]
    assert (rate.start, rate.end, rate.peak) == (rates[0], rates[-1], max(rates))
    assert rate.peak_step == rates.index(max(rates))
    assert matches(found.validation, recorder.validated)
    assert matches(found.saving, recorder.saved)
    # What is left over at the end is logged once more.
    last = found.logging.last
    assert matches(found.logging, [u for u in recorder.logged if u != found.steps or last == u])


def test_memory_and_the_checkpoint_are_those_of_a_run(tmp_path):
    for name, precision in (("sgd", "32"), ("adamw", "bf16-true"), ("adafactor", "32"), ("muon", "64")):
        recorder, config = Recorder(), OptimizerConfig(name, lr=0.01)
        policy = CheckpointConfig(every=None, keep_last=1, best=0)
        options = {"max_steps": 1, "precision": precision, "run_dir": tmp_path / name, "checkpoint": policy}
        runner = quiet(callbacks=[recorder], **options)
        found = runner.plan(Classifier(config), samples())
        result = runner.fit(Classifier(config), samples())
        held = sum(each.numel() * each.element_size() for each in recorder.parameters)
        assert found.memory["parameters"] == found.memory["gradients"] == held
        state = sum(each.numel() * each.element_size() for each in recorder.state)
        assert found.memory["optimizer"] == state, name
        files = list(Path(result.last_checkpoint).rglob("*.safetensors"))
        size = sum(each.stat().st_size for each in files)
        assert found.checkpoint <= size < found.checkpoint + 2500, name  # with the headers of the files
        assert "holds the checkpoints of an earlier run" in runner.plan(Classifier(), samples()).warnings[-1]
    with pytest.raises(ConfigError, match="is a file"):
        quiet(max_steps=1, run_dir=files[0]).plan(Classifier(), samples())


class Wide(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


def wide():
    return Blocks(Wide, 16, OptimizerConfig("adamw", lr=0.01))


class Words(Blocks):
    def __init__(self):
        super().__init__(Wide, 16, OptimizerConfig("adamw", lr=0.01))
        self.embed = nn.Embedding(5, 16)

    def forward(self, x):
        x = self.embed(x)
        for each in self.blocks:
            x = each(x)
        return self.head(x)


WORDS = [torch.zeros(4, 3, dtype=torch.long)] * 2


@pytest.mark.parametrize("precision", ["32", "bf16-mixed"])
def test_the_memory_of_a_plan_is_that_of_a_step_at_its_peak(precision):
    report = MemoryReport(show=False)
    trainer = quiet(max_epochs=1, precision=precision, callbacks=[report])
    found = trainer.plan(wide(), [torch.randn(256, 16)] * 2)
    trainer.fit(wide(), [torch.randn(256, 16)] * 2)
    assert found.peak == report.use.total


def test_a_plan_says_where_the_residual_stream_has_16_bits():
    for strategy in ("ddp", "fsdp"):
        trainer = quiet(max_steps=1, devices=2, precision="bf16-mixed", strategy=strategy)
        assert ("residual stream" in trainer.plan(Words(), WORDS).precision) == (strategy == "fsdp")


class Least(Callback):  # the least of several steps: in some, a thread of gloo frees a buffer late
    def __init__(self):
        self.found = []

    def on_step_start(self, run):
        optimizers = [each.optimizer for each in run.engine.updaters.values()]
        batches = [each.batch for each in run.window.micro_batches]
        self.before = run.progress.steps  # the first step makes the optimizers' states
        self.watch = StepWatch(run.task, optimizers, run.engine.device, batches)
        self.watch.__enter__()

    def on_step_end(self, run):
        self.watch.__exit__(None, None, None)
        if 0 < self.before < run.progress.steps:
            counts = (each for each in self.watch.collectives if each.dtype != "float64")  # of the data
            self.found.append((self.watch.at_peak(), tuple(counts)))


def _measured(make, options):
    least = Least()
    quiet(max_steps=8, devices=2, callbacks=[least], **options).fit(make(), [torch.randn(32, 16)] * 16)
    return min(least.found, key=lambda each: sum(each[0].values()))


def check_against_a_run(make, options):
    before = dict(os.environ), distributed._compute_bucket_assignment_by_size
    found = quiet(max_epochs=1, devices=2, **options).plan(make(), [torch.randn(32, 16)] * 16)
    assert (dict(os.environ), distributed._compute_bucket_assignment_by_size) == before
    assert not distributed.is_initialized()
    use, collectives = on_two_ranks(_measured, make, options)[0]
    expected = [use["parameters"], use["parameters"], use["optimizer"]]  # each has a gradient of its size
    states = [found.memory[each] for each in ("parameters", "gradients", "optimizer")]
    assert states == pytest.approx(expected, rel=0.02)  # every rank has the bias of a matrix split by rows
    hosted = {*found.offloaded, *(["step"] if found.offloaded else [])}
    held = sum(size for kind, size in use.items() if kind not in hosted)
    assert found.peak == pytest.approx(held, rel=0.03)
    assert found.collectives == collectives
    return found


def test_a_plan_for_two_ranks_has_what_each_holds(monkeypatch):
    for strategy in ("ddp", "fsdp"):
        found = check_against_a_run(wide, {"strategy": strategy, "gradient_accumulation_steps": 2})
        assert "in each process" in str(found)
    monkeypatch.setattr("drivetrain.strategies.checks.host_memory", lambda: 10_000)
    sharded = quiet(max_epochs=1, devices=2, strategy="fsdp").plan(wide(), [torch.randn(32, 16)] * 16)
    assert "Give gather_at_end=False" in sharded.warnings[-1]


def test_a_plan_has_what_the_processes_of_a_machine_hold_in_its_memory():
    settings = {"strategy": FSDPConfig(cpu_offload=True), "devices": 2, "max_epochs": 1}
    loader = DataLoader([torch.randn(16)] * 8, batch_size=4, num_workers=2)
    for checkpoint in ("async", CheckpointConfig(every="1 epoch", asynchronous=True)):
        found = quiet(**settings, checkpoint=checkpoint).plan(wide(), loader)
        assert found.offloaded == ("parameters", "gradients", "optimizer")
        offloaded = sum(found.memory[each] for each in found.offloaded)
        copied = found.memory["parameters"] + found.memory["optimizer"]
        assert found.host_memory == 2 * (offloaded + copied + 2 * 2 * 4 * 16 * 4)


def _in_a_job():
    with contextlib.redirect_stdout(io.StringIO()) as shown:
        found = quiet(max_epochs=1).plan(wide(), [torch.randn(32, 16)] * 4)
    return found.steps, found.memory_unknown, shown.getvalue()


def test_a_rank_of_a_job_knows_all_but_the_memory_and_the_first_one_prints():
    (*first, text), (*second, silence) = on_two_ranks(_in_a_job)
    assert first == second == [2, "this process is a rank of a job already; plan before the first fit"]
    assert (text == "", silence) == (False, "")


def test_a_plan_raises_what_the_strategy_of_a_fit_refuses():
    strategy = FSDPConfig(context_parallel=2)
    with pytest.raises(ConfigError, match="context_parallel needs to know what to split"):
        quiet(strategy=strategy, devices=2, max_epochs=1).plan(wide(), [torch.randn(32, 16)] * 16)


class Planned(Blocks):
    def model_info(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        return ModelInfo(parallel_plan=plan)


RUNS = {
    "ddp": {"strategy": DDPConfig(gradient_as_bucket_view=False, bucket_mb=0.005)},
    "accumulation": {"strategy": "ddp", "gradient_accumulation_steps": 4, "precision": "bf16-mixed"},
    "unused": {"strategy": DDPConfig(find_unused_parameters=True)},
    "grad_op": {"strategy": FSDPConfig(sharding="shard_grad_op"), "precision": "bf16-true"},
    "no_shard": {"strategy": FSDPConfig(sharding="no_shard")},
    "hybrid": {"strategy": FSDPConfig(sharding="hybrid", shard_size=1)},
    "offload": {"strategy": FSDPConfig(cpu_offload=True)},
    "again": {"strategy": FSDPConfig(activation_checkpointing=True), "max_grad_norm": 1.0},
    "selective": {"strategy": FSDPConfig(activation_checkpointing="selective"), "precision": "bf16-mixed"},
    "each": {"strategy": FSDPConfig(reduce_each_micro_batch=True), "gradient_accumulation_steps": 4},
    "prefetch": {"strategy": FSDPConfig(forward_prefetch=2), "precision": "16-mixed"},
    "tensor": {"strategy": FSDPConfig(tensor_parallel=2)},
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_plan_is_a_run_under_every_option(name, optimizer):
    check_against_a_run(partial(Planned, Wide, 16, OptimizerConfig(optimizer, lr=0.01)), RUNS[name])


def dropped(x):  # with a mask of one byte for an element, as on GPUs
    return torch.native_dropout(x, 0.1, True)[0]


class Layer(nn.Module):  # as in Korthikanti et al.: attention without fusion, dropout, a wide MLP
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        samples, positions, _ = x.shape
        parts = self.mix(self.first(x)).view(samples, positions, self.heads, -1).transpose(1, 2)
        query, key, value = (each.contiguous() for each in parts.chunk(3, -1))
        scores = dropped(torch.softmax(query @ key.transpose(2, 3) * 0.1, -1))
        mixed = (scores @ value).transpose(1, 2).flatten(2)
        x = x + dropped(self.out(mixed))
        return x + dropped(self.down(F.gelu(self.up(self.second(x)))))


def test_a_plan_has_the_published_figures():
    # Korthikanti et al. 2022, table 2: s b h (34 + 5 a s / h) bytes for a layer; 2 s b h if it is recomputed.
    positions, samples, width, heads = 256, 2, 128, 4
    whole = positions * samples * width
    data = [torch.randn(samples, positions, width)] * 2
    found = {}
    for layers in (1, 3):
        for again in (False, True):
            task = Blocks(lambda: Layer(width, heads), width, OptimizerConfig("adamw", lr=0.01))
            task.blocks = task.blocks[:layers]
            memory = {"activation_checkpointing": "blocks.*"} if again else None
            options = {"precision": "bf16-true", "memory": memory}
            found[layers, again] = plan(data, task=task, max_epochs=1, **options).memory["activations"]
    layer = whole * (34 + 5 * heads * positions / width)
    assert (found[3, False] - found[1, False]) / 2 == pytest.approx(layer, rel=0.01)
    assert (found[3, True] - found[1, True]) / 2 == 2 * whole
    # Rajbhandari et al. 2020, figure 1: gigabytes of states for 7.5 billion parameters on 64 devices.
    with torch.device("meta"):
        task = Planned(lambda: nn.Linear(50_000, 50_000, bias=False), 1, OptimizerConfig("adamw", lr=0.01))
    for stage, gigabytes in enumerate((31.4, 16.6, 1.88), 1):
        strategy = DeepSpeedConfig(stage=stage)
        trainer = quiet(max_steps=1, devices=64, strategy=strategy, precision="bf16-mixed")
        memory = trainer.plan(task, WORDS).memory
        held = sum(memory[each] for each in ("parameters", "gradients", "optimizer"))
        assert held / 1e9 == pytest.approx(gigabytes, rel=0.03), stage


class Divided(Blocks):
    def model_info(self):
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

        first, last = ColwiseParallel(), RowwiseParallel()
        names = {"mix": first, "up": first, "out": last, "down": last}
        return ModelInfo(parallel_plan={f"blocks.*.{name}": style for name, style in names.items()})


class Routed(Blocks):  # one in two rows goes to each expert
    def __init__(self):
        super().__init__(lambda: Experts(2, 16), 16, OptimizerConfig("adamw", lr=0.01))
        self.blocks = self.blocks[:1]

    def training_step(self, batch):
        numbers = torch.arange(len(batch)) % 2
        order = numbers.argsort(stable=True)
        counts = numbers.bincount(minlength=2)
        return self.head(self.blocks[0](batch[order], counts)).square().mean()

    def model_info(self):
        return ModelInfo(parallel_plan={"blocks.*": ExpertParallel()})


@pytest.mark.nightly
def test_a_plan_spreads_tokens_evenly_over_experts():
    check_against_a_run(Routed, {"strategy": FSDPConfig(expert_parallel=True)})


@pytest.mark.nightly
def test_a_plan_counts_quantized_weights_and_states_as_they_are_stored():
    from tests.strategies.test_quantized_base import DATA, Adapted, by_torchao

    in_8_bits = Blocks(lambda: nn.Linear(64, 64), 64, OptimizerConfig("adamw8bit"))
    batches = [torch.randn(64, 64)] * 2
    for task, data in ((Adapted(by_torchao), DataLoader(DATA, batch_size=4)), (in_8_bits, batches)):
        report = MemoryReport(show=False)
        trainer = quiet(max_epochs=1, callbacks=[report])
        found = trainer.plan(task, data)
        with torch.compiler.set_stance("force_eager"):  # whose results are the same
            trainer.fit(task, data)
        stored = (report.use.parameters, report.use.optimizer, report.use.total)
        planned = (found.memory["parameters"], found.memory["optimizer"], found.peak)
        assert planned == pytest.approx(stored, rel=1e-4)  # but for the scalars of a log


def test_a_plan_splits_batches_and_shards_within_a_machine_as_a_run_does():
    whole, parts = (plan([torch.randn(8, 16)] * 2, task=wide(), max_epochs=1, micro_batch=n) for n in (8, 2))
    assert parts.memory["activations"] < whole.memory["activations"] / 3
    assert parts.flops == whole.flops
    exchanging = quiet(max_epochs=1, strategy="ddp", devices=2, micro_batch=2)
    assert [each.kind for each in exchanging.plan(wide(), [torch.randn(8, 16)]).collectives] == ["all_reduce"]
    strategy = FSDPConfig(sharding="hybrid")
    found = quiet(max_epochs=1, strategy=strategy, devices=2, num_nodes=2).plan(wide(), [torch.randn(8, 16)])
    assert {each.ranks for each in found.collectives if each.kind != "broadcast"} == {2}


@pytest.mark.nightly
def test_a_plan_has_the_published_activations_of_175_billion_parameters_on_8_processes():
    # Korthikanti et al. 2022, equation 2: s b h (10 + 24 / t + 5 a s / (h t)) bytes for a layer.
    positions, width, heads, split = 2048, 12_288, 96, 8
    found = {}
    for layers in (1, 3):
        with torch.device("meta"):
            task = Divided(lambda: Layer(width, heads // split), width, OptimizerConfig("adamw", lr=0.01))
        task.blocks = task.blocks[:layers]
        options = {"precision": "bf16-true", "strategy": FSDPConfig(tensor_parallel=split), "devices": split}
        data = [torch.empty(1, positions, width)] * 2
        found[layers] = plan(data, task=task, max_epochs=1, **options).memory["activations"]
    layer = positions * width * (10 + 24 / split + 5 * heads * positions / (width * split))
    assert (found[3] - found[1]) / 2 == pytest.approx(layer, rel=0.01)


def test_a_plan_has_the_steps_of_a_loss_with_terms():
    def loss(self, outputs, batch):
        return {"loss": outputs.mean(), "more": Term(outputs.mean(), (outputs > 0).sum())}

    assert plan(task=variant(loss=loss)(), max_epochs=1, gradient_accumulation_steps=2).peak


class Tokens(Classifier):
    def __init__(self, reads_values=False):
        super().__init__()
        self.reads_values = reads_values
        self.kept = []

    def forward(self, features):
        self.kept.append(features)
        return super().forward(features)

    def tokens(self, batch):
        return int((batch[1] >= 0).sum())

    def loss(self, outputs, batch):
        if self.reads_values and outputs.sum().item() > 0:
            return outputs.mean()
        return super().loss(outputs, batch)


def test_tokens_count_where_the_task_does_and_a_step_that_needs_values_has_no_activations():
    found = plan(task=Tokens(), max_epochs=2, gradient_accumulation_steps=2)
    assert (found.tokens_per_step, found.tokens) == (8, 8 * 6)
    assert "8 per step, 48 in all" in str(found)
    found = plan(task=Tokens(), max_tokens=30)
    assert (found.steps, found.tokens, found.hours(steps_per_second=2)) == (None, 30, 4 / 3600)
    assert found.hours(tokens_per_second=10) == 3 / 3600
    task = Tokens()
    plan(task=task, max_epochs=2)
    assert task.kept == []  # what the forward keeps is the copy's
    found = plan(task=Tokens(reads_values=True), max_epochs=2)
    assert found.memory["activations"] is None
    assert "at least" in str(found)
    with torch.device("meta"):
        task = Tokens()
    assert plan(task=task, max_epochs=2).memory == plan(task=Tokens(), max_epochs=2).memory


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda x: x.mean() * float(x.max()), "the step reads a value of a tensor at test_plan.py:"),
        (lambda x: x.mean() * x.detach().numpy().max(), "reads a value of a tensor at test_plan.py:"),
        (lambda x: x[x > 0].mean(), "nonzero returns as many elements as values say at test_plan.py:"),
        (lambda x: x @ torch.ones(2), "RuntimeError at test_plan.py:"),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_what_a_plan_cannot_know_is_named_with_the_line(loss, why, devices, capfd):
    options = {"strategy": FSDPConfig()} if devices > 1 else {}
    task = variant(loss=lambda self, outputs, batch: loss(outputs))()
    found = quiet(max_epochs=1, devices=devices, **options).plan(task, samples())
    assert why in found.memory_unknown
    assert found.memory.get("gathered") is None
    assert capfd.readouterr().err == ""  # where torch shows its own frames


def test_nothing_is_fetched_changed_or_written(tmp_path, capsys):
    class Random(Classifier):
        def configure_optimizers(self):
            draws = torch.rand(1), random.random(), np.random.rand()  # as a user's factory may
            return OptimizerConfig("adamw", lr=0.01 if draws else 1.0)

    task = Random()
    task.net[1].eval()
    weights = {name: value.clone() for name, value in task.state_dict().items()}
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    found = Trainer(max_epochs=2, precision="64").plan(task, Unreadable(100, 8), Unreadable(10, 8))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]
    assert all(torch.equal(value, weights[name]) for name, value in task.state_dict().items())
    assert all(each.dtype == torch.float32 and each.grad is None for each in task.parameters())
    assert [name for name, each in task.named_modules() if not each.training] == ["net.1"]
    assert list(tmp_path.iterdir()) == []
    assert capsys.readouterr().out == f"{found}\n"


def test_a_plan_is_readable_and_json():
    options = {"max_epochs": 3, "checkpoint": True, "run_dir": "never-made"}
    found = plan(Unreadable(1437, 32), Unreadable(360, 32), **options)
    text = str(found)
    assert "135 in all, 45 per epoch" in text
    assert "1 epoch: 3 times, after steps 45 to 135" in text
    assert "268 bytes" in text
    stored = json.loads(json.dumps(found.to_json()))
    assert stored["last_window"] == [1, 29]
    assert {*stored["rates"]["lr"].pop("curve")} == {0.01}
    assert stored["rates"]["lr"] == {"start": 0.01, "peak": 0.01, "peak_step": 0, "end": 0.01}
    assert stored["validation"] == {"every": "1 epoch", "times": 3, "first": 45, "last": 135}


def test_the_peak_of_a_long_run_is_exact():
    for schedule in ("linear", "cosine_with_restarts", "warmup_stable_decay", "inverse_sqrt"):
        rate = plan(task=sgd(schedule=schedule, warmup_steps=12_345), max_steps=300_000).rates["lr"]
        assert (rate.peak, rate.peak_step) == (0.1, 12_345), schedule
    rate = plan(task=sgd(schedule="linear", warmup_ratio=0.123457), max_steps=300_000).rates["lr"]
    assert (rate.peak, rate.peak_step) == (0.1, 37_038)


def test_data_without_a_length_leaves_only_the_steps():
    class Stream:
        def __iter__(self):
            raise AssertionError("a plan must not draw from the data")

    found = plan(Stream(), max_steps=10, validation=samples(5), validate_every=4)
    assert (found.steps, found.steps_per_epoch, found.last_window) == (10, None, (None, None))
    assert (found.validation.times, found.validation.last) == (2, 8)
    assert "no length" in found.unknown
    unknown = plan(Stream(), max_epochs=2, validation=samples(5))
    assert unknown.steps is None
    assert unknown.validation.times is None


def sgd(**options):
    return Classifier(OptimizerConfig("sgd", lr=0.1, **options))


def one_cycle(parameters):
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    return optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=10)


class Vocabularies(Words):  # its embedding is larger than a block
    def __init__(self, bias):
        super().__init__()
        self.embed, self.head = nn.Embedding(500, 16), nn.Linear(16, 500, bias)


def sharded(bias):
    return {"task": Vocabularies(bias), "data": WORDS, "devices": 2, "strategy": "fsdp", "log_every": 1}


VALIDATION = Unreadable(10, 5)
CONFLICTS = {
    "warm-up takes 20 steps and this fit 12": {"task": sgd(warmup_steps=20)},
    "'cosine' does not finish": {"task": sgd(schedule="cosine", total_steps=50)},
    "OneCycleLR can take 10 steps": {"task": Classifier(one_cycle)},
    "max_steps=100 is not reached": {"max_steps": 100},
    "validate_every=50 steps is longer": {"validate_every": 50, "validation": VALIDATION},
    "log_every=13 steps is longer": {"log_every": 13},
    "validate_every=2 steps was asked for": {"validate_every": 2},
    "CheckpointConfig decides by 'validation/f1'": {"checkpoint": CheckpointConfig(by="validation/f1")},
    "follows the validations never acts": {"task": sgd(schedule="reduce_on_plateau")},
    "gradient_accumulation_steps=9 is more than the 6": {"gradient_accumulation_steps": 9},
    "batch norm (net.1) meets": {"task": Classifier(norm=True), "data": Unreadable(21, 4)},
    "(batch[-1] != -100).sum()": {"data": [(torch.ones(2, 4), torch.tensor([0, -100]))] * 6},
    "head: larger than a block, and gathered": sharded(bias=True),
    "no optimizer trains net.3.weight, net.3.bias": {"task": sgd(parameters="net.0.*")},
}


def test_a_conflict_is_named_once_and_shown_and_just_within_its_bounds_nothing_is_one():
    for words, arguments in CONFLICTS.items():
        found = plan(**{"max_epochs": 2, "log_every": 2, **arguments})
        (warning,) = [each for each in found.warnings if words in each]
        assert f"warning: {warning}" in str(found)
    for within in (
        {"task": sgd(warmup_steps=11)},
        {"task": sgd(schedule="cosine", total_steps=12)},
        {"max_steps": 12},
        {"log_every": 12},
        {"validate_every": 12, "validation": VALIDATION},
        {"gradient_accumulation_steps": 6, "log_every": 1},
        {"task": Classifier(norm=True)},
        sharded(bias=False),
    ):
        assert plan(**{"max_epochs": 2, "log_every": 2, **within}).warnings == (), within


def test_all_processes_count_and_of_data_that_is_already_split_ones_own_part():
    data = DataLoader(TensorDataset(torch.ones(19, 3), torch.ones(19, 1)), batch_size=4)
    runner = quiet(max_epochs=2, strategy="ddp", devices=2)
    found = runner.plan(Regression(), data)
    assert (found.steps, found.samples_per_step, found.last_window) == (6, 8, (1, 3))
    assert "strategy ddp, 2 processes" in str(found)
    whole = runner.plan(Regression(), DataLoader(data.dataset, batch_size=4, drop_last=True))
    assert whole.last_window == (1, 8)
    part = DataLoader(TensorDataset(torch.zeros(10, 4), torch.zeros(10, 1)), batch_size=2)
    for devices in (1, 2):
        found = quiet(max_epochs=2, devices=devices).plan(Regression(), already_split(part))
        assert found.steps == 10
        assert ("the length is what the training data says of itself" in str(found)) == (devices == 2)
    followed = quiet(max_epochs=2, gradient_accumulation_steps={0: 1, "9 tokens": 2})
    found = followed.plan(variant(tokens=lambda self, batch: len(batch[0]))(), data)
    assert (found.steps, found.unknown) == (None, "gradient_accumulation_steps follows what is read")
