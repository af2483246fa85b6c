"""Record the data, results and state of each update of a run, so that two runs can be compared."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import warnings
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch

from drivetrain.callbacks import Callback
from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.checkpoint.weights.module_state import clean_name, module_state
from drivetrain.engine.own_loop_checkpoint import optimizer_state
from drivetrain.testing.resume.digests import batch_texts, leaf_text, short, tensor_text
from drivetrain.testing.resume.program_state import ProgramState

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
        updates: Updates after which the fit is stopped, or killed at the latest.
        save_after: Updates after which the killed run is saved; the other runs are saved at their end.
        epoch: Updates in each epoch; None leaves the length of an epoch unchanged.
        fit: The fit of the program to record, counted from 1. Earlier fits run unchanged.
        module: The program's first module, if other modules than its own may be loaded, as in a
            test; None if all are its own.
    """

    directory: Path
    kind: str
    updates: int
    save_after: int | None = None
    epoch: int | None = None
    fit: int = 1
    module: str | None = None

    def kill_after(self, base: int) -> int:
        """Return the number of updates after which the run is killed; those after the save are lost.

        Args:
            base: The update at which the uninterrupted run began.
        """
        saved = self.save_after or 0
        # Saving happens at an interval, so a second save would follow after twice as many updates.
        return min(saved + 2, self.updates, base + 2 * saved)

    @property
    def log_every(self) -> int:
        """Log interval in updates. The save is no log point, so the checkpoint holds unlogged values."""
        return 2 if (self.save_after or 1) % 2 else 3


def first_update(directory: Path) -> int:
    """Return the update at which the uninterrupted run began; it is not 0 if the program resumed a run."""
    file = next((directory / UNINTERRUPTED).glob("rank-*.jsonl"))
    with file.open(encoding="utf-8") as rows:
        return int(json.loads(rows.readline())["update"])


