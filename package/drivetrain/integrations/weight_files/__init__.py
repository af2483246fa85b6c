"""Where Lightning and Composer put the weights in a `torch.save` file, and what Lightning puts beside them.

Neither library is needed. Each function takes the content of a file, and returns values by the names of the
fields of `TorchWeights`, or None for another program's file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_VERSION = "pytorch-lightning_version"
_HPARAMS = "hyper_parameters"
_AVERAGED_FROM = "current_model_state"
"""The key of the model's own weights in Lightning's WeightAveraging; "state_dict" then has the averages."""

_TAKEN = ("state_dict", _VERSION, _HPARAMS, "hparams_name")

_AVERAGED = (
    "has averaged weights as 'state_dict' and the model's own as 'current_model_state': the averages are"
    " read. To have the model's own, export them from Lightning"
)

_MOST_VALUES = 100_000
"""A hyper-parameter with more values is not plain: a small file can describe 2^60 by repeated references."""


def of_lightning(content: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Return the weights and the hyper-parameters of Lightning's file, or None."""
    hparams, argument = content.get(_HPARAMS, {}), content.get("hparams_name", "kwargs")
    if not content.keys() & {_VERSION, _HPARAMS} or not isinstance(hparams, dict):
        return None
    named = {name: value for name, value in hparams.items() if isinstance(name, str)}
    plain = {name: value for name, value in named.items() if _is_plain(value)}
    averages = {"what": "the averages (state_dict)", "warning": _AVERAGED}
    return {
        "tensors": content.get("state_dict"),
        "origin": f"a checkpoint of Lightning {content.get(_VERSION, '')}".rstrip(),
        "left": tuple(name for name in content if name not in _TAKEN),
        "hparams": plain,
        "objects": {name: _in_words(value) for name, value in named.items() if name not in plain},
        "argument": "" if argument == "kwargs" else str(argument),
        **(averages if _AVERAGED_FROM in content else {}),
    }


def of_composer(content: Mapping[Any, Any]) -> dict[str, Any] | None:
    """Return the weights of Composer's file, or None."""
    state = content.get("state")
    if not isinstance(state, dict):
        return None
    left = tuple(name for name in state if name != "model")
    return {"tensors": state.get("model"), "origin": "a checkpoint of Composer", "left": left}


def _is_plain(value: Any) -> bool:
    """Return whether a value consists only of numbers, texts, lists and mappings."""
    rest, seen = [value], 0
    while rest and seen < _MOST_VALUES:
        each = rest.pop()
        seen += 1
        if isinstance(each, dict):
            rest += each.values()
        elif isinstance(each, (list, tuple)):
            rest += each
        elif each is not None and not isinstance(each, (bool, int, float, str)):
            return False
    return not rest


def _in_words(value: Any) -> str:
    return "a tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
