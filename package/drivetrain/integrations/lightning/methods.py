"""The methods of a LightningModule: which are called here, and what to do about the others."""

from __future__ import annotations

import inspect
from typing import Any

from drivetrain.core.errors import ConfigError
from drivetrain.integrations.lightning.kinds import is_kind, is_overridden, is_theirs

_HOOKS_PER_BATCH = "on_{0}_batch_start on_{0}_batch_end"
_HOOKS = " ".join(
    f"on_{stage}_start on_{stage}_end on_{stage}_epoch_start on_{stage}_epoch_end "
    + _HOOKS_PER_BATCH.format(stage)
    for stage in ("train", "validation", "test", "predict")
)

CALLED = frozenset(
    f"""forward training_step validation_step test_step predict_step configure_optimizers {_HOOKS}
    on_fit_start on_fit_end on_before_zero_grad on_before_backward on_after_backward on_before_optimizer_step
    optimizer_step optimizer_zero_grad lr_scheduler_step configure_gradient_clipping on_after_batch_transfer
    configure_callbacks on_save_checkpoint on_load_checkpoint prepare_data setup teardown configure_model
    train_dataloader val_dataloader test_dataloader predict_dataloader""".split()
)
"""The methods that are called here, if a module overrides them. `as_data` calls the loaders."""

_OF_USERS = frozenset(
    (
        *("save_hyperparameters", "hparams", "hparams_initial", "remove_ignored_hparams"),
        *("freeze", "unfreeze", "to_onnx", "to_torchscript", "to_tensorrt", "load_from_checkpoint"),
        *("example_input_array", "automatic_optimization", "strict_loading", "to", "cuda", "cpu", "type"),
        *("float", "double", "half", "device", "dtype", "on_gpu"),
    )
)
"""The methods that Lightning's Trainer does not call either, but the module or its user."""

_INSTEAD = {
    "backward": "the engine runs backward on what training_step returns. Change the loss there, or gradients"
    " in on_after_backward; or call self.manual_backward(loss) with self.automatic_optimization = False",
    "configure_sharded_model": "Lightning has replaced it by configure_model",
    "transfer_batch_to_device": "give the batch's class a method to(device)",
    "on_before_batch_transfer": "let the loader's collate_fn do it",
    "state_dict": "checkpoints hold all parameters and buffers, those of registered modules included. Keep"
    " what is not to be stored out of the module tree, for example in a list",
    "load_state_dict": "as for state_dict: weights are loaded by their names",
    "log": "self.log belongs to the run. Give the method another name, which calls self.log",
    "log_dict": "self.log_dict belongs to the run. Give the method another name, which calls it",
    "validation_epoch_end": "Lightning 2 has removed it: rename it to on_validation_epoch_end, and collect"
    " outputs in validation_step",
    "training_epoch_end": "Lightning 2 has removed it: rename it to on_train_epoch_end, and collect outputs"
    " in training_step",
    "test_epoch_end": "Lightning 2 has removed it: rename it to on_test_epoch_end, and collect outputs in"
    " test_step",
    "predict_epoch_end": "Lightning 2 has removed it: rename it to on_predict_epoch_end",
    "training_step_end": "Lightning 2 has removed it: do it at the end of training_step",
    "validation_step_end": "Lightning 2 has removed it: do it at the end of validation_step",
    "test_step_end": "Lightning 2 has removed it: do it at the end of test_step",
    "on_epoch_start": "Lightning 2 has removed it: rename it to on_train_epoch_start",
    "on_epoch_end": "Lightning 2 has removed it: rename it to on_train_epoch_end",
    "on_batch_start": "Lightning 2 has removed it: rename it to on_train_batch_start",
    "on_batch_end": "Lightning 2 has removed it: rename it to on_train_batch_end",
    "on_pretrain_routine_start": "Lightning 2 has removed it: rename it to on_fit_start",
    "on_pretrain_routine_end": "Lightning 2 has removed it: rename it to on_fit_start",
}
_MODES = "evaluations set the modes of all modules and restore them"
_OF_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_MANUAL = {
    "optimizer_step": "it is called in automatic optimization only. Call what it does in training_step",
    "optimizer_zero_grad": "it is called in automatic optimization only. Call it in training_step",
    "configure_gradient_clipping": "it is called in automatic optimization only. Call self.clip_gradients in"
    " training_step",
    "lr_scheduler_step": "it is called in automatic optimization only. Step the schedule in training_step",
}


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
    found = {each: _reason(module, each) for each in sorted(_methods(module) | _INSTEAD.keys())}
    refused = {each: why for each, why in found.items() if why}
    if refused:
        listed = "; ".join(f"{each} ({why})" for each, why in refused.items())
        raise ConfigError(f"{name} overrides what is never called here: {listed}")


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


def _methods(module: Any) -> set[str]:
    """Return the names of the public methods of Lightning's own classes."""
    names: set[str] = set()
    for kind in type(module).__mro__:
        if is_theirs(kind) and "core" in kind.__module__ + ".core":
            names |= {name for name in vars(kind) if not name.startswith("_")}
    return names


def _reason(module: Any, name: str) -> str:
    """Return what to do about an overridden method that is never called; empty if it is none."""
    if name in _OF_USERS or not is_overridden(module, name):
        return ""
    if not module.automatic_optimization and name in _MANUAL:
        return _MANUAL[name]
    if name in CALLED:
        return ""
    if name.endswith(("_model_eval", "_model_train", "_model_zero_grad")):
        return _MODES
    return _INSTEAD.get(name, "it belongs to the run, and is replaced while one is in progress")


def takes(function: Any, name: str, place: int) -> bool:
    """Return whether a step takes an argument, by Lightning's rule: by its name, by its place, or by `*`.

    Args:
        function: The bound method.
        name: The argument's name.
        place: The number of parameters that it takes at least if it has one at this place.
    """
    parameters = inspect.signature(function).parameters
    positional = [
        each
        for each in parameters.values()
        if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)
    ]
    star = any(each.kind is each.VAR_POSITIONAL for each in parameters.values())
    return name in parameters or star or len(positional) >= place
