"""The record of a fit: what it ran with, and what a resume has changed."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from drivetrain.core.files import read_json
from drivetrain.core.types import Json
from drivetrain.core.version import __version__
from drivetrain.loggers.files import flat, to_json

if TYPE_CHECKING:
    from drivetrain.data import Feed
    from drivetrain.data.resumption import Resumption
    from drivetrain.run.run import Run

_NOT_IN_USE = re.compile(r"extra == .(bench|docs|test|trackers)")
"""The requirements of extras that no run uses."""

_PATIENCE = 10.0
"""Seconds that Git may take; a tree that it cannot look through by then is "unknown"."""


def record_of(run: Run) -> dict[str, Json]:
    """Return what a fit runs with: versions, Git's commit, the command, the machine, processes and data."""
    strategy = run.engine.strategy
    loaders = run.evaluation_feeds
    data = {} if run.train_feed is None else {"train": _length(run.train_feed)}
    data |= {f"validation/{name}" if name else "validation": _length(feed) for name, feed in loaders}
    return {
        "versions": {**versions()},
        "git": git_state(Path.cwd()),
        "command": shlex.join(sys.orig_argv),
        "directory": os.getcwd(),
        "host": socket.gethostname(),
        "strategy": strategy.name,
        "precision": run.engine.precision.name,
        "device": str(run.engine.device),
        "world_size": strategy.world_size,
        "data": {**data},
    }


@cache
def versions() -> dict[str, Json]:
    """Return the versions of drivetrain, Python, torch, CUDA and the packages that drivetrain can use."""
    found: dict[str, Json] = {"drivetrain": __version__, "python": platform.python_version()}
    found |= {"torch": str(torch.__version__), "cuda": torch.version.cuda}
    try:
        needed = importlib.metadata.requires("drivetrain") or ()
    except importlib.metadata.PackageNotFoundError:  # on PYTHONPATH, not installed
        needed = ()
    names = {re.split(r"[^\w.-]", each)[0] for each in needed if not _NOT_IN_USE.search(each)}
    for name in sorted(names - found.keys()):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def git_state(directory: Path) -> dict[str, Json] | None:
    """Return Git's commit and branch, and whether tracked files differ from it.

    Returns:
        None without Git, a repository or a commit.
    """
    command = ["git", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # a look changes no index
    try:
        done = subprocess.run(
            command, cwd=directory, env=environment, capture_output=True, text=True, timeout=_PATIENCE
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = done.stdout.splitlines()
    head = dict(line[2:].split(" ", 1) for line in lines if line.startswith("# "))
    commit = head.get("branch.oid", "(initial)")
    if done.returncode or commit == "(initial)":
        return None
    return {"commit": commit, "branch": head.get("branch.head"), "dirty": len(lines) > len(head)}


def with_resumes(
    config: dict[str, Json], run: Run, settings_of: str | None, how: Resumption
) -> dict[str, Json]:
    """Return a configuration with the resumes of the run: each with its checkpoint, and what it has changed.

    Earlier ones, and the settings of before, are those of the ``config.json`` beside the checkpoint.
    """
    address = run.last_checkpoint
    if address is None:
        return config
    before = _config_of(address)
    this: dict[str, Json] = {"checkpoint": address, "step": run.progress.steps}
    if settings_of is not None:
        this["optimizer_settings"] = settings_of
    if how.asked:
        this["data"] = how.asked
    if before is not None:
        this["changed"] = changes(before, config)
    of_before = {} if before is None else before.get("run")
    earlier = of_before.get("resumes") if isinstance(of_before, Mapping) else None
    record = config["run"]
    assert isinstance(record, dict)
    resumes = [*(earlier if isinstance(earlier, list) else ()), this]
    return {**config, "run": {**record, "resumes": resumes}}


def changes(before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Json]:
    """Return the settings that differ, by dotted name: the value before and the one now, None for none.

    The machine and the like of the part "run" are compared too, without its earlier resumes.
    """
    flats = []
    for each in (before, now):
        part = each.get("run")
        tree = {**each, "run": {k: v for k, v in part.items() if k != "resumes"} if part else {}}
        flats.append(dict(flat(to_json(tree))))
    old, new = flats
    names = [*old, *(name for name in new if name not in old)]
    return {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}


def _config_of(address: str) -> dict[str, Any] | None:
    """Return the ``config.json`` of the run that has saved a checkpoint; None if there is none here."""
    if "://" in address:
        return None
    for folder in Path(address).absolute().parents[:2]:
        try:
            found = read_json(folder / "config.json")
        except (OSError, ValueError):
            continue
        return found if isinstance(found, dict) and "trainer" in found else None
    return None


def _length(feed: Feed) -> Json:
    return {"samples": feed.source.samples_per_epoch, "batches": feed.batches_per_epoch}
