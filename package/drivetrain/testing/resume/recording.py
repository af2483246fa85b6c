"""Record the data, results and state of each step of a run, so that two runs can be compared."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch

from drivetrain.callbacks import Callback
from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.checkpoint.weights.module_state import clean_name, module_state
from drivetrain.core.random_streams import host_state
from drivetrain.engine.own_loop_checkpoint import optimizer_state
from drivetrain.testing.resume.digests import batch_texts, digest, short, tensor_text

UNINTERRUPTED, KILLED, RESUMED = "uninterrupted", "killed", "resumed"

Item = tuple[str, str, str]
"""A kind of value, its name, and the value as a text."""

TIMED = "measured by the clock"
"""The kind of logged values that are not compared: a callback's `timed_names` match them."""

_TIMES = ("seconds",)


@dataclasses.dataclass(frozen=True)
class Recording:
    """One of the runs that are compared.

    Attributes:
        directory: The directory of the records and of the files that the program's runs write.
        kind: "uninterrupted", "killed" or "resumed".
        steps: Steps after which the fit is stopped, or killed at the latest.
        save_after: Steps after which the killed run is saved; the other runs are saved at their end.
        epoch: Steps in each epoch; None leaves the length of an epoch unchanged.
        fit: The fit of the program to record, counted from 1. Earlier fits run unchanged.
    """

    directory: Path
    kind: str
    steps: int
    save_after: int | None = None
    epoch: int | None = None
    fit: int = 1

    def kill_after(self, base: int) -> int:
        """Return the number of steps after which the run is killed; those after the save are lost."""
        saved = self.save_after or 0
        # Saving happens at an interval, so a second save would follow after twice as many steps.
        return min(saved + 2, self.steps, base + 2 * saved)

    @property
    def log_every(self) -> int:
        """Log interval in steps. The save is no log point, so the checkpoint holds unlogged values."""
        return 2 if (self.save_after or 1) % 2 else 3


def first_step(directory: Path) -> int:
    """Return the step at which the uninterrupted run began; it is not 0 if the program resumed a run."""
    file = next((directory / UNINTERRUPTED).glob("rank-*.jsonl"))
    with file.open(encoding="utf-8") as rows:
        return int(json.loads(rows.readline())["step"])


