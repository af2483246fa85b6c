"""`drivetrain launch`: a program as several processes, on one machine or on many, by torchrun.

torchrun runs each attempt in a process of its own; this one passes signals on to the ranks, begins another
attempt after a failure, and prints the first cause last.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from drivetrain.cli.parser import Parser
from drivetrain.distributed.children import LAUNCHER, children_of, ending, parent_mark, threads_per_rank
from drivetrain.distributed.environment import AGAIN
from drivetrain.distributed.last_words import TRAINING
from drivetrain.errors import EXIT_REQUEUE, EXIT_STOPPED, ConfigError

_PASSED_ON = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGHUP", "SIGQUIT")
_FAILURE = "failure.json"
"""Both are as in `drivetrain.distributed.elastic`, which imports torch."""

_REFUSAL = re.compile(r"(^|: )(drivetrain\.errors\.)?(ConfigError|MissingDependencyError): ")
"""What a process tells that was refused what it asked for: it would be refused again."""

_CLOSING = 60.0
"""Seconds for which the last attempt's meeting of machines may still be open, and refuse the next one's."""

_EPILOG = """\
One machine with 4 GPUs, or 4 processes on its CPU:
  drivetrain launch --devices 4 train.py --batch-size 32
Two machines, on each its own number after --node-rank:
  drivetrain launch --devices 4 --nodes 2 --node-rank 0 --address first-host train.py
Machines that come and go, and a run that is started again after a failure:
  drivetrain launch --devices 4 --nodes 1:4 --rendezvous first-host:29400 --max-restarts 3 train.py
A module, such as this package's own command line:
  drivetrain launch --devices 2 -m drivetrain fit --task digits.Digits --trainer.devices 2
