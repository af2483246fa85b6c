"""Distillation: a student learns the digits from a hundred images and a larger teacher's outputs for them.

    python examples/distill.py

The loss is that of Hinton, Vinyals and Dean, "Distilling the Knowledge in a Neural Network", 2015. The
teacher is frozen: it is not trained, and the checkpoints and the finished weights leave it out.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.utils.data import DataLoader

from digits import Digits, DigitsData
from drivetrain import CheckpointConfig, StepOutput, Trainer
from drivetrain.task import ModelInfo

QUIET = {"loggers": (), "progress_bar": False}


class FewDigits(DigitsData):
    """The same split, with only a hundred images to train on."""

    def train_data(self):
        part = self.parts[0]
        samples = [{"image": part.images[index], "label": part.labels[index]} for index in range(100)]
        return DataLoader(samples, batch_size=self.batch_size, shuffle=True)


class Distilled(Digits):
    """A student, `Digits` of a smaller size, and its teacher.

    Args:
        teacher: The run or checkpoint of the teacher.
        share: The share of the teacher's outputs in the loss, the rest being that of the labels.
        temperature: What both outputs are divided by, so that the smaller probabilities count too.
    """

    def __init__(
        self,
        teacher: str,
        hidden: int = 32,
        learning_rate: float = 1e-2,
        share: float = 0.9,
        temperature: float = 2.0,
    ):
        super().__init__(hidden, learning_rate)
        self.teacher = Digits.from_checkpoint(teacher).requires_grad_(False)
        self.share, self.temperature = share, temperature

    def train(self, mode: bool = True):
        """Set the student's mode; the teacher is always evaluated, without dropout."""
        super().train(mode)
        self.teacher.eval()
        return self

    def model_info(self):
        of_teacher = [name for name, _ in self.named_parameters() if name.startswith("teacher.")]
        return ModelInfo(left_out=of_teacher)

    def training_step(self, batch):
        outputs = self(batch["image"])
        with torch.no_grad():
            taught = self.teacher(batch["image"])
        hard = self.loss(outputs, batch)
        first, second = (each.div(self.temperature).log_softmax(-1) for each in (outputs, taught))
        soft = F.kl_div(first, second, log_target=True, reduction="batchmean") * self.temperature**2
        loss = self.share * soft + (1 - self.share) * hard
        return StepOutput({"loss": loss, "hard": hard, "soft": soft}, outputs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=100, help="epochs of each of the two students")
    parser.add_argument("--teacher-epochs", type=int, default=40)
    parser.add_argument("--run-dir", type=Path, help="where the runs go; by default they are deleted")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    if (given.devices or 1) > 1 and given.run_dir is None:
        parser.error("several processes share a folder: give --run-dir")
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    with tempfile.TemporaryDirectory() as temporary:
        runs = given.run_dir or Path(temporary)

        def fit(name: str, epochs: int, task: Digits, data: DigitsData) -> float:
            """Train a task, and return its accuracy on the test images."""
            policy = CheckpointConfig(every=f"{max(1, epochs // 4)} epochs")
            trainer = Trainer(max_epochs=epochs, checkpoint=policy, run_dir=runs / name, **QUIET, **how)
            trainer.fit(task, data)
            accuracy = trainer.test(task, data)["test/accuracy"]
            size = sum(each.numel() for each in task.parameters() if each.requires_grad)
            print(f"{name:9} {size:6,} trained parameters, test accuracy {accuracy:.1%}")
            return accuracy

        torch.manual_seed(0)
        fit("teacher", given.teacher_epochs, Digits(hidden=256, learning_rate=3e-3), DigitsData())
        few = FewDigits()
        torch.manual_seed(1)
        fit("alone", given.epochs, Digits(hidden=32, learning_rate=1e-2), few)
        torch.manual_seed(1)  # the two students draw the same
        accuracy = fit("distilled", given.epochs, Distilled(str(runs / "teacher")), few)

        # The finished weights are the student's alone, and load into a task without a teacher.
        student = Digits(hidden=32)
        student.load_state_dict(load_file(runs / "distilled" / "model.safetensors"), strict=True)
        again = Trainer(**QUIET, **how).test(student, few)["test/accuracy"]
        size = (runs / "distilled" / "model.safetensors").stat().st_size
        print(f"loaded    {size:6,} bytes, test accuracy {again:.1%}, as before: {again == accuracy}")


if __name__ == "__main__":
    main()
