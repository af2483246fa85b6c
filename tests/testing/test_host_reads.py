"""What would wait for a GPU is found on a CPU, with its line, and nothing else is."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.support.tasks import pairs, variant
from tests.testing.host_reads import HostReads, no_host_reads
from torch import Tensor

X = torch.arange(6.0)
WAITS: dict[str, Callable[[], object]] = {
    "_local_scalar_dense": lambda: X[0].item(),
    "tolist": lambda: X.tolist(),
    "cpu": lambda: X.cpu(),
    "to": lambda: X.to("cpu"),
    "__repr__": lambda: str(X),
    "__format__": lambda: f"{X}",
    "allclose": lambda: torch.allclose(X, X),
    "numpy": lambda: X.numpy(),
    "index": lambda: X[X > 2],
    "index_put_": lambda: X.clone().index_put_((X > 2,), torch.ones(3)),
    "nonzero": lambda: torch.where(X > 2),
    "masked_select": lambda: X.masked_select(X > 2),
    "_unique2": lambda: X.unique(),
    "bincount": lambda: X.long().bincount(),
    "equal": lambda: torch.equal(X, X + 1),
    "repeat_interleave": lambda: X.repeat_interleave(X.long()),
    "lift_fresh": lambda: torch.tensor(2.0),
}
NOTHING: dict[str, Callable[[], object]] = {
    "where": lambda: torch.where(X > 2, X, 0),
    "full": lambda: torch.full((), 2.0),
    "a number for chosen elements": lambda: X.clone().index_put_((X > 2,), X[:1]),
    "rows": lambda: X[X.long()],
    "known size": lambda: X.repeat_interleave(X.long(), output_size=15),
    "sum": lambda: (X + 1).sum(),
    "a Python number for chosen elements": lambda: X.clone().__setitem__(X > 2, 1.0),
    "a Python number for one": lambda: X.clone().__setitem__(0, 1.0),
}


def test_each_operation_that_waits_is_found_and_no_other() -> None:
    for name, act in {**WAITS, **NOTHING}.items():
        with HostReads() as found:
            act()
        assert len(found.reads) == (name in WAITS), name
        assert all(each.startswith(f"{name.strip()} at {__file__}:") for each in found.reads), name
    X[0].item()
    assert not found.reads


def test_a_task_that_waits_fails_with_the_operation_and_its_line_and_how_often() -> None:
    def loss(self: Any, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.sum() * outputs.detach().mean().item()

    line = f"{__file__}:{loss.__code__.co_firstlineno + 1}"
    with pytest.raises(AssertionError) as error:
        no_host_reads(variant(loss=loss)(), pairs(30), steps=3)
    assert "3 times in 3 steps, and 0 are allowed in each:" in str(error.value)
    assert f"3 x _local_scalar_dense at {line}: a number is read" in str(error.value)
    found = no_host_reads(variant(loss=loss)(), pairs(30), steps=3, allowed=1)
    assert [line in each for each in found] == 3 * [True]


def test_on_a_gpu_torchs_warnings_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[object] = []
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with HostReads("cuda") as found:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation (Triggered internally)", stacklevel=1)
        X[0].item()  # on the host
        with pytest.warns(UserWarning, match="another"):
            warnings.warn("another", stacklevel=1)
    assert [f" at {__file__}:" in each for each in found.reads] == [True, True]
    assert modes == ["warn", 0]
