"""The task of a script's Trainer: `TransformersTask`, with the steps that the script's subclass overrides."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import GenerationConfig

from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.types import Batch, EvaluationReader, StepOutput
from drivetrain.distributed.processes import world_size
from drivetrain.integrations.transformers.evaluation import MetricsReader, Read
from drivetrain.integrations.transformers.generation import is_sharded, noisy_embeddings
from drivetrain.integrations.transformers.loss_items import as_tensor
from drivetrain.integrations.transformers.script.methods import is_overridden, items_by_position, items_for
from drivetrain.integrations.transformers.script.pass_outputs import KeptOutputs, Pass
from drivetrain.integrations.transformers.task import TransformersTask
from drivetrain.task.forward import call_forward


class Script(Protocol):
    """The methods of a script's Trainer that its task calls."""

    def training_step(self, model: Any, inputs: dict[str, Any], num_items_in_batch: Any = None) -> Any:
        """Return the loss of a micro-batch."""
        ...

    def compute_loss(
        self, model: Any, inputs: dict[str, Any], return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Return the loss, with the outputs if asked for."""
        ...

    def prediction_step(
        self,
        model: Any,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Any, Any, Any]:
        """Return loss, outputs and labels of a batch."""
        ...


class ScriptTask(TransformersTask):
    """A `TransformersTask` that calls the steps that a script's subclass of Trainer overrides.

    Attributes:
        script: The Trainer of the script; set once, after the task is made.
        has_own_step: Whether the script overrides `training_step`.
        has_own_loss: Whether the script overrides `compute_loss`.
        beside: What the script's optimizer trains beside the model; None for nothing.
        current: The evaluation in progress; None for one that the script did not ask for.
        hides_gradients: Why the parameters' gradients are not those of the step; set as a fit begins.
        scales_losses: Whether the engine scales losses, so that fp16's gradients do not vanish; likewise.
        watched: The modules that each step finds in training mode, or else sets the model to it; likewise.
    """

    script: Script
    takes_any_module = True
    has_own_step = has_own_loss = False
    beside: nn.Module | None = None
    current: Pass | None = None
    hides_gradients = ""
    scales_losses = False
    watched: Sequence[nn.Module] = ()
    _at_once = False
    _pending: list[Tensor] | None = None
    _returned: Tensor | None = None

    @classmethod
    def of(cls, script: Script, model: Any, options: Mapping[str, Any]) -> ScriptTask:
        """Return the task of a script's Trainer."""
        task = cls(model, **options)
        task.script = script
        task.has_own_step = is_overridden(script, "training_step")
        task.has_own_loss = is_overridden(script, "compute_loss")
        if task.compute_loss_func is None and not (task.has_own_step or task.has_own_loss):
            task.columns.check_labels()
        return task

    @property
    def ignored_outputs(self) -> tuple[str, ...]:
        """The outputs that the model's configuration leaves out of evaluations."""
        return self._ignored

    # Training.

    def training_step(self, batch: Batch) -> Any:
        """Run one micro-batch, by the script's `training_step` or `compute_loss` if it has one.

        As transformers' step does, it sets training mode, which a callback or a save may have ended.
        """
        for each in self.watched:
            if not each.training:
                self.model.train()
                break
        if not (self.has_own_step or self.has_own_loss):
            return super().training_step(batch)
        inputs, items = dict(batch), as_tensor(self.loss_weight(batch), batch)
        with noisy_embeddings(self.model, self.neftune_alpha):
            if self.has_own_step:
                return self._own_step(inputs, items)
            compute_loss = self.script.compute_loss
            return compute_loss(self.model, inputs, **items_for(compute_loss, items))

    def run_backward(self, loss: Tensor, retain_graph: bool = False) -> Tensor:
        """Run backward on a loss of the script's step, now or after the step, and return it detached.

        Where the strategy can take gradients that a step has made, it runs now, and the step may look at them
        and change them. They are those of this micro-batch alone.
        """
        if self._pending is None:
            raise ConfigError("training_step and accelerator.backward are for train(), which calls them")
        if self._at_once:
            loss.backward(retain_graph=retain_graph)  # type: ignore[no-untyped-call]
        else:
            self._pending.append(loss)
        self._returned = loss.detach()
        return self._returned

    def _own_step(self, inputs: dict[str, Any], items: Any) -> Tensor:
        """Run the script's step, and return a loss with the gradients that the step has made.

        So the engine weights and reduces them like any other. With sharded parameters or gradients, scaled
        losses or a static graph, and for parameters with hooks, which would run twice, `run_backward` leaves
        its loss to the engine. Then the step sees no gradient.
        """
        script = self.script
        parameters = [each for each in self.parameters() if each.requires_grad]
        sharded = is_sharded(self.model)
        pending: list[Tensor] = []
        self._pending = pending
        hooked = any(each._backward_hooks or each._post_accumulate_grad_hooks for each in parameters)
        self._at_once = not (sharded or self.hides_gradients or self.scales_losses or hooked)
        refused = StrategyError(
            f"{type(script).__name__}.training_step calls loss.backward() itself, which works on one device"
            " and under DDP, and not with sharded parameters or gradients (FSDP, ZeRO) or a static graph."
            " Call super().training_step(model, inputs, num_items_in_batch) or"
            " self.accelerator.backward(loss)"
        )
        stop = refused if self.hides_gradients and not sharded else None
        try:
            with _refusing_backward(parameters, stop), _set_aside(parameters) as made:
                step = script.training_step
                counted = items_by_position(step, items)  # as in transformers: its name is the script's
                logged = step(self.model, inputs, *counted, **({} if counted else items_for(step, items)))
        finally:
            self._pending = None
        if made and sharded:
            raise refused
        if not (made or pending):
            if world_size() == 1 and isinstance(logged, Tensor) and not logged.any():
                return logged.new_zeros((), requires_grad=True)  # the script skips the micro-batch
            raise ConfigError(
                f"{type(script).__name__}.training_step ran no backward. Call super().training_step(model,"
                " inputs, num_items_in_batch), self.accelerator.backward(loss) or loss.backward(), and return"
                " the loss"
            )
        if not made and len(pending) == 1 and logged is self._returned:
            return pending[0]
        losses = list(pending)
        if made:
            losses.append(_GivenGradients.apply(logged.new_zeros(()), made, *(each for each, _ in made)))  # type: ignore[no-untyped-call]
        total: Tensor = torch.stack(losses).sum()
        # The value that the step returned, with the gradients of all that it ran backward on.
        corrected: Tensor = total + (logged.detach() - total.detach())
        return corrected

    # Evaluation.

    def validation_step(self, batch: Batch) -> Any:
        """Run one batch, by the script's `prediction_step` or `compute_loss` if it has one."""
        script, current = self.script, self.current
        if current is None:
            return super().validation_step(batch)
        self.generation = current.generation
        if not is_overridden(script, "prediction_step", "compute_loss"):
            return super().validation_step(batch)
        loss, predictions, labels = script.prediction_step(
            self.model, dict(batch), current.loss_only, ignore_keys=current.ignored
        )
        return StepOutput(loss, Read(predictions, labels))

    def generated(self, inputs: Mapping[str, Any], generation: GenerationConfig) -> Any:
        """Return the sequences that the model generates for the columns of a batch."""
        self.generation = generation
        return self._generated(self.inputs(inputs))

    def outputs_of(self, model: Any, inputs: Mapping[str, Any]) -> Any:
        """Return the outputs of a model, this task's or another one, for the columns of a batch."""
        return call_forward(self, self.inputs(inputs)) if model is self.model else model(**inputs)

    def evaluation_reader(self) -> EvaluationReader | None:
        """Return the reader of the evaluation in progress; None if it wants the loss alone."""
        current = self.current
        if current is None or current.loss_only:
            return None
        reader = MetricsReader(
            current.metrics_of,
            self.columns,
            ignored=self._ignored if current.ignored is None else current.ignored,
            preprocess=self.preprocess_logits_for_metrics,
            by_batch=self.batch_eval_metrics,
            include=self.include_for_metrics,
            needs_labels=False,
        )
        return KeptOutputs(reader, current) if current.keeps else reader


class _GivenGradients(torch.autograd.Function):
    """A loss of zero with given gradients."""

    @staticmethod
    def forward(ctx: Any, zero: Tensor, made: list[tuple[nn.Parameter, Tensor]], *_: nn.Parameter) -> Tensor:
        """Return the zero."""
        ctx.made = made
        return zero

    @staticmethod
    def backward(ctx: Any, share: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients, times the share of this loss."""
        return None, None, *(gradient * share for _, gradient in ctx.made)


@contextmanager
def _refusing_backward(parameters: list[nn.Parameter], error: StrategyError | None) -> Iterator[None]:
    """Run the block; with an error, a backward in it raises that before the strategy sees a gradient."""

    def refuse(_: Tensor) -> None:
        assert error is not None
        raise error

    watched = [] if error is None else parameters
    hooks = [each.register_hook(refuse) for each in watched]  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def _set_aside(parameters: list[nn.Parameter]) -> Iterator[list[tuple[nn.Parameter, Tensor]]]:
    """Run the block with empty gradients; yields a list that then has the parameters with the new ones.

    The gradients of before return.
    """
    before = [each.grad for each in parameters]
    for each in parameters:
        each.grad = None
    made: list[tuple[nn.Parameter, Tensor]] = []
    try:
        yield made
    finally:
        made.extend((each, each.grad) for each in parameters if each.grad is not None)
        for each, gradient in zip(parameters, before, strict=True):
            each.grad = gradient
