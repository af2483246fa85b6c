"""Whole training runs in processes of their own, so that they can be killed as a machine kills them.

Run as a program this is a server: it imports torch once, reads one JSON specification a line, and forks a
process for each, which trains. A fresh interpreter for each would spend four seconds on imports alone.
"""

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, CheckpointConfig, OptimizerConfig, StepOutput, TaskModule, Trainer

SAMPLES, FEATURES, CLASSES = 21, 5, 3
BATCH, ACCUMULATION, EPOCHS = 2, 3, 2
STEPS_PER_EPOCH = 4  # 21 samples are 11 micro-batches of 2, the last of 1: windows of 3, 3, 3 and 2
STEPS = EPOCHS * STEPS_PER_EPOCH


class Augmented(Dataset[dict[str, Tensor]]):
    """Samples that draw from all three of the host's generators, and are noted in a file when fetched."""

    def __init__(self, size: int, seed: int, fetched: Path | None = None) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.features = torch.randn(size, FEATURES, generator=generator)
        self.labels = torch.randint(CLASSES, (size,), generator=generator)
        self.fetched = fetched

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if self.fetched is not None:
            with self.fetched.open("a", encoding="utf-8") as file:
                file.write(f"{index}\n")
        noise = torch.randn(FEATURES) * 0.1 + random.random() * 0.1 + np.random.rand() * 0.1
        features = self.features[index] + (noise if self.fetched is not None else 0)
        return {"features": features, "label": self.labels[index], "index": torch.tensor(index)}


class Classifier(TaskModule):
    """Dropout, batch statistics, and a step that itself draws from the host's generators."""

    calls_left = -1  # of the process, so that no checkpoint holds it

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, CLASSES)
        )
        # The last micro-batch of an epoch is of one sample, which has no variance.
        self.net[1].register_forward_pre_hook(_one_sample_uses_the_running_statistics)

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def loss(self, outputs: Tensor, batch: Mapping[str, Tensor]) -> Tensor:
        return F.cross_entropy(outputs, batch["label"])

    def training_step(self, batch: Mapping[str, Tensor]) -> StepOutput:
        Classifier.calls_left -= 1
        if Classifier.calls_left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        outputs = self(batch["features"]) * (1 + 0.1 * random.random()) + 0.1 * np.random.rand()
        confidence = outputs.detach().softmax(-1).amax(-1).mean()
        return StepOutput(self.loss(outputs, batch), outputs, {"confidence": confidence})

    def metrics(self) -> dict[str, Any]:
        from torchmetrics.classification import MulticlassAccuracy

        return {"accuracy": MulticlassAccuracy(CLASSES)}

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.02, weight_decay=0.01, schedule="cosine", warmup_steps=2)


def _one_sample_uses_the_running_statistics(module: nn.Module, inputs: tuple[Tensor]) -> None:
    if module.training and len(inputs[0]) == 1:
        module.eval()
    elif not module.training and torch.is_grad_enabled():
        module.train()


class Witness(Callback):
    """Writes down each step: its samples, values, learning rate, and where a resumed run began."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def _write(self, **row: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")

    def on_fit_start(self, run: Any) -> None:
        self._write(start=run.progress.steps)

    def on_step_end(self, run: Any) -> None:
        self._write(
            step=run.progress.steps,
            epoch=run.progress.epoch,
            samples=[micro.batch["index"].tolist() for micro in run.window.micro_batches],
            values=[values.tolist() for _, values, _ in run.result.step_values],
            norm=float(run.result.grad_norm),
            rates=run.learning_rates(),
        )

    def on_log(self, run: Any) -> None:
        self._write(logged=run.logged, at=run.progress.steps)


class Killer(Callback):
    """Kills its process in a hook, after a step: what is in the middle of anything is lost."""

    def __init__(self, hook: str, step: int) -> None:
        def kill(run: Any) -> None:
            if run.progress.steps == step:
                os.kill(os.getpid(), signal.SIGKILL)

        setattr(self, hook, kill)


def kill_at_file_event(event: str, part: str, number: int) -> None:
    """Kill this process when it meets an event of `sys.addaudithook` with such a path for the n-th time."""
    left = number

    def hook(name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if name == event and any(part in str(each) for each in arguments):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def train(
    directory: Path, attempt: int, *, workers: int = 0, asynchronous: bool = False, kill: Any = None
) -> None:
    """One attempt of the run in `directory`: it goes on from the newest checkpoint, and may be killed."""
    torch.set_num_threads(1)
    torch.manual_seed(1)  # the weights at the start are the user's
    task = Classifier()
    torch.manual_seed(attempt)  # what the process drew before must not matter
    random.seed(attempt)
    np.random.seed(attempt)
    callbacks: list[Callback] = [Witness(directory / f"witness-{attempt}.jsonl")]
    if kill and "call" in kill:
        Classifier.calls_left = kill["call"]
    elif kill and "hook" in kill:
        callbacks.append(Killer(kill["hook"], kill["step"]))
    elif kill:
        kill_at_file_event(kill["event"], kill["part"], kill["number"])
    trainer = Trainer(
        max_epochs=EPOCHS,
        strategy="cpu",
        gradient_accumulation_steps=ACCUMULATION,
        max_grad_norm=0.5,
        log_every="3 steps",
        checkpoint=[
            CheckpointConfig(every="2 steps", keep_last=2, best=1, asynchronous=asynchronous),
            CheckpointConfig(every="3 steps", best=1, by="train/loss", asynchronous=asynchronous),
        ],
        callbacks=callbacks,
        loggers=("csv", "jsonl"),
        progress_bar=False,
        run_dir=directory / "run",
    )
    data = Augmented(SAMPLES, 1, directory / f"fetched-{attempt}.txt")
    trainer.fit(
        task,
        DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=workers),
        DataLoader(Augmented(5, 2), batch_size=2, num_workers=workers),
        resume="auto",
    )


class Trials:  # the client of the server
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(self, directory: Path, attempt: int, **options: Any) -> int:
        """One attempt, to its end: 0 when it finished, -9 when it was killed; else shows what it printed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        specification = {"directory": str(directory), "attempt": attempt, "options": options}
        print(json.dumps(specification), file=self._process.stdin, flush=True)
        status = int(self._process.stdout.readline())
        printed = (directory / f"printed-{attempt}.txt").read_text(encoding="utf-8")
        assert status in (0, -signal.SIGKILL), printed
        return status


@contextmanager
def trials() -> Iterator[Trials]:  # the server, running
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "error"}
    command = [sys.executable, __file__]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        yield Trials(process)


def _attempt(specification: Mapping[str, Any]) -> int:
    directory, attempt = Path(specification["directory"]), specification["attempt"]
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        with suppress(ProcessLookupError):
            os.killpg(child, signal.SIGKILL)  # its data workers notice only after seconds that it is gone
        return os.waitstatus_to_exitcode(status)
    os.setpgid(0, 0)
    tempfile.tempdir = str(directory)  # what a killed process leaves there goes with the test
    output = os.open(directory / f"printed-{attempt}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    try:
        train(directory, attempt, **specification["options"])
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def _serve() -> None:
    # Once for all: much is imported only when it is first used.
    with tempfile.TemporaryDirectory() as directory:
        train(Path(directory), 0)
    for line in sys.stdin:
        print(_attempt(json.loads(line)), flush=True)


if __name__ == "__main__":
    _serve()
