"""Weights from elsewhere: all or none, what fits or an error that lists the rest, and a report of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.weights.models import Tied
from torch import Tensor, nn

from drivetrain.checkpoint.weights.export import export_weights
from drivetrain.checkpoint.weights.load import find_weights
from drivetrain.checkpoint.weights.module_state import module_state
from drivetrain.checkpoint.weights.rename import renamed
from drivetrain.checkpoint.weights.warm_start import LoadReport, UnfitTensor, load_weights_into
from drivetrain.core.errors import CheckpointError

F32 = torch.float32


class Net(nn.Module):
    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, classes)


def state(module: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in module_state(module)[0].items()}


def filled(module: nn.Module, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(each, value) for name, each in state(module).items()}


def unchanged(module: nn.Module, before: dict[str, Tensor]) -> bool:
    now = state(module)
    return all(now[n].dtype == each.dtype and torch.equal(now[n], each) for n, each in before.items())


def test_everything_that_fits_is_taken_over_and_parameters_stay_what_they_are() -> None:
    module = Net()
    parameters = list(module.parameters())
    report = load_weights_into(module, filled(module, 2))
    assert report == LoadReport(loaded=tuple(state(module)))
    assert str(report) == "loaded 9 of 9 tensors"
    assert unchanged(module, filled(module, 2))
    assert all(now is was for now, was in zip(module.parameters(), parameters, strict=True))
    assert all(each.requires_grad for each in module.parameters())


class WithExtra(nn.Linear):
    def get_extra_state(self) -> Tensor:
        return self.extra

    def set_extra_state(self, state: Tensor) -> None:
        self.extra = state


def test_a_module_keeps_nothing_of_the_mapped_file(tmp_path: Path) -> None:
    saved, module, path = WithExtra(3, 2), WithExtra(3, 2), tmp_path / "w.safetensors"
    saved.extra, module.extra = torch.arange(4.0), torch.zeros(4)
    export_weights(saved.state_dict(), path)
    mapped = find_weights(path, mapped=True).tensors
    load_weights_into(module, path)
    with path.open("r+b") as file:
        file.write(bytes(path.stat().st_size))
    assert not any(each.any() for each in mapped.values())
    assert torch.equal(module.weight, saved.weight)
    assert torch.equal(module.extra, torch.arange(4.0))


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


def test_strict_false_loads_what_fits_and_reports_the_rest() -> None:
    module = Net()
    before = state(module)
    given = {**filled(Net(9), 2), "old.weight": torch.ones(1)}
    given["body.0.bias"] = given["body.0.bias"].double()
    del given["body.0.weight"]
    report = load_weights_into(module, given, strict=False, rename={r"running_mean": None})
    assert report.missing == ("body.0.weight", "body.1.running_mean")
    assert (report.unexpected, report.dropped) == (("old.weight",), ("body.1.running_mean",))
    weight, bias = ("head.weight", (9, 4), (3, 4)), ("head.bias", (9,), (3,))
    assert report.mismatched == (UnfitTensor(*weight, F32, F32), UnfitTensor(*bias, F32, F32))
    assert report.converted == (UnfitTensor("body.0.bias", (4,), (4,), torch.float64, F32),)
    assert set(report.loaded) == set(before) - set(report.missing) - {"head.weight", "head.bias"}
    assert all(state(module)[name].eq(2).all() for name in report.loaded)
    assert unchanged(module, {name: each for name, each in before.items() if name not in report.loaded})
    text = str(report)
    assert "loaded 5 of 9 tensors" in text
    assert "mismatched  head.weight          float32 [9, 4] there, float32 [3, 4] here" in text


@pytest.mark.parametrize("strict", [True, False])
def test_a_wrong_prefix_is_told(strict: bool) -> None:
    module = Net()
    before = state(module)
    given = {f"model.{name}": each for name, each in filled(module, 2).items()}
    words = "do not fit Net: 9 missing" if strict else "fits Net, so nothing was loaded: 9 missing"
    with pytest.raises(CheckpointError, match=words) as caught:
        load_weights_into(module, given, strict=strict)
    assert "'model.head.bias' (Did you mean 'head.bias'?)" in str(caught.value)
    assert unchanged(module, before)
    assert len(load_weights_into(module, given, rename={r"^model\.": ""}).loaded) == 9
    assert load_weights_into(nn.ReLU(), {}).loaded == ()


def test_one_name_of_a_tied_weight_is_enough_and_two_values_are_refused() -> None:
    names = ("embedding.weight", "head.weight")
    for name in names:
        module = Tied()
        report = load_weights_into(module, {name: torch.ones(6, 4)}, strict=False)
        assert (report.loaded, set(report.missing) & set(names)) == (names, set())
        assert module.head.weight is module.embedding.weight
        assert module.head.weight.eq(1).all()
    module = Tied()
    given = {names[0]: torch.ones(6, 4), names[1]: torch.zeros(6, 4)}
    before = state(module)
    with pytest.raises(CheckpointError, match=r"'embedding.weight' and 'head.weight' are one tensor in the"):
        load_weights_into(module, given, strict=False)
    assert unchanged(module, before)
    load_weights_into(module, given, strict=False, rename={"^head.weight$": None})
    assert module.head.weight.eq(1).all()


def test_numbers_are_converted_where_they_mean_the_same() -> None:
    converts = "bfloat16 float32, float64 float16, int32 int64, uint8 int16, complex128 complex64"
    refused = "int64 int32, int8 uint8, int8 float32, float32 int64, bool float32, complex64 float32"
    refused += ", float32 float8_e5m2"
    for pair in f"{converts}, {refused}".split(", "):
        stored, own = (getattr(torch, name) for name in pair.split())
        module = nn.Module()
        module.register_buffer("x", torch.zeros(2).to(own))
        given = {"x": torch.tensor([1, 0]).to(stored)}
        if pair not in converts:
            with pytest.raises(CheckpointError, match="1 of another shape or dtype: 'x': "):
                load_weights_into(module, given)
            continue
        report = load_weights_into(module, given)
        assert report.converted == (UnfitTensor("x", (2,), (2,), stored, own),)
        assert torch.equal(module.get_buffer("x"), given["x"].to(own))
    module = Net().half()
    before = state(module)
    with pytest.raises(CheckpointError, match=r"'head.bias' of the given mapping has the number 1e\+06"):
        load_weights_into(module, {"head.bias": torch.tensor([1.0, 1e6, 1.0])}, strict=False)
    assert unchanged(module, before)


def names(given: list[str], rename: Any) -> tuple[dict[str, str], list[str]]:  # new to old; dropped
    tensors = {name: torch.tensor(number) for number, name in enumerate(given)}
    found, dropped = renamed(tensors, rename, "a file")
    return {new: given[int(tensor)] for new, tensor in found.items()}, dropped


def test_rename_by_patterns_and_by_a_function() -> None:
    # Without a wish only what wrapping adds is taken off.
    assert names(["a.0", "_orig_mod.b"], None) == ({"a.0": "a.0", "b": "_orig_mod.b"}, [])
    rename = {r"^model\.": "", r"^(\w+)\.(\d+)": r"\1.layer\2", "^aux": None, r"layer1\.": "last."}
    found = names(["model.net.0.w", "net.1.w", "model.aux.w"], rename)
    assert found == ({"net.layer0.w": "model.net.0.w", "net.last.w": "net.1.w"}, ["model.aux.w"])
    # a function sees clean names, and may drop.
    drop_head = {"a": "net.a", "head.b": None}.__getitem__
    assert names(["_orig_mod.a", "head.b"], drop_head) == ({"net.a": "_orig_mod.a"}, ["head.b"])


def test_two_names_that_become_one_are_both_named() -> None:
    for rename in ({"^.*$": "same"}, lambda name: "same"):
        with pytest.raises(CheckpointError, match=r"'a.w' and '_orig_mod.b' of a file become 'same'"):
            names(["a.w", "_orig_mod.b"], rename)
    with pytest.raises(CheckpointError, match=r"'net.w' and 'net._orig_mod.w', which are both called"):
        names(["net.w", "net._orig_mod.w"], None)
