"""What is kept in random lives of a run directory, against the policy in its simplest words."""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings, stateful
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.support.held import in_files
from tests.support.keeping import Oracle, Saved
from tests.support.messages import heard

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, SavedCheckpoint, Snapshot
from drivetrain.core.errors import CheckpointError, ConfigError

LOSS, ACCURACY = "validation/loss", "validation/accuracy"
MEMORY = "/dev/shm"

VALUES = st.sampled_from([0.0, 1.0, 2.0, math.inf, -math.inf, math.nan])
METRICS = st.one_of(
    st.fixed_dictionaries({LOSS: VALUES, ACCURACY: VALUES}),
    st.fixed_dictionaries({}, optional={LOSS: VALUES, ACCURACY: VALUES}),
)
PURPOSES = st.sampled_from(
    [(True, False), (False, True), (True, True), ("each", False), ("last", "last"), ("last", True)]
)
"""What a save is for: True and False as a loop of one's own gives them, and the intervals and metrics of each
policy, or of the last."""
SAVE = st.tuples(st.integers(0, 2), METRICS, PURPOSES, st.sampled_from([False, False, False, True]))
SAVES = st.lists(SAVE, min_size=1, max_size=5)


@st.composite
def policies(draw: st.DrawFn) -> tuple[CheckpointConfig, ...]:
    """One policy, or several that go together."""
    modes = {by: draw(st.sampled_from(["min", "max"])) for by in (LOSS, ACCURACY)}
    asynchronous = draw(st.sampled_from([False, False, True]))
    metrics = draw(st.lists(st.sampled_from([LOSS, LOSS, ACCURACY, None]), min_size=1, max_size=3))
    return tuple(
        CheckpointConfig(
            every=draw(st.sampled_from(["1 epoch", "2 steps", None])),
            keep_last=draw(st.sampled_from([0, 1, 2, 3, None] if number else [0, 1, 2, 3])),
            best=draw(st.integers(0, 3)),
            by=by,
            mode=modes.get(by or "", "min"),
            asynchronous=asynchronous,
        )
        for number, by in enumerate(metrics)
    )


CONFIGS = policies()


