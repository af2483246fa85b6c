"""Which strategy a run uses: a pure function of what was asked for, the hardware and the launcher."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from drivetrain.distributed.children import PARENT
from drivetrain.distributed.environment import ProcessEnvironment, detect
from drivetrain.distributed.launch import launched
from drivetrain.errors import StrategyError
from drivetrain.precision import Precision, as_precision
from drivetrain.strategies.accelerate_config import AccelerateConfig, asked
from drivetrain.strategies.accelerate_launch import Request, read_precision, read_request
from drivetrain.strategies.base import Strategy, Support
from drivetrain.strategies.hardware import Hardware
from drivetrain.strategies.single import SingleDevice
from drivetrain.strategies.table import BUILT_IN, DEVICES, XLA, configure, named, strategy_class

OURS = "drivetrain"
"""The launcher of processes that this program itself has started."""

ONE_PROCESS = ("single", "mps")
"""Names of strategies that never run several processes."""

_TO_EVALUATE = (
    ". To evaluate, no process has to be alone: on several every sample counts once, and all get the same"
    " numbers; strategy=drivetrain.strategies.SingleDevice('cpu') has each do the whole by itself"
)
"""What those want who ask for one process in a program that runs as several."""


class Choice(NamedTuple):
    """What a run will use.

    Attributes:
        name: The strategy's name: "single", "ddp", "fsdp" or another package's.
        device_kind: "cpu", "cuda", "mps" or "xla".
        local_world_size: How many processes on this machine.
        world_size: How many processes on all machines.
        config: The strategy's configuration; None for its defaults.
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
    """Decide on strategy, device and number of processes; asks nothing but its arguments.

    "auto" and the names of devices are "single" for one process and "ddp" for several; on a TPU "auto" is
    "xla" for one chip and "xla_fsdp_v2" for several, in one process that uses all. `devices="auto"` is
    the number that a launcher has started; without one it is all GPUs for "auto", "ddp", "fsdp" and other
    packages' strategies, and 1 on a CPU or a Mac, where "ddp" and "fsdp" run with a single process too.

    Args:
        spec: A name, or a strategy's configuration.
        hardware: What this machine has.
        environment: The processes that a launcher has started; None for none.
        devices: How many processes on each machine, or "auto".
        num_nodes: How many machines; 1 also for those of the launcher.
        request: What `accelerate launch` was told; counts for "auto", and for the device of "accelerate".

    Raises:
        ConfigError: An unknown name or configuration.
        StrategyError: The machine or the launcher does not have what was asked for.
    """
    _check_counts(devices, num_nodes)
    name, config = named(spec)
    if name not in ("auto", "accelerate") or request is None:
        request = Request()
    if request.strategy is not None and name == "auto":
        name = request.strategy
        config = configure(name, request.options)
    kind = _device_kind(name, request.device, hardware)
    local, total = _processes(name, kind, hardware, environment, devices, num_nodes)
    if total > 1 and (name in ONE_PROCESS or kind in ("mps", "xla")):
        raise _only_one(name, kind, environment, devices, num_nodes, total)
    # Processes of a launcher that has started one for each GPU see all GPUs, too: see `join`.
    if kind == "cuda" and local > hardware.cuda:
        raise _too_few_gpus(hardware, environment, local)
    if name == "auto" and kind == "xla":
        name = "xla_fsdp_v2" if hardware.tpu > 1 else "xla"
    if name in ("auto", "single", *DEVICES):
        name = "ddp" if total > 1 else "single"
    return Choice(name, kind, local, total, config)


def select_strategy(
    spec: Any,
    precision: Precision,
    devices: int | str = "auto",
    num_nodes: int = 1,
    hardware: Hardware | None = None,
    environment: Mapping[str, str] | None = None,
) -> Strategy:
    """The strategy for a run.

    Args:
        spec: A name, a configuration such as `DDPConfig(...)`, or an instance, which is taken as it is.
        precision: What it must support.
        devices: How many processes on each machine; see `choose`.
        num_nodes: How many machines.
        hardware: What there is; default is this machine's.
        environment: The environment variables; default is this process's.

    Raises:
        ConfigError: An unknown name; lists the nearest.
        StrategyError: The strategy cannot run here, on that many devices, or in that precision.
    """
    if isinstance(spec, Strategy):
        _check_counts(devices, num_nodes)
        _check_instance(spec, devices, num_nodes)
        strategy = spec
    else:
        strategy = _make(spec, precision, devices, num_nodes, hardware or Hardware.here(), environment)
    obstacle = precision.obstacle(strategy.device)
    support = Support(False, obstacle) if obstacle else strategy.supports(precision)
    if not support:
        raise StrategyError(f"precision {precision.name!r} cannot run on {strategy.device}: {support.reason}")
    return strategy


def select_precision(
    spec: str | int | Precision, environment: Mapping[str, str] | None = None, strategy: Any = None
) -> Precision:
    """The precision for a run: "auto" is that of an Accelerator, or what `accelerate launch` was told, and
    else "32".

    Args:
        spec: A name, or a precision, which is taken as it is.
        environment: The environment variables; default is this process's.
        strategy: What the run's strategy is chosen by.

    Raises:
        ConfigError: An unknown name; lists the allowed ones.
        StrategyError: An Accelerator has, or `accelerate launch` was told, one that there is not.
    """
    if spec == "auto":
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
    if found is not None and (launched() is not None or PARENT in variables):
        found = dataclasses.replace(found, launcher=OURS)
    request = _request(spec, variables)
    if isinstance(spec, str) and spec in XLA:  # whose package is missing has no use for other advice
        _check_available(spec, hardware)
    choice = choose(spec, hardware, found, devices, num_nodes, request)
    if choice.name == "single":
        return SingleDevice(choice.device_kind)
    made = _check_available(choice.name, hardware)
    strategy: Strategy = made(choice.config, device=choice.device_kind, world_size=choice.world_size)
    return strategy


