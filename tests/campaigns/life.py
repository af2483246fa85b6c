"""The life of a run's checkpoints, with faults, and what must be true of it whatever the faults."""

import re
from dataclasses import dataclass, field

import torch
from tests.support.fault_kinds import FaultKind, Killed, Step
from tests.support.faults import FaultyFileSystem
from tests.support.messages import heard

from drivetrain.checkpoint.format.manifest import MANIFEST, Snapshot
from drivetrain.checkpoint.saving.config import CheckpointConfig
from drivetrain.checkpoint.saving.index import INDEX
from drivetrain.checkpoint.saving.io import SMALL, UNFINISHED, DirectoryCheckpointIO
from drivetrain.checkpoint.saving.manager import CheckpointManager
from drivetrain.checkpoint.storage.filesystem import FileSystem
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import ALONE, Ranks

STOPS = (3, 5)  # the steps at which a process of the run ends, and the next one begins

LOSSES = (0.5, 0.1, 0.4, 0.3, 0.05)
"""What the steps, from 1, are ranked by: the second is best for long, and is kept while others go."""

_DAMAGE: frozenset[FaultKind] = frozenset(("flip", "lying write", "drop", "truncate"))
_UPDATE = re.compile(r"step-(\d{8})")


def content(step: int) -> Snapshot:  # what is saved at a step
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(16, 16, generator=generator)
    bits = torch.randint(-(2**62), 2**62, (40,), generator=generator)
    # One parameter with the first at every other step, and one of its own at those between.
    output = weight if step % 2 else torch.randn(16, 16, generator=generator)
    # Too large for the manifest at every other step.
    words = "word " * (SMALL // 4 if step % 2 else 4)
    return Snapshot(
        tensors={
            "model": {"weight": weight, "half": weight.bfloat16(), "output": output},
            "state": {"bits": bits},
        },
        objects={"state": {"step": step, "text": f"after {step} steps"}, "words": words},
        progress={"steps": step, "epoch": step // 3},
        metrics={"loss": loss(step)},
    )


def loss(step: int) -> float:
    return LOSSES[step - 1] if step <= len(LOSSES) else 1.0


def differences(snapshot: Snapshot) -> str | None:
    """What of a loaded snapshot is not what was saved at the step that it tells; None for nothing."""
    step = snapshot.progress.get("steps")
    if not isinstance(step, int):
        return f"its progress is {snapshot.progress!r}"
    saved = content(step)
    objects = {name: value for name, value in snapshot.objects.items() if name in saved.objects}
    if (objects, snapshot.progress, snapshot.metrics) != (saved.objects, saved.progress, saved.metrics):
        return f"the objects, the progress or the metrics of step {step} differ"
    there, here = ({group: list(t) for group, t in each.tensors.items()} for each in (snapshot, saved))
    if there != here:
        return f"step {step} has other tensors"
    for group, named in saved.tensors.items():
        for name, tensor in named.items():
            found = snapshot.tensors[group][name]
            same = found.dtype == tensor.dtype and found.shape == tensor.shape
            if not same or not torch.equal(found.view(torch.uint8), tensor.view(torch.uint8)):
                return f"the tensor {name!r} of step {step} differs"
    return None


@dataclass
class Life:  # what happens to one directory of checkpoints: processes save and load there, and faults strike
    directory: str
    asynchronous: bool = False
    ranks: Ranks = ALONE
    acknowledged: int = 0
    attempted: int = 0
    passed_over: int = 0
    loads: int = 0
    wrong: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @property
    def config(self) -> CheckpointConfig:  # the policy of its manager
        return CheckpointConfig(keep_last=2, best=1, by="loss", asynchronous=self.asynchronous)

    def live(self, files: FaultyFileSystem) -> bool:
        """Save and load until all steps are made, or the process is killed."""
        expected: int | None = newest_complete(files.inner, self.directory, self)
        with heard(texts=self.warnings):
            try:
                for stop in STOPS:
                    manager = CheckpointManager(self.directory, self.config, files=files, ranks=self.ranks)
                    step = self._resume(manager, files, expected)
                    while step < stop:
                        step += 1
                        self._save(manager, files, step)
                    expected = None
                return True
            except Killed:
                return False
            finally:
                self.steps.extend(files.struck())

    def damaged(self, steps: list[Step]) -> set[int]:  # 0 for the index
        found: set[int] = set()
        for step in steps:
            lost = step.fault == "EIO" and step.operation in ("look", "open", "read")
            if step.fault in _DAMAGE or lost:
                match = _UPDATE.search(step.path)
                found.add(int(match[1]) if match else 0)
        return found

    def check_load(self, found: tuple[str, Snapshot] | None) -> int:
        if found is None:
            return 0
        self.loads += 1
        path, snapshot = found
        difference = differences(snapshot)
        if difference is not None:
            self.wrong.append(f"{path!r}: {difference}")
        return int(str(snapshot.progress.get("steps", 0)))

    def check_newest(self, step: int, expected: int | None, steps: list[Step], warned: list[str]) -> None:
        """Check that the newest was resumed from, and that a warning tells why one was passed over."""
        damaged = self.damaged(steps)
        newest = self.acknowledged if expected is None else expected
        if step != newest and not (newest in damaged and step == newest - 1):
            self.complaints.append(f"resumed from step {step}, not from {newest}")
        if step < self.acknowledged:
            self.passed_over += 1
            if self.acknowledged not in damaged:
                self.complaints.append(f"step {self.acknowledged} was saved, and is lost without a cause")
            name = f"step-{self.acknowledged:08d}"
            if not any(name in text and ("damaged" in text or "disk" in text) for text in warned):
                self.complaints.append(f"nothing was said of {name}, which was passed over")
        self.acknowledged = self.attempted = step

    def _resume(self, manager: CheckpointManager, files: FaultyFileSystem, expected: int | None) -> int:
        while True:
            try:
                loaded = self.check_load(manager.load_latest())
            except CheckpointError as error:
                self._meet(error, files)
                continue
            # Faults, and warnings, are those of one process; what comes of them concerns all.
            told = self.ranks.all_gather(([*self.steps, *files.struck()], self.warnings))
            steps = [step for each, _ in told for step in each]
            self.check_newest(loaded, expected, steps, [text for _, texts in told for text in texts])
            return loaded

    def _save(self, manager: CheckpointManager, files: FaultyFileSystem, step: int) -> None:
        self.attempted = step
        while True:
            try:
                save(manager, step)
            except CheckpointError as error:
                self._meet(error, files)
                continue
            self.acknowledged = step
            return

    def _meet(self, error: CheckpointError, files: FaultyFileSystem) -> None:
        """Take note of an error, and remove its cause."""
        files.heal()
        text = str(error)
        self.errors.append(text)
        # Each process of several hears of what has struck one of them.
        if self.ranks.size == 1 and len(self.errors) > len([*self.steps, *files.struck()]):
            raise AssertionError(f"an error without a fault: {text}") from error
        if self.directory not in text:
            self.complaints.append(f"an error does not say where: {text}")
        struck = [step.operation for step in (*self.steps, *files.struck())]
        if self.ranks.size == 1 and len(struck) == 1 and struck != ["delete"]:
            for name in unfinished(files.inner, self.directory):
                self.complaints.append(f"{name!r} was left behind by what failed with {text}")
        if not re.search(r"\bE[A-Z]+\b|damaged|missing|not what was written", text):
            self.complaints.append(f"an error does not say why: {text}")

    def end(self, files: FileSystem) -> None:  # on a sound file system
        wanted = _kept(self.acknowledged) & _kept(self.attempted)
        expected = newest_complete(files, self.directory, self)
        with heard(texts=self.warnings):
            manager = CheckpointManager(self.directory, self.config, files=files)
            step = self.check_load(manager.load_latest())
            self.check_newest(step, expected, self.steps, self.warnings)
            self._check_directory(manager, files, wanted)
            save(manager, step + 1)
            if self.check_load(manager.load_latest()) != step + 1:
                self.complaints.append("what was saved next is not what is loaded")
        damaged = self.damaged(self.steps)
        for text in self.warnings:
            named = any((f"step-{step:08d}" if step else INDEX) in text for step in damaged)
            if not named and not (self.steps and "an old checkpoint could not be removed" in text):
                self.complaints.append(f"a warning without a cause: {text}")

    def _check_directory(self, manager: CheckpointManager, files: FileSystem, wanted: set[int]) -> None:
        damaged = self.damaged(self.steps)
        io = DirectoryCheckpointIO(files)
        listed = manager.entries()
        lost = wanted - {entry.step for entry in listed} - damaged
        if lost:
            self.complaints.append(f"steps {sorted(lost)} should have been kept")
        for entry in listed:
            path = files.join(self.directory, entry.name)
            try:
                self.check_load((path, io.load(path)))
            except CheckpointError as error:
                if entry.step not in damaged:
                    self.complaints.append(f"listed, but not whole: {error}")
        known = {entry.name for entry in listed}
        for name, kind in files.entries(self.directory).items():
            aside = not files.renames and f"{MANIFEST}.bad" in files.entries(files.join(self.directory, name))
            match = _UPDATE.fullmatch(name)
            is_damaged = aside or (match is not None and int(match[1]) in damaged)
            if kind == "directory" and name not in known and ".bad" not in name and not is_damaged:
                self.complaints.append(f"{name!r} is there, and is no checkpoint")
        for name in unfinished(files, self.directory):
            self.complaints.append(f"{name!r} was left behind")


def _kept(step: int) -> set[int]:
    """What the policy keeps once a step is saved: the last two, and the best."""
    best = min(range(1, step + 1), key=loss, default=0)
    return {each for each in (step, step - 1, best) if each > 0}


def save(manager: CheckpointManager, step: int) -> None:
    """Save what belongs to a step, change it meanwhile, as training would, and wait for the end."""
    snapshot = content(step)
    live = [tensor for named in snapshot.tensors.values() for tensor in named.values()]
    manager.save(step, 0, {"loss": loss(step)}, lambda: snapshot, best=True)
    for tensor in live:
        tensor.zero_()
    manager.wait()


def unfinished(files: FileSystem, directory: str) -> list[str]:
    """What is neither a checkpoint nor was one: names that begin with a dot, or directories with the mark."""
    found = []
    for name, kind in files.entries(directory).items():
        inside = files.entries(files.join(directory, name)) if kind == "directory" else {}
        if name.startswith(".") or (UNFINISHED in inside and MANIFEST not in inside):
            found.append(name)
    return found


def newest_complete(files: FileSystem, directory: str, life: Life) -> int:
    """The newest step of which the storage has all bytes, found without a manager; 0 for none."""
    io = DirectoryCheckpointIO(files)
    newest = 0
    for name in io.list(directory):
        try:
            snapshot = io.load(files.join(directory, name))
        except CheckpointError:
            continue
        newest = max(newest, life.check_load((name, snapshot)))
    return newest
