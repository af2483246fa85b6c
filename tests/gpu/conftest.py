"""Tests that use an NVIDIA GPU where there is one: `make gpu`. Elsewhere their bodies run on the CPU."""

from collections.abc import Iterator

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:  # mark every test of this folder
    for item in items:
        if "tests/gpu/" in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)


@pytest.fixture
def device() -> str:  # the name of the strategy for one device
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(autouse=True)
def leaks_nothing() -> Iterator[None]:  # CUDA, NCCL and Triton keep threads and files open for good
    before = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    yield
    after = torch.get_default_dtype(), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled()
    assert after == before
    if torch.distributed.is_initialized():  # a group that a fit has made stays for the next
        torch.distributed.destroy_process_group()
    if torch.cuda.is_available():
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.empty_cache()
