"""Load weights from another source into a module: rename, compare, load all or none, and report."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from drivetrain.checkpoint.saving.sharding import is_sharded
from drivetrain.checkpoint.weights.dtypes import check_range
from drivetrain.checkpoint.weights.frozen import check_same, fingerprints
from drivetrain.checkpoint.weights.load import Found, describe_weights, find_weights
from drivetrain.checkpoint.weights.module_state import clean_name, full_state, hint, is_extra, put_state
from drivetrain.checkpoint.weights.rename import Rename, renamed
from drivetrain.checkpoint.weights.stored_rows import FileTensor, differ, forget_weights, leave_weights, same
from drivetrain.checkpoint.weights.torch_files import TorchWeights
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.types import Json

WeightSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Tensor] | TorchWeights
"""A source of weights: a path for `checkpoint.load_weights`, a file that was read, or tensors by name."""

_SHOWN = 10
"""The most names of a kind that a report or a message lists."""


class UnfitTensor(NamedTuple):
    """A tensor with another shape or dtype in the source than in the module."""

    name: str
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    stored_dtype: torch.dtype
    dtype: torch.dtype

    def __str__(self) -> str:
        """Return both sides in words."""
        return (
            f"{_short(self.stored_dtype)} {list(self.stored_shape)} there, {_short(self.dtype)} "
            f"{list(self.shape)} here"
        )


@dataclass(frozen=True)
class LoadReport:
    """The report of loaded weights; its text is a table.

    Attributes:
        loaded: The module's tensors with a new value, in model order; tied ones under each name.
        missing: The module's tensors that the source lacks; they keep their value.
        unexpected: Names in the source that the module lacks.
        mismatched: Tensors of another shape, or of a dtype that cannot be converted; they keep their value.
        converted: Loaded tensors that were rounded or widened to the module's dtype.
        dropped: Source names that `rename` dropped.
        note: For another program's file, what was read and what was not; for a checkpoint, how many frozen
            parameters it leaves out.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    unexpected: tuple[str, ...] = ()
    mismatched: tuple[UnfitTensor, ...] = ()
    converted: tuple[UnfitTensor, ...] = ()
    dropped: tuple[str, ...] = ()
    note: str = ""

    def __str__(self) -> str:
        """Return a line with the number of loaded tensors, and one for each that was not loaded unchanged."""
        found = {
            "missing": [(name, "keeps its value") for name in self.missing],
            "unexpected": [(name, "not in the module") for name in self.unexpected],
            "dropped": [(name, "by rename") for name in self.dropped],
            "mismatched": [(each.name, str(each)) for each in self.mismatched],
            "converted": [(each.name, str(each)) for each in self.converted],
        }
        rows: list[tuple[str, str, str]] = []
        for kind, told in found.items():
            rows += [(kind, name, note) for name, note in told[:_SHOWN]]
            rows += [(kind, f"... and {len(told) - _SHOWN} more", "")] if len(told) > _SHOWN else []
        total = len(self.loaded) + len(self.missing) + len(self.mismatched)
        width = max((len(name) for _, name, _ in rows), default=0)
        lines = [f"{kind:<10}  {name:<{width}}  {note}".rstrip() for kind, name, note in rows]
        note = f": {self.note}" if self.note else ""
        return "\n".join([f"loaded {len(self.loaded)} of {total} tensors{note}", *lines])


