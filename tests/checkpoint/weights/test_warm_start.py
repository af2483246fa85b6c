"""Weights from elsewhere: all or none, what fits or an error that lists the rest, and a report of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

from drivetrain.checkpoint import export_weights
from drivetrain.checkpoint.weights.module_state import module_state
from drivetrain.checkpoint.weights.warm_start import Difference, LoadReport, load_weights_into
from drivetrain.core.errors import CheckpointError, ConfigError

F32 = torch.float32


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, classes)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embedding.weight


def state(module: nn.Module, prefix: str = "") -> dict[str, Tensor]:
    return {prefix + name: value.clone() for name, value in module_state(module)[0].items()}


def filled(module: nn.Module, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(each, value) for name, each in state(module).items()}


def unchanged(module: nn.Module, before: dict[str, Tensor]) -> bool:
    now = state(module)
    return all(
        now[name].dtype == each.dtype and torch.equal(now[name], each) for name, each in before.items()
    )


def test_everything_that_fits_is_taken_over_and_parameters_stay_what_they_are() -> None:
    module = Net()
    parameters = list(module.parameters())
    report = load_weights_into(module, filled(module, 2))
    assert report == LoadReport(loaded=tuple(state(module)))
    assert str(report) == f"loaded {len(state(module))} of {len(state(module))} tensors"
    assert all(each.eq(2).all() for each in state(module).values())
    assert all(now is was for now, was in zip(module.parameters(), parameters, strict=True))
    assert all(each.requires_grad for each in module.parameters())


@pytest.mark.parametrize("kind", ["file", "folder", "run", "checkpoint"])
def test_weights_come_from_any_place_that_has_them(kind: str, tmp_path: Path) -> None:
    task = Regression()
    if kind in ("run", "checkpoint"):
        result = quiet(max_steps=3, run_dir=tmp_path / "run", checkpoint=True).fit(task, pairs())
        source: Any = tmp_path / "run" if kind == "run" else result.last_checkpoint
    else:
        export_weights(filled(task, 0.25), tmp_path / "model.safetensors", max_shard_size=4)
        source = tmp_path if kind == "folder" else str(tmp_path / "model.safetensors")
        task.load_state_dict(filled(task, 0.25))
    other = Regression()
    report = other.load_weights(source)
    assert report.loaded == ("line.weight", "line.bias")
    assert unchanged(other, state(task))


def test_what_does_not_fit_is_listed_and_nothing_is_loaded() -> None:
    module = Net()
    before = state(module)
    given = filled(module, 2)
    given["head.weigth"] = given.pop("head.weight")
    given["head.bias"] = torch.ones(7)
    with pytest.raises(CheckpointError) as caught:
        load_weights_into(module, given)
    assert str(caught.value) == (
        "the weights of the given mapping do not fit Net: 1 missing: 'head.weight'; 1 unexpected: "
        "'head.weigth' (Did you mean 'head.weight'?); 1 of another shape or dtype: 'head.bias': float32 [7] "
        "there, float32 [3] here. strict=False loads those that fit"
    )
    assert unchanged(module, before)


def test_what_fits_is_loaded_when_that_is_wanted_and_the_rest_is_reported() -> None:
    module = Net()
    before = state(module)
    given = {
        name: each.double() if name == "body.0.bias" else each for name, each in filled(Net(9), 2).items()
    }
    given["old.weight"] = torch.ones(1)
    del given["body.0.weight"]
    report = load_weights_into(module, given, strict=False, rename={r"running_mean": None})
    assert report.missing == ("body.0.weight", "body.1.running_mean")
    assert report.unexpected == ("old.weight",)
    assert report.dropped == ("body.1.running_mean",)
    assert report.mismatched == (
        Difference("head.weight", (9, 4), (3, 4), F32, F32),
        Difference("head.bias", (9,), (3,), F32, F32),
    )
    assert report.converted == (Difference("body.0.bias", (4,), (4,), torch.float64, F32),)
    assert set(report.loaded) == set(before) - set(report.missing) - {"head.weight", "head.bias"}
    assert all(state(module)[name].eq(2).all() for name in report.loaded)
    assert unchanged(module, {name: each for name, each in before.items() if name not in report.loaded})
    assert str(report) == (
        "loaded 5 of 9 tensors\n"
        "missing     body.0.weight        keeps its value\n"
        "missing     body.1.running_mean  keeps its value\n"
        "unexpected  old.weight           not in the module\n"
        "dropped     body.1.running_mean  by rename\n"
        "mismatched  head.weight          float32 [9, 4] there, float32 [3, 4] here\n"
        "mismatched  head.bias            float32 [9] there, float32 [3] here\n"
        "converted   body.0.bias          float64 [4] there, float32 [4] here"
    )


def test_a_long_report_is_cut_short() -> None:
    report = LoadReport(loaded=("a",), missing=tuple(map(str, range(25))))
    assert str(report).splitlines()[-1] == "missing     ... and 15 more"
    assert len(str(report).splitlines()) == 12


@pytest.mark.parametrize("strict", [True, False])
def test_a_wrong_prefix_is_told(strict: bool) -> None:
    module = Net()
    before = state(module)
    given = {f"model.{name}": each for name, each in filled(module, 2).items()}
    words = "do not fit Net: 9 missing" if strict else "fits Net, so nothing was loaded: 9 missing"
    with pytest.raises(CheckpointError, match=words) as caught:
        load_weights_into(module, given, strict=strict)
    assert r"Most names would fit with rename={'^model\\.': ''}. " in str(caught.value)
    assert unchanged(module, before)
    assert len(load_weights_into(module, given, rename={r"^model\.": ""}).loaded) == 9


def test_nothing_at_all_is_an_error_too() -> None:
    with pytest.raises(
        CheckpointError, match=r"nothing of the given mapping fits Net, so nothing was loaded: 9 miss"
    ):
        load_weights_into(Net(), {}, strict=False)
    assert load_weights_into(nn.ReLU(), {}).loaded == ()


def test_how_either_side_is_wrapped_does_not_matter() -> None:
    compiled = torch.compile(Net(), backend="eager")
    given = {f"_orig_mod.{name}": each for name, each in filled(Net(), 2).items()}
    assert len(load_weights_into(Net(), given).loaded) == 9
    assert load_weights_into(compiled, given).loaded == tuple(state(Net()))  # type: ignore[arg-type]
    assert load_weights_into(compiled, filled(Net(), 3), strict=False).unexpected == ()  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["embedding.weight", "head.weight"])
def test_one_name_of_a_tied_weight_is_enough(name: str) -> None:
    module = Tied()
    report = load_weights_into(module, {name: torch.ones(5, 3)})
    assert report.loaded == ("embedding.weight", "head.weight")
    assert report.missing == ()
    assert module.head.weight is module.embedding.weight
    assert module.head.weight.eq(1).all()


def test_two_values_for_a_tied_weight_are_refused_until_one_is_dropped() -> None:
    module = Tied()
    given = {"embedding.weight": torch.ones(5, 3), "head.weight": torch.zeros(5, 3)}
    before = state(module)
    with pytest.raises(
        CheckpointError, match=r"'embedding.weight' and 'head.weight' are one tensor in the module"
    ):
        load_weights_into(module, given, strict=False)
    assert unchanged(module, before)
    load_weights_into(module, given, rename={"^head.weight$": None})
    assert module.head.weight.eq(1).all()
    load_weights_into(module, {name: torch.full((5, 3), 3.0) for name in given})
    assert module.head.weight.eq(3).all()


@pytest.mark.parametrize(
    ("stored", "own", "converts"),
    [
        (torch.bfloat16, torch.float32, True),
        (torch.float64, torch.float16, True),
        (torch.int32, torch.int64, True),
        (torch.uint8, torch.int16, True),
        (torch.complex128, torch.complex64, True),
        (torch.int64, torch.int32, False),
        (torch.int8, torch.float32, False),
        (torch.float32, torch.int64, False),
        (torch.bool, torch.float32, False),
        (torch.uint8, torch.bool, False),
        (torch.complex64, torch.float32, False),
        (torch.float32, torch.complex64, False),
        (torch.float8_e4m3fn, torch.float32, False),
        (torch.float32, torch.float8_e5m2, False),
    ],
)
def test_numbers_are_converted_where_they_mean_the_same(
    stored: torch.dtype, own: torch.dtype, converts: bool
) -> None:
    module = nn.Module()
    module.register_buffer("x", torch.zeros(2).to(own))
    given = {"x": torch.tensor([1, 0]).to(stored)}
    if not converts:
        with pytest.raises(CheckpointError, match="1 of another shape or dtype: 'x': "):
            load_weights_into(module, given)
        return
    report = load_weights_into(module, given)
    assert report.converted == (Difference("x", (2,), (2,), stored, own),)
    assert torch.equal(module.get_buffer("x"), given["x"].to(own))


def test_a_number_that_would_become_infinite_is_refused() -> None:
    module = Net().half()
    before = state(module)
    with pytest.raises(CheckpointError, match=r"'head.bias' of the given mapping has the number 1e\+06"):
        load_weights_into(module, {"head.bias": torch.tensor([1.0, 1e6, 1.0])}, strict=False)
    assert unchanged(module, before)


def test_the_module_adopts_the_stored_dtypes_when_asked_to() -> None:
    module = Net()
    parameters = list(module.parameters())
    given = {
        name: each.bfloat16() if each.is_floating_point() else each
        for name, each in filled(module, 2).items()
    }
    report = load_weights_into(module, given, adopt_dtypes=True)
    assert report.converted == ()
    assert unchanged(module, given)
    assert all(now is was for now, was in zip(module.parameters(), parameters, strict=True))


class Scaled(nn.Module):
    """Has an extra state that is a tensor, and is particular about it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.scale = torch.ones(1)

    def get_extra_state(self) -> Tensor:
        return self.scale

    def set_extra_state(self, state: Tensor) -> None:
        if state.numel() != 1:
            raise ValueError("one scale")
        self.scale = state


