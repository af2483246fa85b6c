"""The scalars that steps return: how they are read, averaged and stored, and refused when not finite."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from drivetrain import ConfigError, NonFiniteError, StepOutput
from drivetrain.checkpoint import pack, unpack
from drivetrain.engine.metrics.means import FOLD, MetricBuffer, is_loss, refuse_nonfinite
from drivetrain.task.output import read_output

Returned = dict[str, float]


def add(buffer: MetricBuffer, update: int, values: Returned, weight: Any = 1.0) -> None:
    """One update of one micro-batch that returned these values."""
    _, names, scalars, _ = read_output({name: torch.tensor(value) for name, value in values.items()})
    assert scalars is not None
    buffer.add([(names, scalars, weight)], update)


def mean(pairs: list[tuple[float, float]]) -> float:
    """The weighted mean, summed without any rounding."""
    return math.fsum(v * w for v, w in pairs) / math.fsum(w for _, w in pairs)


def made(count: int, seed: int = 0) -> list[tuple[Returned, float]]:
    """Values as float32 holds them, with ragged weights."""
    source = random.Random(seed)

    def value() -> float:
        return float(np.float32(source.uniform(-5, 5)))

    return [({"loss": value(), "accuracy": value()}, float(source.randint(1, 900))) for _ in range(count)]


# Reading.


def test_a_bare_loss_is_optimised_with_its_graph_and_logged_without() -> None:
    loss = torch.tensor(2.0, requires_grad=True) * 3
    optimised, names, scalars, outputs = read_output(loss)
    assert optimised is loss
    assert names == ("loss",)
    assert scalars is not None
    assert not scalars.requires_grad
    assert scalars.item() == 6.0
    assert outputs is None


def test_of_a_mapping_the_loss_is_optimised_and_everything_is_logged() -> None:
    loss = torch.tensor(1.5, requires_grad=True) * 1
    optimised, names, scalars, _ = read_output({"accuracy": torch.tensor(0.5), "loss": loss, "beam": 3})
    assert optimised is loss
    assert scalars is not None
    assert dict(zip(names, scalars.tolist(), strict=True)) == {"accuracy": 0.5, "loss": 1.5, "beam": 3.0}
    assert not scalars.requires_grad


@pytest.mark.parametrize("metrics", [None, {}, {"accuracy": torch.tensor(0.5)}])
@pytest.mark.parametrize("named", [False, True])
def test_a_step_output_adds_outputs_and_metrics(metrics: Any, named: bool) -> None:
    class Mine(StepOutput):
        pass

    loss = torch.tensor(1.0)
    output = Mine({"loss": loss, "norm": torch.tensor(9.0)} if named else loss, "outputs", metrics)
    optimised, names, scalars, outputs = read_output(output)
    assert optimised is loss
    assert outputs == "outputs"
    assert scalars is not None
    values = dict(zip(names, scalars.reshape(-1).tolist(), strict=True))
    assert values == {
        "loss": 1.0,
        **({"norm": 9.0} if named else {}),
        **({"accuracy": 0.5} if metrics else {}),
    }


def test_a_validation_step_may_return_nothing_or_metrics_alone() -> None:
    assert read_output(None) == (None, (), None, None)
    loss, names, scalars, _ = read_output(StepOutput(None, metrics={"loss": torch.tensor(2.0)}))  # type: ignore[arg-type]
    assert (loss, names) == (None, ("loss",))
    assert scalars is not None
    assert scalars.tolist() == [2.0]


def test_a_scalar_in_a_shape_of_one_is_a_scalar() -> None:
    loss, _, scalars, _ = read_output(torch.tensor([[2.0]]))
    assert loss is not None
    assert loss.shape == ()
    _, names, scalars, _ = read_output({"loss": torch.tensor([2.0]), "a": torch.tensor([[1.0]])})
    assert scalars is not None
    assert dict(zip(names, scalars.tolist(), strict=True)) == {"loss": 2.0, "a": 1.0}


def test_pythons_and_numpys_numbers_are_values_and_keep_their_digits() -> None:
    values = {
        "tenth": 0.1,
        "count": 2**40 + 1,
        "yes": True,
        "numpy": np.float64(0.3),
        "half": np.float16(0.5),
    }
    _, names, scalars, _ = read_output({"loss": torch.tensor(1 / 3, dtype=torch.float64), **values})
    assert scalars is not None
    read = dict(zip(names, scalars.tolist(), strict=True))
    assert read == {"loss": 1 / 3, "tenth": 0.1, "count": 2**40 + 1, "yes": 1.0, "numpy": 0.3, "half": 0.5}


def test_a_value_that_the_task_goes_on_changing_was_read_when_it_was_returned() -> None:
    running = torch.tensor(1.0)
    _, _, scalars, _ = read_output({"loss": torch.tensor(0.0), "running": running})
    running += 5
    assert scalars is not None
    assert scalars.tolist() == [0.0, 1.0]


@pytest.mark.parametrize(
    ("output", "message"),
    [
        (0.5, "a step returned a float; allowed are a scalar tensor"),
        ((torch.tensor(1.0), 2), "a step returned a tuple"),
        ({"accuracy": torch.tensor(1.0)}, "a mapping without 'loss'; it has 'accuracy'"),
        ({}, "a mapping without 'loss'"),
        ({"loss": 0.5}, "'loss' must be a tensor, not a float"),
        ({"loss": None}, "'loss' must be a tensor, not a NoneType"),
        (torch.ones(3), r"'loss' that a step returned has shape \(3,\); only scalars"),
        ({"loss": torch.tensor(1.0), "rows": torch.ones(2, 2)}, r"'rows' .* has shape \(2, 2\)"),
        (StepOutput(None, metrics={"a": torch.ones(2), "b": torch.ones(2)}), r"'a' .* has shape \(2,\)"),  # type: ignore[arg-type]
        ({"loss": torch.ones(0)}, r"'loss' .* has shape \(0,\)"),
        ({"loss": torch.tensor(1.0), "name": "good"}, "'name' that a step returned is a str, not a number"),
        ({"loss": torch.tensor(1.0), "none": None}, "'none' that a step returned is a NoneType"),
    ],
)
def test_what_cannot_be_optimised_or_logged_is_named(output: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_output(output)


@pytest.mark.parametrize("loss", [torch.tensor(torch.nan), {"loss": torch.tensor(torch.nan)}])
def test_a_metric_cannot_hide_the_loss_behind_its_name(loss: Any) -> None:
    with pytest.raises(ConfigError, match="'loss' twice"):
        read_output(StepOutput(loss, metrics={"loss": torch.tensor(0.0)}))


# Averaging.


def test_means_are_weighted() -> None:
    buffer = MetricBuffer()
    add(buffer, 0, {"loss": 1.0}, 1.0)
    add(buffer, 1, {"loss": 4.0}, 2.0)
    assert buffer.means() == {"loss": 3.0}


@pytest.mark.parametrize("count", [1, 2, FOLD - 1, FOLD, FOLD + 1, 3 * FOLD + 5])
def test_means_are_exact_however_long_the_interval(count: int) -> None:
    """Sums of float32 values in float64: where they are folded on the way cannot be seen."""
    buffer = MetricBuffer()
    rows = made(count)
    for update, (values, weight) in enumerate(rows):
        add(buffer, update, values, weight)
    means = buffer.means()
    for name in ("loss", "accuracy"):
        assert means[name] == pytest.approx(mean([(values[name], w) for values, w in rows]), rel=1e-14)


def test_memory_does_not_grow_with_the_interval() -> None:
    buffer = MetricBuffer()
    for update, (values, weight) in enumerate(made(5 * FOLD)):
        add(buffer, update, values, weight)
        assert buffer.state_dict()["adds"] < FOLD


def test_micro_batches_count_by_their_weights() -> None:
    buffer = MetricBuffer()
    rows = [(("loss",), torch.tensor(value), weight) for value, weight in ((1.0, 3.0), (5.0, 1.0))]
    buffer.add(rows, 0)
    assert buffer.means() == {"loss": 2.0}


def test_names_that_come_and_go_are_means_over_where_they_were() -> None:
    buffer = MetricBuffer()
    add(buffer, 0, {"loss": 1.0}, 2.0)
    add(buffer, 1, {"loss": 4.0, "penalty": 10.0}, 1.0)
    add(buffer, 2, {"penalty": 20.0, "loss": 7.0}, 3.0)
    means = buffer.means()
    assert means == {"loss": (2 + 4 + 21) / 6, "penalty": (10 + 60) / 4}
    assert list(means) == ["loss", "penalty"]


@pytest.mark.parametrize("folds", [False, True])
def test_reading_changes_nothing_and_resetting_forgets(folds: bool) -> None:
    buffer = MetricBuffer()
    for update in range(FOLD + 1 if folds else 3):
        add(buffer, update, {"loss": float(update)})
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


@pytest.mark.parametrize(
    "weight", [torch.tensor(3), torch.tensor([3.0]), torch.tensor(3.0, dtype=torch.float64)]
)
def test_a_weight_may_be_a_tensor(weight: Tensor) -> None:
    buffer = MetricBuffer()
    add(buffer, 0, {"loss": 1.0}, 1.0)
    add(buffer, 1, {"loss": 5.0}, weight)
    assert buffer.means() == {"loss": 4.0}


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_of_weight_zero_takes_no_part_whatever_it_is(bad: float) -> None:
    """The mean loss of a batch of padding alone is 0 / 0."""
    buffer = MetricBuffer()
    add(buffer, 0, {"loss": 3.0}, 2.0)
    add(buffer, 1, {"loss": bad}, 0.0)
    assert buffer.means() == {"loss": 3.0}
    buffer.check()


def test_a_mean_over_nothing_is_no_number() -> None:
    buffer = MetricBuffer()
    add(buffer, 0, {"loss": 3.0}, 0.0)
    assert math.isnan(buffer.means()["loss"])


def test_values_in_16_bits_are_summed_in_64() -> None:
    buffer = MetricBuffer()
    for update in range(300):
        buffer.add([(("loss",), torch.tensor(1.0, dtype=torch.bfloat16), 1.0)], update)
    buffer.add([(("loss",), torch.tensor(302.0, dtype=torch.bfloat16), 1.0)], 300)
    assert buffer.means() == {"loss": 602 / 301}


# Values that are not finite.


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("at", [0, 3, FOLD + 7])
def test_a_loss_that_is_not_finite_is_an_error_that_names_its_first_update(bad: float, at: int) -> None:
    buffer = MetricBuffer()
    for update in range(2 * FOLD):
        add(buffer, 1000 + update, {"loss": bad if update >= at else 1.0, "accuracy": 0.5})
    message = rf"NaN or infinite at update {1000 + at} on rank 0: 'loss' \(from update {1000 + at}\)\."
    with pytest.raises(NonFiniteError, match=message):
        buffer.means()
    with pytest.raises(NonFiniteError, match=message):
        buffer.check()


def test_every_bad_value_is_named_with_where_it_began() -> None:
    buffer = MetricBuffer()
    add(buffer, 4, {"loss": 1.0, "norm": torch.inf})
    add(buffer, 5, {"loss": torch.nan, "norm": torch.inf})
    with pytest.raises(
        NonFiniteError, match=r"at update 4 .*: 'loss' \(from update 5\), 'norm' \(from update 4\)"
    ):
        buffer.means()


def test_the_first_bad_update_is_named_also_where_the_names_changed() -> None:
    buffer = MetricBuffer()
    add(buffer, 3, {"loss": torch.nan})
    add(buffer, 9, {"loss": torch.nan, "penalty": 1.0})
    for look in (buffer.check, buffer.means):
        with pytest.raises(NonFiniteError, match=r"at update 3 .*: 'loss' \(from update 3\)"):
            look()


def test_a_metric_that_is_not_finite_is_shown_and_stops_nothing() -> None:
    buffer = MetricBuffer()
    add(buffer, 0, {"loss": 1.0, "perplexity": torch.inf})
    add(buffer, 1, {"loss": 3.0, "perplexity": 2.0})
    buffer.check()
    assert buffer.means() == {"loss": 2.0, "perplexity": math.inf}


def test_an_evaluation_shows_a_bad_loss_as_what_it_is() -> None:
    buffer = MetricBuffer()
    add(buffer, 0, {"loss": torch.nan})
    assert math.isnan(buffer.means(refuse_nonfinite=False)["loss"])


@pytest.mark.parametrize(
    ("name", "loss"), [("loss", True), ("generator_loss", True), ("losses", False), ("lossy", False)]
)
def test_a_loss_is_told_by_its_name(name: str, loss: bool) -> None:
    assert is_loss(name) is loss


def test_the_losses_of_a_skipped_update_are_looked_at_too() -> None:
    good = (("loss", "norm"), torch.tensor([1.0, torch.inf]), 1.0)
    refuse_nonfinite([good], 3)
    with pytest.raises(NonFiniteError, match="at update 3 on rank 1: 'loss'"):
        refuse_nonfinite([good, (("loss",), torch.tensor(torch.nan), 1.0)], 3, rank=1)


# State.


def stored(buffer: MetricBuffer) -> dict[str, Any]:
    """The state as it comes back from a checkpoint."""
    packed, tensors = pack(buffer.state_dict())
    tree = unpack(json.loads(json.dumps(packed)), {name: tensor.clone() for name, tensor in tensors.items()})
    assert isinstance(tree, dict)
    return tree


def bits(means: dict[str, float]) -> dict[str, str]:
    return {name: value.hex() for name, value in means.items()}


@pytest.mark.parametrize("tensors", [False, True], ids=["", "weights that are tensors"])
@pytest.mark.parametrize("stop", [0, 1, 60, FOLD - 1, FOLD, FOLD + 1, 3 * FOLD + 9])
def test_a_state_stored_in_the_middle_goes_on_to_the_same_bits(stop: int, tensors: bool) -> None:
    """Values of very different sizes, so that another order of additions would show."""
    whole, first, second = MetricBuffer(), MetricBuffer(), MetricBuffer()
    rows = made(3 * FOLD + 20, seed=1)
    for update, (values, weight) in enumerate(rows):
        if update == stop:
            second.load_state_dict(stored(first))
        scaled = {name: value * 10.0 ** (update % 30) for name, value in values.items()}
        if update % 7 == 0:
            scaled["now and then"] = 1e-9 * update
        for buffer in (whole, first if update < stop else second):
            if update % 11 == 0:
                buffer.add([], update)  # a generator step may return nothing
            else:
                add(buffer, update, scaled, torch.tensor(weight) if tensors else weight)
    assert bits(second.means()) == bits(whole.means())


def test_updates_are_stored_in_their_order() -> None:
    """In the order in which they were added, from which the same bits follow on any processor."""
    source = random.Random(2)
    values = [source.uniform(-1, 1) * 10.0 ** source.randint(0, 18) for _ in range(97)]
    whole, second = MetricBuffer(), MetricBuffer()
    for update, value in enumerate(values):
        whole.add([(("loss",), torch.tensor(value, dtype=torch.float64), 1.0)], update)
    second.load_state_dict(stored(whole))
    for buffer in (whole, second):
        (group,) = stored(buffer)["pending"]
        assert group["updates"] == list(range(97))
        assert group["values"].flatten().tolist() == values
    assert bits(second.means()) == bits(whole.means())


def test_several_micro_batches_of_an_update_are_stored_in_their_order() -> None:
    def rows(update: int) -> list[Any]:
        values = [1e17 * (update + 1), 1.0, -1e17 * (update + 1), 3.0]
        return [(("loss",), torch.tensor(v, dtype=torch.float64), 1.0) for v in values]

    whole, second = MetricBuffer(), MetricBuffer()
    for update in range(5):
        whole.add(rows(update), update)
    second.load_state_dict(stored(whole), torch.device("cpu"))
    assert bits(second.means()) == bits(whole.means())


def test_what_was_stored_is_not_touched_by_what_follows() -> None:
    buffer, other = MetricBuffer(), MetricBuffer()
    for update in range(FOLD + 3):
        add(buffer, update, {"loss": 1.0})
    state = buffer.state_dict()
    for update in range(2 * FOLD):
        add(buffer, update, {"loss": 9.0})
    other.load_state_dict(state)
    assert other.means() == {"loss": 1.0}


def test_a_bad_loss_before_a_checkpoint_is_still_named_after_it() -> None:
    buffer, other = MetricBuffer(), MetricBuffer()
    for update in range(FOLD + 3):
        add(buffer, update, {"loss": torch.nan if update == 5 else 1.0})
    other.load_state_dict(stored(buffer))
    with pytest.raises(NonFiniteError, match="at update 5 on rank 0"):
        other.means()
