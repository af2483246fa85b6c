"""Data modules of Lightning as data: their life, their loaders, and each sample once on any ranks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, TensorDataset

from drivetrain import (
    CheckpointConfig,
    ConfigError,
    DataError,
    LambdaCallback,
    OptimizerConfig,
    TaskModule,
    rank,
)
from drivetrain.testing import run_distributed

pytest.importorskip("lightning")

import lightning
import pytorch_lightning
from lightning.fabric.utilities.distributed import DistributedSamplerWrapper
from lightning.pytorch.overrides.distributed import UnrepeatedDistributedSampler
from lightning.pytorch.utilities import CombinedLoader

from drivetrain.integrations.lightning import as_data


class Numbers(TaskModule):
    """Keeps which samples it has seen; its loss needs a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.seen: list[int] = []

    def training_step(self, batch: Any) -> Tensor:
        (x,) = batch
        return self.net(x.float()[:, None]).square().mean()

    def validation_step(self, batch: Any) -> Tensor:
        return batch[0].float().mean()

    def configure_optimizers(self) -> Any:
        return OptimizerConfig("sgd", lr=1e-4)


def numbers(count: int = 10, size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=size, **options)


def of_package(package: Any) -> Any:
    """A data module of one of Lightning's two packages that writes down its calls."""

    class Data(package.LightningDataModule):
        def __init__(self) -> None:
            super().__init__()
            self.calls: list[Any] = []
            self.epochs = 0

        def prepare_data(self) -> None:
            self.calls.append("prepare")

        def setup(self, stage: str) -> None:
            self.calls.append(("setup", stage))
            self.count = 10

        def teardown(self, stage: str) -> None:
            self.calls.append(("teardown", stage))

        def train_dataloader(self) -> Any:
            return numbers(self.count, shuffle=True)

        def val_dataloader(self) -> Any:
            return [numbers(self.count), numbers(4)]

        def test_dataloader(self) -> Any:
            return {"near": numbers(4), "far": numbers(6)}

        def predict_dataloader(self) -> Any:
            return [numbers(3)]

        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls.append(("load", state))

    return Data()


@pytest.mark.parametrize("package", [lightning, pytorch_lightning], ids=["lightning", "pytorch_lightning"])
def test_a_data_module_lives_as_in_lightning(package: Any, tmp_path: Path) -> None:
    module = of_package(package)
    by = "validation/dataloader_idx_0/loss"
    options = {"checkpoint": CheckpointConfig(every="1 epoch", by=by), "run_dir": tmp_path}
    count = LambdaCallback(on_epoch_end=lambda run: setattr(module, "epochs", module.epochs + 1))
    result = quiet(max_epochs=2, callbacks=[count], **options).fit(Numbers(), as_data(module))
    assert module.calls == ["prepare", ("setup", "fit"), ("teardown", "fit")]
    assert result.metrics["validation/dataloader_idx_0/loss"] == 4.5
    assert result.metrics["validation/dataloader_idx_1/loss"] == 1.5
    module.calls.clear()
    assert quiet().test(Numbers(), as_data(module)) == {"test/near/loss": 1.5, "test/far/loss": 2.5}
    assert module.calls == ["prepare", ("setup", "test"), ("teardown", "test")]
    again = of_package(package)
    quiet(max_epochs=3, **options).fit(Numbers(), as_data(again), resume="auto")
    assert ("load", {"epochs": 2}) in again.calls


def _lives(path: str) -> list[Any]:
    torch.set_num_threads(1)
    module = of_package(lightning)
    module.prepare_data_per_node = False
    module.prepare_data = lambda: Path(f"{path}/prepared-{rank()}").touch()
    quiet(max_epochs=1, strategy="ddp").fit(Numbers(), as_data(module))
    return module.calls


def test_data_is_prepared_once_and_torn_down_after_an_error(tmp_path: Path) -> None:
    for calls in run_distributed(_lives, str(tmp_path), timeout=120):
        assert calls == [("setup", "fit"), ("teardown", "fit")]
    assert [each.name for each in tmp_path.iterdir()] == ["prepared-0"]
    module = of_package(lightning)
    fails = LambdaCallback(on_epoch_end=lambda run: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1, callbacks=[fails]).fit(Numbers(), as_data(module))
    assert module.calls == ["prepare", ("setup", "fit"), ("teardown", "fit")]


