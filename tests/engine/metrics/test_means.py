"""The scalars that steps return: how they are read, averaged and stored, and refused when not finite."""

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet, variant

from drivetrain import ConfigError, LambdaCallback, NonFiniteError, StepOutput
from drivetrain.checkpoint import pack, unpack
from drivetrain.distributed.ranks import Ranks
from drivetrain.engine.metrics.means import FOLD, MetricBuffer, is_loss, refuse_nonfinite
from drivetrain.task.output import read_output

Returned = dict[str, float]


def add(buffer: MetricBuffer, step: int, values: Returned, weight: Any = 1.0) -> None:
    _, names, scalars, *_ = read_output({name: torch.tensor(value) for name, value in values.items()})
    buffer.add([(names, scalars, weight)], step)


def buffer_of(*rows: tuple[Returned, Any]) -> MetricBuffer:  # with these values and weights, from step 0 on
    buffer = MetricBuffer()
    for step, (values, weight) in enumerate(rows):
        add(buffer, step, values, weight)
    return buffer


def mean(pairs: list[tuple[float, float]]) -> float:  # the weighted mean, summed without any rounding
    return math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)


def made(count: int, seed: int = 0) -> list[tuple[Returned, float]]:
    source = random.Random(seed)
    value = lambda: float(np.float32(source.uniform(-5, 5)))  # noqa: E731
    return [({"loss": value(), "accuracy": value()}, float(source.randint(1, 900))) for _ in range(count)]


def values_of(output: Any) -> dict[str, float]:
    _, names, scalars, *_ = read_output(output)
    assert not scalars.requires_grad
    return dict(zip(names, scalars.reshape(-1).tolist(), strict=True))


def test_the_loss_is_optimised_with_its_graph_and_everything_is_logged_without() -> None:
    class Mine(StepOutput):
        pass

    loss, half, norm = torch.tensor(2.0, requires_grad=True) * 3, torch.tensor(0.5), torch.tensor(9.0)
    for output, more in (
        (loss, {}),
        ({"accuracy": half, "loss": loss, "beam": 3}, {"accuracy": 0.5, "beam": 3.0}),
        (Mine(loss, "outputs", None), {}),
        (Mine(loss, "outputs", {"accuracy": half}), {"accuracy": 0.5}),
        (Mine({"loss": loss, "norm": norm}, "outputs", {}), {"norm": 9.0}),
        (Mine({"loss": loss, "norm": norm}, "outputs", {"accuracy": half}), {"norm": 9.0, "accuracy": 0.5}),
    ):
        optimised, _, _, outputs, *_ = read_output(output)
        assert optimised is loss
        assert outputs == ("outputs" if isinstance(output, StepOutput) else None)
        assert values_of(output) == {"loss": 6.0, **more}


def test_a_validation_step_may_return_nothing_or_metrics_alone() -> None:
    assert read_output(None) == (None, (), None, None, None, None)
    alone = StepOutput(None, metrics={"loss": torch.tensor(2.0)})  # type: ignore[arg-type]
    assert read_output(alone)[0] is None
    assert values_of(alone) == {"loss": 2.0}


def test_scalars_in_a_shape_of_one_and_numbers_of_python_and_numpy_keep_their_digits() -> None:
    assert read_output(torch.tensor([[2.0]]))[0].shape == ()
    assert values_of({"loss": torch.tensor([2.0]), "a": torch.tensor([[1.0]])}) == {"loss": 2.0, "a": 1.0}
    more = {"tenth": 0.1, "count": 2**40 + 1, "yes": True, "numpy": np.float64(0.3), "half": np.float16(0.5)}
    read = values_of({"loss": torch.tensor(1 / 3, dtype=torch.float64), **more})
    assert read == {"loss": 1 / 3, "tenth": 0.1, "count": 2**40 + 1, "yes": 1.0, "numpy": 0.3, "half": 0.5}
    running = torch.tensor(1.0)
    _, _, scalars, *_ = read_output({"loss": torch.tensor(0.0), "running": running})
    running += 5  # a value that the task goes on changing was read when it was returned
    assert scalars.tolist() == [0.0, 1.0]


def test_refusals_of_what_cannot_be_optimised_or_logged() -> None:
    one, nan = torch.tensor(1.0), torch.tensor(torch.nan)
    outputs: dict[str, tuple[Any, ...]] = {
        "a number": (0.5, "a float", "a scalar tensor"),
        "a tuple": ((one, 2), "a tuple"),
        "no loss": ({"accuracy": one}, "without 'loss'", "'accuracy'", "StepOutput(None"),
        "a number as loss": ({"loss": 0.5}, "'loss' must be a tensor, not a float"),
        "a vector": (torch.ones(3), "'loss'", "(3,)"),
        "vectors": (StepOutput(None, metrics={"a": torch.ones(2), "b": torch.ones(2)}), "'a'", "(2,)"),
        "a text": ({"loss": one, "name": "good"}, "'name'", "a str"),
        "loss twice by name": (StepOutput({"loss": nan}, metrics={"loss": one}), "'loss' twice"),
    }
    cases = {name: (lambda o=output: read_output(o), *words) for name, (output, *words) in outputs.items()}
    assert_refused(ConfigError, cases)


