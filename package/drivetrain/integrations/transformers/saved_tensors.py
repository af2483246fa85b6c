"""The tensors in a `from_pretrained` folder, made from those of a model one at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary
from transformers.core_model_loading import revert_weight_conversion
from transformers.modeling_utils import PreTrainedModel, remove_tied_weights_from_state_dict

from drivetrain.checkpoint.weights.dtypes import cast
from drivetrain.checkpoint.weights.lazy_tensors import TensorSource, spec_of
from drivetrain.checkpoint.weights.module_state import clean_names
from drivetrain.core.errors import CheckpointError, ConfigError


@dataclass(eq=False)
class _Group:
    """Tensors of the model, and the tensors of the files that transformers makes from them together."""

    sources: dict[str, None] = field(default_factory=dict)
    results: list[str] = field(default_factory=list)


class SavedTensors(TensorSource):
    """The tensors that `save_pretrained` writes, under its names, without those that are tied to others.

    Some models have other tensors than their files: transformers stacks the experts of a layer, for
    example. It converts them back here, one group at a time; only that group is in memory.

    Args:
        model: The model, which may be on the meta device.
        tensors: The values of its state dict, by clean name.
        dtype: The dtype for floating-point tensors; None keeps each.

    Raises:
        CheckpointError: `tensors` lacks some of the model, or has others.
    """

    def __init__(self, model: Any, tensors: TensorSource, dtype: torch.dtype | None) -> None:
        self._model = model
        self._tensors = tensors
        self._made: dict[str, Tensor] = {}
        self._empty = _empty_state(model, tensors)
        self._origins: dict[str, str | _Group] = {}
        traced = _SavedTrace(self._empty)
        with traced:
            results = self._reverted(self._empty)
        direct = {id(each): name for name, each in self._empty.items()}
        groups: dict[str, _Group] = {}
        for name, result in results.items():
            if id(result) in direct:
                self._origins[name] = direct[id(result)]
                continue
            group = _joined(traced.origins(result), groups)
            group.results.append(name)
        for group in dict.fromkeys(groups.values()):
            self._origins.update(dict.fromkeys(group.results, group))
        self.specs = {name: spec_of(each.shape, _final(each, dtype)) for name, each in results.items()}

    def materialize(self, name: str) -> Tensor:
        """Return a tensor of the files, made from the model's."""
        origin = self._origins[name]
        if isinstance(origin, str):
            tensor = self._tensors.materialize(origin)
        else:
            if name not in self._made:
                self._convert(origin)
            tensor = self._made.pop(name)
        dtype = self.specs[name].dtype
        return cast(tensor, dtype, repr(name)) if tensor.is_floating_point() else tensor

    def gather_rest(self, order: Iterable[str]) -> None:
        """Join the gathers of the model's tensors in the order that the files need them."""
        origins = [self._origins[name] for name in order]
        names = [name for each in origins for name in ([each] if isinstance(each, str) else each.sources)]
        self._tensors.gather_rest(dict.fromkeys(names))

    def _reverted(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        if not isinstance(self._model, PreTrainedModel):
            return tensors
        reverted: dict[str, Tensor] = revert_weight_conversion(self._model, dict(tensors))
        return reverted

    def _convert(self, group: _Group) -> None:
        values = {name: self._tensors.materialize(name) for name in group.sources}
        results = self._reverted({**self._empty, **values})
        self._made.update({name: results[name] for name in group.results})


class AdapterTensors(TensorSource):
    """The tensors of an adapter, under the names that PEFT writes.

    Args:
        model: The `PeftModel`, whose base may be on the meta device.
        tensors: Values of its state dict, by clean name: at least those of the adapter.
        adapter: The adapter's name.
        embeddings: Whether the embeddings belong to it.
        dtype: The dtype for floating-point tensors; None keeps each.

    Attributes:
        origins: The names of the model's tensors by PEFT's; without those that PEFT computes.

    Raises:
        CheckpointError: PEFT computes a tensor from others.
    """

    def __init__(
        self, model: Any, tensors: TensorSource, adapter: str, embeddings: bool, dtype: torch.dtype | None
    ) -> None:
        from peft import get_peft_model_state_dict

        self._tensors = tensors
        empty = {name: each.to("meta") for name, each in tensors.specs.items()}
        found = get_peft_model_state_dict(
            model, state_dict=dict(empty), adapter_name=adapter, save_embedding_layers=embeddings
        )
        names = {id(each): name for name, each in empty.items()}
        self._computed = {name: each for name, each in found.items() if id(each) not in names}
        for name, each in self._computed.items():
            if each.is_meta:
                raise CheckpointError(
                    f"PEFT computes {name!r} of the adapter {adapter!r} from other weights, which are not in"
                    " memory. Call model.save_pretrained(folder) of the trained PeftModel"
                )
        self.origins = {name: names[id(each)] for name, each in found.items() if id(each) in names}
        self.specs = {name: spec_of(each.shape, _final(each, dtype)) for name, each in found.items()}

    def materialize(self, name: str) -> Tensor:
        """Return a tensor of the adapter."""
        origin = self.origins.get(name)
        tensor = self._computed[name].detach() if origin is None else self._tensors.materialize(origin)
        dtype = self.specs[name].dtype
        return cast(tensor, dtype, repr(name)) if tensor.is_floating_point() else tensor

    def gather_rest(self, order: Iterable[str]) -> None:
        """Join the gathers of the adapter's tensors."""
        self._tensors.gather_rest([self.origins[name] for name in order if name in self.origins])


def _final(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def check_shared(model: nn.Module) -> None:
    """Check that `from_pretrained` could load the model's files: it declares all tensors that it shares.

    Raises:
        ConfigError: It does not; names the tensors.
    """
    if not isinstance(model, PreTrainedModel):
        return
    held = {name: each.to("meta") for name, each in model.state_dict().items() if isinstance(each, Tensor)}
    try:
        remove_tied_weights_from_state_dict(held, model)
    except RuntimeError as error:
        raise ConfigError(
            f"the files of {type(model).__name__} could not be loaded again, because it shares tensors that"
            " its _tied_weights_keys do not name. Name them there, make copies of them, or give"
            f' save_strategy="no". transformers says: {error}'
        ) from error


def _empty_state(model: nn.Module, tensors: TensorSource) -> dict[str, Tensor]:
    """Return the tensors that the files hold, on the meta device: without those that are tied to others."""
    raw: dict[str, str] = clean_names(
        (name for name, each in model.state_dict().items() if isinstance(each, Tensor)), type(model).__name__
    )
    lacking, strange = sorted(raw.keys() - tensors.specs.keys()), sorted(tensors.specs.keys() - raw.keys())
    if lacking or strange:
        what = f"lack {lacking[0]!r}" if lacking else f"have {strange[0]!r}, which the model lacks"
        raise CheckpointError(f"the weights do not fit {type(model).__name__}: they {what}")
    ignored = getattr(model, "_keys_to_ignore_on_save", None) or ()
    kept = {raw[name]: each.to("meta") for name, each in tensors.specs.items() if raw[name] not in ignored}
    if isinstance(model, PreTrainedModel):  # transformers finds out which are tied by the model's own names
        kept = remove_tied_weights_from_state_dict(kept, model)
    clean = {original: name for name, original in raw.items()}
    return {clean[name]: each for name, each in kept.items()}


class _SavedTrace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Remembers which of the given tensors each result of an operation was made from."""

    def __init__(self, given: Mapping[str, Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins: Any = WeakIdKeyDictionary()
        for name, each in given.items():
            self._origins[each] = (name,)

    def origins(self, tensor: Tensor) -> tuple[str, ...]:
        """Return the names of the tensors that one was made from."""
        found: tuple[str, ...] = self._origins.get(tensor, ())
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation, and remember."""
        result = func(*args, **(kwargs or {}))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        names = tuple(dict.fromkeys(name for each in given for name in self.origins(each)))
        for each in tree_leaves(result):
            if isinstance(each, Tensor):
                self._origins[each] = names
        return result


def _joined(names: Iterable[str], groups: dict[str, _Group]) -> _Group:
    """Return the group that holds all names, after joining those that overlap."""
    joined = _Group()
    for name in names:
        other = groups.get(name)
        if other is None:
            joined.sources[name] = None
        elif other is not joined:
            joined.sources.update(other.sources)
            joined.results += other.results
            groups.update(dict.fromkeys(other.sources, joined))
    groups.update(dict.fromkeys(joined.sources, joined))
    return joined
