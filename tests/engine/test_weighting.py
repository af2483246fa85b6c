"""The window of one step: factors of micro-batches, reports, generators, labels that a loss leaves out."""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Duel, Regression, duels, pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from drivetrain import ConfigError, DataError, NonFiniteError, OptimizerConfig, StepOutput, TaskModule
from drivetrain.data import MicroBatch
from drivetrain.distributed.ranks import ALONE
from drivetrain.engine.placeholder import Placeholders
from drivetrain.engine.weighting import StepResult, weigh

WEIGHTS = torch.tensor([1.0, 5.0, 20.0])
LABELS = torch.tensor([1, 0, 2, 1, 1, 0, 2, 0])
PIXELS = torch.stack([LABELS, LABELS.roll(1)], dim=1)


def factors(*weights: float | Tensor) -> list[tuple[int, float | Tensor | None]]:
    window = [MicroBatch(number, weight) for number, weight in enumerate(weights)]
    pairs, _ = weigh(window, None, Placeholders())
    return [(micro_batch.batch, factor) for micro_batch, factor in pairs]


def test_shares_are_proportional_to_the_weights_and_add_up_to_one() -> None:
    assert factors(4, 4) == [(0, 0.5), (1, 0.5)]
    assert factors(6, 2) == [(0, 0.75), (1, 0.25)]
    assert sum(factor for _, factor in factors(3, 5, 7.5, 1) if isinstance(factor, float)) == 1
    assert factors(8) == factors(0.25) == [(0, None)]  # an only micro-batch is the whole, whatever its weight


def test_a_micro_batch_of_weight_zero_is_left_out() -> None:
    assert factors(0) == []
    assert factors(0, 0.0) == []
    assert factors(0, 3, 0, 1) == [(1, 0.75), (3, 0.25)]
    assert factors(0, 5) == [(1, 1.0)]


def test_a_weight_on_an_accelerator_is_not_read() -> None:
    """A tensor on "meta" stands in for it: reading its value is an error."""
    there = torch.ones((), device="meta")
    with pytest.raises(RuntimeError):
        bool(there)
    assert factors(there) == [(0, None)]
    window = [MicroBatch(number, weight) for number, weight in enumerate((there, 2, there))]
    for ranks in (None, ALONE):  # ALONE: as several ranks weigh them
        kept, _ = weigh(window, ranks, Placeholders())
        assert [each.batch for each, _ in kept] == [0, 1, 2]
        assert all(isinstance(factor, Tensor) and factor.device.type == "meta" for _, factor in kept)


def test_a_steps_values_are_means_by_weight_over_its_micro_batches() -> None:
    (step,) = quiet(max_steps=1, gradient_accumulation_steps=3).steps(Regression(), pairs(5, batch_size=2))
    task = Regression()
    samples = [task.training_step(batch).loss.item() for batch in pairs(5, batch_size=1)]
    assert (step.step, step.applied, step.grad_norm) == (0, True, None)
    assert step.loss == pytest.approx(sum(samples) / 5, rel=1e-6)
    assert step.metrics == {"loss": step.loss}
    assert step.loss == step.loss, "reading it does not use it up"


def test_each_step_reports_its_own_values() -> None:
    class Counting(Regression):
        calls = 0

        def training_step(self, batch: Any) -> StepOutput:
            self.calls += 1
            return StepOutput(super().training_step(batch).loss, metrics={"call": self.calls})

    steps = quiet(max_epochs=1, gradient_accumulation_steps=2).steps(Counting(), pairs(10))
    assert [(step.step, step.metrics["call"]) for step in steps] == [(0, 1.5), (1, 3.5), (2, 5)]


def train(body: Any, **options: Any) -> Any:  # the first step of a task whose step is `body(task, batch)`

    class Own(Duel):
        def training_step(self, batch: Mapping[str, Tensor]) -> Iterator[Any]:
            return (yield from body(self, batch))

    step, *_ = quiet(max_steps=1, **options).steps(Own(), DataLoader(duels(6), batch_size=2))
    return step


def spread(task: Duel, batch: Mapping[str, Tensor]) -> Tensor:
    return task.generator(batch["noise"]).std()


def body_of(*yielded: Any, returned: Any = None) -> Any:
    """A body that yields and returns these, or what they give for a loss."""

    def body(task: Duel, batch: Mapping[str, Tensor]) -> Iterator[Any]:
        loss = spread(task, batch)
        for each in yielded:
            yield each(loss) if callable(each) else each
        return returned(loss) if callable(returned) else returned

    return body


def generator(loss: Tensor) -> tuple[str, Tensor]:
    return "generator", loss


