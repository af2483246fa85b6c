"""The files beside the weights from which transformers' own Trainer goes on: arguments, optimizer and rates.

They are written for programs around transformers, and nothing here reads them.
"""

from __future__ import annotations

import copy
import io
import os
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME

from drivetrain.checkpoint.storage.files import write_atomically
from drivetrain.checkpoint.storage.filesystem import os_errors
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.module_state import clean_name
from drivetrain.integrations.transformers.callbacks import Rates
from drivetrain.integrations.transformers.optimizers import decayed_parameters


def write_arguments(folder: str, args: TrainingArguments) -> None:
    """Write training_args.bin, without the tokens of the Hub, to a folder or an address.

    Raises:
        StorageError: It cannot be written.
    """
    stored = copy.copy(args)
    vars(stored).update({name: None for name in vars(args) if name.endswith("_token")})
    content = io.BytesIO()
    torch.save(stored, content)
    files = file_system(folder)
    write_atomically(files.join(folder, TRAINING_ARGS_NAME), [content.getbuffer()], files)


def write_optimizer(folder: str, model: nn.Module, optimizer: Optimizer, scheduler: Any, step: int) -> None:
    """Write optimizer.pt and scheduler.pt to a folder.

    Args:
        folder: The folder.
        model: The model, whose parameters are whole in this process.
        optimizer: Its optimizer.
        scheduler: Its scheduler, or `Rates` where the rates are a function of the step.
        step: The number of steps that were made.

    Raises:
        StorageError: A file cannot be written.
    """
    state, rates = optimizer.state_dict(), None
    if isinstance(scheduler, Rates):
        state = _in_two_groups(optimizer, model)
        rates = _as_lambda(state["param_groups"], step)
    with os_errors("write", folder):
        torch.save(state, os.path.join(folder, OPTIMIZER_NAME))
        torch.save(rates or scheduler.state_dict(), os.path.join(folder, SCHEDULER_NAME))


def _in_two_groups(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """Return an optimizer's state with the groups of transformers: the decayed parameters, and the others."""
    decayed = {*decayed_parameters(model)}
    trained = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    parameters = [(name, each) for name, each in model.named_parameters() if id(each) in trained]
    groups, order = [], list[nn.Parameter]()
    for chosen in (True, False):
        found = [each for name, each in parameters if (clean_name(name) in decayed) is chosen]
        settings = trained[id(found[0] if found else parameters[0][1])]
        others = {name: each for name, each in settings.items() if name != "params"}
        groups.append({**others, "params": [len(order) + number for number in range(len(found))]})
        order += found
    known = optimizer.state
    return {
        "state": {number: known[each] for number, each in enumerate(order) if each in known},
        "param_groups": groups,
    }


def _as_lambda(groups: list[dict[str, Any]], step: int) -> dict[str, Any]:
    """Return the state that torch's LambdaLR has after a number of steps; the function is made anew."""
    return {
        "base_lrs": [float(group.get("initial_lr", group["lr"])) for group in groups],
        "last_epoch": step,
        "_step_count": step + 1,
        "_is_initial": False,
        "_get_lr_called_within_step": False,
        "_last_lr": [float(group["lr"]) for group in groups],
        "lr_lambdas": [None] * len(groups),
    }