def load_weights_into(
    module: nn.Module, source: WeightSource | Found, *, strict: bool = True, rename: Rename | None = None
) -> LoadReport:
    """Copy weights from a source into a module, all or none.

    A module on the meta device gets them when a strategy shards it; whether they fit is checked now. Each
    process then reads the rows that it holds from safetensors files; other sources stay in memory until then.

    Floating-point numbers are converted to the module's dtype. One name of a tied parameter is enough. Names
    are compared without the parts that wrappers such as torch.compile add.

    Args:
        module: The module to fill; its parameters stay the same objects.
        source: A path for `checkpoint.load_weights` (a file, a folder, a checkpoint, a run; Lightning's and
            Composer's files too), the result of `read_torch_weights` or `find_weights`, or tensors by name.
        strict: Whether everything must fit. If not, the fitting tensors are loaded; the report has the rest.
            Frozen parameters that the source leaves out must be the same in the module; in another dtype
            only their shapes are compared.
        rename: The rule from source names to module names: a mapping of regular expressions to replacements,
            as for `re.sub`, each applied to the result of those before it; or a function. None instead of a
            name drops the tensor.

    Returns:
        The report: what was loaded and converted and, if allowed, what is missing, unexpected or different.

    Raises:
        CheckpointError: The source is not readable; something does not fit (listed with the nearest names);
            nothing fits; or two names become one. The module is unchanged.
        ConfigError: `source` or `rename` has a wrong type.
    """
    later = any(each.is_meta for each in (*module.parameters(), *module.buffers()))
    where, given, note, frozen = _read(source, later)
    named, dropped = renamed(given, rename, where)
    own = full_state(module)
    if later and isinstance(frozen, dict):
        raise CheckpointError(
            f"{where} leaves out the frozen parameters, and {type(module).__name__} was made on the meta"
            " device and has no values for them. Make it without torch.device('meta')"
        )
    if isinstance(frozen, dict) and strict and rename is None:
        check_same(frozen, fingerprints(module, frozen.keys()), where, may_convert=True)
        own = {name: each for name, each in own.items() if name not in frozen}
        note = f"the other {len(frozen)} are frozen, and left out there"
    fitting, report = _compare(module, own, named, where, later)
    if (report.missing or report.unexpected or report.mismatched) and (strict or not fitting):
        raise CheckpointError(_refusal(report, own, where, type(module).__name__, strict))
    if later:
        leave_weights(module, fitting, own, where)
        note = "; ".join(filter(None, ("each process reads its rows when a run shards the task", note)))
    else:
        put_state(module, fitting)
        if strict:  # of everything, also of what was to be read later
            forget_weights(module)
    return replace(report, dropped=tuple(dropped), note=note)


def _refusal(report: LoadReport, own: Collection[str], where: str, kind: str, strict: bool) -> str:
    problems = "; ".join(_problems(report, report.missing or own))
    if strict:
        return f"the weights of {where} do not fit {kind}: {problems}. strict=False loads those that fit"
    return (
        f"nothing of {where} fits {kind}, so nothing was loaded: {problems}. Give `rename` to turn the"
        " source's names into the module's"
    )


def _read(source: WeightSource | Found, later: bool) -> tuple[str, Mapping[str, Any], str, Json]:
    """Return the source's name for messages, its tensors, a note on them, and the frozen ones left out."""
    if isinstance(source, (str, os.PathLike)):
        found = describe_weights(source) if later else find_weights(source, mapped=True)
        return repr(os.fspath(source)), *found[:3]
    if isinstance(source, Found):
        return repr(source.path), *source[:3]
    if isinstance(source, TorchWeights):
        return repr(source.path), source.tensors, source.note, None
    if not isinstance(source, Mapping):
        more = "; give its state_dict()" if isinstance(source, nn.Module) else ""
        raise ConfigError(
            f"weights come from a path or from tensors by name, not from a {type(source).__name__}{more}"
        )
    for name, value in source.items():
        if isinstance(name, str) and isinstance(value, Tensor):
            continue
        inner = (
            isinstance(value, Mapping) and value and all(isinstance(each, Tensor) for each in value.values())
        )
        more = f". Did you mean source[{name!r}]?" if inner else ""
        raise ConfigError(f"weights are tensors by name; {name!r} is a {type(value).__name__}{more}")
    return "the given mapping", source, "", None


def _problems(report: LoadReport, meant: Collection[str]) -> list[str]:
    """Return a text for each kind of mismatch.

    Args:
        meant: The expected names, from which the nearest is suggested for each unexpected one.
    """
    unexpected = [f"{name!r}{hint(name, meant)}" for name in report.unexpected[:_SHOWN]]
    mismatched = [f"{each.name!r}: {each}" for each in report.mismatched[:_SHOWN]]
    return [
        f"{count} {kind}: {', '.join(texts)}{', ...' if count > _SHOWN else ''}"
        for kind, count, texts in (
            ("missing", len(report.missing), [repr(name) for name in report.missing[:_SHOWN]]),
            ("unexpected", len(report.unexpected), unexpected),
            ("of another shape or dtype", len(report.mismatched), mismatched),
        )
        if count
    ]


