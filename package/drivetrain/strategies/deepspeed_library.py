"""DeepSpeed itself: found, imported without its noise, and connected to the job's process group."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from drivetrain.errors import ConfigError, MissingDependencyError, StrategyError
from drivetrain.muon import CombinedOptimizer
from drivetrain.strategies.base import Support, installed

_ELEMENTWISE = frozenset(
    {
        "ASGD",
        "Adadelta",
        "Adam",
        "AdamW",
        "Adamax",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "DeepSpeedCPUAdam",
        "DeepSpeedCPULion",
        "FusedAdam",
        "FusedLion",
    }
)
"""Optimizers whose update of a number depends on that number's own history alone."""

_OF_MATRICES = frozenset({"Adafactor", "Muon", "Shampoo", "SOAP"})
"""Known to look at a parameter's shape."""

_connected: Any = None


def library(device: str) -> Any:
    """The package, for a kind of device.

    Raises:
        MissingDependencyError: It is not installed.
        StrategyError: It was imported before for another kind of device.
    """
    if not installed("deepspeed", "deepspeed"):
        raise MissingDependencyError("deepspeed", "deepspeed", "strategy 'deepspeed'")
    with _environment(DS_ACCELERATOR=os.environ.get("DS_ACCELERATOR", device)), quiet():
        import deepspeed
        from deepspeed.accelerator import get_accelerator

        there = get_accelerator().device_name()
    if there != device:
        raise StrategyError(
            f"DeepSpeed has chosen {there!r} in this program, and the strategy runs on {device!r}. Set the"
            f" environment variable DS_ACCELERATOR={device}, or use the other device"
        )
    # DeepSpeed calls, in every step, what torch has given other names.
    warnings.filterwarnings("ignore", r".*torch\.distributed\.\w+` is deprecated", FutureWarning)
    # Asked for one operator alone, of inference on a CPU, which it would compile for half a minute before any
    # training; and to know the answer it would try the compiler on every operator that it has.
    vars(deepspeed.ops).setdefault("__compatible_ops__", {})
    return deepspeed


def float16(device: str) -> Support:
    """Whether DeepSpeed computes in float16 on a kind of device."""
    library(device)
    from deepspeed.accelerator import get_accelerator

    if get_accelerator().is_fp16_supported():
        return Support(True)
    return Support(
        False, f"this {device.upper()} has no float16 for DeepSpeed; use 'bf16-mixed', 'ddp' or 'fsdp'"
    )


def connect(deepspeed: Any) -> None:
    """Have DeepSpeed use the job's process group; what it remembers of another is forgotten."""
    global _connected
    world = torch.distributed.group.WORLD
    if _connected is world:
        return
    from deepspeed.utils import groups

    deepspeed.comm.comm.cdb = None
    for name in (
        "_WORLD_GROUP",
        "_DATA_PARALLEL_GROUP",
        "_MODEL_PARALLEL_GROUP",
        "_TENSOR_MODEL_PARALLEL_GROUP",
    ):
        setattr(groups, name, None)
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None
    groups._ALL_TO_ALL_GROUP = {}
    with quiet():
        deepspeed.init_distributed(dist_init_required=False, verbose=False)
    _connected = world


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what DeepSpeed prints, warns of and logs at each start out of the program's output."""
    logger = logging.getLogger("DeepSpeed")
    level = logger.level
    logger.setLevel(max(level, logging.ERROR))
    try:
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)


@contextlib.contextmanager
def compiled_once() -> Iterator[None]:
    """While an operator is compiled, on first use: one process at a time, in a folder of our own.

    torch marks a compilation by a file that a process which is killed leaves behind, for which all later ones
    would wait for ever. Here that mark is only ever found by the holder of a lock that the system itself
    frees, so that it is nobody's, and is removed.
    """
    import fcntl  # where DeepSpeed compiles, there is one

    from torch.utils.cpp_extension import get_default_build_root

    root = Path(os.environ.get("TORCH_EXTENSIONS_DIR") or get_default_build_root()) / "drivetrain"
    root.mkdir(parents=True, exist_ok=True)
    with (
        (root / "building").open("w", encoding="utf-8") as file,
        _environment(TORCH_EXTENSIONS_DIR=str(root)),
        quiet(),
    ):
        fcntl.flock(file, fcntl.LOCK_EX)
        for stale in root.glob("**/lock"):
            stale.unlink()
        yield


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    """Within it the variables are set; afterwards the environment is as before, whatever was set in it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)


def check_optimizer(optimizer: Optimizer, allowed: bool) -> None:
    """Refuse an optimizer that would compute something else on flat pieces than on parameters.

    Args:
        optimizer: Which.
        allowed: Whether the user says that it can.

    Raises:
        ConfigError: It looks at a parameter's shape, or is not known not to.
    """
    if allowed:
        return
    parts = optimizer.parts if isinstance(optimizer, CombinedOptimizer) else (optimizer,)
    unknown = [name for name in (type(each).__name__ for each in parts) if name not in _ELEMENTWISE]
    if not unknown:
        return
    name = unknown[0]
    others = f"Allowed are {', '.join(sorted(_ELEMENTWISE))}"
    given = "DeepSpeed gives the optimizer flat pieces in which parameters lie end to end, and"
    if name in _OF_MATRICES:
        raise ConfigError(f"{given} {name} works on whole matrices. Use strategy 'ddp' with it. {others}")
    raise ConfigError(
        f"{given} {name} is not known to compute the same on those. {others}; if {name} works"
        ' number by number, give DeepSpeedConfig(config={"zero_allow_untested_optimizer": True})'
    )