def test_a_generator_logs_what_it_yields_and_returns() -> None:
    more = {"total": torch.tensor(3.0), "count": 2}
    step = train(body_of(generator, returned=more), gradient_accumulation_steps=3)
    assert {**step.metrics, "generator_loss": 0} == {"generator_loss": 0, "total": 3, "count": 2}
    assert list(train(body_of(generator)).metrics) == ["generator_loss"]
    step = train(body_of(generator, returned=lambda loss: {"loss": loss * 2}), gradient_accumulation_steps=3)
    assert step.loss == pytest.approx(2 * step.metrics["generator_loss"], rel=1e-6)
    step = train(body_of(lambda loss: ("generator", {"loss": loss, "realism": loss * 0 + 0.5})))
    assert step.metrics["realism"] == 0.5


def test_refusals_of_generator_steps_and_their_losses() -> None:
    def by_turns(*turns: Any) -> Any:
        bodies = iter(turns)
        return lambda task, batch: next(bodies)(task, batch)

    def run(*yielded: Any, returned: Any = None) -> Any:
        return lambda: train(body_of(*yielded, returned=returned))

    accumulated = {"gradient_accumulation_steps": 2}
    twice, once = body_of(generator, generator), body_of(generator)
    other = body_of(lambda loss: ("discriminator", loss))
    nan = [(("loss", "extra"), torch.tensor([value, 2.0]), 2) for value in (1.0, math.nan)]
    cases: dict[str, tuple[Any, ...]] = {
        "a number returned": (run(generator, returned=3.0), "returned a float", "mapping"),
        "unequal numbers": (lambda: train(by_turns(twice, once), **accumulated), "same number of times"),
        "two names": (lambda: train(by_turns(once, other), **accumulated), "and 'discriminator'"),
        "no loss": (run(("generator", None)), "no loss"),
        "no yield": (run(), "never", "yielded an optimizer's name"),
        "unknown name": (run(lambda loss: ("discriminater", loss)), "Did you mean 'discriminator'"),
        "no value loss": (lambda: train(once).loss, "'loss'", "'generator_loss'"),
        "NaN": (lambda: StepResult(nan, True, None, 7).loss, "at step 7", "'loss'"),
    }
    assert_refused((ConfigError, DataError, NonFiniteError), cases)


@pytest.mark.parametrize("precision", ["32", "16-mixed"])
def test_a_generator_may_name_the_same_optimizer_more_than_once(precision: str) -> None:
    """The losses are small and in 32 bits, so that none overflows under the first loss scale."""
    before: list[Tensor] = []

    def repeating(task: Duel, batch: Mapping[str, Tensor]) -> Iterator[Any]:
        for _ in range(3):
            before.append(task.generator.weight.detach().clone())
            yield "generator", task.generator(batch["noise"]).float().square().mean() * 0.01
        yield "discriminator", task.discriminator(batch["real"]).float().mean() * 0.01

    assert train(repeating, precision=precision).applied
    assert len({tuple(each.flatten().tolist()) for each in before}) == len(before) == 3


class Tagger(TaskModule):  # gives each token one of five tags
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 5))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.net(tokens)

    def loss(self, outputs: Tensor, batch: Any, **options: Any) -> Tensor:
        labels = batch["labels"] if isinstance(batch, dict) else batch[-1]
        return F.cross_entropy(outputs.flatten(0, -2), labels.flatten(), **options)

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.1)


def tagger(**methods: Any) -> Tagger:
    return type("Tagger", (Tagger,), methods)()


COUNTED = {"loss_weight": lambda self, batch: (batch["labels"] != -100).sum()}


def tagged(ignored: int, as_dict: bool = True) -> list[Any]:
    made = []
    for length in (6, 3):
        tokens = torch.randint(7, (2, length), generator=torch.Generator().manual_seed(length))
        labels = tokens % 5
        labels[0, :ignored] = -100
        made.append({"tokens": tokens, "labels": labels} if as_dict else (tokens, labels))
    return made


def test_a_loss_weight_that_counts_labels_makes_accumulation_equal_to_the_large_batch() -> None:
    data = tagged(2)
    longest = {name: torch.cat([each[name].reshape(-1) for each in data])[None] for name in data[0]}

    def trained(task: TaskModule, given: list[Any]) -> Tensor:
        quiet(max_epochs=1, gradient_accumulation_steps=2).fit(task, given)
        return nn.utils.parameters_to_vector(task.parameters())

    whole = trained(tagger(**COUNTED), [longest])
    assert torch.allclose(trained(tagger(**COUNTED), data), whole, rtol=1e-6, atol=1e-7)
    assert not torch.allclose(trained(Tagger(), data), whole, rtol=1e-6, atol=1e-7)


ASSIGNED: dict[str, tuple[nn.Module, Any]] = {  # the loss, and the targets of 3 classes for all samples
    "weights": (nn.CrossEntropyLoss(WEIGHTS), LABELS),
    "ignored": (nn.NLLLoss(WEIGHTS, ignore_index=1), LABELS),
    "-100": (nn.CrossEntropyLoss(), LABELS.where(torch.arange(8) % 3 < 2, -100)),
    "pixels of -100": (nn.CrossEntropyLoss(), PIXELS.where(PIXELS != 1, -100)),
    "smoothed pixels": (nn.CrossEntropyLoss(WEIGHTS, ignore_index=2, label_smoothing=0.2), PIXELS),
    "probabilities": (nn.CrossEntropyLoss(WEIGHTS), F.one_hot(LABELS, 3) * 0.5 + 0.2),
    "a sum": (nn.CrossEntropyLoss(WEIGHTS, ignore_index=1, reduction="sum"), LABELS),
    "a sum of squares": (nn.MSELoss(reduction="sum"), F.one_hot(LABELS, 3).float()),
}


