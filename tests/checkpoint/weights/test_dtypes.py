"""Names of dtypes as people write them, and conversions that lose no number."""

import math

import pytest
import torch

from drivetrain.checkpoint.weights.dtypes import FLOATS, cast, check_range, floating_dtype
from drivetrain.core.errors import CheckpointError, ConfigError


def test_a_dtype_may_be_given_in_any_of_its_names():
    assert floating_dtype(None) is None
    for name, dtype in FLOATS.items():
        assert floating_dtype(name) is floating_dtype(dtype) is floating_dtype(f"torch.{name}") is dtype


@pytest.mark.parametrize("given", ["bf61", "int8", torch.int64, torch.float8_e4m3fn, torch.complex64, "", 16])
def test_another_is_refused_with_those_there_are(given):
    with pytest.raises(ConfigError, match=r"cannot be converted to the dtype .*Allowed: 'bf16', 'bfloat16'"):
        floating_dtype(given)


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_a_finite_number_never_becomes_infinite(source):
    tensor = torch.tensor([1.0, 2.0**17], dtype=torch.float64).to(source)
    with pytest.raises(CheckpointError, match=r"it has the number 131072, but the largest of torch.float16"):
        cast(tensor, torch.float16, "it")
    if source.is_signed and source != torch.float8_e8m0fnu:
        with pytest.raises(CheckpointError, match=r"the number -131072"):
            cast(-tensor, torch.float16, "it")


def test_rounding_up_to_infinity_counts_and_rounding_down_to_the_end_does_not():
    assert cast(torch.tensor([65519.0]), torch.float16, "it").item() == 65504
    with pytest.raises(CheckpointError, match=r"the number 65520"):
        cast(torch.tensor([65520.0]), torch.float16, "it")


def test_what_is_infinite_or_no_number_stays_so():
    tensor = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert repr(cast(tensor, torch.float16, "it").tolist()) == repr(tensor.tolist())


def test_the_same_dtype_takes_no_copy_and_an_empty_tensor_is_no_trouble():
    tensor = torch.ones(3)
    assert cast(tensor, torch.float32, "it") is tensor
    assert cast(torch.ones(0, 3), torch.float16, "it").shape == (0, 3)
    check_range(torch.tensor([1e300], dtype=torch.float64), torch.float64, "it")
