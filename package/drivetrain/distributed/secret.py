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

_NONCE = "drivetrain/nonce/{}/{}"
"""A key in the store for each rank: a random text, so that no signature of an earlier job is valid."""

_PROOF = "drivetrain/proof/{}/{}"
"""A key in the store for each rank: its number, signed."""

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
    """
    global _key, _store
    store: Store = distributed_c10d._get_default_store()
    if store is _store:
        return
    number, nonce = store.add(_AUTHENTICATED.format(rank), 1), secrets.token_hex(16)
    store.set(_NONCE.format(number, rank), nonce)
    nonces = store.multi_get([_NONCE.format(number, each) for each in range(world_size)])
    # Not what the store says of this rank: an earlier job's nonces would make its messages valid again.
    nonces[rank] = nonce.encode()
    try:
        key = hmac.digest(secret(), b" ".join(nonces), "sha256")
    except StrategyError:
        store.set(_PROOF.format(number, rank), "")  # so that the others do not wait for it
        raise
    store.set(_PROOF.format(number, rank), _proof(key, rank))
    proofs = store.multi_get([_PROOF.format(number, each) for each in range(world_size)])
    others = [
        str(each)
        for each, proof in enumerate(proofs)
        if not hmac.compare_digest(proof, _proof(key, each).encode())
    ]
    if others:
        raise StrategyError(
            f"rank {', '.join(others[:8])} has another secret than rank {rank}, or is no part of this job."
            f" {_HOW.format('~/.config/drivetrain/secret')}"
        )
    _key, _store = key, store


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


def _proof(key: bytes, rank: int) -> str:
    return _sign(key, f"rank {rank}".encode()).hex()


def _sign(key: bytes, data: bytes) -> bytes:
    return hmac.digest(key, data, "sha256")
