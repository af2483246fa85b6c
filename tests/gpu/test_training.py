"""A task trains on a GPU as it does on a CPU: strategies with one rank, data, checkpoints, evaluation."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import Callback, CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule, Trainer
from drivetrain.checkpoint import load_weights
from drivetrain.data import MicroBatch, Transfer
from drivetrain.strategies import SingleDevice

NO_GPU = not torch.cuda.is_available()
needs_gpu = pytest.mark.skipif(NO_GPU, reason="needs an NVIDIA GPU")
SAMPLES, FEATURES, CLASSES, BATCH = 48, 16, 5, 8
STRATEGIES = ["single", "ddp", "fsdp"]


class Classifier(TaskModule):  # two layers with a batch norm; its samples are tuples of features and a label
    def __init__(self, dropout: float = 0.0, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        first = nn.Linear(FEATURES, 32, bias=False)  # before a batch norm its gradient is rounding
        last = nn.Linear(32, CLASSES)
        self.net = nn.Sequential(first, nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(dropout), last)
        self.optimizer = optimizer
        self.devices: set[str] = set()

    def forward(self, features: Tensor) -> Tensor:
        self.devices.add(features.device.type)
        return self.net(features)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.cross_entropy(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig(self.optimizer, lr=0.01, schedule="cosine")


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    features = torch.randn(SAMPLES, FEATURES, generator=generator)
    return TensorDataset(features, features[:, :CLASSES].argmax(1))


def loader(size: int = BATCH, **options: Any) -> DataLoader[Any]:
    return DataLoader(samples(), batch_size=size, **options)


def trainer(**options: Any) -> Trainer:
    quiet = {"max_epochs": 2, "checkpoint": False, "loggers": (), "progress_bar": False, "max_grad_norm": 0.5}
    return Trainer(**{**quiet, **options})


def weights(task: nn.Module) -> dict[str, Tensor]:  # on the host, in full
    state: dict[str, Any] = task.state_dict()
    whole = {name: getattr(each, "full_tensor", lambda each=each: each)() for name, each in state.items()}
    return {name: each.detach().cpu().clone() for name, each in whole.items()}


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 2e-4) -> None:
    assert found.keys() == expected.keys()
    for name, each in expected.items():
        assert torch.allclose(found[name], each, rtol=tolerance, atol=tolerance), name


def trained(strategy: str, **options: Any) -> dict[str, Tensor]:
    task = Classifier()
    trainer(strategy=strategy, devices=1, **options).fit(task, loader())
    return weights(task)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_rank_of_each_strategy_trains_as_a_cpu_does(strategy: str, device: str) -> None:
    task = Classifier()
    result = trainer(strategy=strategy, devices=1).fit(task, loader(), loader())
    assert task.devices == {device}
    assert_close(weights(task), trained("cpu"))
    assert result.progress.samples == 2 * SAMPLES
    assert 0 < result.metrics["validation/loss"] < 2
    chosen = trainer(devices=1).select_strategy()  # a GPU that is there is used without asking
    assert chosen.device.type == device


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "muon"])
def test_optimizers_step_as_on_a_cpu(optimizer: str, device: str) -> None:
    tasks = [Classifier(optimizer=optimizer) for _ in range(2)]
    for task, strategy in zip(tasks, (device, "cpu"), strict=True):
        trainer(strategy=strategy).fit(task, loader())
    # Muon orthogonalises in bfloat16, of which the last bits differ between devices.
    assert_close(weights(tasks[0]), weights(tasks[1]), 3e-2 if optimizer == "muon" else 2e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_accumulated_micro_batches_equal_the_big_batch(strategy: str) -> None:
    found = []
    for accumulation in (1, 4):
        task = Classifier()
        task.net[1] = nn.Identity()  # a batch norm sees the micro-batch
        made = trainer(strategy=strategy, devices=1, gradient_accumulation_steps=accumulation)
        made.fit(task, loader(BATCH // accumulation))
        found.append(weights(task))
    assert_close(found[1], found[0], 1e-5)


@pytest.mark.parametrize("options", [{"num_workers": 1, "pin_memory": True}, {}], ids=str)
def test_batches_reach_the_device_whole_and_in_order(options: dict[str, Any], device: str) -> None:
    if NO_GPU and options:
        pytest.skip("pinned memory needs an NVIDIA GPU")
    seen: list[Tensor] = []

    class Seen(Classifier):
        def forward(self, features: Tensor) -> Tensor:
            assert features.device.type == device
            seen.append(features.clone())
            return super().forward(features)

    trainer(strategy=device, max_epochs=1).fit(Seen(), loader(**options))
    assert torch.equal(torch.cat(seen).cpu(), samples().tensors[0])


def test_outputs_are_predicted_on_the_host_in_order_and_every_sample_counts_once(device: str) -> None:
    task = Classifier()
    made = trainer(strategy=device)
    made.fit(task, loader())
    predicted = torch.cat(made.predict(task, loader(7)))
    assert predicted.device.type == "cpu"
    expected = task.cpu().eval()(samples().tensors[0]).detach()
    torch.testing.assert_close(predicted, expected, rtol=1e-4, atol=1e-4)
    loss = made.validate(task, loader(7))["validation/loss"]
    assert loss == pytest.approx(float(F.cross_entropy(expected, samples().tensors[1])), rel=1e-4)


LEAVE = LambdaCallback(on_step_end=lambda run: run.stop("left") if run.progress.steps == 7 else None)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_resumed_run_equals_the_straight_one_with_dropout(strategy: str, tmp_path: Path) -> None:
    def fit(directory: str, *callbacks: Callback, resume: Any = None) -> dict[str, Tensor]:
        task = Classifier(dropout=0.3)
        options = {"run_dir": tmp_path / directory, "checkpoint": True, "callbacks": callbacks}
        made = trainer(strategy=strategy, devices=1, **options)
        made.fit(task, loader(shuffle=True), resume=resume)
        return weights(task)

    straight = fit("straight")
    fit("left", LEAVE)
    resumed = fit("left", resume="auto")
    assert all(torch.equal(resumed[name], each) for name, each in straight.items())


class Attention(Classifier):  # attends to its own features; the backward of attention adds in any order
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.TransformerEncoderLayer(FEATURES, 2, 32, dropout=0.1, batch_first=True)

    def forward(self, features: Tensor) -> Tensor:
        return super().forward(self.attention(features[:, None].repeat(1, 9, 1)).mean(1))


def test_attention_resumes_bitwise_with_deterministic_kernels(tmp_path: Path, device: str) -> None:
    found = []
    for directory, parts in (("straight", [()]), ("left", [(LEAVE,), ()])):
        for callbacks in parts:
            task = Attention()
            options = {"run_dir": tmp_path / directory, "checkpoint": True, "callbacks": callbacks}
            trainer(strategy=device, deterministic=True, **options).fit(task, loader(), resume="auto")
        found.append(weights(task))
    assert all(torch.equal(found[1][name], each) for name, each in found[0].items())


@needs_gpu
def test_chosen_gpu_is_the_current_one_during_a_fit_alone() -> None:
    last, seen = torch.cuda.device_count() - 1, []
    look = LambdaCallback(on_step_end=lambda run: seen.append(torch.cuda.current_device()))
    before = torch.cuda.current_device()
    trainer(strategy=SingleDevice(f"cuda:{last}"), callbacks=[look]).fit(Classifier(), loader())
    assert set(seen) == {last}
    assert torch.cuda.current_device() == before


def test_a_checkpoint_goes_from_a_gpu_to_a_cpu_and_back(tmp_path: Path, device: str) -> None:
    def fit(strategy: str, epochs: int) -> dict[str, Tensor]:
        task = Classifier()
        options = {"run_dir": tmp_path, "checkpoint": CheckpointConfig(every="1 epoch"), "seed": 3}
        made = trainer(strategy=strategy, devices=1, max_epochs=epochs, **options)
        made.fit(task, loader(), resume="auto" if epochs > 1 else None)
        return weights(task)

    fit(device, 1)
    fit("cpu", 2)
    fit("fsdp", 3)
    found = fit(device, 4)
    assert len(found) == len(Classifier().state_dict())
    stored = load_weights(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], each) for name, each in found.items())


def test_weights_saved_in_the_background_are_those_of_the_step(tmp_path: Path, device: str) -> None:
    task = Classifier()
    config = CheckpointConfig(every="1 steps", keep_last=20, asynchronous=True)
    seen: dict[int, dict[str, Tensor]] = {}

    note = LambdaCallback(on_step_end=lambda run: seen.update({run.progress.steps: weights(task)}))
    options = {"run_dir": tmp_path, "checkpoint": config, "callbacks": [note]}
    trainer(strategy=device, max_epochs=1, **options).fit(task, loader())
    for step, expected in seen.items():
        stored = load_weights(tmp_path / "checkpoints" / f"step-{step:08d}")
        assert all(torch.equal(stored[name], each) for name, each in expected.items()), step


@needs_gpu
@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method.*:DeprecationWarning")
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_compiled_task_trains_as_it_does_without(strategy: str) -> None:
    assert_close(trained(strategy, compile=True), trained(strategy), 1e-3)


class Wide(TaskModule):  # some 4 MiB of activations for a sample
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(FEATURES, 64), nn.Linear(64, 1)

    def forward(self, features: Tensor) -> Tensor:
        hidden = self.first(features).tanh()
        hidden = hidden.repeat(1, 8192).sin().reshape(len(features), -1, 64).mean(1)
        return self.last(hidden)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return (outputs - batch[1]).square().mean()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.01)


@needs_gpu
def test_a_batch_that_does_not_fit_is_split_until_it_does_and_trains_the_same() -> None:
    """With a real lack of the device's memory, of which this process gets a little."""
    features = torch.randn(512, FEATURES, generator=torch.Generator().manual_seed(2))
    data = [(each, each.sum(1, keepdim=True)) for each in features.split(256)]
    expected, task = Wide(), Wide()
    trainer(strategy="cpu", max_epochs=1, micro_batch=8).fit(expected, data)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, (torch.cuda.memory_reserved() + 2**29) / total))
    try:
        with pytest.raises(RuntimeError, match=r"(?i)out of memory"):
            trainer(strategy="cuda", max_epochs=1).fit(Wide(), data)
        result = trainer(strategy="cuda", max_epochs=1, micro_batch="auto").fit(task, data)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert result.progress.steps == 2
    assert_close(weights(task), weights(expected), 1e-4)