"""

_PORT = 29500
"""Where the first machine listens when no port is given; what torchrun takes too."""

_OPTIONS = ("--devices", "--nodes", "--node-rank", "--address", "--rendezvous", "--job", "--max-restarts")
_USAGE = 2
"""The exit code of a program that cannot read its words."""

_LOOKING = "0.1"
"""Seconds between two looks at the processes."""


def run(words: Sequence[str]) -> int:
    """Start the processes, wait for them and return the exit code.

    Args:
        words: What stands after `drivetrain launch`.

    Raises:
        ConfigError: Options that do not fit together; says which do.
    """
    parsed = _parser().parse_args(words)
    devices = _devices(parsed.devices)
    if parsed.max_restarts < 0:
        raise ConfigError(f"--max-restarts takes a number from 0 on, not {parsed.max_restarts}")
    torchrun = [*_where(parsed), "--nproc-per-node", str(devices), "--max-restarts", "0"]
    torchrun += ["--monitor-interval", _LOOKING, *(["--module"] if parsed.module else [])]
    if not parsed.module and not os.path.isfile(parsed.program):
        raise ConfigError(
            f"there is no program {parsed.program!r} here; for a module, write -m before its name"
        )
    with _threads(devices):
        code = _Attempts(parsed.max_restarts).run([*torchrun, parsed.program, *parsed.arguments])
    ours = [each for each in parsed.arguments if each.partition("=")[0] in _OPTIONS]
    if code == _USAGE and ours:
        print(
            f"drivetrain: {ours[0]} stands behind {parsed.program}, and was given to it; the launcher's own"
            f" options stand before: drivetrain launch {ours[0]} ... {parsed.program}",
            file=sys.stderr,
        )
    return code


def _parser() -> Parser:
    parser = Parser(
        prog="drivetrain launch",
        description="Start a program as several processes that train together.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--devices", default="auto", metavar="N", help="processes on this machine; default: one for each GPU")
    add("--nodes", default="1", metavar="N|MIN:MAX", help="machines; default: this one")
    add("--node-rank", type=int, metavar="N", help="which of them this is, from 0, the one at --address")
    add("--address", metavar="HOST[:PORT]", help=f"the first machine; default port: {_PORT}")
    add("--rendezvous", metavar="HOST:PORT", help="where machines meet that are not numbered")
    add("--job", default="drivetrain", metavar="NAME", help="tells jobs apart that meet at one place")
    add(
        "--max-restarts",
        type=int,
        default=0,
        metavar="N",
        help="how often to start all again; default: never",
    )
    add("-m", "--module", action="store_true", help="the program is a module, as for python -m")
    add("program", help="a file")
    add("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    return parser


def _devices(given: str) -> int:
    if given == "auto":
        import torch  # late, as the rest of the command line does without it

        return torch.cuda.device_count() or 1
    if re.fullmatch(r"[1-9]\d{0,5}", given):
        return int(given)
    raise ConfigError(f"--devices takes a number of processes or 'auto', not {given!r}")


def _where(parsed: argparse.Namespace) -> list[str]:
    """The options of torchrun that say which machines there are and how they meet."""
    if parsed.rendezvous is not None:
        if parsed.address is not None or parsed.node_rank is not None:
            raise ConfigError(
                "--rendezvous is for machines without numbers: leave out --address and --node-rank"
            )
        if ":" in parsed.nodes and parsed.max_restarts == 0:
            raise ConfigError(
                f"--nodes {parsed.nodes}: when a machine comes or goes, all processes start anew. Say how"
                " often they may after failures, such as --max-restarts 3"
            )
        meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", parsed.rendezvous, "--rdzv-id", parsed.job]
        return ["--nnodes", parsed.nodes, *meeting]
    if parsed.nodes == "1" and parsed.address is None and parsed.node_rank in (None, 0):
        return ["--standalone"]
    if not re.fullmatch(r"[1-9]\d{0,5}", parsed.nodes):
        raise ConfigError(
            f"--nodes {parsed.nodes} needs --rendezvous HOST:PORT; with --address give one number"
        )
    if parsed.address is None or parsed.node_rank is None:
        raise ConfigError(
            f"--nodes {parsed.nodes} needs --address HOST, the first machine, and --node-rank, which of them"
            " this is; or --rendezvous HOST:PORT, the same on all"
        )
    if not 0 <= parsed.node_rank < int(parsed.nodes):
        raise ConfigError(f"--node-rank {parsed.node_rank} is none of 0 to {int(parsed.nodes) - 1}")
    host, _, port = parsed.address.rpartition(":") if re.search(r":\d+$", parsed.address) else ("", "", "")
    master = ["--master-addr", host or parsed.address, "--master-port", port or str(_PORT)]
    return ["--nnodes", parsed.nodes, "--node-rank", str(parsed.node_rank), *master]


@contextmanager
def _threads(devices: int) -> Iterator[None]:
    """Each process uses its share of the cores, unless the user has said otherwise."""
    threads = threads_per_rank(devices, os.environ)
    if threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(threads)
    try:
        yield
    finally:
        if threads is not None:
            del os.environ["OMP_NUM_THREADS"]


class _Attempts:
    """One attempt after another, until one has ended in order or no more may be made.

    A signal is passed on to the ranks of this machine, each time, and they decide: the first one ends their
    training in order, a second one at once. After a signal nothing is started again, nor after the exit code
    that asks the batch system for it.

    Args:
        restarts: How many attempts may follow the first.
    """

    def __init__(self, restarts: int) -> None:
        self._restarts = self._left = restarts
        self._received: int | None = None
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._last_end = 0.0
        self._not_told: str | None = None

    def run(self, words: Sequence[str]) -> int:
        """Run torchrun with these words; returns the exit code of the whole."""
        handlers = {}
        try:
            for name in _PASSED_ON:
                if hasattr(signal, name):
                    number = getattr(signal, name)
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
            if code and self._received is not None and not text:  # before there was a rank
                _say(f"ended by {signal.Signals(self._received).name}")
                return 128 + self._received
            if code in (0, EXIT_REQUEUE, EXIT_STOPPED):
                return code
            is_refused = code == _USAGE or (code == 1 and _REFUSAL.search(text) is not None)
            if self._received is not None or is_refused or not self._left:
                if is_refused and self._left:
                    _say("not started again: what is wrong would be wrong again")
                _say(text or f"torchrun {ending(code)}")
                return max(code, 1)
            self._left -= 1
            self._last_end = time.monotonic()
            self._not_told = f"rank {failure.get('rank')} {ending(int(failure.get('code', code)))}"
            more = f"{self._left} more {'time' if self._left == 1 else 'times'} if need be"
            _say(f"{self._not_told}; all are started again ({more})")

    def _attempt(self, words: Sequence[str]) -> tuple[int, Mapping[str, Any]]:
        """The exit code of one attempt, and what failed first in it."""
        logs = Path(tempfile.mkdtemp(prefix="drivetrain-launch-"))
        environment = {**os.environ, LAUNCHER: parent_mark()}
        if self._restarts:
            environment[AGAIN] = "1" if self._last_end else "0"
        command = [sys.executable, "-m", "drivetrain.distributed.elastic", str(logs), *words]
        try:
            # In a session of its own: this process alone passes on what a terminal sends to all.
            self._torchrun = subprocess.Popen(command, env=environment, start_new_session=True)
            while self._torchrun.poll() is None:
                time.sleep(float(_LOOKING))
                if self._not_told is not None and any(logs.rglob(TRAINING)):
                    _say(f"training again {time.monotonic() - self._last_end:.1f} s after {self._not_told}")
                    self._not_told = None
            with open(logs / _FAILURE, encoding="utf-8") as file:
                failure: dict[str, Any] = json.load(file)
            return self._torchrun.returncode, failure
        except (FileNotFoundError, ValueError):
            return self._torchrun.returncode if self._torchrun is not None else 1, {}
        finally:
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


def _say(text: str) -> None:
    sys.stderr.write(f"drivetrain: {text}\n")
    sys.stderr.flush()