class Sampled(lightning.LightningDataModule):
    """Loaders whose samplers divide the data among two processes already."""

    KINDS = ("torch", "batches", "wrapper", "unrepeated", "single")

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.arange(11))
        parts = {"num_replicas": 2, "rank": 1}
        if self.kind == "torch":
            return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, **parts))
        if self.kind == "batches":
            sampler = BatchSampler(DistributedSampler(data, **parts, shuffle=False), 2, False)
            return DataLoader(data, batch_sampler=sampler)
        if self.kind == "wrapper":
            chosen = torch.utils.data.SubsetRandomSampler(range(11))
            return DataLoader(data, batch_size=2, sampler=DistributedSamplerWrapper(chosen, **parts))
        if self.kind == "single":
            items = torch.arange(11)[:, None, None]
            return DataLoader(items, batch_size=None, sampler=DistributedSampler(items, **parts))
        return DataLoader(data, batch_size=2, sampler=UnrepeatedDistributedSampler(data, **parts))


def _seen(kind: str, devices: int) -> list[list[int]]:
    """The samples of each of two epochs that this rank trains on."""
    epochs: list[list[int]] = [[]]

    def keep(run: Any) -> None:
        for each in run.window.micro_batches:
            if not each.is_placeholder:
                epochs[-1] += each.batch[0].flatten().tolist()

    watch = LambdaCallback(on_step_end=keep, on_epoch_end=lambda run: epochs.append([]))
    strategy = {"strategy": "ddp", "devices": 2} if devices == 2 else {}
    quiet(max_epochs=2, callbacks=[watch], **strategy).fit(Numbers(), as_data(Sampled(kind)))
    return epochs[:2]


@pytest.mark.parametrize("kind", Sampled.KINDS)
def test_a_distributed_sampler_is_replaced_so_that_each_sample_counts_once(kind: str) -> None:
    first, second = _seen(kind, 1)
    assert sorted(first) == sorted(second) == list(range(11))
    assert (first == second) == (kind == "batches")  # the others shuffle


@pytest.mark.full
@pytest.mark.parametrize("kind", Sampled.KINDS)
def test_on_two_ranks_each_sample_counts_once_in_the_order_of_one(kind: str) -> None:
    one = _seen(kind, 1)
    ranks = run_distributed(_seen, kind, 2)
    for epoch in range(2):
        assert sorted(ranks[0][epoch] + ranks[1][epoch]) == list(range(11))
        assert set(one[epoch][:4]) == {*ranks[0][epoch][:2], *ranks[1][epoch][:2]}


