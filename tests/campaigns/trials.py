"""One trial of the fault campaign: a life with given faults, and what came of it; and all there are."""

from __future__ import annotations

import random
import re
import traceback
from argparse import ArgumentTypeError
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, get_args

from tests.campaigns.life import Life
from tests.support.fault_kinds import OPERATIONS, Fault, FaultKind, Operation, suits
from tests.support.faults import FaultyFileSystem
from tests.support.memory import MemoryObjects

from drivetrain.checkpoint.storage.files import delete_if_there
from drivetrain.checkpoint.storage.filesystem import LOCAL, FileSystem

Storage: TypeAlias = Literal["disk", "objects"]
Manner: TypeAlias = Literal["foreground", "background"]


@dataclass(frozen=True, slots=True)
class Case:  # what a trial is made of; `str` gives a text from which `parse` makes it again
    storage: Storage
    manner: Manner
    faults: tuple[Fault, ...]

    def __str__(self) -> str:
        told = [f"{fault.operation}:{fault.kind}:{fault.seed}" for fault in self.faults]
        return "/".join((self.storage, self.manner, *told))

    @classmethod
    def parse(cls, text: str) -> Case:  # read what `str` gave
        found: Any = re.fullmatch(r"(disk|objects)/(foreground|background)((?:/\d+:[^:/]+:\d+)*)", text)
        told = [each.split(":") for each in found[3].split("/")[1:]] if found else []
        if not found or not {kind for _, kind, _ in told} <= OPERATIONS.keys():
            raise ArgumentTypeError(f"{text!r} is no trial; one is 'disk/background/17:power cut:3'")
        return cls(found[1], found[2], tuple(Fault(int(at), kind, int(seed)) for at, kind, seed in told))


@dataclass(slots=True)
class Outcome:  # what came of a trial
    case: str
    struck: list[str] = field(default_factory=list)
    loads: int = 0
    wrong: list[str] = field(default_factory=list)
    newest: bool = False
    asides: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    @property
    def is_good(self) -> bool:  # whether nothing happened that should not
        return not self.wrong and not self.complaints


def run_case(case: Case, directory: str, files: FileSystem | None = None) -> Outcome:
    files = files or _storage(case.storage)
    life = Life(directory, asynchronous=case.manner == "background")
    try:
        for fault in case.faults:
            life.live(FaultyFileSystem(files, fault, root=directory))
        life.end(files)
    except Exception:  # a trial that breaks is a finding, and the others are to go on
        life.complaints.append(f"it broke:\n{traceback.format_exc()}")
    finally:
        delete_if_there(directory, files)
    return outcome_of(life, str(case))


def outcome_of(life: Life, case: str) -> Outcome:  # what came of a life
    asides = [_without_names(text) for text in life.warnings]
    kinds = [str(step.fault) for step in life.steps]
    return Outcome(case, kinds, life.loads, life.wrong, life.passed_over == 0, asides, life.complaints)


def operations(storage: Storage, directory: str, files: FileSystem | None = None) -> list[Operation]:
    """The operations of a life without faults."""
    counting = FaultyFileSystem(files or _storage(storage))
    life = Life(directory)
    try:
        life.live(counting)
        life.end(counting.inner)
    finally:
        delete_if_there(directory, counting.inner)
    trouble = [*life.wrong, *life.complaints, *life.warnings]
    assert not trouble, f"a life without faults is not what it should be: {trouble}"
    return [step.operation for step in counting.steps]


def single_cases(storage: Storage, asked: list[Operation], seed: int) -> list[Case]:
    """Every kind of fault at every operation, saving in the foreground and in the background."""
    chance = random.Random(seed)
    return [
        Case(storage, manner, (Fault(number, kind, chance.randrange(1000)),))
        for manner in get_args(Manner)
        for number, operation in enumerate(asked, 1)
        for kind in OPERATIONS
        if suits(kind, operation, storage == "disk")
        for _ in range(4 if kind == "power cut" else 1)  # what it takes is drawn, from very much
    ]


def double_cases(storage: Storage, asked: list[Operation], seed: int) -> Iterator[Case]:
    """Without end: a process that dies, and another that meets a fault while it recovers."""
    chance = random.Random(seed)
    deaths: list[FaultKind] = ["kill", "power cut"] if storage == "disk" else ["kill"]
    kinds = [kind for kind in OPERATIONS if storage == "disk" or kind != "power cut"]
    while True:
        first = Fault(chance.randint(1, len(asked)), chance.choice(deaths), chance.randrange(1000))
        second = Fault(chance.randint(1, 40), chance.choice(kinds), chance.randrange(1000))
        yield Case(storage, chance.choice(get_args(Manner)), (first, second))


def _storage(storage: Storage) -> FileSystem:
    return LOCAL if storage == "disk" else MemoryObjects()


def _without_names(text: str) -> str:
    text = re.sub(r"is not valid JSON: .*?(?=\. It was set|$)", "is not valid JSON", text)
    text = re.sub(r"'[^']*'", "'...'", text)
    text = re.sub(r"[0-9a-f]{32}", "...", text)
    return re.sub(r"\d+", "N", text)
