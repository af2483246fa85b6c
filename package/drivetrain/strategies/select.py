"""Choosing the strategy of a run from the arguments, the hardware and the launcher."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.launch.environment import ProcessEnvironment, detect
from drivetrain.strategies.accelerate.launcher import Request
from drivetrain.strategies.base import Strategy, Support
from drivetrain.strategies.hardware import Hardware
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.strategies.registry import BUILT_IN, DEVICES, STRATEGIES, XLA, configure, named
from drivetrain.strategies.single import SingleDevice

ONE_PROCESS = ("single", "mps", "xpu")
"""Names of strategies that never run several processes."""

_TO_EVALUATE = (
    ". An evaluation does not need a single process: on several each sample counts once, and all get the same"
    " numbers. With strategy=drivetrain.strategies.SingleDevice('cpu') each process evaluates everything"
)
"""Advice for a program that runs as several processes and asks for one, usually to evaluate."""


class Choice(NamedTuple):
    """The strategy, device and number of processes of a run.

    Attributes:
        name: The strategy's name: "single", "ddp", "fsdp" or another package's.
        device_kind: "cpu", "cuda", "mps", "xpu" or "xla".
        local_world_size: The number of processes on this machine.
        world_size: The number of processes on all machines.
        config: The strategy's configuration; None uses its defaults.
    """

    name: str
    device_kind: str
    local_world_size: int = 1
    world_size: int = 1
    config: Any = None


def choose(
    spec: Any,
    hardware: Hardware,
    environment: ProcessEnvironment | None = None,
    devices: int | str = "auto",
    num_nodes: int = 1,
    request: Request | None = None,
) -> Choice:
    """Choose strategy, device and number of processes; depends only on the arguments.

    "auto" and the names of devices mean "single" for one process and "ddp" for several. On a TPU "auto" means
    "xla" for one chip and "xla_fsdp" for several, in one process that uses all chips.

    `devices="auto"` is the number of processes that a launcher has started. Without a launcher it is all GPUs
    for "auto", "ddp", "fsdp" and other packages' strategies. On a CPU or a Mac it is 1: "ddp" and "fsdp" run
    with a single process too.

    Args:
        spec: A name, or a strategy's configuration.
        hardware: The hardware of this machine.
        environment: The processes that a launcher has started; None means no launcher.
        devices: The number of processes on each machine, or "auto".
        num_nodes: The number of machines; 1 also accepts the launcher's number.
        request: The arguments of `accelerate launch` or of its file, for "auto" and "accelerate".

    Raises:
        ConfigError: The name or configuration is unknown.
        StrategyError: The machine or the launcher cannot provide what was asked for.
    """
    _check_counts(devices, num_nodes)
    name, config = named(spec)
    if name not in ("auto", "accelerate") or request is None:
        request = Request()
    if request.strategy is not None:
        name, config = request.strategy, configure(request.strategy, request.options)
    kind = _device_kind(name, request.device, hardware)
    local, total = _processes(name, kind, hardware, environment, devices, num_nodes)
    if total > 1 and (name in ONE_PROCESS or kind in ("mps", "xpu", "xla")):
        raise _only_one(name, kind, total, environment is not None)
    # Each process of a launcher that has started one per GPU sees all GPUs: see `join`.
    if kind == "cuda" and local > hardware.cuda:
        raise _too_few_gpus(hardware, local)
    return Choice(_resolved(name, kind, hardware, total), kind, local, total, config)


def _resolved(name: str, kind: str, hardware: Hardware, total: int) -> str:
    """Return the strategy that a name such as "auto" stands for."""
    if name == "auto" and kind == "xla":
        return "xla_fsdp" if hardware.tpu > 1 else "xla"
    if name in ("auto", "single", *DEVICES):
        return "ddp" if total > 1 else "single"
    return name


def select_strategy(
    spec: Any,
    precision: Precision,
    devices: int | str = "auto",
    num_nodes: int = 1,
    hardware: Hardware | None = None,
    environment: Mapping[str, str] | None = None,
) -> Strategy:
    """Return the strategy for a run.

    Args:
        spec: A name, a configuration such as `DDPConfig(...)`, or an instance, which is returned unchanged.
        precision: The precision that the strategy must support.
        devices: The number of processes on each machine; see `choose`.
        num_nodes: The number of machines.
        hardware: The hardware; default is this machine's.
        environment: The environment variables; default is this process's.

    Raises:
        ConfigError: The name is unknown; the message gives the nearest.
        StrategyError: The strategy cannot run here, on that many devices, or in that precision.
    """
    if isinstance(spec, Strategy):
        _check_counts(devices, num_nodes)
        _check_instance(spec, devices, num_nodes)
        strategy = spec
    else:
        strategy = _make(spec, precision, devices, num_nodes, hardware or Hardware.here(), environment)
    check_precision(strategy, precision)
    return strategy


def check_precision(strategy: Strategy, precision: Precision) -> None:
    """Check that a strategy supports a precision on its device.

    The question to a GPU starts CUDA, after which this process cannot be forked into ranks. So a process that
    is going to have ranks does not ask; each rank does.
    """
    several = strategy.device.type == "cuda" and strategy.world_size > 1
    if several and not torch.distributed.is_initialized() and detect(os.environ) is None:
        return
    obstacle = precision.obstacle(strategy.device)
    support = Support(False, obstacle) if obstacle else strategy.supports(precision)
    if not support:
        raise StrategyError(f"precision {precision.name!r} cannot run on {strategy.device}: {support.reason}")


def select_precision(
    spec: str | int | Precision, environment: Mapping[str, str] | None = None, strategy: Any = None
) -> Precision:
    """Return the precision for a run.

    "auto" takes the precision of an Accelerator, then that of `accelerate launch`, then "32".

    Args:
        spec: A name, or a precision, which is returned unchanged.
        environment: The environment variables; default is this process's.
        strategy: The run's `strategy` argument.

    Raises:
        ConfigError: The name is unknown; the message lists the allowed ones.
        StrategyError: The precision of the Accelerator or of `accelerate launch` is not supported.
    """
    if spec == "auto":
        from drivetrain.strategies.accelerate.options import read_precision

        asked_by = None if isinstance(strategy, type) else getattr(strategy, "asked_precision", None)
        spec = asked_by or (read_precision(os.environ if environment is None else environment) or "32")
    return as_precision(spec)


def _make(
    spec: Any,
    precision: Precision,
    devices: int | str,
    num_nodes: int,
    hardware: Hardware,
    environment: Mapping[str, str] | None,
) -> Strategy:
    variables = os.environ if environment is None else environment
    found = detect(variables)
    request = _request(spec, variables, precision)
    if isinstance(spec, str) and spec in XLA:  # report a missing torch_xla before anything else
        _check_available(spec, hardware)
    choice = choose(spec, hardware, found, devices, num_nodes, request)
    if choice.name == "single":
        return SingleDevice(choice.device_kind)
    made = _check_available(choice.name, hardware)
    strategy: Strategy = made(choice.config, device=choice.device_kind, world_size=choice.world_size)
    return strategy


def _request(spec: Any, variables: Mapping[str, str], precision: Precision) -> Request | None:
    """Return the arguments of `accelerate launch` or of its configuration that apply to this strategy."""
    if isinstance(spec, str) and spec not in ("auto", "accelerate"):
        return None
    from drivetrain.strategies.accelerate.options import AccelerateConfig, request_of

    config = AccelerateConfig() if isinstance(spec, str) else spec
    return request_of(config, variables, precision) if isinstance(config, AccelerateConfig) else None


def _check_available(name: str, hardware: Hardware) -> Any:
    """Return the class of a strategy, or raise if it cannot run here."""
    made: Any = STRATEGIES[name]
    support = made.available(hardware)
    if not support:
        raise StrategyError(
            f"strategy {name!r} cannot run here: {support.reason}. It needs {made.needs}. Use"
            " strategy='auto', which runs on any machine"
        )
    return made


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _check_counts(devices: object, num_nodes: object) -> None:
    if not _is_count(num_nodes):
        raise StrategyError(f"num_nodes must be a positive number, not {num_nodes!r}")
    if devices != "auto" and not _is_count(devices):
        raise StrategyError(
            f"devices must be a positive number of processes, or 'auto', not {devices!r}. To choose GPUs, set"
            " CUDA_VISIBLE_DEVICES=0,2 before the program starts, and give devices=2"
        )


def _check_instance(strategy: Strategy, devices: int | str, num_nodes: int) -> None:
    size = strategy.world_size
    if isinstance(devices, int) and devices * num_nodes == size:
        return
    if devices == "auto" and size % num_nodes == 0:
        return
    raise StrategyError(
        f"strategy {strategy.name!r} runs {_counted(size)}, but devices={devices!r} on {num_nodes} node(s) is"
        " another number. Give both the same, or 'ddp' in place of an instance"
    )


def _device_kind(name: str, wanted: str | None, hardware: Hardware) -> str:
    """Return the kind of device: the one in the strategy's name, or the fastest that it can use."""
    if wanted is not None:
        return wanted
    if name in DEVICES:
        if not hardware.has(name):
            raise StrategyError(
                f"strategy {name!r} cannot run here: this machine has {hardware}. Use strategy='auto', which"
                " takes the fastest device there is, or 'cpu'"
            )
        return name
    if name in XLA:
        return "xla"
    if name == "auto":
        return hardware.best_device
    if hardware.tpu and not hardware.cuda and name in BUILT_IN:
        raise StrategyError(
            f"strategy {name!r} would leave this machine's TPU idle ({hardware}). Use strategy='auto' or"
            " 'xla', which use it, or 'cpu' to train on the CPU"
        )
    if name == "single":
        return hardware.best_device
    return "cuda" if hardware.cuda else "cpu"


