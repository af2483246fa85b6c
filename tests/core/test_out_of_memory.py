"""Out-of-memory errors: recognise them, and free what their frames hold."""

from __future__ import annotations

import weakref

import pytest
import torch

from drivetrain.core.out_of_memory import clear_frames, is_out_of_memory


def test_what_torch_really_raises_on_the_host_is_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), True),
        (MemoryError(), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
        (OSError("Cannot allocate memory"), False),
    ],
)
def test_errors_are_told_apart(error: Exception, lacks: bool) -> None:
    assert is_out_of_memory(error) is lacks


def test_what_the_frames_of_an_error_and_of_its_causes_hold_is_freed() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def fail() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise MemoryError

    def outer() -> None:
        try:
            fail()
        except MemoryError as error:
            raise RuntimeError("out of memory") from error

    try:
        outer()
    except RuntimeError as error:
        assert held[0]() is not None
        clear_frames(error)
        assert held[0]() is None
