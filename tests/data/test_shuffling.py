"""A shuffle buffer of a stream: its order, and a resume that reads the buffer again and no more."""

from pathlib import Path
from typing import Any

import pytest
from tests.data.test_divided_streams import Files, files, fit
from tests.support.refusals import assert_refused
from torch.utils.data import DataLoader

from drivetrain import ConfigError, DataError
from drivetrain.data import mixture, packed, shuffled

ALONE: dict[str, Any] = {"devices": 1, "strategy": "auto", "max_epochs": 3}


def numbers(stream: Any) -> list[int]:
    return [int(each["id"]) for each in stream]


def test_each_sample_comes_once_in_an_order_of_the_seed_the_epoch_and_the_buffer() -> None:
    stream, orders = shuffled(files(1, 50), 20), []
    for epoch in (0, 1, 0):
        stream.set_epoch(epoch)
        orders.append(numbers(stream))
    assert [*range(50)] != orders[0] == orders[2] != orders[1]
    assert numbers(shuffled(files(1, 50), 20, seed=1)) != orders[0]
    buffers = [orders[0][start : start + 20] for start in (0, 20, 40)]
    assert [sorted(each) for each in buffers] == [[*range(20)], [*range(20, 40)], [*range(40, 50)]]
    assert [each - 20 for each in buffers[1]] != buffers[0]


KINDS: dict[str, Any] = {
    "samples": lambda: shuffled(files(), 7),
    "twice, in whole buffers": lambda: shuffled(shuffled(files(4, 24), 6), 5),
    "in a mixture": lambda: mixture(
        {"a": shuffled(files(), 7), "b": shuffled(files(2, 17, 23), 5)}, {"a": 1, "b": 1}, until="all"
    ),
    "of a mixture": lambda: shuffled(mixture({"a": files(), "b": files(2, 17, 23)}, {"a": 1, "b": 1}), 7),
    "packed": lambda: packed(shuffled(files(key="input_ids"), 7), 4, buffer=4),
    "of packed rows": lambda: shuffled(packed(files(key="input_ids"), 4, buffer=4), 3),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_resume_at_any_step_is_exact(kind: str, tmp_path: Path) -> None:
    options = ALONE | {"checkpoint": True, "key": "input_ids" if "packed" in kind else "id"}
    whole = fit(KINDS[kind](), run_dir=tmp_path / "whole", **options)
    parts = [
        each
        for stop in (1, 6, 12, 13, None)
        for each in fit(KINDS[kind](), stop, run_dir=tmp_path, **options)
    ]
    assert parts == whole


def test_the_state_has_no_samples_and_a_resume_reads_one_buffer_again() -> None:
    first, source = shuffled(files(1, 50), 20), files(1, 50)
    iterator = iter(first)
    given = [int(next(iterator)["id"]) for _ in range(27)]
    assert first.state_dict() == {"stream": {"at": 20}, "at": [0, 1, 7]}
    again = shuffled(source, 20)
    again.load_state_dict(first.state_dict())
    assert sorted(given + numbers(again)) == [*range(50)]
    assert source.read == [*range(20, 50)]


def test_only_streams_of_samples_are_shuffled() -> None:
    cases = {
        "a list": (lambda: shuffled([1, 2], 2), "not a list", "DataLoader(shuffle=True)"),
        "a loader": (lambda: shuffled(DataLoader(Files([]), 2), 2), "not a DataLoader", "dataset"),
        "no buffer": (lambda: shuffled(files(), 1), "buffer"),
        "a seed": (lambda: shuffled(files(), 9, seed=-1), "seed"),
    }
    assert_refused((ConfigError, DataError), cases)