class Recorder(Callback):
    """Records one fit on one rank.

    Args:
        recording: The run to record.
        data: The data given to the fit.
        callbacks: The program's callbacks.

    Attributes:
        update: The last update.
        is_over: Whether the fit has ended.
    """

    def __init__(self, recording: Recording, data: tuple[Any, ...], callbacks: tuple[Any, ...]) -> None:
        self.update = 0
        self.is_over = False
        self._recording = recording
        self._base = 0
        self._kill_after = 0
        self._checkpoint: str | None = None
        self._data = data
        self._callbacks = callbacks
        self._timed: list[str] = []
        self._file: Path | None = None
        self._read: list[Item] = []
        self._step: list[Item] = []
        self._logged: list[Item] = []

    def on_fit_start(self, run: Any) -> None:
        """Record the state at the beginning of the fit, whether it was restored or not."""
        rank = run.engine.ranks.rank
        place = self._recording.directory / self._recording.kind
        place.mkdir(parents=True, exist_ok=True)
        self._file = place / f"rank-{rank}.jsonl"
        self._base = self.update = run.progress.updates
        if self._recording.kind == RESUMED:
            self._base = first_update(self._recording.directory)
        self._kill_after = self._recording.kill_after(self._base)
        self._checkpoint = run.last_checkpoint
        for callback in run.callbacks:
            self._timed += callback.timed_names
        self._write("start", run, list(self._state(run)), self._program_state(run))

    def on_step_start(self, run: Any) -> None:
        """Note the data and random streams. Record the program's state at the first update after the save."""
        progress, self._read = run.progress, []
        for name in ("epoch", "position"):
            self._read.append(("data", name, str(getattr(progress, name))))
        for number, micro_batch in enumerate(run.window.micro_batches):
            samples = batch_texts(micro_batch.batch)
            self._read.append(("data", f"samples of micro-batch {number}", " ".join(samples)))
            self._read.append(("data", f"weight of micro-batch {number}", _number(micro_batch.weight)))
        self._read += _host_streams("before")
        after = progress.updates - self._base
        if after == self._recording.save_after and self._recording.kind != UNINTERRUPTED:
            self._write("next", run, [], self._program_state(run))

    def on_step_end(self, run: Any) -> None:
        """Note the step's random streams and results, and stop the run after the last update to compare."""
        step, self.update = run.result, run.progress.updates
        self._step = [
            *self._read,
            *_host_streams("after"),
            ("random stream", "torch, after the step", short(_torch_state(run))),
        ]
        for number, (names, values, _) in enumerate(step.rows):
            for name, value in zip(names, values.detach().reshape(-1).tolist(), strict=True):
                self._step.append((name, f"of micro-batch {number}", repr(value)))
        if step.grad_norm is not None:
            self._step.append(("gradient", "norm", _number(step.grad_norm)))
        self._step.append(("update", "applied", str(step.applied)))
        recording = self._recording
        if recording.kind != KILLED and run.progress.updates - self._base >= recording.updates:
            run.stop(f"{recording.updates} updates are recorded")

    def _kill(self, run: Any) -> None:
        for each in run.callbacks:
            if isinstance(each, CheckpointSaver):
                each.settle(run)
        if run.last_checkpoint == self._checkpoint:
            return  # no checkpoint to resume from
        self._write("killed", run, [], {})
        if hasattr(signal, "SIGKILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    def on_log(self, run: Any) -> None:
        """Note the logged values."""
        at = run.progress.updates
        for name, value in run.logged.items():
            timed = next((each for each in self._timed if fnmatchcase(name, each)), None)
            if timed is None:
                self._logged.append(("logged value", f"{name} at update {at}", repr(value)))
            else:
                self._logged.append((TIMED, timed, repr(value)))

    def on_save(self, run: Any) -> None:
        """Record the update and the state after it, and kill the process at the chosen update."""
        self._write("update", run, [*self._step, *self._state(run), *self._logged], self._program_state(run))
        if self._recording.kind == KILLED and run.progress.updates - self._base >= self._kill_after:
            self._kill(run)

    def on_fit_end(self, run: Any) -> None:
        """Record the last logged values: the last log point comes after the last save."""
        self._write("end", run, self._logged, {})
        self.is_over = True

    def on_exception(self, run: Any) -> None:
        """Record that the fit failed or was ended."""
        self.failed(run.exception, run.progress.updates)

    def failed(self, error: BaseException, update: int) -> None:
        """Record that an exception ended the fit.

        Args:
            error: The exception, of the fit or of the body of the user's loop.
            update: The last update before it.
        """
        self.is_over = True
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._add({"kind": "failed", "update": update, "error": text})

    def _write(self, kind: str, run: Any, items: list[Item], state: Mapping[str, str]) -> None:
        self._add(
            {"kind": kind, "update": run.progress.updates, "items": items, "program state": dict(state)}
        )

    def _add(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:  # None if the fit failed before it began
            with self._file.open("w" if row["kind"] == "start" else "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _state(self, run: Any) -> Iterator[Item]:
        """Yield the state of the run in the order of dependence, so that a cause comes before its effects."""
        engine = run.engine
        for name, value in run.progress.to_json().items():
            if name not in _TIMES:
                yield "progress", name, str(value)
        for name, updater in engine.updaters.items():
            for key, rate in updater.rates().items():
                yield "learning rate", key if len(engine.updaters) == 1 else f"{key} of {name}", repr(rate)
            yield "schedule", name, _digest(updater.state_dict())
        with engine.exchanged() as taken:
            weights, extras = module_state(run.task)
            slots, _ = optimizer_state(run.task, taken)
        saved = {clean_name(name) for name, _ in run.task.named_parameters()}
        for name, buffer in run.task.named_buffers():
            yield "buffer", clean_name(name), tensor_text(buffer)
        for name, weight in weights.items():
            if name in saved:
                yield "parameter", name, tensor_text(weight)
        yield "extra state", "of the modules", _digest(extras)
        for name, slot in slots.items():
            yield "optimizer state", name, tensor_text(slot)
        yield "strategy", "state", _digest(engine.strategy.state_dict())
        if run.train_metrics:
            yield "declared metrics", "sums", _digest(run.train_metrics.state_dict())
        yield "values to be logged", "sums", _digest(engine.buffer.state_dict())

    def _program_state(self, run: Any) -> dict[str, str]:
        state = ProgramState([*run.task.parameters(), *run.task.buffers(), self])
        with warnings.catch_warnings():  # reading a deprecated property may warn
            warnings.simplefilter("ignore")
            state.add("task", run.task, whole=True)
            for name, data in zip(("train data", "validation data"), self._data, strict=False):
                state.add(name, data)
            for callback in self._callbacks:
                state.add_callback(callback)
            for each in run.engine.updaters.values():
                state.add("schedule", each.schedule)
                state.add("scheduler", getattr(each.scheduler, "lr_lambdas", None))
            state.add_modules(self._recording.module)
        return state.texts


def _number(value: Any) -> str:
    return repr(float(value))


def _host_streams(when: str) -> list[Item]:
    legacy: Any = np.random.get_state(legacy=True)
    name, keys, *rest = legacy
    return [
        ("random stream", f"Python's random, {when} the step", short(repr(random.getstate()).encode())),
        (
            "random stream",
            f"numpy.random, {when} the step",
            short(keys.tobytes() + repr((name, rest)).encode()),
        ),
    ]


def _torch_state(run: Any) -> bytes:
    generators = [torch.default_generator]
    if run.engine.device.type == "cuda":
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return b"".join(each.get_state().numpy().tobytes() for each in generators)


def _digest(value: Any) -> str:
    """Return a hash of a nested state."""
    parts: list[str] = []

    def walk(each: Any) -> None:
        text = None if isinstance(each, (list, tuple, Mapping)) else leaf_text(each)
        if text is not None:
            parts.append(text)
        elif isinstance(each, Mapping):
            for key in each:
                parts.append(str(key))
                walk(each[key])
        elif isinstance(each, (list, tuple)):
            for inner in each:
                walk(inner)
        else:
            parts.append(type(each).__name__)

    walk(value)
    return short("\n".join(parts).encode())
