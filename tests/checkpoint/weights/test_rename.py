"""Names of weights elsewhere become names here, by patterns or by a function; two never become one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from drivetrain.checkpoint.weights.rename import prefix_hint, renamed
from drivetrain.core.errors import CheckpointError


def names(given: list[str], rename: Any) -> tuple[dict[str, str], list[str]]:
    """From new to old name, and what was dropped."""
    tensors = {name: torch.tensor(number) for number, name in enumerate(given)}
    found, dropped = renamed(tensors, rename, "a file")
    return {new: given[int(tensor)] for new, tensor in found.items()}, dropped


def test_rename_by_patterns_and_by_a_function() -> None:
    # Without a wish only what wrapping adds is taken off.
    assert names(["a.0", "_orig_mod.b"], None) == ({"a.0": "a.0", "b": "_orig_mod.b"}, [])
    rename = {r"^model\.": "", r"^(\w+)\.(\d+)": r"\1.layer\2", "^aux": None, r"layer1\.": "last."}
    found = names(["model.net.0.w", "net.1.w", "model.aux.w"], rename)
    assert found == ({"net.layer0.w": "model.net.0.w", "net.last.w": "net.1.w"}, ["model.aux.w"])
    # A function sees clean names, and may drop.
    drop_head = {"a": "net.a", "head.b": None}.__getitem__
    assert names(["_orig_mod.a", "head.b"], drop_head) == ({"net.a": "_orig_mod.a"}, ["head.b"])


def test_two_names_that_become_one_are_both_named() -> None:
    for rename in ({"^.*$": "same"}, lambda name: "same"):
        with pytest.raises(CheckpointError, match=r"'a.w' and '_orig_mod.b' of a file both become 'same'"):
            names(["a.w", "_orig_mod.b"], rename)
    with pytest.raises(CheckpointError, match=r"'net.w' and 'net._orig_mod.w', which are both called"):
        names(["net.w", "net._orig_mod.w"], None)


OWN = [f"net.{layer}.{kind}" for layer in range(4) for kind in ("weight", "bias")]


def test_the_hint_is_the_prefix_that_most_names_need() -> None:
    for change, hint in (
        (lambda name: f"model.{name}", r"rename={'^model\\.': ''}"),
        (lambda name: name.removeprefix("net."), "rename={'^': 'net.'}"),
        (lambda name: name.replace("net", "backbone.layers"), r"rename={'^backbone\\.layers\\.': 'net.'}"),
        (lambda name: name, ""),
        (lambda name: name.replace(".", "_"), ""),
        (lambda name: f"{name}.x", ""),
    ):
        given = [change(name) for name in OWN] + ["head.weight"]
        assert prefix_hint(given, OWN) == (f"Most names would fit with {hint}. " if hint else "")
    few = ["model.net.0.weight", *(f"other.part{number}" for number in range(10))]
    half = [f"model.{name}" for name in OWN[:4]] + [f"other.{number}" for number in range(4)]
    assert (
        prefix_hint(few, OWN) == prefix_hint(half, OWN) == prefix_hint([], OWN) == prefix_hint(OWN, []) == ""
    )
    assert r"{'^model\\.': ''}" in prefix_hint([*half[1:], f"model.{OWN[0]}", f"model.{OWN[4]}"], OWN)
    assert prefix_hint(["weight"], ["head.weight", "head.bias"]) == ""
    assert prefix_hint(["weight"], ["head.weight"]) == "Most names would fit with rename={'^': 'head.'}. "
