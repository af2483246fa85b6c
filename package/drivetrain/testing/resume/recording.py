"""What a run was made of, update by update, written down so that two runs can be compared."""

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
from drivetrain.engine_state import optimizer_state
from drivetrain.module_state import clean_name, module_state
from drivetrain.testing.resume.digests import batch_texts, leaf_text, short, tensor_text
from drivetrain.testing.resume.held import Held

STRAIGHT, KILLED, RESUMED = "straight", "killed", "resumed"

Item = tuple[str, str, str]
"""A part of a run, the name of a thing, and its value as a text."""

TIMED = "measured by the clock"
"""The part that is left out: a value by whose pattern of names a callback says so."""

_TIMES = ("seconds",)


@dataclasses.dataclass(frozen=True)
class Recording:
    """One of the runs that are compared.

    Attributes:
        directory: Where it is written down, and where what the program's runs write is put.
        kind: "straight", "killed" or "resumed".
        updates: After how many updates each fit is stopped; of the run that is killed, after how many it is
            at the latest.
        save_after: After how many the run that is killed is saved; the others never are before their end.
        epoch: Updates of an epoch, if it is to be that short; None for as many as there are.
        fit: Which fit of the program is recorded, from 1; those before it are run as they are.
    """

    directory: Path
    kind: str
    updates: int
    save_after: int | None = None
    epoch: int | None = None
    fit: int = 1

    def kill_after(self, base: int) -> int:
        """After how many updates it is killed, if it is to be: what came after the save is lost.

        Args:
            base: The update that the straight run began at.
        """
        saved = self.save_after or 0
        # It is saved at an interval: again once that has passed twice.
        return min(saved + 2, self.updates, base + 2 * saved)

    @property
    def log_every(self) -> int:
        """An interval that does not end with the save: what was not logged yet is then in the checkpoint."""
        return 2 if (self.save_after or 1) % 2 else 3


def first_update(directory: Path) -> int:
    """Where the straight run began: not at 0, if the program itself has resumed it."""
    file = next((directory / STRAIGHT).glob("rank-*.jsonl"))
    with file.open(encoding="utf-8") as rows:
        return int(json.loads(rows.readline())["update"])


