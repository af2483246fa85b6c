"""The conformance suite finds what is wrong; the strategies' own tests have what passes it."""

from typing import Any

import pytest
import torch
import torch._dynamo  # here and not in each of the processes, which are copies of this one
import torch.distributed.fsdp
import torchmetrics  # noqa: F401  for the same reason

from drivetrain import ConfigError
from drivetrain.distributed.ranks import ALONE
from drivetrain.strategies import Strategy
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.testing.strategies.check import CHECKS, check_strategy

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def ddp(world_size: int) -> Strategy:
    return DDP(world_size=world_size)


def fsdp(world_size: int) -> Strategy:
    return FSDP(world_size=world_size)


class Summing(DDP):  # forgets that the shares are of all ranks' weight
    def backward(self, loss: Any, factor: Any = None, inputs: Any = None) -> None:
        super().backward(loss, None, inputs)


class Deaf(DDP):  # never exchanges a gradient
    def microbatch(self, model: Any, last: bool) -> None:
        super().microbatch(model, False)

    def synchronize(self, parameters: Any) -> None:
        pass


class Exaggerating(DDP):  # tells of a norm that is too large by a thousandth
    def clip_grad_norm(self, parameters: Any, max_norm: float) -> Any:
        return super().clip_grad_norm(parameters, max_norm) * 1.001


class Stubborn(DDP):  # leaves each process the values that it has made
    def prepare(self, module: Any, make_optimizers: Any, precision: Any) -> Any:
        own = [each.detach().clone() for each in module.parameters()]
        prepared = super().prepare(module, make_optimizers, precision)
        with torch.no_grad():
            for each, value in zip(module.parameters(), own, strict=True):
                each.copy_(value)
        return prepared


class Unweighted(FSDP):  # takes every micro-batch for as much of the window as every other
    def backward(self, loss: Any, factor: Any = None, inputs: Any = None) -> None:
        super().backward(loss, None, inputs)


class Thawing(DDP):  # trains what is frozen
    def prepare(self, module: Any, make_optimizers: Any, precision: Any) -> Any:
        module.requires_grad_(True)
        return super().prepare(module, make_optimizers, precision)


class Waiting(DDP):  # waits for the gradients of all that it once trained
    def retrain(self, model: Any) -> Any:
        return model


class Untying(DDP):  # gives each module a weight of its own
    def prepare(self, module: Any, make_optimizers: Any, precision: Any) -> Any:
        module.task.head.weight = torch.nn.Parameter(module.task.head.weight.detach().clone())
        return super().prepare(module, make_optimizers, precision)


class Parroting(DDP):  # draws the same on every rank, at every step
    def microbatch(self, model: Any, last: bool) -> None:
        torch.manual_seed(0)
        super().microbatch(model, last)


class Rereading(DDP):  # reads the first share of the data on every rank
    @property
    def data_rank(self) -> int:
        return 0


class Isolated(DDP):  # does not say who the other processes are
    def setup(self) -> None:
        super().setup()
        self.ranks = ALONE


class Wrapping(DDP):  # puts a wrapper inside of the task, where its name is seen
    def prepare(self, module: Any, make_optimizers: Any, precision: Any) -> Any:
        module.task.head = torch.nn.Sequential(module.task.head)
        return super().prepare(module, make_optimizers, precision)


class Drifting(DDP):  # has a state that no checkpoint knows
    steps = 0

    def optimizer_step(self, optimizer: Any) -> bool:
        self.steps += 1
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.add_(1e-4 * self.steps)
        return super().optimizer_step(optimizer)


FAULTS: list[tuple[type[DDP | FSDP], str, str]] = [
    (Summing, "same_as_the_big_batch", "the weights .* on rank"),
    (Deaf, "same_as_the_big_batch", "the weights .* on rank"),
    (Exaggerating, "same_as_the_big_batch", "the gradient's norm .* on rank"),
    (Stubborn, "all_begin_with_the_weights_of_rank_0", "the weights on rank"),
    (Unweighted, "a_process_may_begin_with_padding", ""),
    (Thawing, "frozen_and_tied", "the weights .*frozen.* on rank"),
    (Untying, "frozen_and_tied", "the weights .*tied.* on rank"),
    (Waiting, "parameters_may_be_unfrozen", "parameters were frozen after the run had started"),
    (Deaf, "generator_steps", "the weights .* on rank"),
    (Parroting, "each_rank_draws_for_itself", "with dropout.* on rank"),
    (Rereading, "evaluation_counts_each_sample_once", "sum of 1-by-1 on rank"),
    (Isolated, "all_ranks_see_the_same", "the logged values: rank 0 has"),
    (Wrapping, "checkpoints_have_plain_names", "stored as .*'head.0.weight'"),
    (Drifting, "resume_is_bitwise", "norms differ in a resume after step 1 on rank"),
    (Drifting, "resume_on_another_number_of_processes", "the weights after a resume to several processes"),
]


QUICK = {"same_as_the_big_batch", "resume_is_bitwise"}


@pytest.mark.parametrize(
    ("broken", "check", "found"),
    [
        pytest.param(*row, marks=() if row[1] in QUICK and row[0] is not Deaf else pytest.mark.nightly)
        for row in FAULTS
    ],
    ids=[f"{kind.__name__}-{check}" for kind, check, _ in FAULTS],
)
def test_a_wrong_strategy_is_told_what_differs(broken: type[DDP | FSDP], check: str, found: str) -> None:
    with pytest.raises(RuntimeError, match=f"(?s){found}.*in the check '{check}'"):
        check_strategy(lambda world_size: broken(world_size=world_size), checks=[check])


def test_every_check_has_found_a_fault_and_an_unknown_one_is_named() -> None:
    assert {check for _, check, _ in FAULTS} == set(CHECKS)
    with pytest.raises(ConfigError, match=r"no check 'same_as_a_big_batch'\. Did you mean 'same_as_the_big"):
        check_strategy(ddp, checks=["same_as_a_big_batch"])