def _compare(
    module: nn.Module, own: Mapping[str, Any], named: Mapping[str, Any], where: str, later: bool
) -> tuple[dict[str, Any], LoadReport]:
    """Return the weights that fit a module, and the report of all."""
    fitting: dict[str, Any] = {}
    mismatched: list[UnfitTensor] = []
    converted: list[UnfitTensor] = []
    for name in [name for name in own if name in named]:  # in the module's order
        value = named[name]
        if is_extra(name):  # the module checks it itself; it may have any size and type
            if later:
                raise CheckpointError(
                    f"{where} has the extra state {name!r}, which a module on the meta device cannot take."
                    f" Make {type(module).__name__} without torch.device('meta')"
                )
            fitting[name] = value.clone()  # the module may keep it; what it is given is a mapped file
            continue
        mine = own[name]
        _check_usable(name, mine, value, where)
        shape = tuple(value.shape)
        both = UnfitTensor(
            name, shape, shape if is_lazy(mine) else tuple(mine.shape), value.dtype, mine.dtype
        )
        if both.shape != shape or not _converts(value.dtype, mine.dtype):
            mismatched.append(both)
            continue
        if value.dtype != mine.dtype:
            if value.dtype.is_floating_point and isinstance(value, Tensor):  # others are read later
                check_range(value, mine.dtype, f"{name!r} of {where}")
            converted.append(both)
        fitting[name] = value
    twins = _tied(module)
    if not later:
        _check_twins(twins, fitting, where)
    loaded, missing = _reached(own, fitting, twins, {each.name for each in mismatched})
    unexpected = tuple(name for name in named if name not in own)
    return fitting, LoadReport(loaded, missing, unexpected, tuple(mismatched), tuple(converted))


def _reached(
    own: Collection[str], fitting: Mapping[str, Any], twins: Mapping[str, Collection[str]], wrong: set[str]
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the module's names that get a value, by themselves or as a tied one, and those that get none."""
    tried = [name for name in own if name not in wrong]
    loaded = [each for each in tried if not fitting.keys().isdisjoint((each, *twins.get(each, ())))]
    reached = set(loaded)
    return tuple(loaded), tuple(each for each in tried if each not in reached and not is_extra(each))


def _check_usable(name: str, mine: Tensor, value: Tensor | FileTensor, where: str) -> None:
    if isinstance(value, FileTensor):
        return
    if value.is_meta or value.layout != torch.strided:
        raise CheckpointError(
            f"{name!r} of {where} is {'on the meta device' if value.is_meta else value.layout}; give dense "
            "tensors with data"
        )
    if is_sharded(mine) != is_sharded(value):
        raise CheckpointError(
            f"{name!r} is {'sharded' if is_sharded(mine) else 'whole'} in the module, and not in {where}. "
            "Load weights before `fit` shards the module"
        )


def _converts(stored: torch.dtype, own: torch.dtype) -> bool:
    """Return whether numbers of a stored dtype can be converted to the module's dtype."""
    if stored == own:
        return True
    if stored.is_floating_point and own.is_floating_point:
        # 8-bit numbers have no meaning without their scale.
        return stored.itemsize > 1 and own.itemsize > 1
    if stored.is_complex or own.is_complex:
        return stored.is_complex and own.is_complex
    if torch.bool in (stored, own) or stored.is_floating_point or own.is_floating_point:
        return False
    narrow, wide = torch.iinfo(stored), torch.iinfo(own)
    return wide.min <= narrow.min and narrow.max <= wide.max


def _tied(module: nn.Module) -> dict[str, list[str]]:
    """Return, for each name of a parameter or buffer, all names of the same tensor."""
    groups: dict[int, list[str]] = {}
    for tensors in (module.named_parameters, module.named_buffers):
        for name, tensor in tensors(remove_duplicate=False):
            groups.setdefault(id(tensor), []).append(clean_name(name))
    return {name: group for group in groups.values() for name in group}


def _check_twins(twins: Mapping[str, list[str]], fitting: Mapping[str, Tensor], where: str) -> None:
    """Raise if one tensor gets two different values."""
    for name, value in fitting.items():
        first = next((each for each in twins.get(name, ()) if each in fitting), name)
        other = fitting[first]
        if other is not value and not same(other, value.to(device=other.device, dtype=other.dtype)):
            raise differ(first, name, where)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