def test_means_are_weighted_by_micro_batch() -> None:
    assert buffer_of(({"loss": 1.0}, 1.0), ({"loss": 4.0}, 2.0)).means() == {"loss": 3.0}
    buffer = MetricBuffer()
    buffer.add([(("loss",), torch.tensor(value), weight) for value, weight in ((1.0, 3.0), (5.0, 1.0))], 0)
    assert buffer.means() == {"loss": 2.0}
    for weight in (torch.tensor(3), torch.tensor([3.0]), torch.tensor(3.0, dtype=torch.float64)):
        assert buffer_of(({"loss": 1.0}, 1.0), ({"loss": 5.0}, weight)).means() == {"loss": 4.0}


@pytest.mark.parametrize("count", [1, FOLD - 1, FOLD, FOLD + 1, 3 * FOLD + 5])
def test_means_are_exact_however_long_the_interval(count: int) -> None:
    """Sums of float32 values in float64; where they are folded on the way is seen in memory alone."""
    buffer, rows = MetricBuffer(), made(count)
    for step, (values, weight) in enumerate(rows):
        add(buffer, step, values, weight)
        assert buffer.state_dict()["adds"] < FOLD
    means = buffer.means()
    for name in ("loss", "accuracy"):
        assert means[name] == pytest.approx(mean([(values[name], w) for values, w in rows]), rel=1e-14)


def test_names_that_come_and_go_are_means_over_where_they_were() -> None:
    second, third = ({"loss": 4.0, "penalty": 10.0}, 1.0), ({"penalty": 20.0, "loss": 7.0}, 3.0)
    means = buffer_of(({"loss": 1.0}, 2.0), second, third).means()
    assert means == {"loss": (2 + 4 + 21) / 6, "penalty": (10 + 60) / 4}
    assert list(means) == ["loss", "penalty"]


@pytest.mark.parametrize("count", [3, FOLD + 1])
def test_reading_changes_nothing_and_resetting_forgets(count: int) -> None:
    buffer = buffer_of(*(({"loss": float(step)}, 1.0) for step in range(count)))
    buffer.check()
    first = buffer.means()
    buffer.check()
    assert buffer.means() == first
    add(buffer, 500, {"loss": 1000.0})
    assert buffer.means() != first
    buffer.reset()
    assert buffer.means() == {}
    add(buffer, 501, {"loss": 8.0})
    assert buffer.means() == {"loss": 8.0}


def test_a_value_of_weight_zero_takes_no_part_whatever_it_is() -> None:
    """The mean loss of a batch of padding alone is 0 / 0; a mean over nothing is no number."""
    for bad in (torch.nan, torch.inf):
        buffer = buffer_of(({"loss": 3.0}, 2.0), ({"loss": bad}, 0.0))
        assert buffer.means() == {"loss": 3.0}
        buffer.check()
    assert math.isnan(buffer_of(({"loss": 3.0}, 0.0)).means()["loss"])


def test_values_in_16_bits_are_summed_in_64() -> None:
    buffer = MetricBuffer()
    for step in range(301):
        value = torch.tensor(302.0 if step == 300 else 1.0, dtype=torch.bfloat16)
        buffer.add([(("loss",), value, 1.0)], step)
    assert buffer.means() == {"loss": 602 / 301}


def test_means_on_ranks_are_over_the_samples_of_all() -> None:
    """Rank 0 has batches of two samples and rank 1 of one, with values of their own."""

    def run() -> list[float]:
        logged: list[dict[str, float]] = []
        step = lambda self, batch: {"loss": 0 * self(batch[0]).sum() + batch[0].mean()}  # noqa: E731
        task = variant(training_step=step, validation_step=step)()
        note = LambdaCallback(on_log=lambda run: logged.append(dict(run.logged)))
        batches = [(torch.full((2 - number % 2, 4), 10.0**number),) for number in range(4)]
        trainer = quiet(max_epochs=1, log_every="2 steps", strategy="ddp", devices=2, callbacks=[note])
        trainer.fit(task, batches, batches)
        return [value for each in logged for value in each.values()]

    expected = (2 * 1 + 10 + 2 * 100 + 1000) / 6
    assert on_two_ranks(run) == [[pytest.approx(expected, rel=1e-6)] * 2] * 2


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("at", "copies", "where"), [(0, 1, "rank 0"), (FOLD + 7, 2, "ranks 0 to 1")])
def test_a_loss_that_is_not_finite_is_an_error_that_names_its_first_step(
    bad: float, at: int, copies: int, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Ranks, "all_gather", lambda _, value: [value])
    buffer = MetricBuffer(Ranks(copies=copies))  # ranks that have the same samples
    for step in range(2 * FOLD):
        add(buffer, 1000 + step, {"loss": bad if step >= at else 1.0, "accuracy": 0.5})
    message = rf"NaN or infinite at step {1000 + at} on {where}: 'loss' \(from step {1000 + at}\)\."
    for look in (buffer.means, buffer.check):
        with pytest.raises(NonFiniteError, match=message):
            look()


