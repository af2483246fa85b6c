"""Two samples are told apart by a few numbers of them, and the same one on two machines is not."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from drivetrain.data.fingerprint import fingerprint, matches


@dataclass
class Pair:
    image: Any
    label: int


IMAGE = torch.rand(3, 8, 8, generator=torch.Generator().manual_seed(0))


def test_what_differs_is_told_apart() -> None:
    different: tuple[tuple[Any, Any], ...] = (
        (IMAGE, IMAGE.flip(0)),
        (IMAGE, IMAGE.double()),
        ((IMAGE, torch.tensor(1)), (IMAGE, torch.tensor(2))),
        ({"x": 10_000}, {"x": 10_001}),
        (Pair(IMAGE, 1), Pair(IMAGE, 2)),
        (np.arange(5), np.arange(1, 6)),
        ("a line of text", "another"),
        ([b"bytes"], [b"byte"]),
        (torch.zeros(2), torch.zeros(3)),
        (torch.tensor([1 + 2j]), torch.tensor([2 + 1j])),
    )
    for one, other in different:
        assert matches(fingerprint(one), fingerprint(one))
        assert not matches(fingerprint(one), fingerprint(other)), (one, other)


def test_what_machines_make_differently_is_not_told_apart() -> None:
    same: tuple[tuple[Any, Any], ...] = (
        (IMAGE, IMAGE * (1 + 1e-6)),
        ({"x": IMAGE, "path": "/one/cat.png"}, {"x": IMAGE, "path": "/other/cat.png"}),
        (torch.tensor([float("nan")]), torch.tensor([float("nan")])),
        (object(), object()),
        (torch.empty(0), torch.empty(0)),
        (np.array(["a"]), np.array(["b"])),
    )
    assert all(matches(fingerprint(one), fingerprint(other)) for one, other in same)
