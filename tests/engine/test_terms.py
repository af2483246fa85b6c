"""Terms of a loss with denominators of their own: any split of a batch makes the step of the whole batch."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Duel, duels, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from drivetrain import ConfigError, OptimizerConfig, StepOutput, TaskModule, Term

SAMPLES, TOKENS, WORDS, RATE = 16, 6, 11, 0.3


def batch_of(
    indices: list[int],
) -> dict[str, Tensor]:  # some samples without a label, and some without a route
    generator = torch.Generator().manual_seed(0)
    words, labels = torch.randint(0, WORDS, (2, SAMPLES, TOKENS), generator=generator)
    lengths, routed = torch.randint(0, TOKENS + 1, (2, SAMPLES, 1), generator=generator)
    lengths[[2, 9, 12]] = 0
    place = torch.arange(TOKENS)
    columns = {"words": words, "labels": labels.where(place < lengths, -100), "routed": place < routed}
    return {name: column[indices] for name, column in columns.items()}


def loader(size: int) -> DataLoader[Any]:
    return DataLoader(range(SAMPLES), batch_size=size, collate_fn=batch_of)


class Mixture(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding, self.router, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, 3), nn.Linear(8, WORDS)
        self.register_buffer("forwards", torch.zeros(()))
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=generator))

    def forward(self, words: Tensor) -> Tensor:
        self.forwards += 1
        return self.embedding(words)

    def means(self, hidden: Tensor, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        cross_entropy = F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten())
        routes, routed = self.router(hidden), batch["routed"]
        balance = (routes.softmax(-1).square().sum(-1) * routed).sum() / routed.sum()
        return cross_entropy, balance, routes.logsumexp(-1).square().mean()

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Mapping[str, Any]:
        cross_entropy, balance, z = self.means(outputs, batch)
        return {
            "loss": cross_entropy,
            "balance": Term(balance, weight=batch["routed"].sum(), scale=0.5),
            "z": Term(z, weight=len(outputs), scale=0.1),
            "half": cross_entropy / 2,
        }

    def loss_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return (batch["labels"] != -100).sum()

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=RATE)


def plain() -> tuple[Mixture, float]:  # after two steps of whole batches; and the balance of the second
    task = Mixture()
    optimizer = torch.optim.SGD(task.parameters(), lr=RATE)
    for batch in loader(8):
        cross_entropy, balance, z = task.means(task(batch["words"]), batch)
        optimizer.zero_grad()
        (cross_entropy + 0.5 * balance + 0.1 * z).backward()
        optimizer.step()
    return task, balance.item()


def check(size: int, **options: Any) -> dict[str, float]:
    task, (expected, balance) = Mixture(), plain()
    metrics = quiet(max_epochs=1, log_every=1, **options).fit(task, loader(size), loader(3)).metrics
    for given, wanted in zip(task.parameters(), expected.parameters(), strict=True):
        assert (given - wanted).abs().max() < 1e-6 * wanted.abs().max()
    assert metrics["train/balance"] == pytest.approx(balance, rel=1e-6)
    return metrics


@pytest.mark.parametrize(
    ("size", "count", "part"),
    [(8, 1, None), (4, 2, None), (1, 8, None), (8, 1, 1), (4, 2, 3), (8, 1, "auto")],
)
def test_any_split_of_a_batch_makes_the_step_of_the_whole_batch(size: int, count: int, part: Any) -> None:
    metrics = check(size, gradient_accumulation_steps=count, micro_batch=part)
    assert {*metrics} >= {"train/loss", "train/half", "train/balance", "train/z", "validation/z"}
    assert metrics["train/half"] == pytest.approx(metrics["train/loss"] / 2)


def test_ranks_make_the_step_of_the_whole_batch() -> None:
    def on_rank() -> None:
        for name, size, count in (("ddp", 4, 1), ("ddp", 1, 4), ("fsdp", 4, 1), ("fsdp", 1, 4)):
            check(size, devices=2, strategy=name, gradient_accumulation_steps=count)
        check(4, devices=2, strategy="ddp", micro_batch=1)

    on_two_ranks(on_rank)


def test_forwards_for_the_weights_leave_no_trace() -> None:
    task = Mixture()
    draws: list[Tensor] = []
    task.embedding.register_forward_hook(lambda *_: draws.append(torch.rand(1)))
    quiet(max_steps=1, gradient_accumulation_steps=4).fit(task, loader(2))
    assert (float(task.forwards), draws[1:4]) == (4, draws[4:])


def returning(
    *returned: Any, **options: Any
) -> Any:  # fits; steps return these, or what they give for a loss
    class Own(Mixture):
        def training_step(self, batch: Mapping[str, Tensor]) -> Any:
            loss = self(batch["words"]).square().mean()
            given = returned[min(int(self.forwards), len(returned)) - 1]
            return given(loss) if callable(given) else given

        loss_weight = TaskModule.loss_weight

    data = DataLoader(range(4), batch_size=2, collate_fn=batch_of)
    return lambda: quiet(max_steps=1, gradient_accumulation_steps=2, **options).fit(Own(), data)


def with_term(**term: Any) -> Any:
    return lambda loss: {"loss": loss, "balance": Term(**{"value": loss, "weight": 2, **term})}


def test_refusals_of_terms() -> None:
    class Yielding(Duel):
        def training_step(self, batch: Mapping[str, Tensor]) -> Any:
            loss = self.generator(batch["noise"]).std()
            yield "generator", {"loss": loss, "more": Term(loss, weight=1)}

    cases: dict[str, Any] = {
        "the loss itself": (returning(lambda loss: {"loss": Term(loss, 3)}), "'loss'", "loss_weight"),
        "only a term": (returning(lambda loss: Term(loss, 3)), "a Term", "mapping with 'loss'"),
        "a metric": (
            returning(lambda loss: StepOutput(loss, metrics={"x": Term(loss, 3)})),
            "'x'",
            "only logged",
        ),
        "negative weight": (returning(with_term(weight=-1)), "weight=", "'balance'", "0 or more, not -1"),
        "infinite weight": (returning(with_term(weight=torch.tensor(math.inf))), "weight=", "finite"),
        "weights of samples": (returning(with_term(weight=torch.ones(2))), "weight=", "shape (2,)"),
        "no scalar": (
            returning(lambda loss: with_term(value=loss.expand(2))(loss)),
            "'balance'",
            "shape (2,)",
        ),
        "scale": (returning(with_term(scale="1")), "scale=", "'balance'", "'1'"),
        "later": (returning(lambda loss: loss, with_term()), "['balance']", "first micro-batch []"),
        "missing": (returning(with_term(), lambda loss: loss), "terms []", "Term(0.0, weight=0)"),
        "yielded": (lambda: quiet(max_steps=1).fit(Yielding(), DataLoader(duels(2), 2)), "['more']"),
    }
    assert_refused(ConfigError, cases)
