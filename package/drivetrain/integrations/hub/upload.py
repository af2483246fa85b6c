"""Upload a checkpoint's model to the Hub in one commit; also as a program, for uploads in the background."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drivetrain.checkpoint.format.strict_json import MAX_JSON_BYTES
from drivetrain.checkpoint.saving.run_directory import resolve
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.files import MODEL, WeightFiles
from drivetrain.core.errors import ConfigError
from drivetrain.integrations.hub.card import CARD, MARK, CardData
from drivetrain.integrations.hub.client import (
    HubError,
    check_installed,
    check_repository,
    client,
    known_token,
    without_token,
    words_of,
)
from drivetrain.integrations.hub.model_folder import (
    checkpoint_files,
    files_in,
    make_card,
    run_dir_of,
    settings_of,
    write_model,
)

if TYPE_CHECKING:
    from huggingface_hub import HfApi

LAST = "last-checkpoint"
"""The folder of the newest checkpoint in a repository."""

_SCANNED = MAX_JSON_BYTES  # a manifest holds the arguments of the task
"""Bytes above which a text file is not searched for the token."""


@dataclass(frozen=True, kw_only=True)
class Upload:
    """One commit to a repository.

    Attributes:
        repository: Its name.
        checkpoint: The checkpoint whose weights are uploaded.
        run_dir: The run directory, with TensorBoard's files; None for none.
        settings: The Trainer's arguments; empty takes those in the run directory's `config.json`.
        folders: Checkpoints that are uploaded as they are, by their folders in the repository.
        message: The message of the commit.
        revision: The branch; None for the main one. It is made if it is missing.
        private: Whether a repository that is made is private; None leaves that to the organisation.
        card: The parts of the model card that the user gives.
    """

    repository: str
    checkpoint: str
    run_dir: str | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    message: str = "Upload a model"
    revision: str | None = None
    private: bool | None = None
    card: CardData = field(default_factory=CardData)

    def to_json(self) -> dict[str, Any]:
        """Return all attributes in JSON's types."""
        return asdict(self)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Upload:
        """Return the upload that `to_json` described."""
        return cls(**{**value, "card": CardData(**value["card"])})


def push(
    path: str | os.PathLike[str],
    repository: str,
    *,
    revision: str | None = None,
    private: bool | None = None,
    checkpoint: bool = False,
    card: CardData | None = None,
    token: str | None = None,
    message: str | None = None,
) -> str:
    """Upload the model of a checkpoint, with TensorBoard's files and a model card, in one commit.

    Args:
        path: A checkpoint, or a run directory: its newest good checkpoint. Both must be local.
        repository: The repository, such as "organisation/name"; it is made if it is missing.
        revision: The branch; None for the main one. It is made if it is missing.
        private: Whether a repository that is made is private; None leaves that to the organisation.
        checkpoint: Whether to upload the whole checkpoint too, as `last-checkpoint`, to resume from.
        card: The parts of the model card that no run knows.
        token: The token; None takes `HF_TOKEN`, or that of `hf auth login`.
        message: The message of the commit; None names the checkpoint.

    Returns:
        The address of the commit.

    Raises:
        MissingDependencyError: huggingface_hub is not installed.
        ConfigError: The name is none that the Hub allows, or the path is an address.
        CheckpointError: There is no checkpoint, or it is damaged.
        HubError: The upload failed.
    """
    check_installed("pushing to the Hub")
    check_repository(repository)
    given = os.fspath(path)
    if not file_system(given).renames:
        raise ConfigError(f"{given!r} is an address; only local checkpoints can be pushed. Copy it first")
    found = resolve(given)
    run_dir = run_dir_of(found)
    upload = Upload(
        repository=repository,
        checkpoint=found,
        run_dir=None if run_dir is None else str(run_dir),
        folders={LAST: found} if checkpoint else {},
        message=message or f"Upload {Path(found).name}",
        revision=revision,
        private=private,
        card=card or CardData(),
    )
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        return send(upload, Path(folder), token)