def _request(spec: Any, variables: Mapping[str, str]) -> Request | None:
    """What the environment has to say to this choice of a strategy."""
    if isinstance(spec, AccelerateConfig):
        return Request(device=asked(spec, variables).device)
    if spec == "accelerate":
        return Request(device=asked(AccelerateConfig(), variables).device)
    return read_request(variables) if spec == "auto" else None


def _check_available(name: str, hardware: Hardware) -> Any:
    """The class of a strategy that can run here."""
    made = strategy_class(name)
    support = made.available(hardware)
    if not support:
        raise StrategyError(
            f"strategy {name!r} cannot run here: {support.reason}. Use strategy='auto', which takes"
            " what there is; `drivetrain strategies` lists what each needs"
        )
    return made


def _check_counts(devices: object, num_nodes: object) -> None:
    if devices != "auto" and (not isinstance(devices, int) or isinstance(devices, bool) or devices < 1):
        raise StrategyError(f"devices must be a positive number of processes or 'auto', not {devices!r}")
    if not isinstance(num_nodes, int) or isinstance(num_nodes, bool) or num_nodes < 1:
        raise StrategyError(f"num_nodes must be a positive number, not {num_nodes!r}")


def _check_instance(strategy: Strategy, devices: int | str, num_nodes: int) -> None:
    size = strategy.world_size
    if isinstance(devices, int) and devices * num_nodes == size:
        return
    if devices == "auto" and size % num_nodes == 0:
        return
    asked = f"devices={devices!r} on {num_nodes} node(s)"
    wanted = f" asks for {devices * num_nodes}" if isinstance(devices, int) else " does not divide it"
    hint = "Use devices=1, or a strategy for several: 'ddp'" if size == 1 else "Give it the same number"
    raise StrategyError(f"strategy {strategy.name!r} runs {_counted(size)}, but {asked}{wanted}. {hint}")


def _device_kind(name: str, wanted: str | None, hardware: Hardware) -> str:
    """The kind of device: the one that a strategy is named after, or the fastest that it can use."""
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
            " 'xla', which use it, or 'cpu' to train on the CPU all the same"
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
    """How many processes there are on this machine, and on all."""
    if environment is not None:
        _check_launcher(environment, devices, num_nodes)
        return environment.local_world_size, environment.world_size
    if isinstance(devices, int):
        local = devices
    else:
        local = hardware.cuda if kind == "cuda" and name not in ("single", "cuda") else 1
    return local, local * num_nodes


def _check_launcher(environment: ProcessEnvironment, devices: int | str, num_nodes: int) -> None:
    """Refuse other numbers than the launcher's; `num_nodes=1` by itself asks for nothing."""
    launcher, total = environment.launcher, environment.world_size
    local, nodes = environment.local_world_size, environment.num_nodes
    if launcher == OURS:
        has = f"this program already runs as {_counted(total)}, which its first run has started"
        hint = "Ask for as many everywhere"
    else:
        has = f"{launcher} has started {_counted(total)}, {local} on this machine"
        hint = "Leave out devices and num_nodes, to take what it says, or start as many as are asked for"
    if isinstance(devices, int) and devices * num_nodes != total:
        asked = f"devices={devices} and num_nodes={num_nodes} ask for {devices * num_nodes}"
        more = _TO_EVALUATE if devices * num_nodes == 1 else ""
        raise StrategyError(f"{has}, but {asked}. {hint}{more}")
    if isinstance(devices, int) and devices != local:
        raise StrategyError(f"{has}, but devices={devices} asks for {devices} on each. {hint}")
    if devices == "auto" and num_nodes not in (1, nodes):
        raise StrategyError(f"{has} of {nodes}, but num_nodes={num_nodes} asks for {num_nodes}. {hint}")


def _only_one(
    name: str,
    kind: str,
    environment: ProcessEnvironment | None,
    devices: int | str,
    num_nodes: int,
    total: int,
) -> StrategyError:
    who = (
        f"devices={devices!r} on {num_nodes} node(s) asks for {total}"
        if environment is None
        else f"{environment.launcher} has started {total}"
    )
    one = "Use devices=1, or" if environment is None else "Start one, or use"
    more = "" if environment is None or kind == "mps" else _TO_EVALUATE
    if name == "xla_fsdp_v2":
        one, more = "Leave devices out, for", "; CPU_NUM_DEVICES says how many a CPU stands for"
    other = {
        "mps": "strategy='cpu' for several processes on the CPU: Metal serves one",
        "xla": "'xla_fsdp_v2', which uses all devices of one process",
    }.get(kind, "a strategy for several processes: 'ddp', 'fsdp' or 'auto'")
    return StrategyError(f"strategy {name!r} runs 1 process on {kind}, but {who}. {one} {other}{more}")


def _too_few_gpus(hardware: Hardware, environment: ProcessEnvironment | None, local: int) -> StrategyError:
    gpus = f"this process sees {hardware.cuda} GPU{'' if hardware.cuda == 1 else 's'}"
    if environment is None:
        return StrategyError(
            f"{local} processes were asked for on this machine, one for each GPU, and {gpus}. Give at most"
            f" devices={hardware.cuda}, or strategy='cpu'"
        )
    return StrategyError(
        f"{environment.launcher} has started {local} processes on this machine, one for each GPU, and {gpus}."
        " Start as many as there are GPUs, and let each process see all GPUs of its machine (SLURM:"
        " --gpus-per-node in place of --gpus-per-task)"
    )


def _counted(processes: int) -> str:
    return f"{processes} process{'' if processes == 1 else 'es'}"
