"""Metrics of all samples at once (`EpochMetric`): any function, with the samples of all ranks in order."""

import shutil
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score, roc_auc_score
from tests.support.outcome import Counting
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor

from drivetrain import ConfigError, DataError, EpochMetric, LambdaCallback, OptimizerConfig


def updated(metric: EpochMetric, *batches: tuple[Any, ...]) -> EpochMetric:
    for batch in batches:
        metric.update(*batch)
    return metric


def classes(count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed)), torch.arange(count) % 2


def test_a_function_of_scikit_learn_gets_its_arguments_by_name() -> None:
    first, second = classes(5, 1), classes(4, 2)
    scores, target = (torch.cat(each).numpy() for each in zip(first, second, strict=True))
    assert updated(EpochMetric(roc_auc_score), first, second).compute() == roc_auc_score(target, scores)
    right = recall_score(target, scores > -1)
    metric = EpochMetric(partial(recall_score, average="binary"), transform=lambda each, t: (each > -1, t))
    assert updated(metric, first, second).compute() == right
    assert right != recall_score(scores > -1, target)


def test_any_other_function_gets_outputs_and_target_as_arrays_or_tensors() -> None:
    given: list[Any] = []
    half = torch.ones(2, 3, dtype=torch.bfloat16)
    for tensors in (False, True):
        metric = EpochMetric(lambda *inputs: given.append(inputs) or 0.0, tensors=tensors)
        updated(metric, (half, {"y": (3, np.float32(0.5), [1, 2])})).compute()
        outputs, target = given.pop()
        assert type(outputs) is (Tensor if tensors else np.ndarray)
        assert outputs.shape == (2, 3)
        assert str(outputs.dtype).endswith("float32")  # NumPy has no bfloat16
        assert [np.asarray(each).tolist() for each in target["y"]] == [[3], [0.5], [1, 2]]


def ones(*shape: int, kind: Any = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=kind)


def test_batches_of_different_lengths_are_padded() -> None:
    def rows(outputs: Any, target: Any) -> float:
        assert outputs.tolist() == [[1, 1, -7], [1, 1, -7], [1, 1, 1]]
        return float(len(target))

    batches = [(ones(2, 2), ones(2)), (ones(1, 3), ones(1))]
    assert updated(EpochMetric(rows, padding=-7), *batches).compute() == 3


def test_a_step_copies_on_the_device_and_keeps_no_more_than_the_rows() -> None:
    outputs, target = torch.ones(4, 2, requires_grad=True), torch.zeros(4)
    metric = EpochMetric(lambda o, t: float(o.sum() + t.sum()), transform=lambda o, t: (o[:, 1], t))
    with Counting() as counting:
        metric.update(outputs * 1, target)
    assert {*counting.seen} == {"mul", "select", "detach", "clone"}
    target += 5
    state = metric.state_dict()["records"][0][1]
    assert not state[0].requires_grad
    assert state[0].untyped_storage().nbytes() == 16  # the column alone
    assert metric.compute() == 4


def test_refusals_of_epoch_metrics() -> None:
    def compute(*batches: Any, **options: Any) -> Any:
        return lambda: updated(EpochMetric(lambda *_: 0.0, **options), *batches).compute()

    def padded(kind: Any, padding: float) -> Any:
        return compute((ones(1, 2, kind=kind), ones(1)), (ones(1, 1, kind=kind), ones(1)), padding=padding)

    two, names = (ones(2, 2), ones(2)), ({"low": ones(2)}, {"top": ones(2)})
    cases: dict[str, tuple[Any, ...]] = {
        "lengths": (compute(two, (ones(1, 3), ones(1))), "(2,)", "(3,)", "EpochMetric(padding="),
        "names": (compute(*((each, ones(2)) for each in names)), "[0]['low'], [0]['top']"),
        "bool": (padded(torch.bool, -100), "bool cannot hold the padding -100"),
        "a text": (compute((ones(1), "text")), "a str", "transform="),
        "a class": (lambda: EpochMetric(Ordered), "must be a function, not <class"),
    }
    assert_refused((ConfigError, DataError), cases)


def ordered(outputs: Any, target: Any) -> dict[str, float]:
    places = np.arange(1, len(target) + 1)
    return {"rows": len(target), "outputs": outputs[:, 0] @ places, "target": target[:, 0] @ places}


class Ordered(Regression):
    def __init__(self, function: Any = ordered, still: bool = False, **options: Any) -> None:
        super().__init__(OptimizerConfig("sgd", lr=1e-30) if still else None)  # too little to change a weight
        self.metric = EpochMetric(function, **options)

    def metrics(self) -> Mapping[str, Any]:
        return {"all": self.metric}


