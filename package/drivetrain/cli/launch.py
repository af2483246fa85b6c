"""`drivetrain launch`: a program as several processes, on one machine or on many, by torch's own launcher."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from drivetrain.distributed.children import ending, threads_per_rank
from drivetrain.errors import ConfigError

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
    torchrun = [*_where(parsed), "--nproc-per-node", str(devices), "--max-restarts", str(parsed.max_restarts)]
    torchrun += ["--monitor-interval", _LOOKING, *(["--module"] if parsed.module else [])]
    if not parsed.module and not os.path.isfile(parsed.program):
        raise ConfigError(
            f"there is no program {parsed.program!r} here; for a module, write -m before its name"
        )
    with _threads(devices):
        code = _torchrun([*torchrun, parsed.program, *parsed.arguments])
    ours = [each for each in parsed.arguments if each.partition("=")[0] in _OPTIONS]
    if code == _USAGE and ours:
        print(
            f"drivetrain: {ours[0]} stands behind {parsed.program}, and was given to it; the launcher's own"
            f" options stand before: drivetrain launch {ours[0]} ... {parsed.program}",
            file=sys.stderr,
        )
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drivetrain launch",
        description="Start a program as several processes that train together.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
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


def _torchrun(words: Sequence[str]) -> int:
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    from drivetrain.distributed.elastic import launch

    try:
        return launch(words)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        print(f"drivetrain: {_first(rank, failure)}", file=sys.stderr)
        return int(failure.exitcode) if failure.exitcode > 0 else 1
    except SignalException as error:
        print(f"drivetrain: ended by {error.sigval.name}", file=sys.stderr)
        return 128 + int(error.sigval)


def _first(rank: int, failure: Any) -> str:
    """What failed first, as far as its process has told."""
    told = failure.error_file_data.get("message") if isinstance(failure.error_file_data, dict) else None
    text = str(told.get("message", "")) if isinstance(told, dict) else ""
    if "failed first" in text or "no progress" in text:  # one rank tells of another, or of all
        return text.partition(": ")[2]
    stack = str(told.get("extraInfo", {}).get("py_callstack", "")) if isinstance(told, dict) else ""
    note = stack.strip().rpartition("\n")[2]
    if note.startswith("drivetrain: "):  # it says how far the rank was, too
        return note.partition(": ")[2]
    return f"rank {rank} failed first: {text or f'it {ending(failure.exitcode)}'}"