def test_a_sampler_of_the_users_that_divides_is_refused() -> None:
    class Own(DistributedSampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(range(self.rank, 10, self.num_replicas))

    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            data = TensorDataset(torch.arange(10))
            return DataLoader(data, batch_size=2, sampler=Own(data, num_replicas=2, rank=0))

    # On one process too, where half of the data would never be read.
    with pytest.raises(DataError, match=r"Data\.train_dataloader\(\).*\(Own\) divides the dataset into 2"):
        quiet(max_epochs=1).fit(Numbers(), as_data(Data()))


class Pairs(TaskModule):
    """Keeps the batches of several loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.batches: list[Any] = []

    def training_step(self, batch: Any) -> Tensor:
        named = batch if isinstance(batch, dict) else dict(enumerate(batch))
        self.batches.append({name: each[0].tolist() for name, each in named.items()})
        return self.net(named[next(iter(named))][0].float()[:, None]).square().mean()

    def loss_weight(self, batch: Any) -> float:
        return 1.0


def several(loaders: Any) -> Any:
    class Data(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return loaders

    return Data()


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # of their CombinedLoader
@pytest.mark.parametrize("named", [True, False])
def test_several_training_loaders_give_batches_together_as_lightnings_do(named: bool) -> None:
    loaders: Any = {"a": numbers(7, 2), "b": numbers(4, 2)}
    loaders = loaders if named else list(loaders.values())
    expected = []
    for batch, _, _ in CombinedLoader(loaders, "max_size_cycle"):
        each = batch if named else dict(enumerate(batch))
        expected.append({name: part[0].tolist() for name, part in each.items()})
    task = Pairs()
    quiet(max_epochs=1).fit(task, as_data(several(loaders)))
    assert task.batches == expected
    combined = Pairs()  # theirs is iterated as it is, in its own mode
    quiet(max_epochs=1).fit(combined, as_data(several(CombinedLoader(loaders, "min_size"))))
    assert combined.batches == expected[:2]


def _together(rank_count: int, generator: bool, workers: int, steps: int, path: str) -> list[Any]:
    made = torch.Generator().manual_seed(5) if generator else None
    loaders = {
        "a": numbers(12, 2, shuffle=True, generator=made, num_workers=workers),
        "b": numbers(6, 2, shuffle=True),
    }
    task = Pairs()
    options = {"strategy": "ddp", "devices": 2} if rank_count == 2 else {}
    checkpoint = CheckpointConfig(every="1 step") if path else False
    trainer = quiet(max_steps=steps, run_dir=path or None, checkpoint=checkpoint, **options)
    trainer.fit(task, as_data(several(loaders)), resume="auto" if path else None)
    return task.batches


def test_several_training_loaders_resume_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    whole = _together(1, True, 0, 11, "")
    path = str(tmp_path / "run")
    # In the second epoch, whose order must not depend on what the loader's generator has drawn before.
    assert _together(1, True, 0, 8, path) + _together(1, True, 0, 11, path) == whole
    assert [each["a"] for each in whole[:3]] != [each["a"] for each in whole[6:]]


@pytest.mark.full
def test_several_training_loaders_on_two_ranks_and_with_workers_give_the_order_of_one() -> None:
    whole = _together(1, False, 0, 6, "")
    assert _together(1, False, 2, 6, "") == whole
    ranks = run_distributed(_together, 2, False, 0, 3, "")
    assert [each for pair in zip(*ranks, strict=True) for each in pair] == whole


def test_a_stream_among_several_training_loaders_is_refused_with_what_works() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(range(4))

    loaders = [numbers(4), DataLoader(Stream(), batch_size=2)]
    with pytest.raises(DataError, match=r"Data\.train_dataloader\(\)\[1\] is a DataLoader.*CombinedLoader"):
        quiet(max_epochs=1).fit(Pairs(), as_data(several(loaders)))


def test_a_module_with_loaders_of_its_own_is_data() -> None:
    class Module(lightning.LightningModule):
        def train_dataloader(self) -> Any:
            return numbers()

        def val_dataloader(self) -> Any:
            return []  # no validation, as in Lightning

    result = quiet(max_epochs=1).fit(Numbers(), as_data(Module()))
    assert result.progress.updates == 5
    assert "validation/loss" not in result.metrics
    made = lightning.LightningDataModule.from_datasets(TensorDataset(torch.arange(4)), batch_size=2)
    assert quiet(max_epochs=1).fit(Numbers(), as_data(made)).progress.updates == 2


def test_what_would_not_be_called_is_refused_by_name() -> None:
    class Moves(lightning.LightningDataModule):
        def train_dataloader(self) -> Any:
            return numbers()

        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            return batch

        def on_exception(self, exception: BaseException) -> None:
            pass

    with pytest.raises(
        ConfigError, match=r"Moves overrides.*on_exception \(write a callback.*transfer_batch"
    ):
        as_data(Moves())
    with pytest.raises(ConfigError, match="LightningDataModule has no loader: override one of train_data"):
        as_data(lightning.LightningDataModule())
    with pytest.raises(ConfigError, match=r"not Moves\. Pass an instance: as_data\(Moves"):
        as_data(Moves)
    with pytest.raises(ConfigError, match=r"not list\. Other data is given to the Trainer as it is"):
        as_data([])
    with pytest.raises(ConfigError, match=r"LightningData has no test_data\(\)"):
        quiet().test(Numbers(), as_data(several(numbers())))