class Life(RuleBasedStateMachine):
    """The life of a run directory: saves, kills, restarts, damage and removals to other places."""

    def __init__(self) -> None:
        super().__init__()
        # In memory where the system has such a place: waiting for a disk proves nothing about what is kept.
        self.outer = tempfile.TemporaryDirectory(dir=MEMORY if os.path.isdir(MEMORY) else None)
        self.moves = 0
        self.written = 0
        self.update = 0
        self.oracle = Oracle()

    def teardown(self) -> None:
        self.outer.cleanup()

    @property
    def directory(self) -> Path:
        return Path(self.outer.name, f"run-{self.moves}", "checkpoints")

    def manager(self) -> CheckpointManager:
        return CheckpointManager(str(self.directory), self.oracle.policies)

    @contextmanager
    def warned(self) -> Iterator[None]:
        """What is done inside warns of exactly what the oracle foretells."""
        self.oracle.warnings.clear()
        with heard() as texts:
            yield
        found = [[text for text in texts if each in text] for each in self.oracle.warnings]
        assert [len(each) for each in found] == [1] * len(texts), (texts, self.oracle.warnings)

    @initialize(config=CONFIGS)
    def start(self, config: tuple[CheckpointConfig, ...]) -> None:
        self.oracle.policies = config
        self.run = self.manager()

    @rule(saves=SAVES)
    def train(self, saves: Sequence[tuple[int, dict[str, float], tuple[Any, Any], bool]]) -> None:
        for steps, metrics, purposes, fails in saves:
            resume, keeper = self.purposes(*purposes)
            self.update += steps
            if not self.is_ranked(metrics):
                self.refuse(metrics, resume, keeper)
            elif fails and self.oracle.here(self.update) is None:
                self.fail(metrics, resume, keeper)
            else:
                self.save(metrics, resume, keeper)
            self.the_run_and_the_oracle_agree()

    def purposes(self, resume: Any, keeper: Any) -> tuple[Any, Any]:
        """The intervals and the metrics that words mean."""
        names = [str(each.every) for each in self.oracle.policies if each.every is not None]
        metrics = self.oracle.metrics()
        resume = {"each": ["", *names], "last": names[-1:] or [""]}.get(resume, resume)
        return resume, {"last": metrics[-1:]}.get(keeper, keeper)

    def is_ranked(self, metrics: dict[str, float]) -> bool:
        """Whether the metrics that rank keepers are there."""
        return all(by in metrics for by in self.oracle.metrics())

    def refuse(self, metrics: dict[str, float], resume: Any, keeper: Any) -> None:
        """Without the metrics nothing can be ranked, but a resume point can be saved."""
        missing = next(by for by in self.oracle.metrics() if by not in metrics)
        lacking = f"metric '{missing}', which this run has not logged so far"
        with pytest.raises(ConfigError, match=f"{lacking}.*Allowed: {', '.join(map(repr, metrics))}"):
            self.run.should_keep(metrics)
        if keeper is True or missing in (keeper or ()):
            with pytest.raises(ConfigError, match=lacking):
                self.run.save(self.update, 0, metrics, pytest.fail, resume=resume, keeper=True)
        elif resume:
            self.save(metrics, resume, False)

    def fail(self, metrics: dict[str, float], resume: Any, keeper: Any) -> None:
        """A save that fails half-way leaves everything as it was."""
        with pytest.raises(CheckpointError, match="cannot be written as strict JSON"):
            self.commit(metrics, self.unstorable, resume, keeper)

    def unstorable(self) -> Snapshot:
        return Snapshot(tensors={"model": {"number": torch.tensor([-1])}}, objects={"state": math.nan})

    def save(self, metrics: dict[str, float], resume: Any, keeper: Any) -> None:
        if self.is_ranked(metrics):
            wanted = [by for by in self.oracle.metrics() if self.oracle.is_wanted(metrics, by)]
            assert [by for by in self.oracle.metrics() if self.run.should_keep(metrics, by)] == wanted
            assert self.run.should_keep(metrics) == bool(wanted)
        there = self.oracle.here(self.update)
        names = self.names()
        result = self.commit(metrics, self.snapshot, resume, keeper)
        path = Path(result.path)
        assert path.parent == self.directory
        assert (path.name == there.name) if there else (path.name not in names)
        saved = there or Saved(path.name, self.written, self.update)
        points = resume if isinstance(resume, list) else [""] * resume
        self.oracle.save(
            saved, metrics, points, keeper if isinstance(keeper, list) else self.oracle.metrics() * keeper
        )
        assert result.is_keeper == bool(saved.best)
        self.written += there is None

    def commit(
        self, metrics: dict[str, float], snapshot: Callable[[], Snapshot], resume: Any, keeper: Any
    ) -> SavedCheckpoint:
        """Save, and wait for what is written in the background."""
        epoch = self.update // 3
        result = self.run.save(self.update, epoch, metrics, snapshot, resume=resume, keeper=keeper)
        self.run.wait()
        return result

    def snapshot(self) -> Snapshot:
        assert self.oracle.here(self.update) is None, "written a second time"
        content = torch.tensor([self.written])
        return Snapshot(tensors={"model": {"number": content}}, progress={"updates": self.update})

    @precondition(lambda self: self.written)
    @rule(config=st.none() | CONFIGS)
    def go_on(self, config: tuple[CheckpointConfig, ...] | None) -> None:
        """A kill, and a restart that resumes from the newest, perhaps under another policy."""
        self.reopen(config)

    @precondition(lambda self: any(each.damage is None for each in self.oracle.all))
    @rule(which=st.integers(0, 5))
    def go_back(self, which: int) -> None:
        """A run that resumes from a checkpoint that the user names."""
        whole = [each for each in self.oracle.all if each.damage is None]
        self.reopen(back_to=whole[which % len(whole)])

    @precondition(lambda self: self.written)
    @rule(lost=st.sampled_from(["gone", "damaged"]), where=st.floats(0, 1, exclude_max=True))
    def lose_the_index(self, lost: str, where: float) -> None:
        path = self.directory / "index.json"
        if self.oracle.has_index and lost == "gone":
            path.unlink()
        elif self.oracle.has_index:
            flip(path, where)
        self.reopen(lost=lost)

    @precondition(lambda self: self.oracle.all)
    @rule(
        which=st.lists(st.integers(0, 2), min_size=1, max_size=2, unique=True),
        damage=st.sampled_from(["tensor", "object", "manifest", "gone"]),
        lost=st.sampled_from([None, None, "damaged"]),
    )
    def damage(self, which: Sequence[int], damage: str, lost: str | None) -> None:
        """The newest, or those before it, are damaged, perhaps together with the index."""
        for each in {self.oracle.all[-1 - number % len(self.oracle.all)] for number in which}:
            if each.damage is None:
                each.damage = damage
                self.hurt(self.directory / each.name, damage)
        if lost and self.oracle.has_index:
            flip(self.directory / "index.json", 0.5)
        self.reopen(lost=lost)

    def hurt(self, path: Path, damage: str) -> None:
        if damage == "gone":
            shutil.rmtree(path)
        elif damage == "manifest":
            (path / "manifest.json").unlink()
        else:
            flip(in_files(path) / {"tensor": "model.safetensors", "object": "checkpoint.json"}[damage], 0.99)

    @precondition(lambda self: self.written)
    @rule()
    def move(self) -> None:
        before = self.directory.parent
        self.moves += 1
        if before.exists():
            shutil.move(before, self.directory.parent)
        self.reopen()

    def reopen(
        self,
        config: tuple[CheckpointConfig, ...] | None = None,
        *,
        back_to: Saved | None = None,
        lost: str | None = None,
    ) -> None:
        self.oracle.policies = config or self.oracle.policies
        self.run = self.manager()
        with self.warned():
            self.run.entries()
            self.oracle.open(lost)
        if back_to is not None:
            self.update = back_to.update
            return
        with self.warned():
            found = self.run.load_latest()
            expected = self.oracle.load_latest()
        self.check_content(found, expected)
        self.update = expected.update if expected else 0

    def check_content(self, found: tuple[str, Snapshot] | None, expected: Saved | None) -> None:
        assert (found is None) == (expected is None)
        if found is not None and expected is not None:
            assert found[0] == str(self.directory / expected.name)
            assert found[1].tensors["model"]["number"].item() == expected.number

    def names(self) -> set[str]:
        return set(os.listdir(self.directory)) if self.directory.exists() else set()

    @invariant()
    def the_run_and_the_oracle_agree(self) -> None:
        oracle = self.oracle
        self.run.entries()
        index = {"index.json"} if oracle.has_index else set()
        assert self.names() == {each.name for each in oracle.all} | oracle.others | index
        expected = [each.known() for each in oracle.all]
        best = {by: oracle.best_by(by) for by in oracle.metrics()}
        again = self.manager()  # another process finds the same
        for manager in (self.run, again):
            assert [
                (each.name, each.update, repr(sorted(each.metrics.items())), *map(frozenset, purposes(each)))
                for each in manager.entries()
            ] == expected
            assert all(each.epoch == each.update // 3 for each in manager.entries())
            for by, found in best.items():
                assert manager.best(by) == (str(self.directory / found.name) if found else None)
            first = next(iter(best.values()), None)
            assert manager.best() == (str(self.directory / first.name) if first else None)
        newest = oracle.all[-1] if oracle.all else None
        if newest is None or newest.damage is None:
            self.check_content(again.load_latest(), newest)
        if oracle.has_index:
            text = (self.directory / "index.json").read_text(encoding="utf-8")
            assert self.outer.name not in text
            assert [each["name"] for each in json.loads(text)["checkpoints"]] == [
                each.name for each in oracle.all
            ]


def purposes(entry: Any) -> tuple[Any, Any]:
    return entry.resume, entry.keeper


def flip(path: Path, where: float) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[int(where * len(content))] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("examples", [8, pytest.param(40, marks=pytest.mark.landing)])
def test_what_is_kept_in_the_life_of_a_run_directory(examples: int) -> None:
    stateful.run_state_machine_as_test(Life, settings=settings(max_examples=examples, stateful_step_count=25))
