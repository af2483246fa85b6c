"""Names of weights elsewhere become names here, by patterns or by a function; two never become one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from drivetrain.checkpoint.weights.rename import prefix_hint, renamed
from drivetrain.core.errors import CheckpointError, ConfigError


def names(given: list[str], rename: Any) -> tuple[dict[str, str], list[str]]:
    """From new to old name, and what was dropped."""
    tensors = {name: torch.tensor(number) for number, name in enumerate(given)}
    found, dropped = renamed(tensors, rename, "a file")
    return {new: given[int(tensor)] for new, tensor in found.items()}, dropped


def test_without_a_wish_only_what_wrapping_adds_is_taken_off() -> None:
    assert names(["a.0", "_orig_mod.b"], None) == ({"a.0": "a.0", "b": "_orig_mod.b"}, [])


def test_patterns_are_applied_one_after_another() -> None:
    rename = {r"^model\.": "", r"^(\w+)\.(\d+)": r"\1.layer\2", "^aux": None, r"layer1\.": "last."}
    found = names(["model.net.0.w", "net.1.w", "model.aux.w"], rename)
    assert found == ({"net.layer0.w": "model.net.0.w", "net.last.w": "net.1.w"}, ["model.aux.w"])


def test_a_function_sees_clean_names_and_may_drop() -> None:
    seen = []

    def rename(name: str) -> str | None:
        seen.append(name)
        return None if name.startswith("head") else f"net.{name}"

    assert names(["_orig_mod.a", "head.b"], rename) == ({"net.a": "_orig_mod.a"}, ["head.b"])
    assert seen == ["a", "head.b"]


@pytest.mark.parametrize("rename", [{"^.*$": "same"}, lambda name: "same"])
def test_two_names_that_become_one_are_both_named(rename: Any) -> None:
    with pytest.raises(CheckpointError, match=r"'a.w' and '_orig_mod.b' of a file both become 'same'"):
        names(["a.w", "_orig_mod.b"], rename)


def test_two_names_that_differ_in_wrapping_alone_are_both_named() -> None:
    with pytest.raises(
        CheckpointError, match=r"a file has 'net.w' and 'net._orig_mod.w', which are both called"
    ):
        names(["net.w", "net._orig_mod.w"], None)


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"(": "x"}, r"rename has '\(': 'x', which cannot be applied: .*unterminated"),
        ({"a": r"\2"}, r"rename has 'a': .*invalid group reference"),
        ({"a": 3}, r"rename has 'a': 3, which cannot be applied"),
        ({3: "a"}, r"rename has 3: 'a', which cannot be applied"),
        ("a", r"rename must be a mapping of regular expressions to replacements, or a function, not a str"),
        (lambda name: 3, r"rename\('a'\) returned a int; allowed are a name, and None"),
    ],
)
def test_what_cannot_be_applied_is_refused(rename: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        names(["a"], rename)


OWN = [f"net.{layer}.{kind}" for layer in range(4) for kind in ("weight", "bias")]


@pytest.mark.parametrize(
    ("change", "hint"),
    [
        (lambda name: f"model.{name}", r"rename={'^model\\.': ''}"),
        (lambda name: name.removeprefix("net."), "rename={'^': 'net.'}"),
        (lambda name: name.replace("net", "backbone.layers"), r"rename={'^backbone\\.layers\\.': 'net.'}"),
        (lambda name: name, ""),
        (lambda name: name.replace(".", "_"), ""),
        (lambda name: f"{name}.x", ""),
    ],
)
def test_the_beginning_that_most_names_need_is_found(change: Callable[[str], str], hint: str) -> None:
    given = [change(name) for name in OWN] + ["head.weight"]
    assert prefix_hint(given, OWN) == (f"Most names would fit with {hint}. " if hint else "")


def test_a_hint_that_helps_few_is_not_given() -> None:
    given = ["model.net.0.weight", *(f"other.part{number}" for number in range(10))]
    assert prefix_hint(given, OWN) == ""
    assert prefix_hint(["weight"], ["head.weight", "head.bias"]) == ""
    assert prefix_hint(["weight"], ["head.weight"]) == "Most names would fit with rename={'^': 'head.'}. "
    half = [f"model.{name}" for name in OWN[:4]] + [f"other.{number}" for number in range(4)]
    assert prefix_hint(half, OWN) == ""
    assert r"{'^model\\.': ''}" in prefix_hint([*half[1:], f"model.{OWN[0]}", f"model.{OWN[4]}"], OWN)
    assert prefix_hint([], OWN) == prefix_hint(OWN, []) == ""


def test_a_hint_is_found_among_very_many_names() -> None:
    own = [f"layers.{layer}.block.{part}.weight" for layer in range(5000) for part in "qkv"]
    # Comparing all with all would be 225 million pairs.
    assert r"'^model\\.': ''" in prefix_hint([f"model.{name}" for name in own], own)
