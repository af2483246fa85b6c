"""Each strategy goes on from the checkpoints of every other, on any number of processes."""

import pytest
import torch
import torch._dynamo  # here and not in each of the processes, which are copies of this one
import torch.distributed.fsdp
import torchmetrics  # noqa: F401  for the same reason
from tests.strategies.resuming import check_resume
from tests.testing.strategies.test_check import Drifting, Rereading, ddp, fsdp

from drivetrain.strategies import SingleDevice, Strategy

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def single(world_size: int) -> Strategy:
    return SingleDevice("cpu")


@pytest.mark.landing
def test_ddp_and_fsdp_resume_from_one_anothers_checkpoints() -> None:
    assert check_resume({"ddp": ddp, "fsdp": fsdp}, (2,)) == 4


@pytest.mark.nightly
def test_every_strategy_resumes_from_every_other_on_any_number_of_processes() -> None:
    assert check_resume({"single": single, "ddp": ddp, "fsdp": fsdp}) == 49
    assert check_resume({"ddp": ddp}, (2, 3)) == 4


@pytest.mark.landing
def test_what_differs_is_told_with_who_saved_and_who_resumed() -> None:
    for broken, found in {
        Rereading: r"of \(epoch, sample\) \[\(0, ",
        Drifting: r"the losses \(saved",
    }.items():
        with pytest.raises(RuntimeError, match=found) as caught:
            check_resume({"broken": lambda world_size, kind=broken: kind(world_size=world_size)}, (2,))
        assert "saved under broken on 2, resumed under broken on 2" in str(caught.value)
