"""Record the samples and results of each step of a fit, save it, and stop or kill it."""

from __future__ import annotations

import json
import os
import signal
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drivetrain.callbacks import Callback
from drivetrain.callbacks.checkpoint import CheckpointSaver
from drivetrain.data.fingerprint import of_samples

UNINTERRUPTED, KILLED, RESUMED = "uninterrupted", "killed", "resumed"


@dataclass(frozen=True)
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
        self._file: Path | None = None
        self._row: dict[str, Any] = {}

    def on_fit_start(self, run: Any) -> None:
        """Record where the fit begins, and which logged values measure time."""
        recording, rank = self._recording, run.engine.ranks.rank
        folder = recording.directory / recording.kind
        folder.mkdir(parents=True, exist_ok=True)
        self._file = folder / f"rank-{rank}.jsonl"
        self._base = self.step = run.progress.steps
        if recording.kind == RESUMED:
            self._base = Recorded(recording.directory / UNINTERRUPTED / self._file.name).base or 0
        timed = [name for each in run.callbacks for name in each.timed_names]
        self._write("start", run.progress.steps, run_dir=str(run.run_dir), timed=timed)

    def on_step_start(self, run: Any) -> None:
        read = [each for each in run.window.micro_batches if not each.is_placeholder]
        samples = [one for each in read for one in of_samples(each.batch, each.samples, each.samples)]
        texts = [format(zlib.crc32(repr(each).encode()), "08x") for each in samples]
        self._row = {"epoch": run.progress.epoch, "samples": texts}

    def on_step_end(self, run: Any) -> None:
        """Record the step, and save the run or stop it where that is asked for."""
        result, recording, self.step = run.result, self._recording, run.progress.steps
        norm = {} if result.grad_norm is None else {"gradient norm": float(result.grad_norm)}
        rates = {name: rate for each in run.engine.updaters.values() for name, rate in each.rates().items()}
        losses = {name: each for name, each in result.metrics.items() if name.endswith("loss")}
        self._write("step", self.step, results=losses | norm | rates, **self._row)
        made = self.step - self._base
        if recording.kind != KILLED and made >= recording.steps:
            run.stop(f"{recording.steps} steps are recorded")
        elif recording.kind == KILLED and made == recording.save_after:
            run.save()

    def on_save(self, run: Any) -> None:
        """Kill the process two steps after the save, or after the last step."""
        recording, made = self._recording, run.progress.steps - self._base
        if recording.kind == KILLED and made >= min((recording.save_after or 0) + 2, recording.steps):
            _wait_for_save(run)
            self._write("killed", run.progress.steps)
            if hasattr(signal, "SIGKILL"):
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)

    def on_fit_end(self, run: Any) -> None:
        _wait_for_save(run)
        lost = [f"{name!r} ({kind})" for name, kind in run.attributes.lost.items()]
        self._write("end", run.progress.steps, checkpoint=run.last_checkpoint, lost=lost)
        self.is_over = True

    def on_exception(self, run: Any) -> None:
        self.failed(run.exception, run.progress.steps)

    def failed(self, error: BaseException, step: int) -> None:
        self.is_over = True
        self._write("failed", step, text=f"{type(error).__name__}: {error}".partition("\n")[0])

    def _write(self, kind: str, step: int, **more: Any) -> None:
        if self._file is not None:  # None if the fit failed before it began
            with self._file.open("w" if kind == "start" else "a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind, "step": step, **more}) + "\n")


def _wait_for_save(run: Any) -> None:
    for each in run.callbacks:
        if isinstance(each, CheckpointSaver):
            each.wait_for_save(run)


class Recorded:
    """The record of one run on one rank.

    Attributes:
        base: The step before the first, or None if the fit did not begin.
        steps: The samples, results and epoch of each step.
        logged: The values logged at each step, on rank 0.
        timed: Patterns of the names of logged values that measure time.
        is_whole: Whether the fit ended without an exception.
        checkpoint: The last checkpoint of such a fit.
        lost: The attributes that the checkpoint cannot hold.
        is_killed: Whether the run was killed at the chosen step.
        failed: The exception that ended the run, and the step before it, or None.
    """

    def __init__(self, file: Path) -> None:
        self.base: int | None = None
        self.steps: dict[int, dict[str, Any]] = {}
        self.logged: dict[int, dict[str, Any]] = {}
        self.timed: list[str] = []
        self.checkpoint: str | None = None
        self.lost: list[str] = []
        self.is_whole = self.is_killed = False
        self.failed: str | None = None
        run_dir = Path()
        for row in _rows(file):
            if row["kind"] == "start":
                self.base, self.timed = row["step"], row["timed"]
                run_dir = Path(row["run_dir"])
            elif row["kind"] == "step":
                self.steps[row["step"]] = row
            elif row["kind"] == "end":
                self.is_whole, self.checkpoint, self.lost = True, row["checkpoint"], row["lost"]
            elif row["kind"] == "failed":
                self.failed = f"after step {row['step']}: {row['text']}"
            self.is_killed = row["kind"] == "killed"
        if file.stem == "rank-0" and (run_dir / "metrics.jsonl").exists():
            for row in _rows(run_dir / "metrics.jsonl"):
                self.logged.setdefault(row.pop("step"), {}).update(row)


def _rows(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]  # a kill may cut the last one


def read(directory: Path, kind: str) -> list[Recorded]:
    """Read the records of all ranks of a run."""
    found = sorted((directory / kind).glob("rank-*.jsonl"), key=lambda each: int(each.stem.split("-")[-1]))
    return [Recorded(each) for each in found]