class Recorder(Callback):
    """Writes down one fit on one rank.

    Args:
        recording: Which run it is.
        data: What the fit was given.
        callbacks: Those of the program.

    Attributes:
        update: The update that was made last.
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
        """Where the fit begins: anew, or with what a checkpoint brought."""
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
            patterns = getattr(callback, "timed_names", ())
            self._timed += [patterns] if isinstance(patterns, str) else patterns
        self._write("start", run, list(self._state(run)), self._held(run))

    def on_step_start(self, run: Any) -> None:
        """What the update is made of; and of the first one after the save, what is held as it begins."""
        progress, self._read = run.progress, []
        for name in ("epoch", "position"):
            self._read.append(("data", name, str(getattr(progress, name))))
        for number, micro_batch in enumerate(run.window.micro_batches):
            samples = batch_texts(micro_batch.batch)
            self._read.append(("data", f"samples of micro-batch {number}", " ".join(samples)))
            self._read.append(("data", f"weight of micro-batch {number}", _number(micro_batch.weight)))
        self._read += _host_streams("before")
        after = progress.updates - self._base
        if after == self._recording.save_after and self._recording.kind != STRAIGHT:
            self._write("next", run, [], self._held(run))

    def on_step_end(self, run: Any) -> None:
        """What the step drew and gave; then the end, if it is here."""
        step, self.update = run.step, run.progress.updates
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
        self._step.append(("update", "made", str(step.applied)))
        recording = self._recording
        if recording.kind != KILLED and run.progress.updates - self._base >= recording.updates:
            run.stop(f"{recording.updates} updates are recorded")

    def _kill(self, run: Any) -> None:
        for each in run.callbacks:
            if isinstance(each, CheckpointSaver):
                each.settle(run)
        if run.last_checkpoint == self._checkpoint:
            return  # there is nothing to resume from
        self._write("killed", run, [], {})
        if hasattr(signal, "SIGKILL"):
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(1)

    def on_log(self, run: Any) -> None:
        """What is logged."""
        at = run.progress.updates
        for name, value in run.logged.items():
            timed = next((each for each in self._timed if fnmatchcase(name, each)), None)
            if timed is None:
                self._logged.append(("logged value", f"{name} at update {at}", repr(value)))
            else:
                self._logged.append((TIMED, timed, repr(value)))

    def on_save(self, run: Any) -> None:
        """What everything is, once all of the update is over; then the kill, if it is here."""
        self._write("update", run, [*self._step, *self._state(run), *self._logged], self._held(run))
        if self._recording.kind == KILLED and run.progress.updates - self._base >= self._kill_after:
            self._kill(run)

    def on_fit_end(self, run: Any) -> None:
        """The last log point comes after the last save."""
        self._write("end", run, self._logged, {})
        self.is_over = True

    def on_exception(self, run: Any) -> None:
        """The fit has failed, or has been ended."""
        self.failed(run.exception, run.progress.updates)

    def failed(self, error: BaseException, update: int) -> None:
        """Write down that an exception has ended the fit.

        Args:
            error: From within it, or from the body of a program's own loop.
            update: After which update.
        """
        self.is_over = True
        text = f"{type(error).__name__}: {error}".partition("\n")[0]
        self._add({"kind": "failed", "update": update, "error": text})

    def _write(self, kind: str, run: Any, items: list[Item], held: Mapping[str, str]) -> None:
        self._add({"kind": kind, "update": run.progress.updates, "items": items, "held": dict(held)})

    def _add(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:  # else it has failed before it began
            with self._file.open("w" if row["kind"] == "start" else "a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")

    def _state(self, run: Any) -> Iterator[Item]:
        """In the order in which things depend on one another."""
        engine = run.engine
        for name, value in run.progress.to_json().items():
            if name not in _TIMES:
                yield "progress", name, str(value)
        for name, updater in engine.updaters.items():
            for key, rate in updater.rates().items():
                yield "learning rate", key if len(engine.updaters) == 1 else f"{key} of {name}", repr(rate)
            yield "schedule", name, _tree(updater.state_dict())
        with engine.exchanged() as taken:
            weights, extras = module_state(run.task)
            slots, _ = optimizer_state(run.task, taken)
        saved = {clean_name(name) for name, _ in run.task.named_parameters()}
        for name, buffer in run.task.named_buffers():
            yield "buffer", clean_name(name), tensor_text(buffer)
        for name, weight in weights.items():
            if name in saved:
                yield "parameter", name, tensor_text(weight)
        yield "extra state", "of the modules", _tree(extras)
        for name, slot in slots.items():
            yield "optimizer state", name, tensor_text(slot)
        yield "strategy", "state", _tree(engine.strategy.state_dict())
        if run.train_metrics:
            yield "declared metrics", "sums", _tree(run.train_metrics.state_dict())
        yield "values to be logged", "sums", _tree(engine.buffer.state_dict())

    def _held(self, run: Any) -> dict[str, str]:
        known = [*run.task.parameters(), *run.task.buffers(), self]
        held = Held(known)
        with warnings.catch_warnings():  # a property or a module of old names may warn that it is looked at
            warnings.simplefilter("ignore")
            held.add("task", run.task, whole=True)
            for name, data in zip(("train data", "validation data"), self._data, strict=False):
                held.add(name, data)
            for callback in self._callbacks:
                held.add_callback(callback)
            for each in run.engine.updaters.values():
                held.add("schedule", each.schedule)
                held.add("scheduler", getattr(each.scheduler, "lr_lambdas", None))
            held.add_modules()
        return held.texts


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


def _tree(value: Any) -> str:
    """A state of any shape, in one word."""
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