def send(upload: Upload, folder: Path, token: str | None = None) -> str:
    """Make the model folder, and upload it and the checkpoints in one commit.

    Args:
        upload: The upload.
        folder: An empty folder for the model's files, on a disk with room for them.
        token: The token; None takes the one that the machine has.

    Returns:
        The address of the commit.

    Raises:
        CheckpointError: A checkpoint is damaged, or a file cannot be written.
        HubError: The Hub refused the upload, or could not be reached; or a file holds the token.
    """
    token = known_token(token)
    run_dir = None if upload.run_dir is None else Path(upload.run_dir)
    settings = upload.settings or settings_of(run_dir)
    write_model(folder, upload.checkpoint, run_dir)
    if not (folder / CARD).exists():  # unless it is an asset
        card = make_card(folder, upload.checkpoint, upload.repository, settings, upload.card)
        (folder / CARD).write_text(without_token(card, token), encoding="utf-8")
    files = {path.relative_to(folder).as_posix(): path for path in files_in(folder)}
    for name, checkpoint in upload.folders.items():
        files.update({f"{name}/{file}": path for file, path in checkpoint_files(Path(checkpoint)).items()})
    _refuse_token(upload.repository, files, token)
    try:
        return _commit(client(token), upload, files)
    # The client raises errors of many kinds, and the texts of some hold what was sent.
    except Exception as error:
        raise HubError(f"{upload.repository} was not uploaded", words_of(error, token)) from None


def _commit(api: HfApi, upload: Upload, files: dict[str, Path]) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    api.create_repo(upload.repository, private=upload.private, exist_ok=True)
    if upload.revision is not None:
        api.create_branch(upload.repository, branch=upload.revision, exist_ok=True)
    there = set(api.list_repo_files(upload.repository, revision=upload.revision))
    if CARD in there and not _is_ours(api, upload):
        del files[CARD]
    operations: list[Any] = [
        CommitOperationDelete(name) for name in sorted(_stale(there, files, upload.folders))
    ]
    operations += [CommitOperationAdd(name, str(path)) for name, path in files.items()]
    commit = api.create_commit(
        upload.repository, operations, commit_message=upload.message, revision=upload.revision
    )
    return str(commit.commit_url)


def _stale(there: Iterable[str], files: Iterable[str], folders: Iterable[str]) -> set[str]:
    """Return the files that an earlier upload left: weights in other shards, or of another checkpoint."""
    names = WeightFiles(MODEL)
    weights = {names.single, names.index}
    old = {name for name in there if name in weights or names.is_one_of_several(name)}
    old |= {name for name in there if any(name.startswith(f"{folder}/") for folder in folders)}
    return old - set(files)


def _is_ours(api: HfApi, upload: Upload) -> bool:
    """Return whether the card on the Hub may be replaced: nobody has deleted its mark."""
    with tempfile.TemporaryDirectory(prefix="drivetrain-") as folder:
        path = api.hf_hub_download(
            upload.repository, CARD, revision=upload.revision, local_dir=folder, cache_dir=folder
        )
        return MARK in Path(path).read_text(encoding="utf-8", errors="replace")


def _refuse_token(repository: str, files: Mapping[str, Path], token: str | None) -> None:
    if token is None or not token.strip():
        return
    for name, path in files.items():
        is_text = name.endswith((".json", ".md", ".txt", ".jinja")) and path.stat().st_size <= _SCANNED
        if is_text and token.strip().encode() in path.read_bytes():
            raise HubError(
                f"{repository} was not uploaded",
                f"{name} holds the Hub's token. Leave the token out of the task's arguments: the Hub's client"
                " finds it in HF_TOKEN, or after `hf auth login`",
            )


def main() -> int:
    """Run the upload that a file describes, its path the only argument; print the result as JSON.

    The program ends when its standard input does, so that it never outlives the one that started it. It
    leaves signals to that one, too.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if hasattr(os, "nice"):
        os.nice(10)  # training goes first
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job = Path(sys.argv[1])
    token = None
    try:
        folder = job.parent / "model"
        folder.mkdir()
        token = known_token()
        result = {"address": send(Upload.from_json(json.loads(job.read_text(encoding="utf-8"))), folder)}
    # Every error is reported: nobody else hears of it.
    except Exception as error:
        result = {"error": error.reason if isinstance(error, HubError) else words_of(error, token)}
    print(json.dumps(result), flush=True)
    return 0


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