def test_an_extra_state_that_is_a_tensor_is_taken_over_and_never_missed() -> None:
    module = Scaled()
    assert load_weights_into(module, {"weight": torch.ones(2)}).missing == ()
    report = load_weights_into(module, {"weight": torch.ones(2), "_extra_state": torch.full((1,), 4.0)})
    assert report.loaded == ("weight", "_extra_state")
    assert module.scale.item() == 4
    with pytest.raises(ValueError, match="one scale"):
        load_weights_into(module, {"weight": torch.zeros(2), "_extra_state": torch.ones(2)})
    assert module.scale.item() == 4
    assert module.weight.tolist() == [1, 1]
    with pytest.raises(CheckpointError, match=r"unexpected: '_extra_state'"):
        load_weights_into(nn.Linear(1, 1), {**state(nn.Linear(1, 1)), "_extra_state": torch.ones(1)})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (3, r"from a path or from tensors by name, not from a int"),
        (nn.Linear(1, 1), r"not from a Linear; give its state_dict\(\)"),
        ({"epoch": 3, "state_dict": {}}, r"'epoch' is a int"),
        (
            {"state_dict": {"w": torch.ones(1)}},
            r"'state_dict' is a dict. Did you mean .*source\['state_dict'\]\?",
        ),
    ],
)
def test_what_is_no_source_is_refused(source: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_weights_into(Net(), source)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(3, 4, device="meta"), "'head.weight' of the given mapping is on the meta device"),
        (torch.eye(3, 4).to_sparse(), "'head.weight' of the given mapping is torch.sparse_coo"),
    ],
    ids=["meta", "sparse"],
)
def test_tensors_without_all_their_numbers_are_refused(value: Tensor, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_weights_into(Net(), {"head.weight": value}, strict=False)


def test_a_source_with_nothing_readable_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no weights at '.*nowhere'"):
        load_weights_into(Net(), tmp_path / "nowhere")


def test_training_starts_from_what_was_loaded(tmp_path: Path) -> None:
    task, other = Regression(), Regression()
    quiet(max_steps=3).fit(task, pairs())
    other.load_weights(task.state_dict())
    after = [quiet(max_steps=1).fit(each, pairs()).metrics for each in (task, other)]
    assert after[0] == after[1]
    assert unchanged(other, state(task))


def test_tied_tensors_that_hold_the_same_nan_are_the_same(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
            self.second.weight = self.first.weight

    task = Tied()
    with torch.no_grad():
        task.first.weight[0, 0] = float("nan")
    export_weights(task.state_dict(), tmp_path / "tied.safetensors")
    assert "first.weight" in load_weights_into(Tied(), tmp_path / "tied.safetensors").loaded
