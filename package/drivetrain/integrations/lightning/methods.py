"""The methods of a LightningModule: which are called here, and which of Lightning 1 no longer are."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.integrations.lightning.kinds import is_kind, is_overridden, is_theirs

_LOG = logger(__name__)

_REMOVED = {
    "training_epoch_end": ("training_step", "on_train_epoch_end"),
    "validation_epoch_end": ("validation_step", "on_validation_epoch_end"),
    "test_epoch_end": ("test_step", "on_test_epoch_end"),
}
"""The hooks of Lightning 1 that its Trainer refuses too: the step whose outputs each was given, and what has
replaced it."""

_OLD = {
    **dict.fromkeys(("training_step_end", "validation_step_end", "test_step_end"), "the end of the step"),
    "predict_epoch_end": "on_predict_epoch_end",
    "on_epoch_start": "on_train_epoch_start",
    "on_epoch_end": "on_train_epoch_end",
    "on_batch_start": "on_train_batch_start",
    "on_batch_end": "on_train_batch_end",
    "on_pretrain_routine_start": "on_fit_start",
    "on_pretrain_routine_end": "on_fit_start",
}
"""Other hooks of Lightning 1, which its Trainer never calls: what has replaced each. A module may have a
helper of such a name."""

_OF_STEPS = ("training_step", "validation_step", "test_step", "predict_step")


def check_module(module: Any) -> None:
    """Check that a module overrides nothing that is never called.

    Raises:
        ConfigError: It is no LightningModule, or it overrides such a method; says what to do instead.
    """
    if isinstance(module, type) and any(each.__name__ == "LightningModule" for each in module.__mro__):
        raise ConfigError(
            f"as_task takes an object, not the class {module.__name__}: as_task({module.__name__}(...))"
        )
    if not is_kind(module, "LightningModule"):
        raise ConfigError(
            "as_task takes a LightningModule of lightning or pytorch_lightning, not a"
            f" {type(module).__name__}. Another module becomes a task as a subclass of drivetrain.TaskModule"
        )
    name = type(module).__name__
    if not is_overridden(module, "training_step") and not any(
        is_overridden(module, each) for each in _OF_STEPS
    ):
        raise ConfigError(f"{name} has no step: override one of {', '.join(_OF_STEPS)}")
    for step in _OF_STEPS:
        _check_step(module, name, step)
    removed = {
        each: f"Lightning 2 has removed it: rename it to {hook}, and collect outputs in {step}"
        for each, (step, hook) in _REMOVED.items()
        if is_overridden(module, each) and is_overridden(module, step)
    }
    if removed:
        listed = "; ".join(f"{each} ({why})" for each, why in removed.items())
        raise ConfigError(f"{name} overrides what is never called here: {listed}")
    for each, instead in _OLD.items():
        if is_overridden(module, each) and not _is_used_by(module, each):
            _LOG.warning(
                f"{name}.{each} is not called: Lightning 2 has removed this hook. {instead} has replaced it"
            )


def _check_step(module: Any, name: str, step: str) -> None:
    if not is_overridden(module, step):
        return
    parameters = inspect.signature(getattr(module, step)).parameters
    for given, why in {
        "dataloader_iter": "each step is given a batch. Write it as training_step(self, batch, batch_idx)",
        "optimizer_idx": "Lightning 2 has removed it. Set self.automatic_optimization = False and step the"
        " optimizers in training_step",
    }.items():
        if given in parameters:
            raise ConfigError(f"{name}.{step} has a parameter {given!r}: {why}")


def _is_used_by(module: Any, name: str) -> bool:
    """Return whether a method of a module's own classes names another one, as if to call it."""
    methods = (each for kind in type(module).__mro__ if not is_theirs(kind) for each in vars(kind).values())
    return any(name in each.__code__.co_names for each in methods if inspect.isfunction(each))


def takes(function: Any, name: str, position: int) -> bool:
    """Return whether a step takes an argument, by Lightning's rule: by its name, by its position, or by `*`.

    Args:
        function: The bound method.
        name: The argument's name.
        position: The number of parameters that it takes at least if it has one there.
    """
    parameters = inspect.signature(function).parameters
    positional = [
        each
        for each in parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    star = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    return name in parameters or star or len(positional) >= position


def check_state_dict(module: Any) -> None:
    """Check that a `state_dict` of the module's own adds nothing, as checkpoints hold the tensors alone.

    Raises:
        ConfigError: It has entries that no parameter, buffer or extra state of a submodule has.
    """
    held = nn.Module.state_dict(module).keys()
    added = sorted(module.state_dict().keys() - held)
    if added:
        raise ConfigError(
            f"{type(module).__name__}.state_dict adds {', '.join(map(repr, added[:5]))}, which no checkpoint"
            " would have: they hold all parameters and buffers. Register them as buffers, or"
            " store it in on_save_checkpoint"
        )