def _processes(
    name: str,
    kind: str,
    hardware: Hardware,
    environment: ProcessEnvironment | None,
    devices: int | str,
    num_nodes: int,
) -> tuple[int, int]:
    """Return the number of processes on this machine, and on all machines."""
    if environment is not None:
        _check_launcher(environment, devices, num_nodes)
        return environment.local_world_size, environment.world_size
    if isinstance(devices, int):
        local = devices
    else:
        local = hardware.cuda if kind == "cuda" and name not in ("single", "cuda") else 1
    return local, local * num_nodes


def _check_launcher(environment: ProcessEnvironment, devices: int | str, num_nodes: int) -> None:
    """Check that the numbers match the launcher's; `num_nodes=1` alone always does."""
    total, local = environment.world_size, environment.local_world_size
    if isinstance(devices, int):
        fits = (devices, devices * num_nodes) == (local, total)
    else:
        fits = num_nodes in (1, environment.num_nodes)
    if fits:
        return
    raise StrategyError(
        f"this program was started as {_counted(total)}, {local} on this machine, but devices={devices!r} and"
        f" num_nodes={num_nodes} ask for another number. Leave both out to use these processes in every run,"
        f" or start as many as are asked for{_TO_EVALUATE if devices == 1 else ''}"
    )


def _only_one(name: str, kind: str, total: int, started: bool) -> StrategyError:
    other = "'ddp' or 'fsdp' for several processes"
    if kind != "cuda":
        other = "'xla_fsdp' for all XLA devices of one process, or strategy='cpu' for several on the CPU"
    return StrategyError(
        f"strategy {name!r} runs 1 process on {kind}, not {total}. Leave devices out and start one process,"
        f" or use {other}{_TO_EVALUATE if started else ''}"
    )


def _too_few_gpus(hardware: Hardware, local: int) -> StrategyError:
    return StrategyError(
        f"{local} processes on this machine need a GPU each, but this one sees {hardware.cuda}"
        f" GPU{'' if hardware.cuda == 1 else 's'}. Use at most devices={hardware.cuda}, or strategy='cpu'. A"
        " launcher starts one process per GPU, and each must see all GPUs of its machine (SLURM:"
        " --gpus-per-node instead of --gpus-per-task)"
    )


def _counted(processes: int) -> str:
    return f"{processes} process{'' if processes == 1 else 'es'}"
