"""The study of a search: its storage, and trials that one process at a time runs."""

from __future__ import annotations

import json
import os
import socket
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import optuna
from optuna.storages import BaseStorage, JournalStorage, RDBStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

from drivetrain.checkpoint.saving.lock import LOCK, DirectoryLock
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.core.errors import HIDDEN, ConfigError, without_secrets
from drivetrain.core.files import open_file, read_text
from drivetrain.core.messages import logger
from drivetrain.distributed.processes import one_at_a_time
from drivetrain.integrations.optuna.sampling import EXHAUSTED
from drivetrain.integrations.optuna.space import differences
from drivetrain.loggers.files import replace_text

_LOG = logger(__name__)

FAILURE = "failure"
"""The trial's attribute that says why it failed."""

JOURNAL = "journal.log"
RECORD = "search.json"
"""The file in a search's directory that says where its storage is."""

IDENTITY = "search"
"""The study's attribute with what a search that goes on must have in common."""


class JournalLock(JournalFileOpenLock):  # type: ignore[misc]  # mypy does not follow Optuna
    """A lock of the journal that ends with its process, as Optuna's own files of locks do not.

    A process that is killed while it writes leaves half a line, behind which no other line could be read.
    Taking the lock removes it.

    Args:
        path: The journal.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(str(path))
        self._path = path
        self._held: AbstractContextManager[None] | None = None

    def acquire(self) -> bool:
        """Wait for the lock, and remove half a line."""
        self._held = one_at_a_time(self._path)
        self._held.__enter__()
        with open(self._path, "r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size and (file.seek(size - 1), file.read(1))[1] != b"\n":
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)
        return True

    def release(self) -> None:
        """Release the lock."""
        held, self._held = self._held, None
        if held is not None:
            held.__exit__(None, None, None)


_BEGINNING = b'{"op_code"'
"""The first bytes of a journal of Optuna."""


def open_storage(
    given: str | os.PathLike[str] | BaseStorage | None, directory: Path, *, reads_only: bool = False
) -> BaseStorage:
    """Return the storage of a search.

    Args:
        given: An address such as "sqlite:///search.db", the path of a journal, or a storage of Optuna; None
            takes a journal in the search's directory.
        directory: The directory of the search.
        reads_only: Whether the storage must be there, and nothing is written to it.

    Raises:
        ConfigError: It is something else, such as a file that is no journal of Optuna, or cannot be opened.
    """
    if isinstance(given, BaseStorage):
        return given
    if given is not None and not isinstance(given, (str, os.PathLike)):
        raise ConfigError(
            "storage must be an address such as 'sqlite:///search.db', the path of a journal, a storage of"
            f" Optuna, or None for a journal in run_dir; not {given!r}"
        )
    if isinstance(given, str) and "://" in given:
        try:
            if reads_only:
                return RDBStorage(_for_reading(given), skip_table_creation=True)
            return optuna.storages.get_storage(given)
        except Exception as error:  # of SQLAlchemy, and of the database's own package
            raise ConfigError(f"storage={given!r} cannot be opened: {error}") from None
    path = (directory / JOURNAL if given is None else Path(given)).absolute()
    try:
        if not reads_only:
            path.parent.mkdir(parents=True, exist_ok=True)
        with open_file(path, "rb" if reads_only else "ab+") as file:
            file.seek(0)
            if not _BEGINNING.startswith(file.read(len(_BEGINNING))):  # its last line might be removed
                raise ValueError("it is another kind of file, which is left as it is")
        return JournalStorage(JournalFileBackend(str(path), lock_obj=JournalLock(path)))
    except (OSError, ValueError) as error:
        raise ConfigError(f"the journal {str(path)!r} of the search cannot be opened: {error}") from error


def _for_reading(address: str) -> str:
    """Return the address by which SQLite opens a database for reading; other addresses are unchanged."""
    kind, _, path = address.partition(":///")
    if not kind.startswith("sqlite"):
        return address
    path, _, query = path.partition("?")
    return f"{kind}:///file:{quote(path)}?{'&'.join(filter(None, (query, 'mode=ro&uri=true')))}"


def id_of(study: optuna.Study, storage: BaseStorage, number: int) -> int:
    """Return the number that a storage has for a trial of a study."""
    of_study = storage.get_study_id_from_name(study.study_name)
    return int(storage.get_trial_id_from_study_id_trial_number(of_study, number))


def fail(study: optuna.Study, storage: BaseStorage, number: int, reason: str) -> None:
    """Record that a trial has failed, and why."""
    storage.set_trial_user_attr(id_of(study, storage, number), FAILURE, reason)
    study.tell(number, state=TrialState.FAIL)
    _LOG.warning(f"trial {number} failed: {reason}")


def running_trials_of(study: optuna.Study, directory: Path, pid: int) -> list[int]:
    """Return the numbers of the trials that a process of this machine, which has ended, was running."""
    found = []
    for each in study.get_trials(deepcopy=False):
        if each.state == TrialState.RUNNING:
            try:
                owner = json.loads((trial_directory(directory, each.number) / LOCK).read_text("utf-8"))
            except FileNotFoundError:
                continue
            if (owner["pid"], owner["host"]) == (pid, socket.gethostname()):
                found.append(each.number)
    return found


def is_shared(given: object) -> bool:
    """Return whether other processes can open the storage by what the user gave."""
    return given is None or isinstance(given, (str, os.PathLike))


def identify(study: optuna.Study, identity: dict[str, Any], directory: Path) -> None:
    """Check that the study is one of the same search and directory, or note which search it belongs to.

    Raises:
        ConfigError: It belongs to another; names the difference.
    """
    noted = _noted(directory)
    # A directory that was moved, or that another machine has elsewhere, keeps the path that it began with.
    identity = json.loads(json.dumps({"run_dir": noted.get("run_dir", str(directory)), **identity}))
    found = study.user_attrs.get(IDENTITY)
    if found is None:
        if study.get_trials(deepcopy=False):
            raise ConfigError(
                f"the storage has a study {study.study_name!r} that drivetrain.search did not make. Give the"
                " Trainer another run_name, which names the study"
            )
        if noted:
            raise ConfigError(
                f"{directory} is the run_dir of another search: {noted['name']!r} in"
                f" {noted['storage'] or 'its own journal'}. Give this search another run_dir"
            )
        study.set_user_attr(IDENTITY, identity)
        return
    if found.get("run_dir") != identity["run_dir"]:
        raise ConfigError(
            f"the search {study.study_name!r} in this storage belongs to the run_dir {found.get('run_dir')},"
            f" which has the files of its trials, and not to {directory}. Give that run_dir, or another"
            " run_name for a new search in this storage"
        )
    for name, now in identity.items():
        if (before := found.get(name)) != now:
            how = f"{name}={before!r}, and goes on with {now!r}"
            if name == "space":
                how = f"another space ({differences(before, now)})"
            raise ConfigError(
                f"the search {study.study_name!r} in this storage began with {how}. Give the same, or another"
                " run_dir for a new search"
            )


def record(directory: Path, storage: str | None, name: str) -> None:
    """Write where the storage of a search is, without its password, and the directory's first path."""
    begun = _noted(directory).get("run_dir", str(directory))
    content = {"storage": storage and without_secrets(storage), "name": name, "run_dir": begun}
    replace_text(directory / RECORD, json.dumps(content))


