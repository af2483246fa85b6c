"""The callback that uploads a run's model and checkpoints to the Hub while it trains."""

from __future__ import annotations

import os
import re
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, ClassVar

from drivetrain.callbacks.base import Callback
from drivetrain.checkpoint.saving.config import chosen_policies
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import ConfigError, Preempted, nearest
from drivetrain.core.messages import logger
from drivetrain.core.validation import duration
from drivetrain.integrations.hub.background import BackgroundUpload
from drivetrain.integrations.hub.card import CardData
from drivetrain.integrations.hub.client import check_installed, check_repository, known_token
from drivetrain.integrations.hub.download import ALL, fetch_newest
from drivetrain.integrations.hub.model_folder import run_dir_of
from drivetrain.integrations.hub.upload import LAST, Upload

if TYPE_CHECKING:
    from datetime import timedelta

    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies.base import Strategy

_LOG = logger(__name__)

WORK = ".hub"
"""The folder beside the checkpoints with what is being uploaded, by hard links."""

_EVERY = ("end", "save", "checkpoint", "all")
_ATTEMPTS = 3
_PAUSE = 5.0
_GRACE = 10.0
"""Seconds that an error waits for an upload in progress."""


class Publish(Callback):
    """Uploads the model to the Hugging Face Hub, in the background, and resumes from there.

    An upload is one commit with the weights as plain safetensors, the files beside them, TensorBoard's files
    and a model card. A separate process makes the uploads, one at a time, so that they neither delay nor end
    training. While one is in progress, newer saves wait; only the newest of them is uploaded next, except
    with "all". A failure is a warning, and the next save tries again.

    `fit(..., resume="hub")` resumes from the newest checkpoint of the repository or of the run directory,
    whichever is newer, and begins anew if there is none. The checkpoint that it needs is uploaded with
    `every="checkpoint"` or `every="all"`.

    No message and no file holds the token. Only rank 0 uploads.

    Args:
        repository: The repository, such as "organisation/name"; it is made if it is missing.
        every: When to upload: "end" for once, after training; "save", "checkpoint" and "all" at each
            checkpoint. "checkpoint" also uploads the checkpoint itself, as `last-checkpoint`; "all" keeps
            each of them, in `checkpoints`.
        private: Whether a repository that is made is private; None leaves that to the organisation.
        revision: The branch; None for the main one. It is made if it is missing.
        card: The parts of the model card that no run knows, such as the licence.
        token: The token; None takes `HF_TOKEN`, or that of `hf auth login`.
        timeout: How long an upload may take: "30 minutes", seconds, or a timedelta. The end of a fit waits
            no longer for the last upload.

    Raises:
        ConfigError: A value that is not allowed; says what is.
        MissingDependencyError: huggingface_hub is not installed.
    """

    after_saver: ClassVar[bool] = True
    resume_name: ClassVar[str | None] = "hub"

    def __init__(
        self,
        repository: str,
        every: str = "end",
        *,
        private: bool | None = None,
        revision: str | None = None,
        card: CardData | None = None,
        token: str | None = None,
        timeout: str | float | timedelta = "30 minutes",
    ) -> None:
        check_installed("Publish")
        if every not in _EVERY:
            raise ConfigError(f"every={every!r} is not allowed. {nearest(str(every), _EVERY)}")
        self.repository = check_repository(repository)
        self.every = every
        self.private = private
        self.revision = revision
        self.card = self._card = card or CardData()
        self._token = token
        self._timeout = duration("timeout", timeout) or 0.0
        self._settings: dict[str, Any] = {}
        self._newest: str | None = None
        self._begin()

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that the Trainer saves checkpoints on a local disk.

        Raises:
            ConfigError: It does not.
        """
        self._settings = trainer.to_json()
        if trainer.checkpoint is False:
            raise ConfigError("Publish uploads a run's checkpoints, and checkpoint=False saves none")
        directory = next((each.directory for each in chosen_policies(trainer.checkpoint)), None)
        if directory is not None and not file_system(os.fspath(directory)).renames:
            raise ConfigError(
                f"Publish uploads from a local disk, and the checkpoints go to {os.fspath(directory)!r}."
                " Keep them local"
            )

    def fetch_checkpoint(self, directory: str) -> str | None:
        """Download the repository's newest checkpoint to a directory of checkpoints, verified.

        Returns:
            Its path, or None if there is none.

        Raises:
            HubError: The Hub could not be reached, or denied access.
            DamagedCheckpointError: The checkpoint differs from its hashes.
        """
        folder = Path(directory)
        work = folder.parent / WORK / "fetched"
        return fetch_newest(self.repository, folder, work, revision=self.revision, token=self._token)

    def on_fit_start(self, run: Run) -> None:
        """Check that there is a token.

        Raises:
            ConfigError: There is none.
        """
        self._begin()
        last = run.last_checkpoint
        if last is not None and run.run_dir is not None and run_dir_of(last) == run.run_dir:
            self._newest = last  # a run that only finishes what an earlier one could not upload
        if run.is_main and known_token(self._token) is None:
            raise ConfigError(
                f"no token to upload to {self.repository} with. Run `hf auth login`, or set HF_TOKEN"
            )
        self._card = self.card
        if not self.card.datasets and run.train_feed is not None:
            self._card = replace(self.card, datasets=_names_on_hub(run.train_feed.source.dataset))

    def _begin(self) -> None:
        self._newest = None
        self._uploaded: str | None = None
        self._pending: dict[str, Path] = {}
        self._sending: dict[str, Path] = {}
        self._current: BackgroundUpload | None = None
        self._failures = 0
        self._last_failed = False
        self._is_ending = False
        self._reason = ""

    def on_checkpoint_saved(self, run: Run) -> None:
        """Upload the checkpoint, now or after the upload in progress."""
        if not run.is_main or run.last_checkpoint is None:
            return
        self._newest = run.last_checkpoint
        if self.every != "end":
            self._add(run.last_checkpoint)
            self._last_failed = False
            self._advance()

    def on_log(self, run: Run) -> None:
        """Report an upload that has ended, and start the next."""
        if run.is_main:
            self._advance()

    def on_fit_end(self, run: Run) -> None:
        """Upload what is not uploaded yet, and wait for it."""
        if run.is_main and self._newest is not None and self._newest != self._uploaded:
            self._add(self._newest)
        ends = self._end_within(self._timeout)
        with run.timed("save"):
            while not run.engine.ranks.first(lambda: self._is_finished(ends)):
                run.report_progress()
        if run.is_main:
            self._clean_up()

    def on_exception(self, run: Run) -> None:
        """Wait for the uploads, but only shortly unless a signal has ended the run."""
        if not run.is_main:
            return
        if isinstance(run.exception, Preempted):
            ends = self._end_within(self._timeout)
        else:
            self._pending = {}
            ends = self._end_within(0.0 if isinstance(run.exception, KeyboardInterrupt) else _GRACE)
        while not self._is_finished(ends):
            run.report_progress()
        self._clean_up()

    def _end_within(self, seconds: float) -> float:
        self._is_ending = True
        self._failures, self._last_failed = 0, False
        return monotonic() + seconds

    def _is_finished(self, ends: float) -> bool:
        """Take a step towards the end of all uploads; return whether there is none left, or no time."""
        self._advance()
        if self._last_failed:
            if self._failures == _ATTEMPTS or monotonic() + _PAUSE > ends:
                self._warn("To upload it by hand: drivetrain checkpoint push {path} {repository}")
                return True
            sleep(_PAUSE)
            self._last_failed = False
            return False
        if self._current is None:
            return True
        if monotonic() >= ends:
            self._current.end()
            self._failed(f"it took too long, and the end of the fit waits only {self._timeout:g} seconds")
            return False
        sleep(0.1)
        return False

    def _advance(self) -> None:
        if self._current is not None:
            reason = self._current.poll()
            if reason is None:
                return
            if reason:
                self._failed(reason)
            else:
                self._succeeded()
        if self._pending and not self._last_failed:
            self._send()

    def _succeeded(self) -> None:
        self._current = None
        self._failures = 0
        self._uploaded = list(self._sending)[-1]
        self._forget(self._sending)

    def _failed(self, reason: str) -> None:
        self._current = None
        self._failures += 1
        self._last_failed = True
        self._pending = {**self._sending, **self._pending}
        self._sending = {}
        self._keep_newest()
        self._reason = reason
        if not self._is_ending:
            self._warn("The next save tries again")

    def _warn(self, then: str) -> None:
        path = list(self._pending)[-1]
        then = then.format(path=path, repository=self.repository)
        _LOG.warning(f"the upload of {Path(path).name} to {self.repository} failed: {self._reason}. {then}")

    def _send(self) -> None:
        self._sending, self._pending = self._pending, {}
        path, newest = list(self._sending.items())[-1]
        run_dir = run_dir_of(path)
        folders = {f"{ALL}/{Path(each).name}": str(at) for each, at in self._sending.items()}
        upload = Upload(
            repository=self.repository,
            checkpoint=str(newest),
            run_dir=None if run_dir is None else str(run_dir),
            settings=self._settings,
            folders={"checkpoint": {LAST: str(newest)}, "all": folders}.get(self.every, {}),
            message=f"Upload {Path(path).name}",
            revision=self.revision,
            private=self.private,
            card=self._card,
        )
        work = self._work_folder(path) / "upload"
        try:
            self._current = BackgroundUpload(upload, work, self._token, self._timeout)
        except OSError as error:
            self._failed(str(error))

    def _add(self, checkpoint: str) -> None:
        if checkpoint not in self._pending and checkpoint not in self._sending:
            self._pending[checkpoint] = _linked(Path(checkpoint), self._work_folder(checkpoint))
            self._keep_newest()

    def _keep_newest(self) -> None:
        if self.every != "all":
            self._forget(dict(list(self._pending.items())[:-1]))

    def _forget(self, checkpoints: dict[str, Path]) -> None:
        for each, at in list(checkpoints.items()):
            self._pending.pop(each, None)
            self._sending.pop(each, None)
            if str(at) != each:
                shutil.rmtree(at, ignore_errors=True)

    def _clean_up(self) -> None:
        if self._current is not None:
            self._current.end()
            self._current = None
        if self._newest is not None:
            work = self._work_folder(self._newest)
            shutil.rmtree(work, ignore_errors=True)
            with suppress(OSError):  # another Publish still uses the folder
                work.parent.rmdir()

    def _work_folder(self, checkpoint: str) -> Path:
        name = "--".join([*self.repository.split("/"), *(self.revision or "").split("/")])
        return Path(checkpoint).parent.parent / WORK / name


def _names_on_hub(dataset: object) -> list[str]:
    """Return the repositories that a dataset of Hugging Face was loaded from, by the files it records."""
    files = getattr(getattr(dataset, "info", None), "download_checksums", None) or ()
    found = [re.match(r"hf://datasets/([^@]+)@", str(each)) for each in files]
    return sorted({each[1] for each in found if each})


def _linked(checkpoint: Path, work: Path) -> Path:
    """Return a folder with hard links to a checkpoint's files, so that the run may prune the checkpoint.

    On a disk without hard links, it is the checkpoint itself.
    """
    target = work / checkpoint.name
    shutil.rmtree(target, ignore_errors=True)
    try:
        for path in checkpoint.rglob("*"):
            if path.is_file():
                (target / path.relative_to(checkpoint)).parent.mkdir(parents=True, exist_ok=True)
                os.link(path, target / path.relative_to(checkpoint))
    except OSError:
        with suppress(OSError):
            shutil.rmtree(target)
        return checkpoint
    return target
