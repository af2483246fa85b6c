"""Errors: what they say after a wrong name, what catches them, and out-of-memory errors of torch."""

import pickle
import weakref

import pytest
import torch

from drivetrain.core import errors
from drivetrain.core.errors import DrivetrainError, MissingDependencyError, nearest
from drivetrain.core.out_of_memory import clear_frames, is_out_of_memory

KINDS = [each for each in vars(errors).values() if isinstance(each, type)]
ALL = [each for each in KINDS if issubclass(each, DrivetrainError) and each is not MissingDependencyError]


def test_a_misspelt_name_is_answered_with_the_nearest_and_all_in_order() -> None:
    for name, meant in {"adamv": "adamw", "AdamW": "adamw", "sdg": "sgd", "mse": "MSE"}.items():
        assert nearest(name, ["sgd", "adamw", "MSE"]).startswith(f"Did you mean {meant!r}? ")
    assert nearest("qqqq", ["b", "c", "a"]) == "Allowed: 'a', 'b', 'c'."
    assert nearest("", iter(["a"])) == "Allowed: 'a'."
    assert nearest("a", []) == "Allowed: none."


def test_errors_are_caught_by_one_class_and_by_pythons_and_reach_another_process() -> None:
    missing = MissingDependencyError("deepspeed", "deepspeed", "strategy 'zero3'")
    assert str(missing) == (
        "strategy 'zero3' needs the package 'deepspeed', which is not installed. "
        "Install it with: pip install 'drivetrain[deepspeed]'"
    )
    for error in (missing, *(kind("what went wrong") for kind in ALL)):
        arrived = pickle.loads(pickle.dumps(error))
        assert isinstance(error, DrivetrainError)
        assert (type(arrived), str(arrived)) == (type(error), str(error))
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.NonFiniteError, ArithmeticError)
    assert issubclass(MissingDependencyError, ImportError)


def test_out_of_memory_errors_are_recognised() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**58)
    lack = [
        caught.value,
        torch.OutOfMemoryError("CUDA out of memory."),
        MemoryError(),
        RuntimeError("MPS backend out of memory (MPS allocated: 8 GB)"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
    ]
    other = [RuntimeError("mat1 and mat2 shapes cannot be multiplied"), ValueError("out of memory")]
    assert [is_out_of_memory(each) for each in (*lack, *other)] == [True] * len(lack) + [False] * len(other)


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
