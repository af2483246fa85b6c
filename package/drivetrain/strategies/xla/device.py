"""The base of XLA's strategies: the device, when traced operations run, and precisions.

torch_xla does not compute an operation when it is called. It traces operations until `sync`, compiles traces
that it has not seen before, runs them, and keeps the results that are still referenced. So a run is fast as
long as the trace is the same in every step, and nothing reads a value in between.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from drivetrain.core.errors import MissingDependencyError, StrategyError
from drivetrain.strategies.base import MakeOptimizers, Prepared, Strategy, Support, installed
from drivetrain.strategies.checks import check_values
from drivetrain.strategies.hardware import Hardware
from drivetrain.strategies.optimizer_step import step
from drivetrain.strategies.precision.base import Precision
from drivetrain.strategies.wrapping import apply_tied
from drivetrain.strategies.xla.norms import correct_variances, forget_corrections
from drivetrain.task.task import StepModule

Context = Callable[[], AbstractContextManager[object]]

RUN_AFTER = ("micro_batch", "step")
"""When traced operations run; see `Trace`."""

_CLIENT = "PJRT_DEVICE"
"""The environment variable that selects torch_xla's kind of device."""


def check_alone(name: str, world_size: int) -> None:
    """Check that a strategy runs in one process."""
    if world_size != 1:
        raise StrategyError(
            f"strategy {name!r} runs 1 process, not {world_size}: with several, torch_xla's collectives on a"
            " CPU deadlock. 'xla_fsdp' uses all devices of one process"
        )


def on_tpu() -> bool:
    """Return whether torch_xla would use a TPU."""
    client = os.environ.get(_CLIENT)
    return client == "TPU" if client is not None else Hardware.here().tpu > 0


def open_device(name: str, spmd: bool = False) -> torch.device:
    """Open this process's XLA device: a TPU, or without one the CPU, unless the environment says otherwise.

    Args:
        spmd: Whether the device represents all devices of the process.

    Raises:
        MissingDependencyError: torch_xla cannot be imported.
        StrategyError: This process has used XLA with another `spmd`, or has computed gradients before XLA was
            opened; or torch_xla has started several processes.
    """
    if not on_tpu():
        os.environ.setdefault(_CLIENT, "CPU")
    # XLA's compiler prints a deprecation warning at every compilation.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    try:
        import torch_xla
        import torch_xla.runtime as runtime
    except ImportError as error:
        raise MissingDependencyError("torch_xla", "xla", f"strategy {name!r}") from error
    if spmd and not runtime.is_spmd() and torch_xla._XLAC._xla_get_spmd_config_is_locked():
        raise StrategyError(
            f"strategy {name!r} must be the first to use XLA in its process: torch_xla decides once whether"
            " its device is a single one or represents all. Run it in a separate program"
        )
    if not spmd and runtime.is_spmd():
        raise StrategyError(
            f"strategy {name!r} is for one device, but in this process XLA's device represents all, because"
            " 'xla_fsdp' has run. Run it in a separate program"
        )
    if spmd and not runtime.is_spmd():
        runtime.use_spmd()
    device: torch.device = torch_xla.device()
    check_alone(name, runtime.world_size())  # counts the processes of `torch_xla.launch`
    # Opens the device; torch looks for devices only once, in its first backward.
    runtime.global_runtime_device_count()
    try:
        torch.zeros((), device=device, requires_grad=True).backward()  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise StrategyError(
            f"strategy {name!r}: torch computed gradients in this process before XLA's device was opened, and"
            " cannot use the device since. Train under XLA first, or in a separate program"
        ) from error
    return device


def move(module: nn.Module, device: torch.device | str) -> None:
    """Move a module to or from XLA's device, and keep tied parameters tied.

    torch cannot move a parameter in place between these devices. It creates new parameters, a separate one
    for each module of a tied parameter.
    """
    apply_tied(module, lambda tensor: tensor.to(device))


