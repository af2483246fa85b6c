"""The secret of a job: its ranks prove that they have it, and sign their entries in the store with it."""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from drivetrain.core.errors import RankFailure, StrategyError

SECRET = "DRIVETRAIN_SECRET"
"""An environment variable: the secret of a job, the same for all its processes."""

_SHORTEST = 16
"""Characters that a secret has at least."""

_AUTHENTICATED = "drivetrain/authenticated/{}"
"""A key in the store for each rank: how often it has done this, the same number on all."""

_CHALLENGE = "drivetrain/challenge/{}"
"""A key in the store: rank 0's random text, so that no claim and no signature of an earlier job is valid."""

_CLAIM = "drivetrain/claim/{}/{}"
"""A key in the store for each other rank: its own random text, and both texts signed."""

_ANSWER = "drivetrain/answer/{}/{}"
"""A key in the store for each other rank: the ranks whose claims are wrong, signed with its random text."""

_HOW = (
    f"Set {SECRET} to the same text, of at least {_SHORTEST} characters, for all processes of the job, or"
    " give all machines the same file {}"
)

_UNSIGNED = (
    "does not have this job's signature, and was not read: it comes from a process that is no part of the"
    " job, or was changed on its way"
)

_key = b""
_store: Store | None = None
"""The store of the process group that the key is for."""


def new_secret() -> str:
    """Return a random secret for a job whose processes are all started here."""
    return secrets.token_hex(32)


def secret() -> bytes:
    """Return the secret of the environment, or of a file of the user's that is made now if there is none."""
    given = os.environ.get(SECRET)
    path = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "drivetrain", "secret").expanduser()
    try:
        found = given if given is not None else _read(path)
    except (OSError, RuntimeError, UnicodeDecodeError) as error:  # RuntimeError: there is no home directory
        raise StrategyError(
            f"the secret of the job cannot be made or read: {error}. {_HOW.format(path)}"
        ) from error
    source = SECRET if given is not None else path
    if len(found.strip()) < _SHORTEST:
        raise StrategyError(f"{source} has {len(found.strip())} characters. {_HOW.format(path)}")
    try:
        return found.strip().encode()
    except UnicodeEncodeError as error:
        raise StrategyError(f"{source} has bytes that are no text. {_HOW.format(path)}") from error


def _read(path: Path) -> str:
    if not os.path.lexists(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        number, temporary = tempfile.mkstemp(dir=path.parent)  # which only this user may read
        try:
            with os.fdopen(number, "w", encoding="ascii") as file:
                file.write(new_secret())
            with suppress(FileExistsError):  # another rank has been faster
                os.link(temporary, path)
        finally:
            os.unlink(temporary)
    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f"{path} is not a file")
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o077):
        raise OSError(f"{path} belongs to another user, or others may read it: chmod 600 {path}")
    return path.read_text(encoding="ascii")[:1024]


def authenticate(rank: int, world_size: int) -> None:
    """Check that every rank has the job's secret, and sign what it writes into the store from now on.

    Every rank must call it, when all have reached the store. A second call for the same group does nothing.
    Rank 0 checks the others and each of them checks rank 0, so that a rank's work does not grow with their
    number.
    """
    global _key, _store
    store: Store = distributed_c10d._get_default_store()
    if store is _store:
        return
    number = store.add(_AUTHENTICATED.format(rank), 1)
    try:
        key = secret()
    except StrategyError:
        if rank:
            store.set(_CLAIM.format(number, rank), "")  # so that rank 0 does not wait for it
        else:
            _answer(store, number, world_size, "", b"")
        raise
    if rank:
        challenge, wrong = _ask(store, number, rank, key)
    else:
        challenge = secrets.token_hex(16)
        wrong = _answer(store, number, world_size, challenge, key)
    if wrong:
        raise StrategyError(
            f"rank {wrong} has another secret than rank {rank if wrong == '0' else 0}, or is no part of this"
            f" job. {_HOW.format('~/.config/drivetrain/secret')}"
        )
    _key, _store = _sign(key, f"job {challenge}".encode()), store


def _ask(store: Store, number: int, rank: int, key: bytes) -> tuple[str, str]:
    """Return rank 0's challenge and the ranks that have another secret; "0" if rank 0 has."""
    nonce, challenge = secrets.token_hex(16), store.get(_CHALLENGE.format(number)).decode(errors="replace")
    store.set(_CLAIM.format(number, rank), f"{nonce} {_claim(key, challenge, rank, nonce)}")
    wrong, _, proof = store.get(_ANSWER.format(number, rank)).decode(errors="replace").rpartition(" ")
    answers = hmac.compare_digest(proof.encode(), _claim(key, challenge, rank, nonce, wrong).encode())
    return challenge, wrong if answers else "0"


def _answer(store: Store, number: int, world_size: int, challenge: str, key: bytes) -> str:
    """Answer the other ranks and return those that have another secret; without a challenge, refuse all."""
    ranks = range(1, world_size)
    store.set(_CHALLENGE.format(number), challenge)
    claims = [
        each.decode(errors="replace").partition(" ")
        for each in store.multi_get([_CLAIM.format(number, each) for each in ranks])
    ]
    others = [
        str(rank)
        for rank, (nonce, _, proof) in zip(ranks, claims, strict=True)
        if not hmac.compare_digest(proof.encode(), _claim(key, challenge, rank, nonce).encode())
    ]
    wrong = ", ".join(others[:8])
    for rank, (nonce, *_) in zip(ranks, claims, strict=True):
        answer = f"{wrong} {_claim(key, challenge, rank, nonce, wrong)}" if challenge else ""
        store.set(_ANSWER.format(number, rank), answer)
    return wrong


def _claim(key: bytes, challenge: str, rank: int, nonce: str, answer: str | None = None) -> str:
    """Return the signature of a rank's claim or, with an answer, of rank 0's answer to it."""
    return _sign(key, repr((challenge, rank, nonce, answer)).encode()).hex()


def derived(label: str) -> str | None:
    """Return a secret of the running job for one purpose; None outside a job that is authenticated."""
    return _sign(_key, f"text {label}".encode()).hex() if _is_active() else None


def signed(label: str, text: str) -> str:
    """Return a text for the store of the running job, with a signature in its last line."""
    mark = derived(f"{label}\n{text}")
    return text if mark is None else f"{text}\n{mark}"


def verified(label: str, text: str) -> str:
    """Return a text of `signed` without its signature."""
    found, _, mark = text.rpartition("\n") if _is_active() else (text, "", "")
    if not hmac.compare_digest(mark.encode(), (derived(f"{label}\n{found}") or "").encode()):
        raise RankFailure(f"the entry {label!r} of the job's store {_UNSIGNED}")
    return found


def _is_active() -> bool:
    """Return whether the default group is the one that was authenticated."""
    return (
        _store is not None
        and distributed_c10d.is_initialized()
        and distributed_c10d._get_default_store() is _store
    )


def _sign(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
