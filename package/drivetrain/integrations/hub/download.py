"""Fetch the newest checkpoint of a repository on the Hub."""

from __future__ import annotations

import os
import shutil
from pathlib import Path, PurePosixPath
from typing import Any

from drivetrain.checkpoint.format.manifest import MANIFEST
from drivetrain.checkpoint.saving.index import PURPOSE
from drivetrain.checkpoint.saving.reading import open_checkpoint
from drivetrain.core.errors import CheckpointError
from drivetrain.integrations.hub.client import HubError, client, known_token, words_of
from drivetrain.integrations.hub.upload import LAST

ALL = "checkpoints"
"""The folder of all checkpoints in a repository."""


def fetch_newest(
    repository: str, directory: Path, work: Path, *, revision: str | None = None, token: str | None = None
) -> str | None:
    """Download the newest checkpoint of a repository, and verify each byte.

    Args:
        repository: The repository.
        directory: Where the checkpoint goes; one of the same name that is there already is kept.
        work: A folder on the same disk for unfinished files; removed afterwards.
        revision: The branch; None for the main one.
        token: The token; None takes the one that the machine has.

    Returns:
        The checkpoint's path; None if the repository is missing or has no checkpoint.

    Raises:
        HubError: The Hub could not be reached, or denied access.
        DamagedCheckpointError: The checkpoint differs from its hashes.
    """
    token = known_token(token)
    try:
        return _fetch(repository, directory, work, revision, token)
    except (CheckpointError, HubError):
        raise
    # The client raises errors of many kinds, and the texts of some hold what was sent.
    except Exception as error:
        raise HubError(f"no checkpoint was read from {repository}", words_of(error, token)) from None
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _fetch(
    repository: str, directory: Path, work: Path, revision: str | None, token: str | None
) -> str | None:
    from huggingface_hub.errors import RepositoryNotFoundError, RevisionNotFoundError

    api = client(token)
    try:
        commit = api.model_info(repository, revision=revision).sha
    except RevisionNotFoundError:
        return None
    except RepositoryNotFoundError as error:
        if error.response.status_code == 404:
            return None
        raise  # without a valid token, a private repository seems to be missing
    shutil.rmtree(work, ignore_errors=True)
    names = api.list_repo_files(repository, revision=commit)
    for name in names:
        if ".." in PurePosixPath(name).parts:
            raise CheckpointError(f"{repository} has a file {name!r}, which leads out of its folder")

    def download(*patterns: str) -> None:
        api.snapshot_download(
            repository,
            revision=commit,
            allow_patterns=[*patterns],
            local_dir=work,
            cache_dir=work / ".cache",
        )

    found = {str(PurePosixPath(name).parent) for name in names if PurePosixPath(name).name == MANIFEST}
    found = {each for each in found if each == LAST or str(PurePosixPath(each).parent) == ALL}
    entries = {}
    for each in found:
        download(
            f"{each}/{MANIFEST}", f"{each}/{PURPOSE}.json"
        )  # which is in the manifest unless it is large
        entry: Any = open_checkpoint(str(work / each)).object(PURPOSE)
        entries[each] = (int(entry["order"]), int(entry["step"]))
    if not entries:
        return None
    newest = max(entries, key=lambda each: entries[each])
    target = directory / f"step-{entries[newest][1]:08d}"
    if not target.exists():
        download(f"{newest}/*")
        open_checkpoint(str(work / newest)).verify()
        directory.mkdir(parents=True, exist_ok=True)
        os.rename(work / newest, target)
    return str(target)
