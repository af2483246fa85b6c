"""Data modules of Lightning as data: their life, their loaders, and each sample once on any ranks."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, TensorDataset

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule, rank
from drivetrain.core.errors import ConfigError, DataError
from drivetrain.integrations.lightning import as_data

lightning = Lazy("lightning")
pytorch_lightning = Lazy("pytorch_lightning")


class Numbers(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.batches: list[Any] = []

    def training_step(self, batch: Any) -> Tensor:
        named = batch if isinstance(batch, dict) else dict(enumerate(batch))
        self.batches.append({name: torch.as_tensor(each[0]).tolist() for name, each in named.items()})
        first = next(iter(named.values()))
        first = first[0] if isinstance(first, list) else first
        return self.net(first.float().reshape(-1, 1)).square().mean()

    def validation_step(self, batch: Any) -> Tensor:
        return batch[0].float().mean()

    def loss_weight(self, batch: Any) -> float:
        return 1.0

    def configure_optimizers(self) -> Any:
        return OptimizerConfig("sgd", lr=1e-4)


def numbers(count: int = 10, size: int = 2, **options: Any) -> DataLoader[Any]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=size, **options)


def data_of(**loaders: Any) -> Any:  # a data module with these loaders, such as `train=numbers()`
    methods = {f"{name}_dataloader": lambda self, each=each: each for name, each in loaders.items()}
    return type("Data", (lightning.LightningDataModule,), methods)()


def noting(package: Any) -> Any:  # of one of Lightning's packages
    class Data(package.LightningDataModule):  # type: ignore[misc]
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

        def state_dict(self) -> dict[str, Any]:
            return {"epochs": self.epochs}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.calls.append(("load", state))

    return Data()


@pytest.mark.parametrize("package", ["lightning", "pytorch_lightning"])
def test_a_data_module_is_set_up_resumed_and_torn_down_as_in_lightning(package: str, tmp_path: Path) -> None:
    module = noting(Lazy(package))
    policy = CheckpointConfig(every="1 epoch", by="validation/dataloader_idx_0/loss")
    options = {"checkpoint": policy, "run_dir": tmp_path}
    count = LambdaCallback(on_epoch_end=lambda run: setattr(module, "epochs", module.epochs + 1))
    result = quiet(max_epochs=2, callbacks=[count], **options).fit(Numbers(), as_data(module))
    assert module.calls == ["prepare", ("setup", "fit"), ("teardown", "fit")]
    assert result.metrics["validation/dataloader_idx_0/loss"] == 4.5
    assert result.metrics["validation/dataloader_idx_1/loss"] == 1.5
    module.calls.clear()
    assert quiet().test(Numbers(), as_data(module)) == {"test/near/loss": 1.5, "test/far/loss": 2.5}
    assert module.calls == ["prepare", ("setup", "test"), ("teardown", "test")]
    again = noting(Lazy(package))
    quiet(max_epochs=3, **options).fit(Numbers(), as_data(again), resume="auto")
    assert ("load", {"epochs": 2}) in again.calls
    module.calls.clear()
    fails = LambdaCallback(on_epoch_end=lambda run: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        quiet(max_epochs=1, callbacks=[fails]).fit(Numbers(), as_data(module))
    assert module.calls[-1] == ("teardown", "fit")


def _lives(path: str) -> list[Any]:
    module = noting(lightning)
    module.prepare_data_per_node = False
    module.prepare_data = lambda: Path(f"{path}/prepared-{rank()}").touch()
    quiet(max_epochs=1, strategy="ddp").fit(Numbers(), as_data(module))
    return module.calls


def test_data_is_prepared_on_one_rank(tmp_path: Path) -> None:
    for calls in on_two_ranks(_lives, str(tmp_path)):
        assert calls == [("setup", "fit"), ("teardown", "fit")]
    assert [each.name for each in tmp_path.iterdir()] == ["prepared-0"]


KINDS = ("torch", "batches", "wrapper")


def sampled(kind: str) -> Any:
    from lightning.fabric.utilities.distributed import DistributedSamplerWrapper

    data, parts = TensorDataset(torch.arange(11)), {"num_replicas": 2, "rank": 1}
    chosen = torch.utils.data.SubsetRandomSampler(range(11))
    in_order = DistributedSampler(data, **parts, shuffle=False)
    options: dict[str, Any] = {"batches": {"batch_sampler": BatchSampler(in_order, 2, False)}}
    options["torch"] = {"sampler": DistributedSampler(data, **parts), "batch_size": 2}
    options["wrapper"] = {"sampler": DistributedSamplerWrapper(chosen, **parts), "batch_size": 2}
    return data_of(train=DataLoader(data, **options[kind]))


def _seen(devices: int) -> dict[str, list[list[int]]]:
    found = {}
    for kind in KINDS:
        epochs: list[list[int]] = [[]]

        def keep(run: Any, epochs: Any = epochs) -> None:
            for each in run.window.micro_batches:
                if not each.is_placeholder:
                    epochs[-1] += each.batch[0].flatten().tolist()

        ends = LambdaCallback(on_step_end=keep, on_epoch_end=lambda run, epochs=epochs: epochs.append([]))
        strategy = {"strategy": "ddp", "devices": 2} if devices == 2 else {}
        quiet(max_epochs=2, callbacks=[ends], **strategy).fit(Numbers(), as_data(sampled(kind)))
        found[kind] = epochs[:2]
    return found


def test_a_distributed_sampler_is_replaced_so_that_each_sample_counts_once_on_any_ranks() -> None:
    one, ranks = _seen(1), on_two_ranks(_seen, 2)
    for kind, (first, second) in one.items():
        assert sorted(first) == sorted(second) == list(range(11)), kind
        assert (first == second) == (kind == "batches"), kind  # the others shuffle
        for epoch in range(2):
            parts = [each[kind][epoch] for each in ranks]
            assert sorted(parts[0] + parts[1]) == list(range(11)), kind
            assert {*one[kind][epoch][:4]} == {*parts[0][:2], *parts[1][:2]}, kind


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec:FutureWarning")  # of their CombinedLoader
@pytest.mark.parametrize("named", [True, False])
def test_several_training_loaders_give_batches_together_as_lightnings_do(named: bool) -> None:
    combined_loader = lightning.pytorch.utilities.CombinedLoader
    loaders: Any = {"a": numbers(7, 2), "b": numbers(4, 2)}
    loaders = loaders if named else list(loaders.values())
    expected = []
    for batch, _, _ in combined_loader(loaders, "max_size_cycle"):
        each = batch if named else dict(enumerate(batch))
        expected.append({name: part[0].tolist() for name, part in each.items()})
    task = Numbers()
    quiet(max_epochs=1).fit(task, as_data(data_of(train=loaders)))
    assert task.batches == expected
    combined = Numbers()  # theirs is iterated as it is, in its own mode
    quiet(max_epochs=1).fit(combined, as_data(data_of(train=combined_loader(loaders, "min_size"))))
    assert combined.batches == expected[:2]


def _together(rank_count: int, generator: bool, workers: int, steps: int, path: str) -> list[Any]:
    made = torch.Generator().manual_seed(5) if generator else None
    first = numbers(12, 2, shuffle=True, generator=made, num_workers=workers)
    task, loaders = Numbers(), {"a": first, "b": numbers(6, 2, shuffle=True)}
    options = {"strategy": "ddp", "devices": 2} if rank_count == 2 else {}
    checkpoint = CheckpointConfig(every="1 step") if path else False
    trainer = quiet(max_steps=steps, run_dir=path or None, checkpoint=checkpoint, **options)
    trainer.fit(task, as_data(data_of(train=loaders)), resume="auto" if path else None)
    return task.batches


def test_several_training_loaders_resume_within_an_epoch_and_have_one_order_on_ranks(tmp_path: Path) -> None:
    whole, path = _together(1, True, 0, 11, ""), str(tmp_path / "run")
    # In the second epoch, whose order must not depend on what the loader's generator has drawn before.
    assert _together(1, True, 0, 8, path) == whole[:8]
    assert _together(1, True, 0, 11, path) == whole  # the list of the module goes on
    assert [each["a"] for each in whole[:3]] != [each["a"] for each in whole[6:]]
    whole = _together(1, False, 0, 6, "")
    ranks = on_two_ranks(_together, 2, False, 0, 3, "")
    assert [each for pair in zip(*ranks, strict=True) for each in pair] == whole


class Cycled(DataLoader[Any]):  # as scvi-tools has it; asked for more than its length, zip raises
    def __iter__(self) -> Any:
        return zip(itertools.cycle([[torch.arange(2)]]), super().__iter__(), strict=True)


def test_a_loader_that_iterates_by_itself_is_read_to_its_length() -> None:
    loader = Cycled(TensorDataset(torch.arange(10)), batch_size=2)
    task = Numbers()
    assert quiet(max_epochs=2).fit(task, as_data(data_of(train=loader))).progress.steps == 10
    assert len(task.batches) == 10
    assert type(loader) is Cycled


def test_a_module_with_loaders_of_its_own_is_data() -> None:
    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
        def train_dataloader(self) -> Any:
            return numbers()

        def val_dataloader(self) -> Any:
            return []  # no validation, as in Lightning

    result = quiet(max_epochs=1).fit(Numbers(), as_data(Module()))
    assert result.progress.steps == 5
    assert "validation/loss" not in result.metrics
    made = lightning.LightningDataModule.from_datasets(TensorDataset(torch.arange(4)), batch_size=2)
    assert quiet(max_epochs=1).fit(Numbers(), as_data(made)).progress.steps == 2

    class Without(lightning.LightningDataModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.val_dataloader = super().val_dataloader  # "none", as in Lightning
            self.train_dataloader = numbers

    assert "validation/loss" not in quiet(max_epochs=1).fit(Numbers(), as_data(Without())).metrics


def test_refusals() -> None:
    class Own(DistributedSampler[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(range(self.rank, 10, self.num_replicas))

    def fit(loaders: Any) -> Any:
        return lambda: quiet(max_epochs=1).fit(Numbers(), as_data(data_of(train=loaders)))

    data = TensorDataset(torch.arange(10))
    # On one process too, where half of the data would never be read.
    divided = DataLoader(data, batch_size=2, sampler=Own(data, num_replicas=2, rank=0))
    cases: dict[str, Any] = {
        "a sampler that divides": (fit(divided), "Data.train_dataloader()", "(Own) divides the dataset"),
        "no loader": (lambda: as_data(lightning.LightningDataModule()), "override one of train_data"),
        "no test data": (lambda: quiet().test(Numbers(), as_data(data_of(train=data))), "no test_data()"),
    }
    assert_refused((ConfigError, DataError), cases)