def expected(rows: int, start: int = 0, of: int = 0, prefix: str = "validation") -> dict[str, float]:
    """What `Ordered` computes, untrained, over `rows` samples from `start` on of a data set."""
    features, target = (each[start : start + rows] for each in pairs(of or rows).dataset.tensors)
    with torch.no_grad():
        found = ordered(Ordered()(features).numpy(), target.numpy())
    return {f"{prefix}/all/{name}": pytest.approx(value, rel=1e-4) for name, value in found.items()}


def chosen(values: Mapping[str, float], prefix: str = "validation/all") -> dict[str, float]:
    return {name: value for name, value in values.items() if name.startswith(prefix)}


def validated(**options: Any) -> list[dict[str, float]]:
    loaders = [pairs(count, 2, shuffle=True, drop_last=True) for count in (1, 7, 8)]
    return [chosen(quiet(**options).validate(Ordered(), each)) for each in loaders]


def test_evaluation_has_each_sample_once_in_the_order_of_the_dataset() -> None:
    assert validated() == [expected(count) for count in (1, 7, 8)]
    values = quiet().test(Ordered(), {"one": pairs(3), "other": pairs(5)})
    assert (values["test/one/all/rows"], values["test/other/all/rows"]) == (3, 5)


def test_evaluation_on_ranks_has_each_sample_once_with_the_same_result() -> None:
    found = on_two_ranks(lambda: validated(strategy="ddp", devices=2))
    assert found == [[expected(count) for count in (1, 7, 8)]] * 2


def failing(outputs: Any, target: Any) -> float:
    raise ValueError("only one class")


def test_an_error_of_the_function_names_it() -> None:
    with pytest.raises(ValueError, match="only one class") as raised:
        quiet().validate(Ordered(failing), pairs(5))
    assert "EpochMetric(failing), given float32 of shape (5, 1)" in raised.value.__notes__[0]


def log_of(data: Any, validation: Any = None, **options: Any) -> list[dict[str, float]]:
    logged: list[dict[str, float]] = []
    note = LambdaCallback(on_log=lambda run: logged.append(chosen(run.logged, "train/all")))
    quiet(max_epochs=1, callbacks=[note], **options).fit(Ordered(still=True), data, validation)
    return [each for each in logged if each]


def in_log_points(*rows: int) -> list[Any]:
    """What each log point has of the samples in order: so many of them, then the next ones."""
    starts = [sum(rows[:number]) for number in range(len(rows))]
    return [expected(*each, sum(rows), "train") for each in zip(rows, starts, strict=True)]


def test_training_computes_over_each_log_interval() -> None:
    data = list(pairs(20, 2))
    assert log_of(data, log_every="2 steps") == in_log_points(4, 4, 4, 4, 4)
    assert log_of(data, log_every="2 steps", gradient_accumulation_steps=2) == in_log_points(8, 8, 4)
    # A metric that the task keeps is not reset by an evaluation.
    options = {"log_every": "4 steps", "validate_every": "3 steps"}
    assert log_of(list(pairs(16)), pairs(4), **options) == in_log_points(8, 8)


def test_training_on_ranks_computes_over_the_samples_of_all() -> None:
    """The last step has samples on one rank alone."""
    options = {"log_every": "2 steps", "strategy": "ddp", "devices": 2}
    found = on_two_ranks(lambda: log_of(list(pairs(18, 2)), **options))
    assert found == [in_log_points(8, 8, 2)] * 2


def trained(directory: Path, steps: int, resume: Any = None, every: int = 4, **options: Any) -> Any:
    options = {"checkpoint": True, "run_dir": directory, **options}
    trainer = quiet(max_steps=steps, log_every=f"{every} steps", **options)
    return chosen(trainer.fit(Ordered(), pairs(20, 2), resume=resume).metrics, "train/all")


@pytest.mark.parametrize("stop", [1, 3])
def test_resume_in_the_middle_of_a_log_interval_has_the_same_values(stop: int, tmp_path: Path) -> None:
    trained(tmp_path / "parts", stop)
    found = trained(tmp_path / "parts", 4, "auto")
    assert found == trained(tmp_path / "whole", 4)
    assert found["train/all/rows"] == 8


def test_resume_on_ranks_and_on_fewer_ranks_has_the_same_values(tmp_path: Path) -> None:
    def on_ranks() -> list[Any]:
        options = {"every": 2, "strategy": "ddp", "devices": 2}
        trained(tmp_path / "parts", 1, **options)
        if torch.distributed.get_rank() == 0:
            shutil.copytree(tmp_path / "parts", tmp_path / "fewer")
        torch.distributed.barrier()
        return [trained(tmp_path / "parts", 2, "auto", **options), trained(tmp_path / "whole", 2, **options)]

    (first, whole), (second, _) = on_two_ranks(on_ranks)
    assert first == second == whole
    assert whole["train/all/rows"] == 8
    fewer = trained(tmp_path / "fewer", 2, "auto", every=2, gradient_accumulation_steps=2)
    assert fewer == {name: pytest.approx(value, rel=1e-5) for name, value in whole.items()}