class Recorder(Callback):
    """Records one fit on one rank.

    Attributes:
        step: The last step.
        is_over: Whether the fit has ended.
    """

    def __init__(self, recording: Recording) -> None:
        self.step = 0
        self.is_over = False
        self._recording = recording
        self._base = 0
        self._kill_after = 0
        self._checkpoint: str | None = None
        self._timed: list[str] = []
        self._file: Path | None = None
        self._read: list[Item] = []
        self._step: list[Item] = []

    def on_fit_start(self, run: Any) -> None:
        """Record the state at the beginning of the fit, whether it was restored or not."""
        rank = run.engine.ranks.rank
        place = self._recording.directory / self._recording.kind
        place.mkdir(parents=True, exist_ok=True)
        self._file = place / f"rank-{rank}.jsonl"
        self._base = self.step = run.progress.steps
        if self._recording.kind == RESUMED:
            self._base = first_step(self._recording.directory)
        self._kill_after = self._recording.kill_after(self._base)
        self._checkpoint = run.last_checkpoint
        for callback in run.callbacks:
            self._timed += callback.timed_names
        self._write("start", run, list(self._state(run)))

    def on_step_start(self, run: Any) -> None:
        micro_batches = run.window.micro_batches
        samples = " ".join(text for each in micro_batches for text in batch_texts(each.batch))
        self._read = [("result", each, str(getattr(run.progress, each))) for each in ("epoch", "position")]
        self._read.append(("samples", "samples", samples))
        self._read += _of_each("weight", [_number(each.weight) for each in micro_batches])

    def on_step_end(self, run: Any) -> None:
        """Note the step's random streams and results, and stop the run after the last step to compare."""
        step, self.step = run.result, run.progress.steps
        self._step = [*self._read, *_streams(run)]
        scalars: dict[str, list[str]] = {}
        for names, values, _ in step.rows:
            for name, value in zip(names, values.detach().reshape(-1).tolist(), strict=True):
                scalars.setdefault(name, []).append(repr(value))
        for name, texts in scalars.items():
            self._step += _of_each(name, texts)
        if step.grad_norm is not None:
            self._step.append(("result", "gradient norm", _number(step.grad_norm)))
        self._step.append(("result", "applied", str(step.applied)))
        recording = self._recording
        if recording.kind != KILLED and run.progress.steps - self._base >= recording.steps:
            run.stop(f"{recording.steps} steps are recorded")

    def _kill(self, run: Any) -> None:
        for each in run.callbacks:
            if isinstance(each, CheckpointSaver):
                each.wait_for_save(run)
        if run.last_checkpoint == self._checkpoint:
            return  # no checkpoint to resume from
        self._write("killed", run, [])
        if hasattr(signal, "SIGKILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    def on_log(self, run: Any) -> None:
        items: list[Item] = []
        for name, value in run.logged.items():
            timed = next((each for each in self._timed if fnmatchcase(name, each)), None)
            items.append(("value", name, repr(value)) if timed is None else (TIMED, timed, name))
        self._write("logged", run, items)

    def on_save(self, run: Any) -> None:
        """Record the step and the state after it, and kill the process at the chosen step."""
        self._write("step", run, [*self._step, *self._state(run)])
        if self._recording.kind == KILLED and run.progress.steps - self._base >= self._kill_after:
            self._kill(run)

    def on_fit_end(self, run: Any) -> None:
        self._write("end", run, [])
        self.is_over = True

    def on_exception(self, run: Any) -> None:
        self.failed(run.exception, run.progress.steps)

    def failed(self, error: BaseException, step: int) -> None:
        self.is_over = True
        self._add("failed", step, text=f"{type(error).__name__}: {error}".partition("\n")[0])

    def warned(self, text: str) -> None:
        self._add("unsaved", self.step, text=text)

    def _write(self, kind: str, run: Any, items: list[Item]) -> None:
        self._add(kind, run.progress.steps, items=items)

    def _add(self, kind: str, step: int, **more: Any) -> None:
        if self._file is not None:  # None if the fit failed before it began
            with self._file.open("w" if kind == "start" else "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": step, **more}) + "\n")

    def _state(self, run: Any) -> Iterator[Item]:
        """Yield the state of the run in the order of dependence, so that a cause comes before its effects."""
        engine = run.engine
        for name, value in run.progress.to_json().items():
            if name not in _TIMES:
                yield "progress", name, str(value)
        for name, updater in engine.updaters.items():
            for key, rate in updater.rates().items():
                yield "learning rate", key if len(engine.updaters) == 1 else f"{key} of {name}", repr(rate)
            yield "state", f"schedule of {name}", digest(updater.state_dict())
        with engine.checkpoint_layout() as taken:
            weights, extras = module_state(run.task)
            slots, _ = optimizer_state(run.task, taken)
        saved = {clean_name(name) for name, _ in run.task.named_parameters()}
        for name, buffer in run.task.named_buffers():
            yield "buffer", clean_name(name), tensor_text(buffer)
        for name, weight in weights.items():
            if name in saved:
                yield "weight", name, tensor_text(weight)
        yield "state", "get_extra_state of the modules", digest(extras)
        for name, slot in slots.items():
            yield "optimizer state", name, tensor_text(slot)
        yield "state", "strategy", digest(engine.strategy.state_dict())
        if run.train_metrics:
            yield "state", "declared metrics", digest(run.train_metrics.state_dict())
        yield "state", "values to be logged", digest(engine.buffer.state_dict())


def _number(value: Any) -> str:
    return repr(float(value))


def _of_each(name: str, texts: list[str]) -> list[Item]:
    """Return a value for each micro-batch of a step."""
    if len(texts) == 1:
        return [("result", name, texts[0])]
    return [("result", f"{name} of micro-batch {number}", text) for number, text in enumerate(texts)]


def _streams(run: Any) -> list[Item]:
    host = host_state()
    return [
        ("generator", "random", digest(host["python"])),
        ("generator", "numpy.random", digest(host["numpy"])),
        ("generator", "torch", short(_torch_state(run))),
    ]


def _torch_state(run: Any) -> bytes:
    generators = [torch.default_generator]
    if run.engine.device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return b"".join(each.get_state().numpy().tobytes() for each in generators)