class Assigned(TaskModule):
    def __init__(self, loss: nn.Module, pixels: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.pixels = nn.Linear(4, 6 if pixels else 3), pixels
        self.loss = loss  # type: ignore[method-assign, assignment]

    def forward(self, x: Tensor) -> Tensor:
        outputs = self.net(x)
        return outputs.view(-1, 3, 2) if self.pixels else outputs

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.1)


def assigned(kind: str, size: int, **options: Any) -> tuple[Tensor, float]:
    """The weights after a step of 8 samples in batches of this size, and the loss of them in such batches."""
    loss, target = ASSIGNED[kind]
    task, generator = Assigned(loss, target.shape[1:] == (2,)), torch.Generator().manual_seed(1)
    samples = TensorDataset(torch.randn(8, 4, generator=generator), target)
    before = quiet(**options).validate(task, DataLoader(samples, size))["validation/loss"]
    quiet(max_epochs=1, **options).fit(task, DataLoader(samples, size))
    return task.net.weight.detach(), before


@pytest.mark.parametrize("kind", ASSIGNED)
def test_an_assigned_loss_of_torch_gives_its_own_gradient_for_any_split(kind: str) -> None:
    whole, value = assigned(kind, 8)
    plain = Assigned(*((loss := ASSIGNED[kind][0]), ASSIGNED[kind][1].shape[1:] == (2,)))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(1))
    loss(plain(x), ASSIGNED[kind][1]).backward()
    assert torch.allclose(plain.net.weight - 0.1 * plain.net.weight.grad, whole, atol=1e-6)
    for size, options in ((2, {"gradient_accumulation_steps": 4}), (8, {"micro_batch": 3})):
        split, of_parts = assigned(kind, size, **options)
        assert torch.allclose(split, whole, atol=1e-6)
        assert of_parts == pytest.approx(value, rel=1e-5)


def test_an_assigned_loss_of_torch_gives_its_own_gradient_on_two_ranks() -> None:
    options = {"strategy": "ddp", "devices": 2, "gradient_accumulation_steps": 2}
    kinds = ("-100", "ignored", "a sum")
    for ends in on_two_ranks(lambda: [assigned(kind, 2, **options) for kind in kinds]):
        for kind, (weight, value) in zip(kinds, ends, strict=True):
            whole, expected = assigned(kind, 8)
            assert torch.allclose(weight, whole, atol=1e-6)
            assert value == pytest.approx(expected, rel=1e-5)


def test_an_assigned_loss_whose_weight_cannot_be_known_is_refused() -> None:
    focal = type("Focal", (nn.CrossEntropyLoss,), {"forward": lambda self, *given: given[0].mean()})
    within = type("Within", (nn.Module,), {"forward": lambda self, *given: self.part(*given)})()
    within.part = nn.CrossEntropyLoss(WEIGHTS)

    def fit(loss: nn.Module, **methods: Any) -> Any:
        task = type("Own", (Assigned,), methods)(loss, False)
        return lambda: quiet(max_epochs=1).fit(task, [(torch.ones(2, 4), LABELS[:2])])

    step = {"training_step": lambda self, batch: self.loss(self(batch[0]), batch[1])}
    listed = {"metric_inputs": lambda self, outputs, batch: (outputs, batch[1].tolist())}
    found = {"metric_inputs": lambda self, outputs, batch: (outputs[0], batch[1])}
    table = {
        "none": (fit(nn.MSELoss(reduction="none")), "MSELoss(reduction='none')", "reduction='mean'"),
        "a step": (fit(nn.MSELoss(reduction="sum"), **step), "with training_step of the task"),
        "a weight": (fit(nn.MSELoss(reduction="sum"), **COUNTED), "with loss_weight of the task"),
        "a forward": (fit(focal(WEIGHTS)), "Own.loss, Focal", "loss_weight(self, batch)"),
        "within": (fit(within), "Own.loss, Within", "loss_weight(self, batch)"),
        "a target": (fit(nn.CrossEntropyLoss(), **found), "metric_inputs needs the outputs", "loss_weight"),
        "a list": (fit(nn.CrossEntropyLoss(), **listed), "the target of Own.loss is a list", "collate_fn"),
    }
    assert_refused((ConfigError, DataError), table)
    fit(focal(WEIGHTS), loss_weight=lambda self, batch: 1)()
    fit(focal())()
    fit(nn.CrossEntropyLoss(), **found, **step, forward=lambda self, x: self.net(x))()
    fit(nn.CrossEntropyLoss(WEIGHTS), **step)()
