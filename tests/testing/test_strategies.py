"""The conformance suite: what passes it, and that it finds what is wrong."""

import pytest
import torch

from drivetrain.strategies.ddp import DDP, DDPConfig
from drivetrain.testing.strategies import CHECKS, check_strategy

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def ddp(world_size):
    return DDP(world_size=world_size)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_ddp_conforms(world_size):
    check_strategy(ddp, world_size)


@pytest.mark.parametrize(
    "config",
    [
        DDPConfig(find_unused_parameters=True),
        DDPConfig(static_graph=True, gradient_as_bucket_view=False, bucket_mb=0.0001),
        DDPConfig(communication="fp16"),
    ],
    ids=["find_unused_parameters", "static_graph", "fp16"],
)
def test_the_options_of_ddp_conform(config):
    tolerance = 1e-6 if config.communication is None else 2e-3
    check_strategy(
        lambda world_size: DDP(config, world_size=world_size),
        checks=["same_as_the_big_batch", "all_ranks_see_the_same"],
        tolerance=tolerance,
    )


@pytest.mark.parametrize(
    ("precision", "tolerance"), [("64", 1e-6), ("bf16-mixed", 0.05), ("bf16-true", 0.1), ("16-mixed", 0.05)]
)
def test_ddp_conforms_in_every_precision(precision, tolerance):
    checks = ["same_as_the_big_batch", "all_ranks_see_the_same", "resume_is_bitwise"]
    check_strategy(ddp, checks=checks, precision=precision, tolerance=tolerance)


class Summing(DDP):
    """Forgets that the shares are of all ranks' weight."""

    def backward(self, loss, share=None, inputs=None):
        super().backward(loss, None, inputs)


class Deaf(DDP):
    """Never exchanges a gradient."""

    def microbatch(self, model, last):
        super().microbatch(model, False)

    def synchronize(self, parameters):
        pass


class Forgetful(DDP):
    """Loses what it has learned of the gradients' place in memory: not to be told at two ranks."""

    def clip_grad_norm(self, parameters, max_norm):
        return super().clip_grad_norm(parameters, max_norm) * 1.001


@pytest.mark.parametrize(
    ("broken", "check", "found"),
    [
        (Summing, "same_as_the_big_batch", "the weights"),
        (Deaf, "same_as_the_big_batch", "the weights"),
        (Deaf, "generator_steps", "the weights"),
        (Forgetful, "same_as_the_big_batch", "the gradient's norm"),
    ],
)
def test_a_strategy_that_is_wrong_is_told_what_differs(broken, check, found):
    with pytest.raises(RuntimeError, match=f"{found} .* on rank"):
        check_strategy(lambda world_size: broken(world_size=world_size), checks=[check])


def test_a_check_that_does_not_exist_is_named():
    with pytest.raises(RuntimeError, match="no check 'sameness'; there are same_as_the_big_batch"):
        check_strategy(ddp, checks=["sameness"])
    assert len(CHECKS) >= 7
