"""How the machines of `drivetrain launch` meet: torchrun's agents, with what torch's own meetings lack.

torch's own listen on all interfaces, even for one machine, wait without a word, and unpickle what they
find in a store that anybody can write to.
"""

from __future__ import annotations

import hmac
import json
import os
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import HashStore, Store, TCPStore
from torch.distributed import DistError
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStateError,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import (
    DynamicRendezvousHandler,
    RendezvousBackend,
    RendezvousTimeout,
    Token,
)

from drivetrain.core.errors import StrategyError, shown
from drivetrain.distributed.interfaces import check_resolves, loopback_variables, own_address
from drivetrain.distributed.launch.children import say
from drivetrain.distributed.launch.meeting import STORE, Meeting, Patience, join_timeout, loopback_store
from drivetrain.distributed.secret import SECRET, new_secret, secret
from drivetrain.distributed.sockets import closing_sockets_in_forks
from drivetrain.distributed.threads import within

_SIGNATURE = 32
"""Bytes of a signature."""

_FAILED = "drivetrain/failed"
"""A key in the store: the first failure of an attempt."""

_ANSWERS = 65.0
"""Seconds that the machine at `--rendezvous` may take to answer: torch itself tries for 60 s to connect."""

_HEARD = 2.0
"""Seconds after which the other machines know of a failure, because they look once a second."""


class Machines:
    """The meetings "drivetrain", of machines that have numbers, and "drivetrain-elastic", of others.

    Machines that have met also tell one another that one has failed, through the store of their meeting.

    Args:
        logs: A folder where the ranks of a single machine meet; only this user can enter it.
    """

    def __init__(self, logs: Path) -> None:
        self.store: Store | None = None
        registry = rendezvous_handler_registry
        registry.register("drivetrain", lambda parameters: _Numbered(parameters, logs, self))
        registry.register("drivetrain-elastic", lambda parameters: _elastic(parameters, self))

    def tell(self, failure: dict[str, Any]) -> None:
        """Tell the other machines that this one has failed; the first failure counts."""
        if self.store is not None:
            with suppress(DistError):  # the first machine's launcher, which has the store, has ended
                self.store.compare_set(_FAILED, "", json.dumps(failure))
                time.sleep(_HEARD)  # this process may have the store

    def heard(self) -> dict[str, Any] | None:
        """Return the failure of another machine, or None."""
        with suppress(DistError, ValueError, LookupError, TypeError):
            if self.store is not None and self.store.check([_FAILED]):
                found = json.loads(self.store.get(_FAILED))
                numbers = {name: int(found[name]) for name in ("rank", "code")}
                return {
                    **numbers,
                    "text": shown(found["text"]),
                    "closed": False,
                    "began": bool(found["began"]),
                }
        return None

    def check(self) -> None:
        """Check that no other machine has failed.

        Raises:
            StrategyError: One has.
        """
        failure = self.heard()
        if failure is not None:
            raise StrategyError(failure["text"])


class _Numbered(RendezvousHandler):
    """Machines that have numbers; the ranks of a single one meet in a file."""

    def __init__(self, parameters: RendezvousParameters, logs: Path, machines: Machines) -> None:
        self._run_id = parameters.run_id
        self._logs = logs
        self._machines = machines
        host, _, port = parameters.endpoint.rpartition(":")
        self._meeting = Meeting(
            int(parameters.config["number"]),
            parameters.max_nodes,
            host.strip("[]"),
            int(port),
            variable="--address",
            each="machine",
            say=say,
        )
        self._store: Store | None = None
        self._own: TCPStore | None = None

    def get_backend(self) -> str:
        """Return the name under which torchrun knows this meeting."""
        return "drivetrain"

    @property
    def use_agent_store(self) -> bool:
        """Whether the agent has the store at the ranks' MASTER_PORT."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other machines, and return the store of the agents."""
        here = self._meeting
        if here.size == 1:
            self._own = self._own or loopback_store()
            os.environ |= {STORE: str(self._logs / f"store-{self._own.port}"), SECRET: new_secret()}
            os.environ.update(loopback_variables())
            return RendezvousInfo(HashStore(), 0, 1, RendezvousStoreInfo("127.0.0.1", self._own.port))
        if self._store is None:
            self._store = self._machines.store = self._new_store()
            here.wait(self._store, self._machines.check)
        address = RendezvousStoreInfo(here.address, here.port)
        return RendezvousInfo(self._store, here.number, here.size, address)

    def _new_store(self) -> Store:
        """Return the store of this attempt: an earlier one's is there until the first machine ends it."""
        patience = Patience(say)
        while True:
            store = self._meeting.store(timedelta(seconds=join_timeout()))
            with suppress(DistError):
                if not store.check([_FAILED]):
                    return store
            patience.wait("machine 0 to start again")

    def is_closed(self) -> bool:
        """Return False: there is one meeting for each attempt."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no machine joins later."""
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        """Do nothing; the store ends with the process."""
        return True


def _elastic(parameters: RendezvousParameters, machines: Machines) -> RendezvousHandler:
    host = parameters.endpoint.rpartition(":")[0].strip("[]") or parameters.endpoint
    check_resolves(host, "--rendezvous")
    made: list[Any] = []
    with closing_sockets_in_forks(keeps_alive=True):
        # torch has no limit for the first answer of a port that takes connections.
        within(_ANSWERS, lambda: made.extend(create_backend(parameters)), "drivetrain-connect")
    if not made:
        raise RendezvousConnectionError
    backend, store = made
    key = hmac.digest(secret(), f"machines of {parameters.run_id}".encode(), "sha256")
    handler: _Elastic = _Elastic.from_backend(
        parameters.run_id,
        store,
        _Signed(backend, key),
        parameters.min_nodes,
        parameters.max_nodes,
        parameters.local_addr or own_address(host),
        RendezvousTimeout(join=timedelta(seconds=join_timeout())),
    )
    handler.machines = machines
    return handler


class _Elastic(DynamicRendezvousHandler):
    """torch's meeting of machines without numbers, which then tell one another of their failures."""

    machines: Machines

    def next_rendezvous(self) -> RendezvousInfo:
        found = super().next_rendezvous()
        self.machines.store = found.store
        return found


class _Signed(RendezvousBackend):
    """A backend of torch's whose state, a pickle, is read only if it is signed with the job's secret."""

    def __init__(self, backend: RendezvousBackend, key: bytes) -> None:
        self._backend = backend
        self._key = key

    @property
    def name(self) -> str:
        """Return the name that torchrun was asked for; it refuses another one."""
        return "drivetrain-elastic"

    def get_state(self) -> tuple[bytes, Token] | None:
        found = self._backend.get_state()
        return None if found is None else (self._checked(found[0]), found[1])

    def set_state(self, state: bytes, token: Token | None = None) -> tuple[bytes, Token, bool] | None:
        mark = hmac.digest(self._key, state, "sha256")
        found: Any = self._backend.set_state(mark + state, token)
        return None if found is None else (self._checked(found[0]), *found[1:])

    def _checked(self, state: bytes) -> bytes:
        mark, found = state[:_SIGNATURE], state[_SIGNATURE:]
        if not hmac.compare_digest(mark, hmac.digest(self._key, found, "sha256")):
            raise RendezvousStateError(
                "the machines' list is not signed with this job's secret, and was not read: another machine"
                f" has another secret, or a stranger wrote it. Set {SECRET} to the same text on all machines,"
                " or give them the same file ~/.config/drivetrain/secret"
            )
        return found
