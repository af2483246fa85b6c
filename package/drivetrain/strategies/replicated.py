"""The base of strategies with a copy of the model in each process, wrapped by `DistributedDataParallel`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from drivetrain.distributed.processes import has_fake_ranks
from drivetrain.distributed.tensors import average_gradients, broadcast_module
from drivetrain.strategies.base import MakeOptimizers, Prepared, Strategy
from drivetrain.strategies.sparse import average_sparse, no_rows, trained_sparsely
from drivetrain.strategies.unused import check_used, gradients_now
from drivetrain.task.task import StepModule


class Replicated(Strategy):
    """Gradients are averaged in the backward of a window's last micro-batch, and each parameter must get one.

    Attributes:
        leaves_out: What a user writes to let a step leave parameters out.
    """

    leaves_out: ClassVar[str]

    def _begin(self) -> None:
        """Forget the modules of an earlier run."""
        self._wrapped: DistributedDataParallel | None = None
        self._parts: list[tuple[list[str], list[nn.Parameter]]] = []  # of each wrapped module
        self._names: list[str] = []
        self._parameters: list[nn.Parameter] = []
        self._sparse: list[nn.Parameter] = []
        self._synchronized = True
        self._has_earlier = False  # whether the window has had another micro-batch
        self._unlearned = self._may_leave_out = False

    @abstractmethod
    def _wrapper(self, module: StepModule, init_sync: bool) -> nn.Module:
        """Return the module in its wrapper, or the module itself if a single process needs none.

        Args:
            init_sync: Whether processes may have different parameters.
        """

    def _replicate(self, module: StepModule, make_optimizers: MakeOptimizers) -> Prepared:
        """Wrap a module on its device, then build the optimizers."""
        self._note(module)
        if make_optimizers is None or not self._parameters:
            broadcast_module(module, self.world_size)
            return Prepared(module, make_optimizers(module) if make_optimizers else {})
        is_quantized = any(map(is_traceable_wrapper_subclass, module.parameters()))
        if is_quantized:  # torch's broadcast would round the values of NF4 a second time
            broadcast_module(module, self.world_size)
        return Prepared(self._wrap(module, init_sync=not is_quantized), make_optimizers(module))

    def retrain(self, model: nn.Module) -> nn.Module:
        """Wrap the module again: the wrapper waits for the gradients of those that were trained before.

        All processes have the same parameters by now.
        """
        wrapped = self._wrapped
        if wrapped is None:
            return model
        wrapped.reducer._remove_autograd_hooks()  # else a second wrapper's gradients would go to it too
        self._begin()
        self._note(wrapped.module)
        return self._wrap(wrapped.module, init_sync=False)

    def _note(self, module: StepModule) -> None:
        trained = [(name, each) for name, each in module.named_parameters() if each.requires_grad]
        self._names = [name.removeprefix("task.") for name, _ in trained]
        self._parameters = [each for _, each in trained]
        self._sparse += trained_sparsely(module.task)

    def _wrap(self, module: StepModule, init_sync: bool = True) -> nn.Module:
        wrapped = self._wrapper(module, init_sync)
        if isinstance(wrapped, DistributedDataParallel):
            self._wrapped = wrapped
            self._parts.append((self._names, self._parameters))
            self._synchronized = True
            self._unlearned = bool(wrapped.static_graph)
            self._may_leave_out = bool(wrapped.find_unused_parameters)
            if self.world_size > 1 and not (self._unlearned or self._may_leave_out or has_fake_ranks()):
                fix_buckets(wrapped, self._parameters)
        return wrapped

    def microbatch(self, model: nn.Module, last: bool) -> None:
        """Average gradients only in the window's last micro-batch."""
        # torch learns a static graph in the very first backward, which must be synchronised. Its gradients
        # are averaged a second time, which does not change them.
        last = last or self._unlearned
        self._unlearned = False
        self._has_earlier = self._has_earlier or not last
        if last != self._synchronized:  # setting an attribute of a module takes 3 us
            self._synchronized = last
            if self._wrapped is not None:
                self._wrapped.require_backward_grad_sync = last

    def backward(
        self, loss: Tensor, factor: float | Tensor | None = None, inputs: Sequence[Tensor] | None = None
    ) -> None:
        """Run backward with the factor as the gradient of the loss."""
        root = None
        if factor is not None or self._scale is not None:
            loss, root = self._root(loss, factor)
        checks = inputs is None and self._synchronized and not self._may_leave_out
        before = gradients_now(self._parameters) if checks and self._has_earlier else None
        loss.backward(root, inputs=inputs)  # type: ignore[no-untyped-call]
        if checks:
            only = len(self._parts) == 1  # of several modules a loss may leave out some
            for names, parameters in self._parts:
                check_used(names, parameters, self.leaves_out, before, only)
        if self._synchronized:
            self._has_earlier = False

    def synchronize(self, parameters: Sequence[Tensor]) -> None:
        """Average gradients that backward did not: those of a generator step's optimizers."""
        if not self._sparse:
            average_gradients(parameters, self.world_size)
            return
        sparse = {id(each) for each in self._sparse}
        average_gradients([each for each in parameters if id(each) not in sparse], self.world_size)
        average_sparse([each for each in parameters if id(each) in sparse], self.world_size)


def fix_buckets(wrapped: DistributedDataParallel, parameters: Sequence[nn.Parameter]) -> None:
    """Fix the buckets of gradients before the first step.

    torch rebuilds the buckets after the first backward, ordered by when gradients became ready. With more
    than two processes the sums of an all-reduce depend on a gradient's position in its bucket, so the first
    step after a resume would differ in its last bits from the uninterrupted run's. Here a backward of zeros
    triggers the rebuild: its gradients become ready in the reverse order of the parameters.
    """
    sparse = {id(each) for each in trained_sparsely(wrapped)}
    total = torch.zeros((), device=parameters[0].device)
    for parameter in parameters:
        none = no_rows(parameter) if id(parameter) in sparse else parameter.reshape(-1)[:0].sum()
        total = total + (none.real if none.is_complex() else none).float()
    wrapped.reducer.prepare_for_backward([])
    total.backward()  # type: ignore[no-untyped-call]
    for parameter in parameters:
        parameter.grad = None
