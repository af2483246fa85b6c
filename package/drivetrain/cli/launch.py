"""`drivetrain launch`: start a program as several processes, on one machine or many, with torchrun.

torchrun runs each attempt in a separate process. This process forwards signals to the ranks, starts another
attempt after a failure, and prints the first cause last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.cli.parser import Parser
from drivetrain.core.errors import EXIT_REQUEUE, EXIT_STOPPED, ConfigError
from drivetrain.distributed.interfaces import check_resolves
from drivetrain.distributed.launch.children import (
    FAILURE,
    FORWARDED,
    LAUNCHER,
    children_of,
    ending,
    parent_mark,
    say,
    threads_per_rank,
)
from drivetrain.distributed.launch.environment import AGAIN

_REFUSAL = re.compile(r"(^|: )(drivetrain\.core\.errors\.)?(ConfigError|MissingDependencyError): ")
"""Errors of the configuration: another attempt would raise them again."""

_CLOSING = 60.0
"""Seconds in which the next attempt may meet the end of the last one's rendezvous, and tries again."""

_PORT = 29500
"""The default port of the first machine, as in torchrun."""

_USAGE = 2
"""The exit code of a program that rejects its arguments."""

_LOOKING = "0.1"
"""Seconds between two checks of the processes."""


def run(words: Sequence[str]) -> int:
    """Start the processes, wait for them and return the exit code."""
    parsed = _parser().parse_args(words)
    devices = _devices(parsed.devices)
    if parsed.max_restarts < 0:
        raise ConfigError(f"--max-restarts takes a number, at least 0, not {parsed.max_restarts}")
    torchrun = [*_where(parsed), "--nproc-per-node", str(devices), "--max-restarts", "0"]
    torchrun += ["--monitor-interval", _LOOKING, *(["--module"] if parsed.module else [])]
    for option in ("rendezvous", "address"):
        given = getattr(parsed, option)
        if given is not None:
            port = re.search(r":(\d+)$", given)
            if port and not 0 < int(port[1]) < 65_536:
                raise ConfigError(f"--{option} {given}: a port is a number from 1 to 65535")
            check_resolves(re.sub(r":\d*$", "", given).strip("[]"), f"--{option}")
    if not parsed.module and not os.path.isfile(parsed.program):
        raise ConfigError(f"no file {parsed.program!r}; for a module, write -m before its name")
    threads = threads_per_rank(devices, os.environ)
    variables = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    attempts = _Attempts(parsed.max_restarts, variables, parsed.log_dir)
    return attempts.run([*torchrun, parsed.program, *parsed.arguments])


def _parser() -> Parser:
    parser = Parser(
        prog="drivetrain launch", description="Start a program as several processes that train together."
    )
    add = parser.add_argument
    add("--devices", default="auto", metavar="N", help="processes on this machine; default: one for each GPU")
    add("--nodes", default="1", metavar="N|MIN:MAX", help="number of machines; default: 1")
    add("--node-rank", type=int, metavar="N", help="this machine's number; 0 is the one at --address")
    add("--address", metavar="HOST[:PORT]", help=f"the first machine; default port: {_PORT}")
    add("--rendezvous", metavar="HOST:PORT", help="where machines without numbers meet")
    add("--job", default="drivetrain", metavar="NAME", help="the job's name, if several share a rendezvous")
    add("--log-dir", metavar="DIR", help="where each rank writes what it prints; the first is shown too")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often to restart all processes after a failure; default: never",
    )
    parser.add_program()
    return parser


def _devices(given: str) -> int:
    if given == "auto":
        import torch  # late: other commands do not need it

        return torch.cuda.device_count() or 1
    if re.fullmatch(r"[1-9]\d{0,5}", given):
        return int(given)
    raise ConfigError(f"--devices takes a number of processes or 'auto', not {given!r}")


def _where(parsed: argparse.Namespace) -> list[str]:
    """Return torchrun's options for the machines and their rendezvous."""
    if parsed.rendezvous is not None:
        return _elastic(parsed)
    if parsed.nodes == "1" and parsed.address is None and parsed.node_rank in (None, 0):
        return [*_meeting("1", "drivetrain", "127.0.0.1:0", parsed.job), "--rdzv-conf", "number=0"]
    if not re.fullmatch(r"[1-9]\d{0,5}", parsed.nodes):
        raise ConfigError(f"--nodes {parsed.nodes} needs --rendezvous HOST:PORT; --address takes one number")
    if parsed.address is None or parsed.node_rank is None:
        raise ConfigError(
            f"--nodes {parsed.nodes} needs --address HOST of the first machine and --node-rank of this one;"
            " or --rendezvous HOST:PORT, the same on all"
        )
    if not 0 <= parsed.node_rank < int(parsed.nodes):
        raise ConfigError(f"--node-rank must be from 0 to {int(parsed.nodes) - 1}, not {parsed.node_rank}")
    host, _, port = parsed.address.rpartition(":") if re.search(r":\d+$", parsed.address) else ("", "", "")
    endpoint = f"{host or parsed.address}:{port or _PORT}"
    meeting = _meeting(parsed.nodes, "drivetrain", endpoint, parsed.job)
    return [*meeting, "--rdzv-conf", f"number={parsed.node_rank}"]