class Trace:
    """The schedule that runs traced operations.

    Args:
        run_after: "micro_batch" runs each micro-batch's operations separately; the last one's run with the
            step. "step" runs a whole window's operations together, so XLA compiles all micro-batches as
            one program and plans memory for it.
    """

    def __init__(self, run_after: str) -> None:
        self._whole = run_after == "step"
        self._backward = False

    def run(self) -> None:
        """Run the traced operations, without waiting for the results."""
        import torch_xla

        self._backward = False
        torch_xla.sync()

    def context(self, inner: Context | None) -> Context:
        """Return the context of a step: `inner`, with earlier operations run before it if they are due.

        An evaluation's operations run at its end.
        """

        @contextmanager
        def step() -> Iterator[None]:
            if self._backward and not (self._whole and torch.is_grad_enabled()):
                self.run()  # the previous micro-batch
            with inner() if inner is not None else nullcontext():
                yield
            if not torch.is_grad_enabled():
                self.run()

        return step

    def backward(
        self, loss: Tensor, factor: float | Tensor | None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Run backward with the share as the gradient of the loss, as an input of the compiled program.

        The factor is moved to the device as a tensor with a dimension. torch_xla merges equal numbers, and
        equal 0-d tensors, to one input, and compiles 0 and 1 as constants. So another factor could need
        another program.
        """
        root = None
        if factor is not None:
            given = factor if isinstance(factor, Tensor) else torch.tensor([factor], dtype=loss.dtype)
            root = given.to(loss.device, loss.dtype).reshape(())
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]
        self._backward = True

    def update(self, optimizer: Optimizer, before: Callable[[Optimizer], Any] | None = None) -> None:
        """Step, and run all operations, without gradients: XLA would keep those as results nobody reads."""
        step(optimizer)
        if before is not None:
            before(optimizer)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self.run()


class OnXLA(Strategy):
    """The base of XLA's strategies, which run in one process."""

    config_type: type[Any]
    refusals: Mapping[str, str] = {
        "compile": "XLA compiles every step as it is, and torch.compile loses what is sharded or freed",
        "value_clipping": "",
        "unfreezing": "",
        "skipping": "XLA runs what it traced of a step as a whole, before which no gradient is looked at",
    }

    def __init__(self, config: Any = None, *, device: str = "xla", world_size: int = 1) -> None:
        check_alone(self.name, world_size)
        self.config = config or self.config_type()
        self.device = torch.device(device)
        self._trace = Trace(self.config.run_after)
        self._prepared: list[StepModule] = []

    @classmethod
    def available(cls, hardware: Hardware) -> Support:
        """Return whether a machine can run it, without importing torch_xla."""
        found = installed("torch_xla", "xla")
        if not found:
            return found
        if hardware.cuda and not hardware.tpu and _CLIENT not in os.environ:
            return Support(
                False,
                f"torch_xla runs on TPUs and CPUs, and this machine has {hardware}. Set {_CLIENT}=CPU to"
                " train on the CPU and leave the GPU idle",
            )
        return Support(True)

    def supports(self, precision: Precision) -> Support:
        """Support float32, bfloat16 with updates rounded to the nearest, and float64 on a CPU."""
        dtypes = (precision.param_dtype, precision.compute_dtype)
        if torch.float16 in dtypes:
            return Support(
                False,
                "float16 needs a loss scale, which the host would have to read at every step; XLA's devices"
                " support bfloat16, so use 'bf16-mixed' or 'bf16-true-nearest'",
            )
        if torch.float64 in dtypes and on_tpu():
            return Support(False, "a TPU has no float64; use '32' or 'bf16-mixed'")
        if precision.updates_of_weights != "nearest":
            return Support(
                False,
                f"XLA does not support {precision.updates!r} updates of bfloat16 weights; use 'bf16-mixed',"
                " or 'bf16-true-nearest', which loses small updates",
            )
        return Support(True)

    def prepare(self, module: StepModule, make_optimizers: MakeOptimizers, precision: Precision) -> Prepared:
        """Convert, move and annotate the module, then build the optimizers on the moved parameters."""
        check_values(module.task, self.name)
        precision.convert_module(module)
        move(module, self.device)
        correct_variances(module.task)
        module.context = self._trace.context(precision.forward_context(self.device))
        self._annotate(module)
        self._prepared.append(module)
        return Prepared(module, make_optimizers(module) if make_optimizers else {})

    def _annotate(self, module: StepModule) -> None:
        """Tell the compiler how to divide a module that is on the device."""

    def restore(self) -> None:
        """Move the tasks to the host's memory, where operations run when they are called."""
        for module in self._prepared:
            forget_corrections(module)
            move(module, "cpu")
        self._prepared = []

    def teardown(self) -> None:
        """Move the tasks off the device after a failed run; with one process, this needs no other rank."""
        error = sys.exc_info()[1]
        if error is None:
            return
        try:
            self.restore()
        except Exception as second:  # it must not hide the first
            error.add_note(f"drivetrain: the task could not be moved off XLA's device either: {second}")

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Run backward with the share as the gradient of the loss."""
        self._trace.backward(loss, factor, inputs)

    def optimizer_step(self, optimizer: Optimizer) -> bool:
        """Step, and run the traced operations."""
        self._trace.update(optimizer)
        return True