def test_every_bad_value_is_named_with_where_it_began() -> None:
    buffer = buffer_of(({"loss": 1.0, "norm": torch.inf}, 1.0), ({"loss": torch.nan, "norm": torch.inf}, 1.0))
    both = r"at step 0 .*: 'loss' \(from step 1\), 'norm' \(from step 0\)"
    with pytest.raises(NonFiniteError, match=both):
        buffer.means()
    buffer = MetricBuffer()  # also where the names changed
    add(buffer, 3, {"loss": torch.nan})
    add(buffer, 9, {"loss": torch.nan, "penalty": 1.0})
    for look in (buffer.check, buffer.means):
        with pytest.raises(NonFiniteError, match=r"at step 3 .*: 'loss' \(from step 3\)"):
            look()


def test_a_metric_that_is_not_finite_and_an_evaluations_loss_are_shown_and_stop_nothing() -> None:
    buffer = buffer_of(({"loss": 1.0, "perplexity": torch.inf}, 1.0), ({"loss": 3.0, "perplexity": 2.0}, 1.0))
    buffer.check()
    assert buffer.means() == {"loss": 2.0, "perplexity": math.inf}
    assert math.isnan(buffer_of(({"loss": torch.nan}, 1.0)).means(refuse_nonfinite=False)["loss"])
    names = ("loss", "generator_loss", "losses", "lossy")
    assert [name for name in names if is_loss(name)] == ["loss", "generator_loss"]


def test_the_losses_of_a_skipped_step_are_looked_at_too() -> None:
    good = (("loss", "norm"), torch.tensor([1.0, torch.inf]), 1.0)
    refuse_nonfinite([good], 3)
    with pytest.raises(NonFiniteError, match="at step 3 on rank 1: 'loss'"):
        refuse_nonfinite([good, (("loss",), torch.tensor(torch.nan), 1.0)], 3, rank=1)


def stored(buffer: MetricBuffer) -> dict[str, Any]:  # the state as it comes back from a checkpoint
    packed, tensors = pack(buffer.state_dict())
    tree = unpack(json.loads(json.dumps(packed)), {name: tensor.clone() for name, tensor in tensors.items()})
    assert isinstance(tree, dict)
    return tree


def bits(means: dict[str, float]) -> dict[str, str]:
    return {name: value.hex() for name, value in means.items()}


@pytest.mark.parametrize("tensors", [False, True], ids=["", "weights that are tensors"])
@pytest.mark.parametrize("stop", [0, 1, FOLD - 1, FOLD, FOLD + 1, 3 * FOLD + 9])
def test_a_state_stored_in_the_middle_goes_on_to_the_same_bits(stop: int, tensors: bool) -> None:
    """Values of very different sizes, so that another order of additions would show."""
    whole, first, second = MetricBuffer(), MetricBuffer(), MetricBuffer()
    for step, (values, weight) in enumerate(made(3 * FOLD + 20, seed=1)):
        if step == stop:
            second.load_state_dict(stored(first))
        scaled = {name: value * 10.0 ** (step % 30) for name, value in values.items()}
        if step % 7 == 0:
            scaled["now and then"] = 1e-9 * step
        for buffer in (whole, first if step < stop else second):
            if step % 11 == 0:
                buffer.add([], step)  # a generator step may return nothing
            else:
                add(buffer, step, scaled, torch.tensor(weight) if tensors else weight)
    assert bits(second.means()) == bits(whole.means())


def rows(*values: float) -> list[Any]:
    return [(("loss",), torch.tensor(value, dtype=torch.float64), 1.0) for value in values]


def test_steps_and_their_micro_batches_are_stored_in_their_order() -> None:
    """In the order in which they were added, from which the same bits follow on any processor."""
    source = random.Random(2)
    values = [source.uniform(-1, 1) * 10.0 ** source.randint(0, 18) for _ in range(97)]
    whole, second = MetricBuffer(), MetricBuffer()
    for step, value in enumerate(values):
        whole.add(rows(value), step)
    second.load_state_dict(stored(whole))
    for buffer in (whole, second):
        (group,) = stored(buffer)["pending"]
        assert group["steps"] == list(range(97))
        assert group["values"].flatten().tolist() == values
    assert bits(second.means()) == bits(whole.means())


def test_what_was_stored_is_not_touched_by_what_follows_and_has_a_bad_loss() -> None:
    buffer, other = buffer_of(*[({"loss": 1.0}, 1.0)] * (FOLD + 3)), MetricBuffer()
    state = buffer.state_dict()
    for step in range(2 * FOLD):
        add(buffer, step, {"loss": 9.0})
    other.load_state_dict(state)
    assert other.means() == {"loss": 1.0}
    bad = buffer_of(*(({"loss": torch.nan if step == 5 else 1.0}, 1.0) for step in range(FOLD + 3)))
    other.load_state_dict(stored(bad))
    with pytest.raises(NonFiniteError, match="at step 5 on rank 0"):
        other.means()
