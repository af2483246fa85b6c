"""What XLA's strategies have in common: the device, when what was traced runs, and precisions.

torch_xla does not compute an operation when it is called. It traces operations until it is told to run them
together, compiles what it has not compiled before, and fetches the results that are still referred to. So a
run is fast as long as what is traced is the same from update to update, and nothing is read in between.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.errors import ConfigError, MissingDependencyError, StrategyError, nearest
from drivetrain.precision import Precision
from drivetrain.strategies.base import Strategy, Support, installed
from drivetrain.strategies.hardware import Hardware
from drivetrain.strategies.stepping import step

Context = Callable[[], AbstractContextManager[object]]

RUN_AFTER = ("micro_batch", "update")
"""When what was traced may run; see `Trace`."""

_CLIENT = "PJRT_DEVICE"
"""The variable that tells torch_xla what to compute on."""


def check_alone(name: str, world_size: int) -> None:
    """See that a strategy is asked for in one process.

    Raises:
        StrategyError: It is asked for in several.
    """
    if world_size != 1:
        raise StrategyError(
            f"strategy {name!r} runs 1 process, not {world_size}: of several, torch_xla's collectives on a"
            " CPU wait for one another for ever. 'xla_fsdp_v2' uses all devices of one process"
        )


def on_tpu() -> bool:
    """Whether torch_xla would compute on a TPU."""
    client = os.environ.get(_CLIENT)
    return client == "TPU" if client is not None else Hardware.here().tpu > 0


def open_device(name: str, spmd: bool = False) -> torch.device:
    """This process's device; on a machine without a TPU its CPU, unless the environment says otherwise.

    Args:
        name: The strategy's.
        spmd: Whether it is to stand for all devices of the process.

    Raises:
        MissingDependencyError: torch_xla cannot be loaded.
        StrategyError: This process has used XLA the other way before, or gradients without it; or torch_xla
            has started several.
    """
    if not on_tpu():
        os.environ.setdefault(_CLIENT, "CPU")
    # Its compiler warns at every compilation that a part of it will be replaced.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import torch_xla
        import torch_xla.runtime as runtime
    except ImportError as error:
        raise MissingDependencyError("torch_xla", "xla", f"strategy {name!r}") from error
    if spmd and not runtime.is_spmd() and torch_xla._XLAC._xla_get_spmd_config_is_locked():
        raise StrategyError(
            f"strategy {name!r} must be the first to use XLA in its process: torch_xla decides once whether"
            " its device is one or stands for all. Run it in a program of its own"
        )
    if not spmd and runtime.is_spmd():
        raise StrategyError(
            f"strategy {name!r} is for one device, and in this process 'xla_fsdp_v2' has made XLA's device"
            " stand for all. Run it in a program of its own"
        )
    if spmd and not runtime.is_spmd():
        runtime.use_spmd()
    device: torch.device = torch_xla.device()
    check_alone(name, runtime.world_size())  # those of `torch_xla.launch`
    runtime.global_runtime_device_count()  # opens it; torch asks for its devices in its first backward, once
    try:
        torch.zeros((), device=device, requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise StrategyError(
            f"strategy {name!r}: torch computed gradients in this process before XLA's device was opened, and"
            " knows none since. Train under XLA first, or in a program of its own"
        ) from error
    return device


def move(module: nn.Module, device: torch.device | str) -> None:
    """Move a module to XLA's device or from there; parameters that were tied stay so.

    Between these devices a parameter cannot keep its place: torch makes new ones, for each of a tied one's
    modules its own.
    """
    places: dict[int, list[tuple[nn.Module, str]]] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((each, name))
    module.to(device)
    for (owner, name), *others in places.values():
        for other, alias in others:
            setattr(other, alias, getattr(owner, name))


def check_run_after(kind: str, value: str) -> None:
    """Check the option of all of XLA's configurations.

    Args:
        kind: The configuration's class.
        value: What was given.

    Raises:
        ConfigError: It is unknown.
    """
    if value not in RUN_AFTER:
        raise ConfigError(f"{kind}(run_after={value!r}) is unknown. {nearest(str(value), RUN_AFTER)}")


class Trace:
    """When the operations that were traced run.

    Args:
        run_after: "micro_batch" runs them once for each, in the last one's case with the update. "update"
            runs a window's together, so that XLA compiles the sum of its micro-batches and plans memory for
            it.
    """

    def __init__(self, run_after: str) -> None:
        self._whole = run_after == "update"
        self._backward = False

    def run(self) -> None:
        """Run them; does not wait for the results."""
        import torch_xla

        self._backward = False
        torch_xla.sync()

    def context(self, inner: Context | None) -> Context:
        """What a step runs under: `inner`, between the ends of what was traced before and of an evaluation's
        batch.
        """

        @contextmanager
        def step() -> Iterator[None]:
            if self._backward and not (self._whole and torch.is_grad_enabled()):
                self.run()  # the micro-batch before
            with inner() if inner is not None else nullcontext():
                yield
            if not torch.is_grad_enabled():
                self.run()

        return step

    def backward(
        self, loss: Tensor, share: float | Tensor | None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward from the share as the loss's own gradient, which is no part of what is compiled.

        Not as a number, nor as a tensor without dimensions: torch_xla makes one input of those that are
        equal, and constants of 0 and 1, so that another share could be another program.
        """
        root = None
        if share is not None:
            given = share if isinstance(share, Tensor) else torch.tensor([share], dtype=loss.dtype)
            root = given.to(loss.device, loss.dtype).reshape(())
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]
        self._backward = True

    def update(self, optimizer: Optimizer, before: Callable[[Optimizer], Any] | None = None) -> None:
        """Step, and run everything; gradients are left out, which would else be results that nobody reads.

        Args:
            optimizer: Which.
            before: What is to be done with the optimizer in between.
        """
        step(optimizer)
        if before is not None:
            before(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.run()


class OnXLA(Strategy):
    """The base of XLA's strategies, each in one process.

    Args:
        config: The options.
        device: The kind of device, "xla".
        world_size: How many processes: 1.

    Raises:
        StrategyError: More than one process.
    """

    config_type: type[Any]
    no_compile = "XLA compiles every update as it is, and torch.compile loses what is sharded or freed there"
    no_skipping = "XLA runs what it traced of an update as a whole, before which no gradient is looked at"

    def __init__(self, config: Any = None, *, device: str = "xla", world_size: int = 1) -> None:
        check_alone(self.name, world_size)
        self.config = config or self.config_type()
        self.device = torch.device(device)
        self._trace = Trace(self.config.run_after)
        self._prepared: list[Any] = []

    @classmethod
    def available(cls, hardware: Hardware) -> Support:
        """Whether it can run on a machine, without loading torch_xla."""
        found = installed("torch_xla", "xla")
        if not found:
            return found
        if hardware.cuda and not hardware.tpu and _CLIENT not in os.environ:
            return Support(
                False,
                f"torch_xla computes on TPUs and CPUs, and this machine has {hardware}. Set {_CLIENT}=CPU to"
                " leave the GPU idle",
            )
        return Support(True)

    def supports(self, precision: Precision) -> Support:
        """float32 and bfloat16, whose updates are rounded to the nearest; float64 on a CPU."""
        dtypes = (precision.param_dtype, precision.compute_dtype)
        if torch.float16 in dtypes:
            return Support(
                False,
                "XLA's devices compute in bfloat16, which needs no loss scale, that the host would have to"
                " read at every update; use 'bf16-mixed' or 'bf16-true-nearest'",
            )
        if torch.float64 in dtypes and on_tpu():
            return Support(False, "a TPU has no float64; use '32' or 'bf16-mixed'")
        if precision.updates_of_weights != "nearest":
            return Support(
                False,
                "XLA makes the updates of bfloat16 weights as the optimizer does, and not"
                f" {precision.updates!r}; use 'bf16-mixed', or 'bf16-true-nearest', which loses small"
                " updates",
            )
        return Support(True)

    def teardown(self) -> None:
        """Leave no task on the device also after a run that failed: in one process nobody is waited for."""
        error = sys.exc_info()[1]
        if error is None:
            return
        try:
            self.restore()
        except Exception as second:  # which must not hide the first
            error.add_note(
                f"drivetrain: the task could not be brought back from XLA's device either: {second}"
            )

    def backward(
        self, loss: Tensor, share: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Backward from the share as the loss's own gradient."""
        self._trace.backward(loss, share, inputs)

    def clip_grad_norm(self, parameters: Sequence[Tensor], max_norm: float) -> Tensor:
        """Clip by the global norm: in one process all of it is here."""
        return torch.nn.utils.clip_grad_norm_(parameters, max_norm)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, and run what was traced."""
        self._trace.update(optimizer)
        return True