def _elastic(parsed: argparse.Namespace) -> list[str]:
    if parsed.address is not None or parsed.node_rank is not None:
        raise ConfigError("--rendezvous numbers the machines itself: leave out --address and --node-rank")
    numbers = [int(each) for each in re.findall(r"\d+", parsed.nodes)]
    if not re.fullmatch(r"[1-9]\d*(:\d+)?", parsed.nodes) or numbers != sorted(numbers):
        raise ConfigError(f"--nodes takes a number of machines, or MIN:MAX such as 1:4, not {parsed.nodes!r}")
    if ":" in parsed.nodes and parsed.max_restarts == 0:
        raise ConfigError(
            f"--nodes {parsed.nodes}: all processes restart when a machine joins or leaves. Allow"
            " restarts after failures too, such as --max-restarts 3"
        )
    return _meeting(parsed.nodes, "drivetrain-elastic", parsed.rendezvous, parsed.job)


def _meeting(nodes: str, backend: str, endpoint: str, job: str) -> list[str]:
    return ["--nnodes", nodes, "--rdzv-backend", backend, "--rdzv-endpoint", endpoint, "--rdzv-id", job]


class _Attempts:
    """Attempts to run the program, repeated after failures until one succeeds or no restart is left.

    Every signal is forwarded to the ranks of this machine. The first ends their training after a save, the
    second at once. Nothing is restarted after a signal, or after the exit code that asks the batch system for
    a restart.
    """

    def __init__(self, restarts: int, variables: Mapping[str, str], log_dir: str | None) -> None:
        self._restarts = self._left = restarts
        self._variables = variables
        self._log_dir = log_dir
        self._received: int | None = None
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._last_end = 0.0

    def run(self, words: Sequence[str]) -> int:
        """Run torchrun with these words, and return the exit code for the whole job."""
        handlers = {}
        try:
            for number in FORWARDED:
                handlers[number] = signal.signal(number, self._pass_on)
            return self._run(words)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _run(self, words: Sequence[str]) -> int:
        while True:
            code, failure = self._attempt(words)
            text = str(failure.get("text", ""))
            if failure.get("closed") and self._last_end and time.monotonic() < self._last_end + _CLOSING:
                time.sleep(1.0)
                continue
            if code and self._received is not None and not text:  # before any rank started
                say(f"ended by {signal.Signals(self._received).name}")
                return 128 + self._received
            if code in (0, EXIT_REQUEUE, EXIT_STOPPED):
                if text.startswith("no progress"):  # a hang; a rank may have printed its stacks last
                    say(text)
                return code
            is_refused = code == _USAGE or (code == 1 and _REFUSAL.search(text) is not None)
            if not failure.get("began", True):  # no rank had started, so no machine has failed in training
                is_refused = True
            elif is_refused and self._left:
                say("not started again: the same error would come back")
            if self._received is not None or is_refused or not self._left:
                say(text or f"torchrun {ending(code)}")
                return max(code, 1)
            self._left -= 1
            self._last_end = time.monotonic()
            rank = failure.get("rank", -1)  # -1 is torchrun, as when its rendezvous is lost
            who = f"rank {rank}" if rank >= 0 else "torchrun"
            ended = ending(int(failure.get("code", code)))
            say(f"{who} {ended}; all are started again ({self._left} more allowed)")

    def _attempt(self, words: Sequence[str]) -> tuple[int, Mapping[str, Any]]:
        """Make one attempt; return its exit code and its first failure."""
        if self._log_dir is None:
            logs = Path(tempfile.mkdtemp(prefix="drivetrain-launch-"))
        else:
            try:
                Path(self._log_dir).mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(f"--log-dir {self._log_dir} cannot be made: {error}") from error
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{socket.gethostname()}-{self._restarts - self._left}-"
            logs = Path(tempfile.mkdtemp(prefix=name, dir=self._log_dir))
            words = ["--redirects", "3", "--tee", "0:3", *words]
        environment = {**os.environ, **self._variables, LAUNCHER: parent_mark()}
        if self._restarts:
            environment[AGAIN] = "1" if self._last_end else "0"
        command = [sys.executable, "-m", "drivetrain.distributed.launch.torchrun", str(logs), *words]
        try:
            # In a new session: a terminal signals all processes of ours, and only this one forwards it.
            self._torchrun = subprocess.Popen(command, env=environment, start_new_session=True)
            while self._torchrun.poll() is None:
                time.sleep(float(_LOOKING))
            with open(logs / FAILURE, encoding="utf-8") as file:
                failure: dict[str, Any] = json.load(file)
            return self._torchrun.returncode, failure
        except (FileNotFoundError, ValueError):
            return self._torchrun.returncode if self._torchrun is not None else 1, {}
        finally:
            if self._log_dir is None:
                shutil.rmtree(logs, ignore_errors=True)

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._received = number if self._received is None else self._received
        if self._torchrun is None or self._torchrun.poll() is not None:
            return
        ranks = children_of(self._torchrun.pid)
        for pid in ranks:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        if not ranks:
            self._torchrun.kill()
