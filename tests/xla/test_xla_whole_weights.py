"""Callbacks that read and change weights, under XLA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.strategies.test_whole_weights import EXAMPLES, Found, assert_alike, by_one_process, fitted
from tests.support.xla import apart, make


def _sent(found: dict[str, Found]) -> dict[str, Any]:
    """With arrays in place of tensors, whose memory would end with the process."""
    return {name: (values, [each.numpy() for each in weights]) for name, (values, weights) in found.items()}


def _plain() -> dict[str, Any]:
    return _sent(by_one_process())


def _found(name: str, devices: int) -> dict[str, Any]:
    strategy = make(name, devices=devices)
    return _sent({each: fitted(strategy(1), 1, made()) for each, made in EXAMPLES.items()})


@pytest.fixture(scope="module")
def expected() -> Any:
    return apart(_plain)


@pytest.mark.parametrize(("name", "devices"), [("xla_fsdp", 1), ("xla_fsdp_v2", 2)])
def test_callbacks_that_read_and_change_weights_are_the_same(
    name: str, devices: int, expected: dict[str, Any]
) -> None:
    found = apart(_found, name, devices)
    for each in EXAMPLES:
        assert_alike(
            *((values, list(map(torch.from_numpy, w))) for values, w in (found[each], expected[each]))
        )