def _noted(directory: Path) -> dict[str, Any]:
    """Return what `record` has written; empty if there is nothing."""
    try:
        found = json.loads(read_text(directory / RECORD, 1 << 20))
        return {"storage": found["storage"], "name": found["name"], **found}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{directory / RECORD} is not what drivetrain.search has written: {error}"
        ) from None


def recorded_study(directory: Path, storage: str | None = None) -> optuna.Study:
    """Return the study of a search's directory, opened for reading.

    Args:
        storage: The address or the path of its storage; None takes the recorded one.

    Raises:
        ConfigError: There is none, or its storage has a password, which is not recorded.
    """
    found = _noted(directory)
    if not found:
        raise ConfigError(
            f"{directory} is not the directory of a search: it has no {RECORD}. Give the run_dir of one"
        )
    storage, name = storage or found["storage"], found["name"]
    if storage is not None and HIDDEN in storage:
        raise ConfigError(
            f"the storage {storage} of {directory} has a password, which is stored nowhere. Give the whole"
            " address: --storage ADDRESS"
        )
    try:
        return optuna.load_study(study_name=name, storage=open_storage(storage, directory, reads_only=True))
    except KeyError:
        raise ConfigError(f"the storage of {directory} has no study {name!r}") from None


@dataclass(frozen=True)
class Claim:
    """A trial that this process runs, until its lock is released.

    Attributes:
        trial: Optuna's trial.
        run_dir: The directory of the trial's fit.
        lock: Keeps other processes from running the trial.
        has_begun: Whether another process began it, and ended before the trial did.
    """

    trial: optuna.Trial
    run_dir: Path
    lock: DirectoryLock
    has_begun: bool


def trial_directory(directory: Path, number: int) -> Path:
    """Return the run directory of a trial."""
    return directory / f"trial-{number:04d}"


def claim_trial(study: optuna.Study, storage: BaseStorage, directory: Path, most: int) -> Claim | None:
    """Return the next trial to run: one whose process has ended, or else a new one.

    Args:
        study: The study.
        storage: Its storage.
        directory: The directory of the search.
        most: The number of trials, finished and running ones together.

    Returns:
        The trial, or None if there are enough, or a sampler of finite spaces has tried all.
    """
    with one_at_a_time(directory / "search"):
        trials = study.get_trials(deepcopy=False)
        for each in trials:
            if each.state == TrialState.RUNNING:
                lock = _lock(directory, each.number)
                try:
                    lock.take()
                except ConfigError:  # another process runs it
                    continue
                number = id_of(study, storage, each.number)
                if storage.get_trial(number).state.is_finished():  # it has ended since the list was made
                    lock.release()
                    continue
                return Claim(
                    optuna.Trial(study, number), trial_directory(directory, each.number), lock, has_begun=True
                )
        begun = [each for each in trials if each.state != TrialState.WAITING]
        if len(begun) >= most or study.user_attrs.get(EXHAUSTED):
            return None
        trial = study.ask()
        lock = _lock(directory, trial.number)
        lock.take()
        return Claim(trial, trial_directory(directory, trial.number), lock, has_begun=False)


def _lock(directory: Path, number: int) -> DirectoryLock:
    path = str(trial_directory(directory, number))
    return DirectoryLock(path, file_system(path))