@needs_gpu
@pytest.mark.parametrize(("rows", "beside"), [(8, False), (1 << 14, True)])
def test_a_small_batch_is_copied_on_the_stream_of_the_steps(rows: int, beside: bool) -> None:
    transfer = Transfer(torch.device("cuda", 0))
    given = MicroBatch(torch.arange(rows).float(), 1.0)
    moved, is_beside = transfer.started(given, torch.cuda.Stream())
    torch.cuda.synchronize()
    assert is_beside is beside
    assert torch.equal(moved.batch.cpu(), given.batch)


@needs_gpu
def test_a_batch_that_is_computed_on_the_device_is_cast_after_that() -> None:
    device = torch.device("cuda", 0)

    def computed() -> Iterator[MicroBatch]:
        for number in range(5):
            value = torch.zeros(2048, 2048, device=device)
            for _ in range(20):  # long enough that a cast in another stream would read before it is done
                value = value @ value + number
                value.clamp_(max=number)
            yield MicroBatch({"features": value}, 1.0)

    given = [
        float(each.batch["features"].max()) for each in Transfer(device, torch.float64).ahead(computed())
    ]
    assert given == [0.0, 1.0, 2.0, 3.0, 4.0]


@needs_gpu
def test_memory_of_a_batch_in_use_is_not_given_to_the_next_copy() -> None:
    device = torch.device("cuda", 0)
    host = [torch.full((1 << 20,), float(number)).pin_memory() for number in range(20)]
    factor = torch.ones(4096, 4096, device=device) / 4096
    sums = []
    for each in Transfer(device).ahead(MicroBatch(batch, 1.0) for batch in host):
        torch.linalg.multi_dot([factor] * 4)  # keeps the step's stream behind the copies
        sums.append(each.batch.mean())
        del each
    assert [float(value) for value in sums] == [float(number) for number in range(20)]
