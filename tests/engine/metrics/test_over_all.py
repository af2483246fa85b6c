"""Metrics of all samples at once: any function, on rank 0, with the samples of all ranks in order."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score, roc_auc_score
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from drivetrain import CheckpointConfig, ConfigError, DataError, LambdaCallback, OptimizerConfig, OverAll
from drivetrain.testing import run_distributed


def updated(metric: OverAll, *batches: tuple[Any, ...]) -> OverAll:
    for batch in batches:
        metric.update(*batch)
    return metric


def classes(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, generator=generator), torch.arange(count) % 2


# What the function gets.


def test_a_function_of_scikit_learn_gets_the_target_first() -> None:
    first, second = classes(5, 1), classes(4, 2)
    scores, target = (torch.cat(each).numpy() for each in zip(first, second, strict=True))
    assert updated(OverAll(roc_auc_score), first, second).compute() == roc_auc_score(target, scores)
    right = recall_score(target, scores > -1)
    metric = OverAll(partial(recall_score, average="binary"), transform=lambda each, t: (each > -1, t))
    assert updated(metric, first, second).compute() == right
    assert right != recall_score(scores > -1, target)


def test_a_metric_of_evaluate_gets_its_arguments_by_name() -> None:
    def compute(*, predictions: Any = None, references: Any = None, **options: Any) -> dict[str, float]:
        return {"wrong": float((predictions != references).sum())}

    outputs, target = torch.tensor([1, 0, 1]), torch.tensor([1, 1, 0])
    assert updated(OverAll(compute), (outputs, target)).compute() == {"wrong": 2.0}


@pytest.mark.parametrize("tensors", [False, True])
def test_any_other_function_gets_outputs_and_target_as_arrays_or_tensors(tensors: bool) -> None:
    given: list[Any] = []

    def note(*inputs: Any) -> float:
        given.extend(inputs)
        return 0.0

    half = torch.ones(2, 3, dtype=torch.bfloat16)
    updated(OverAll(note, tensors=tensors), (half, {"y": (3, np.float32(0.5), [1, 2])})).compute()
    outputs, target = given
    assert type(outputs) is (Tensor if tensors else np.ndarray)
    assert outputs.shape == (2, 3)
    assert str(outputs.dtype).endswith("float32")  # NumPy has no bfloat16
    assert [np.asarray(each).tolist() for each in target["y"]] == [[3], [0.5], [1, 2]]


def test_batches_of_different_lengths_are_refused_or_padded() -> None:
    def rows(outputs: Any, target: Any) -> float:
        assert outputs.tolist() == [[1, 1, -7], [1, 1, -7], [2, 2, 2]]
        return float(len(target))

    batches = [(torch.ones(2, 2), torch.ones(2)), (torch.full((1, 3), 2.0), torch.ones(1))]
    with pytest.raises(DataError, match=r"rows.*shape \(2,\), those of another \(3,\).*OverAll\(padding=..."):
        updated(OverAll(rows), *batches).compute()
    assert updated(OverAll(rows, padding=-7), *batches).compute() == 3
    other = [(torch.ones(2), torch.ones(2)), (torch.ones(2), {"a": torch.ones(2), "b": torch.ones(2)})]
    with pytest.raises(DataError, match="one batch have 3 arrays, those of another 2"):
        updated(OverAll(rows), *other).compute()
    with pytest.raises(DataError, match=r"shape \(2,\), those of another \(\), and padding cannot make"):
        updated(OverAll(rows, padding=-7), batches[0], (torch.ones(2), torch.ones(2))).compute()


@pytest.mark.parametrize(
    ("kind", "padding", "fits"),
    [
        (torch.bool, -100, False),
        (torch.bool, 1, True),
        (torch.uint8, -100, False),
        (torch.int8, -100, True),
        (torch.int64, 0.5, False),
        (torch.float16, 0.1, True),
    ],
)
def test_a_padding_that_the_dtype_cannot_hold_is_refused(kind: Any, padding: float, fits: bool) -> None:
    batches = [(torch.ones(1, 2, dtype=kind), torch.ones(1)), (torch.ones(1, 1, dtype=kind), torch.ones(1))]
    metric = updated(OverAll(lambda outputs, _: outputs[1, 1], padding=padding), *batches)
    if fits:
        assert metric.compute() == torch.tensor(padding, dtype=kind).item()
        return
    name = str(kind).removeprefix("torch.")
    with pytest.raises(DataError, match=f"their dtype {name} cannot hold the padding {padding}"):
        metric.compute()


def test_tensors_that_numpy_lacks_become_arrays_that_it_has() -> None:
    for outputs in (torch.eye(2).to_sparse(), torch.eye(2).to(torch.float8_e5m2)):
        assert updated(OverAll(lambda each, _: each.sum()), (outputs, torch.ones(2))).compute() == 2
    with pytest.raises(DataError, match="tensors and numbers, and was given a ndarray"):
        updated(OverAll(len), (np.array(["a"]), torch.ones(1)))


def test_outputs_are_joined_by_their_names() -> None:
    def named(first: str, second: str) -> tuple[Any, ...]:
        return {first: torch.full((2,), 1.0), second: torch.full((2,), 5.0)}, torch.ones(2)

    def lows(outputs: Any, target: Any) -> float:
        return float(outputs["low"].sum())

    low_last = ({"high": torch.full((2,), 5.0), "low": torch.full((2,), 1.0)}, torch.ones(2))
    assert updated(OverAll(lows), named("low", "high"), low_last).compute() == 4
    with pytest.raises(DataError, match="not both have '0/high', '0/top'"):
        updated(OverAll(lows), named("low", "high"), named("low", "top")).compute()


@pytest.mark.parametrize("memory", [0, 100, 10**6])
def test_above_a_limit_of_memory_the_function_gets_maps_of_files(memory: int) -> None:
    kinds: list[type] = []

    def total(outputs: Any, target: Any) -> float:
        kinds.append(type(outputs))
        return float((outputs * target).sum())

    batches = [classes(9, seed) for seed in range(6)]
    batches[4] = (batches[4][0].double(), batches[4][1])  # of another dtype than those in the file
    metric = updated(OverAll(total, memory=memory), *batches)
    metric.add([metric.taken()])
    assert metric.result() == pytest.approx(float(sum((o * t).sum() for o, t in batches)))
    assert kinds == [np.ndarray if memory == 10**6 else np.memmap]
    metric.reset()
    assert not metric.has_rows


def test_what_is_kept_does_not_change_with_the_tensors_that_were_given() -> None:
    outputs, target = torch.ones(4, 2, requires_grad=True), torch.zeros(4)
    metric = OverAll(
        lambda outputs, target: float(outputs.sum() + target.sum()), transform=lambda o, t: (o[:, 1], t)
    )
    metric.update(outputs * 1, target)
    target += 5
    state = metric.state_dict()["records"][0][1]
    assert not state[0].requires_grad
    assert state[0].untyped_storage().nbytes() == 16  # the column alone
    assert metric.compute() == 4


def test_an_update_on_a_device_only_copies_there() -> None:
    """A copy to the host in it would wait for the device in each step."""
    called: list[str] = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            called.append(func.__name__)
            return func(*args, **(kwargs or {}))

    with Calls():
        OverAll(roc_auc_score).update(*classes(4))
    assert set(called[-4:]) == {"detach.default", "clone.default"}


@pytest.mark.parametrize(
    ("value", "what"),
    [("text", "str"), (["a", "b"], "list of str"), ([torch.ones(1)], "list of Tensor"), (None, "NoneType")],
)
def test_what_is_no_tensor_is_refused_by_name(value: Any, what: str) -> None:
    with pytest.raises(DataError, match=f"keeps tensors and numbers, and was given a {what}. .*transform="):
        OverAll(roc_auc_score).update(torch.ones(1), value)


class Computes:
    def compute(self) -> float:
        return 0.0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0.5,), "takes a function, not a float. Give a function of the outputs and the target"),
        ((Computes(),), "takes a function, not a Computes. Give its method compute"),
        ((Computes,), "not the class Computes"),
    ],
)
def test_what_is_no_function_is_refused(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        OverAll(*arguments)


@pytest.mark.parametrize(
    "options", [{"transform": 3}, {"padding": "x"}, {"tensors": "no"}, {"memory": -1}], ids=str
)
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(options))):
        OverAll(roc_auc_score, **options)


def test_without_an_update_there_is_nothing_to_compute() -> None:
    with pytest.raises(DataError, match="without an update"):
        OverAll(roc_auc_score).compute()


# In runs. A function that notes what it gets returns numbers that depend on the order.


def ordered(outputs: Any, target: Any) -> dict[str, float]:
    """Numbers that change with any sample that is missing, doubled or in another place."""
    places = np.arange(1, len(target) + 1)
    return {"rows": len(target), "outputs": outputs[:, 0] @ places, "target": target[:, 0] @ places}


class Ordered(Regression):
    """Has the samples in order as a metric."""

    def __init__(self, function: Any = ordered, **options: Any) -> None:
        super().__init__(**options)
        self.function = function

    def metrics(self) -> Mapping[str, Any]:
        return {"all": OverAll(self.function)}


def expected(task: nn.Module, data: Any) -> dict[str, float]:
    features, target = data.dataset.tensors
    with torch.no_grad():
        found = ordered(task(features).numpy(), target.numpy())
    return {f"validation/all/{name}": pytest.approx(value, rel=1e-5) for name, value in found.items()}


def chosen(values: Mapping[str, float], prefix: str = "validation/all") -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith(prefix)}


def validated(strategy: str, devices: Any, count: int, **options: Any) -> dict[str, float]:
    trainer = quiet(strategy=strategy, devices=devices, **options)
    return chosen(trainer.validate(Ordered(), pairs(count, 2, shuffle=True, drop_last=True)))


@pytest.mark.parametrize("options", [{}, {"micro_batch": 1}], ids=["whole", "in parts"])
@pytest.mark.parametrize("count", [1, 7, 8])
def test_an_evaluation_has_each_sample_once_in_the_order_of_the_dataset(count: int, options: Any) -> None:
    assert validated("cpu", "auto", count, **options) == expected(Ordered(), pairs(count))


@pytest.mark.parametrize(
    ("strategy", "ranks"),
    [
        ("ddp", 2),
        pytest.param("ddp", 3, marks=pytest.mark.full),
        pytest.param("fsdp", 2, marks=pytest.mark.full),
        pytest.param("zero2", 2, marks=pytest.mark.full),
        pytest.param("zero3", 2, marks=pytest.mark.full),
        pytest.param("accelerate", 2, marks=pytest.mark.full),
    ],
)
def test_so_it_has_on_several_ranks_with_the_same_result_on_each(strategy: str, ranks: int) -> None:
    def each() -> list[dict[str, float]]:
        return [validated(strategy, ranks, count) for count in (1, 7, 8)]

    found = run_distributed(each, world_size=ranks)
    assert found[0] == [expected(Ordered(), pairs(count)) for count in (1, 7, 8)]
    assert all(each == found[0] for each in found[1:])


def test_named_loaders_and_tests_have_values_of_their_own() -> None:
    data = {"one": pairs(3), "other": pairs(5)}
    values = quiet().test(Ordered(), data)
    assert (values["test/one/all/rows"], values["test/other/all/rows"]) == (3, 5)


def _failing(outputs: Any, target: Any) -> float:
    raise ValueError("only one class")


def _fails_on_ranks() -> None:
    quiet(strategy="ddp", devices=2).validate(Ordered(_failing), pairs(5))


def test_an_error_of_the_function_ends_all_ranks_and_says_what_it_was_given() -> None:
    with pytest.raises(RuntimeError, match="ValueError: only one class"):
        run_distributed(_fails_on_ranks)
    with pytest.raises(ValueError, match="only one class") as raised:
        quiet().validate(Ordered(_failing), pairs(5))
    assert raised.value.__notes__[0] == (
        "drivetrain: raised by OverAll(_failing), which was given float32 of shape (5, 1), float32 of shape"
        " (5, 1)"
    )


def test_the_short_validation_before_training_does_not_call_the_function() -> None:
    rows: list[int] = []

    def count(outputs: Any, target: Any) -> float:
        rows.append(len(target))
        return 0.0

    quiet(max_epochs=1, sanity_validation=2, train_metrics=False).fit(Ordered(count), pairs(), pairs(10))
    assert rows == [10]


def test_an_evaluation_that_fails_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    class Spilled(Ordered):
        def metrics(self) -> Mapping[str, Any]:
            return {"all": OverAll(_failing, memory=0)}

    with pytest.raises(ValueError, match="only one class"):
        quiet().validate(Spilled(), pairs(5))
    assert list(tmp_path.iterdir()) == []


# In training.


def log_of(task: Any, data: Any, **options: Any) -> list[dict[str, float]]:
    """The values of `train/all` at each log point."""
    logged: list[dict[str, float]] = []
    note = LambdaCallback(on_log=lambda run: logged.append(chosen(run.logged, "train/all")))
    quiet(**{"max_epochs": 1, "callbacks": [note], **options}).fit(task, data)
    return [each for each in logged if each]


def still(**options: Any) -> Ordered:
    """A task whose weights stay what they are."""
    return Ordered(optimizer=OptimizerConfig("sgd", lr=1e-30), **options)


def in_log_points(rows: Sequence[int]) -> list[Any]:
    """What each log point has of the samples in order: `rows` samples, then the next ones."""
    features, target = pairs(sum(rows)).dataset.tensors
    found, start = [], 0
    with torch.no_grad():
        outputs = Ordered()(features).numpy()
    for count in rows:
        values = ordered(outputs[start : start + count], target.numpy()[start : start + count])
        found.append({f"train/all/{k}": pytest.approx(v, rel=1e-4) for k, v in values.items()})
        start += count
    return found


@pytest.mark.parametrize("accumulation", [1, 2])
def test_training_computes_over_each_log_interval(accumulation: int) -> None:
    options = {"log_every": "2 steps", "gradient_accumulation_steps": accumulation}
    data = list(pairs(20, 2))
    assert log_of(still(), data, **options) == in_log_points(
        [4, 4, 4, 4, 4] if accumulation == 1 else [8, 8, 4]
    )


def _logged_on_a_rank(strategy: str) -> list[dict[str, float]]:
    return log_of(still(), list(pairs(18, 2)), log_every="2 steps", strategy=strategy, devices=2)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.full)])
def test_on_several_ranks_it_computes_over_the_samples_of_all(strategy: str) -> None:
    """The last update has samples on one rank alone."""
    first, second = run_distributed(_logged_on_a_rank, strategy)
    assert first == second == in_log_points([8, 8, 2])


def _trained(directory: Path, steps: int, resume: str | None, **options: Any) -> Any:
    trainer = quiet(
        max_steps=steps,
        log_every="4 steps",
        checkpoint=CheckpointConfig(every="1 steps"),
        run_dir=directory,
        **options,
    )
    return chosen(trainer.fit(Ordered(), pairs(20, 2), resume=resume).metrics, "train/all")


@pytest.mark.parametrize("stop", [1, 3])
def test_a_run_resumed_in_the_middle_of_a_log_interval_has_the_same_values(stop: int, tmp_path: Path) -> None:
    _trained(tmp_path / "parts", stop, None)
    found = _trained(tmp_path / "parts", 4, "auto")
    assert found == _trained(tmp_path / "whole", 4, None)
    assert found["train/all/rows"] == 8


def _begun(directory: Path) -> Any:
    return _trained(directory, 3, None, strategy="ddp", devices=2)


def _ended(directory: Path) -> Any:
    return _trained(directory, 4, "auto", strategy="ddp", devices=2)


@pytest.mark.full
def test_so_it_has_on_several_ranks_and_on_fewer_than_before(tmp_path: Path) -> None:
    run_distributed(_begun, tmp_path / "parts")
    shutil.copytree(tmp_path / "parts", tmp_path / "fewer")
    first, second = run_distributed(_ended, tmp_path / "parts")
    whole, _ = run_distributed(_whole, tmp_path / "whole")
    assert first == second == whole
    assert whole["train/all/rows"] == 16
    fewer = _trained(tmp_path / "fewer", 4, "auto", gradient_accumulation_steps=2)
    assert fewer == {name: pytest.approx(value, rel=1e-5) for name, value in whole.items()}


def _whole(directory: Path) -> Any:
    return _trained(directory, 4, None, strategy="ddp", devices=2)


def test_a_metric_that_the_task_keeps_is_not_reset_by_an_evaluation() -> None:
    class Keeps(Ordered):
        def __init__(self) -> None:
            super().__init__(optimizer=OptimizerConfig("sgd", lr=1e-30))
            self.kept = OverAll(ordered)

        def metrics(self) -> Mapping[str, Any]:
            return {"all": self.kept}

    logged: list[dict[str, float]] = []
    note = LambdaCallback(on_log=lambda run: logged.append(chosen(run.logged, "train/all")))
    trainer = quiet(max_epochs=1, log_every="4 steps", validate_every="3 steps", callbacks=[note])
    trainer.fit(Keeps(), list(pairs(16)), pairs(4))
    assert [each for each in logged if each] == in_log_points([8, 8])
