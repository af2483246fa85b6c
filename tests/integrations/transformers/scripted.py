"""Subclasses of the script's Trainer as users write them, and callbacks."""

from pathlib import Path
from typing import Any

import torch
import transformers

from drivetrain.integrations.transformers import Trainer


class Wrapping(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loss = super().training_step(model, inputs, num_items_in_batch)
        assert not loss.requires_grad
        return loss


class OwnBackward(Trainer):
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        model.train()
        inputs = self._prepare_inputs(inputs)
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs)
        loss.backward()
        return loss.detach()


class ByAccelerator(Trainer):  # runs backward by the accelerator, and reports another value
    def training_step(self, model: Any, inputs: Any) -> Any:
        loss = self.compute_loss(model, inputs)
        self.accelerator.backward(loss)
        return loss.detach() + 1


class OwnLoss(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        total = torch.nn.functional.cross_entropy(outputs.logits, labels, reduction="sum")
        loss = total / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


class OwnPrediction(Trainer):
    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
        return loss, logits.argmax(-1), labels


class CopiedStep(Trainer):
    training_step = transformers.Trainer.training_step


class CopiedLoss(Trainer):
    compute_loss = transformers.Trainer.compute_loss


class CopiedEvaluation(Trainer):
    evaluate = transformers.Trainer.evaluate
    predict = transformers.Trainer.predict
    prediction_step = transformers.Trainer.prediction_step


class Answering(Trainer):  # evaluates in the shape of transformers' question answering example
    def evaluate(self, eval_dataset: Any = None, ignore_keys: Any = None) -> dict[str, float]:
        loader = self.get_eval_dataloader(eval_dataset)
        output = self.evaluation_loop(loader, description="Evaluation", ignore_keys=ignore_keys)
        shares = output.predictions.shape[0] / 5
        metrics = {"eval_f1": shares + self.state.global_step, **output.metrics}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics


STEPS = (Wrapping, OwnBackward, ByAccelerator, OwnLoss, CopiedStep, CopiedLoss, CopiedEvaluation)


def editing(kind: Any) -> Any:  # adds the gradients at a neighbouring point
    class Editing(kind):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            loss = super().training_step(model, inputs, num_items_in_batch)
            words = model.get_input_embeddings().weight
            change = 0.1 * words.grad / words.grad.norm()
            words.data += change
            self.accelerator.backward(self.compute_loss(model, inputs))
            words.data -= change
            words.grad.zero_()
            return loss

    return Editing


class Interrupted(transformers.TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            raise KeyboardInterrupt


class SavesAt2(transformers.TrainerCallback):
    def __init__(self, folder: Path | str) -> None:
        self.folder = folder
        self.script: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **given: Any) -> None:
        if state.global_step == 2:
            self.script.save_model(self.folder)
