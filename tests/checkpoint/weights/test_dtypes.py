"""Names of dtypes as people write them, and conversions that lose no number."""

import math

import pytest
import torch

from drivetrain.checkpoint.weights.dtypes import FLOATS, cast, check_range, floating_dtype
from drivetrain.core.errors import CheckpointError


def test_a_dtype_may_be_given_in_any_of_its_names():
    assert floating_dtype(None) is None
    for name, dtype in FLOATS.items():
        assert floating_dtype(name) is floating_dtype(dtype) is floating_dtype(f"torch.{name}") is dtype


def test_cast_never_makes_a_finite_number_infinite():
    for source in (torch.float64, torch.float32, torch.bfloat16, torch.float8_e8m0fnu):
        tensor = torch.tensor([1.0, 2.0**17], dtype=torch.float64).to(source)
        with pytest.raises(CheckpointError, match=r"it has the number 131072, but .* torch.float16"):
            cast(tensor, torch.float16, "it")
        if source != torch.float8_e8m0fnu:
            with pytest.raises(CheckpointError, match=r"the number -131072"):
                cast(-tensor, torch.float16, "it")
    # Rounding up to infinity counts, and rounding down to the end does not.
    assert cast(torch.tensor([65519.0]), torch.float16, "it").item() == 65504
    with pytest.raises(CheckpointError, match=r"the number 65520"):
        cast(torch.tensor([65520.0]), torch.float16, "it")


def test_cast_leaves_what_needs_no_change():
    tensor = torch.tensor([math.inf, -math.inf, math.nan, 1.0])
    assert repr(cast(tensor, torch.float16, "it").tolist()) == repr(tensor.tolist())
    assert cast(tensor, torch.float32, "it") is tensor
    assert cast(torch.ones(0, 3), torch.float16, "it").shape == (0, 3)
    check_range(torch.tensor([1e300], dtype=torch.float64), torch.float64, "it")
