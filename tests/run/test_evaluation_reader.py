"""What reads a whole evaluation: every sample once and in order, on any number of ranks."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor


class Reader:
    """Notes the features of all samples, and what was done with itself."""

    def __init__(self, notes: list[Any]) -> None:
        self.notes = notes
        self.rows: list[Tensor] = []

    def record(self, loss: Tensor | None, outputs: Any, batch: Any) -> Tensor:
        assert loss is not None
        assert not loss.requires_grad
        assert len(outputs) == len(batch[0])
        return batch[0]

    def add(self, record: Tensor) -> None:
        self.rows.append(record)

    def compute(self) -> Mapping[str, float]:
        self.notes.append(torch.cat(self.rows))
        return {"rows": float(len(self.notes[-1]))}

    def close(self) -> None:
        self.notes.append("closed")


class Read(Regression):
    """Has its evaluations read."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def evaluation_reader(self) -> Reader:
        return Reader(self.notes)


def validated(devices: int | str, **options: Any) -> tuple[dict[str, float], list[Any]]:
    task = Read()
    strategy = "cpu" if devices == "auto" else "ddp"
    found = quiet(strategy=strategy, devices=devices, **options).validate(task, pairs(7, 2, shuffle=True))
    assert devices != "auto" or task.notes[-1] == "closed"
    return found, [each.tolist() for each in task.notes if isinstance(each, Tensor)]


IN_ORDER: Any = pairs(7).dataset.tensors[0].tolist()  # type: ignore[attr-defined]


@pytest.mark.parametrize("options", [{}, {"micro_batch": 1}], ids=["whole", "in parts"])
def test_an_evaluation_reader_reads_all_samples_in_the_order_of_the_dataset(options: dict[str, Any]) -> None:
    values, (rows,) = validated("auto", **options)
    assert values["validation/rows"] == 7
    assert rows == IN_ORDER


def test_the_evaluation_reader_of_rank_0_reads_the_samples_of_all_and_all_get_its_values() -> None:
    (first, (rows,)), (second, nothing) = on_two_ranks(validated, 2)
    assert first == second
    assert first["validation/rows"] == 7
    assert rows == IN_ORDER
    assert nothing == []
