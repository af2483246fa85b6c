"""Start the other ranks of this machine: the command that runs here is run again, once for each."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch._C._distributed_c10d import Store

from drivetrain.core.errors import StrategyError
from drivetrain.distributed.failure.messages import is_consequence
from drivetrain.distributed.launch.children import (
    PARENT,
    Child,
    end_all,
    end_with_launcher,
    end_with_parent,
    ending,
    environment_of,
    started,
    threads_per_rank,
    wait_for,
)
from drivetrain.distributed.launch.environment import ProcessEnvironment, detect
from drivetrain.distributed.launch.meeting import (
    HOSTED,
    STORE,
    loopback_store,
    make_store_folder,
    remove_store_folder,
)
from drivetrain.distributed.processes import has_fake_ranks
from drivetrain.distributed.threads import Periodic

_DIRECTORY = str(Path.cwd())
"""The program's first working directory; its command is run again there."""

_LOOKING = 0.1
"""Seconds between two checks of the ranks while no failure channel watches them."""

_GRACE = 4.0
"""Seconds that this process has to end by itself once another rank has failed."""

_PATIENCE = 60.0
"""Seconds that rank 0 waits at its end for the others if nothing has failed."""

_launched: _Launched | None = None
_followed = False
_ran_alone = False


def ensure_ranks(local_world_size: int, num_nodes: int = 1) -> ProcessEnvironment:
    """Check that a launcher has started a job of this size, or start it now.

    Without a launcher this process becomes rank 0, and its command is run again for each other rank, with
    the variables that torchrun sets. So every rank runs the program from its beginning, which needs no
    `if __name__ == "__main__"`. A second call returns the same.

    At its end, rank 0 waits for the others, and its exit code is nonzero if one of theirs is. They end when
    rank 0 dies, and rank 0 ends when one of them fails.
    """
    global _followed
    asked = local_world_size * num_nodes
    found = detect(os.environ)
    if found is not None:
        if _launched is not None or PARENT in os.environ:
            found = replace(found, launcher="drivetrain")  # the variables are torchrun's
        _check_size(found, local_world_size, num_nodes)
        if PARENT in os.environ and not _followed:
            _followed = True
            # Rank 0 waits for the end, which would otherwise begin with a garbage collection.
            atexit.register(gc.freeze)
            end_with_parent(int(os.environ[PARENT]), os.path.dirname(os.environ.get(STORE, "")))
        return found
    if num_nodes > 1:
        raise StrategyError(
            f"num_nodes={num_nodes} needs a launcher on every machine, and none has started this process."
            f" Start it on each with `drivetrain launch --nodes {num_nodes} --node-rank 0 --address HOST"
            f" --devices {local_world_size} train.py` (0, 1, ...: which machine; HOST: the first one's name),"
            f" with torchrun, or as a step of a batch system: `srun --nodes {num_nodes} --ntasks-per-node"
            f" {local_world_size} python train.py`"
        )
    if asked == 1:
        return ProcessEnvironment("drivetrain", 0, 1, 0, 1)
    obstacle = rerun_obstacle()
    if obstacle is not None:
        raise StrategyError(
            f"devices={local_world_size} needs {asked} processes, but this program cannot be run again for"
            f" each: {obstacle}. Trainer.fit, validate, test and predict then fork the process;"
            " Trainer.steps and Engine cannot. Use devices=1, or start it as a script, with python -m or"
            " with `drivetrain launch`"
        )
    return _start(local_world_size)


def join_job(world_size: int, num_nodes: int) -> None:
    """Start the processes of a run, if none have been started; see `ensure_ranks`.

    A run in one process is remembered, because other ranks would repeat it.
    """
    global _ran_alone
    if has_fake_ranks():
        return
    end_with_launcher()
    if world_size == 1:
        _ran_alone = True
    elif not torch.distributed.is_initialized():
        ensure_ranks(world_size // num_nodes, num_nodes)


def rerun_obstacle() -> str | None:
    """Return why this process's command cannot be run again for the other ranks; None if it can."""
    main = sys.modules.get("__main__")
    if hasattr(sys, "ps1") or sys.flags.interactive or sys.flags.inspect or _is_notebook():
        return "it is interactive"
    if multiprocessing.parent_process() is not None:
        return "it is a process of multiprocessing"
    if "PYTEST_CURRENT_TEST" in os.environ and "_pytest" in sys.modules:
        return "it is a test run, and all tests would run again"
    if _ran_alone:
        return "it has trained or evaluated in one process before, which every rank would repeat"
    if sys.argv[:1] != ["-c"] and not os.path.exists(getattr(main, "__file__", None) or ""):
        return "it was read from standard input"
    return None


def _is_notebook() -> bool:
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)
    return shell() is not None


def _check_size(found: ProcessEnvironment, local_world_size: int, num_nodes: int) -> None:
    if found.world_size != local_world_size * num_nodes:
        raise StrategyError(
            f"this program was started as {found.world_size} processes, but devices={local_world_size} and"
            f" num_nodes={num_nodes} ask for {local_world_size * num_nodes}. Give the same number everywhere,"
            " or start as many as are asked for"
        )


def _start(world_size: int) -> ProcessEnvironment:
    global _launched
    store, threads = loopback_store(), threads_per_rank(world_size, os.environ)
    port = store.port
    command = [sys.executable, *sys.orig_argv[1:]]
    children: list[Child] = []
    variables = {**make_store_folder(port), HOSTED: str(True)}
    try:
        for rank in range(1, world_size):
            own = {**environment_of(rank, world_size, port, threads), **variables, PARENT: str(os.getpid())}
            # Only one process can read standard input, and that is this one.
            process = subprocess.Popen(
                command, cwd=_DIRECTORY, env={**os.environ, **own}, stdin=subprocess.DEVNULL
            )
            children.append(Child(rank, process.pid, process.poll))
            started[rank] = children[-1]
    except BaseException as error:
        end_all(children, grace=0)
        remove_store_folder(variables)
        if isinstance(error, OSError):
            raise StrategyError(f"rank {len(children) + 1} could not be started: {error}") from error
        raise
    os.environ.update({**environment_of(0, world_size, port, threads), **variables})
    if threads is not None:
        torch.set_num_threads(threads)
    _launched = _Launched(children, variables, store)
    return ProcessEnvironment("drivetrain", 0, world_size, 0, world_size, "127.0.0.1", port, one_machine=True)


class _Launched:
    """The ranks that rank 0 has started: it ends after them, and watches them while no failure channel does.

    Attributes:
        children: The processes.
        agreed_code: The exit code of an orderly end of all ranks; None for no such end.
        exit_code: Rank 0's exit code after another rank has failed; None uses that rank's.
    """

    def __init__(self, children: list[Child], variables: dict[str, str], store: Store) -> None:
        self.children = children
        self.agreed_code: int | None = None
        self.exit_code: int | None = None
        self._variables, self._store = variables, store
        self._failure_told = self._has_finished = False
        self._channels, self._failed_for = 0, 0.0
        atexit.register(self._finish)
        self._watch = self._watching()

    def open_channel(self) -> None:
        """Leave the ranks to a failure channel, which knows more of a failure."""
        self._channels += 1
        self._watch.stop()

    def close_channel(self, is_fine: bool, failure_told: bool) -> None:
        """Watch the ranks again, after a failure channel.

        Args:
            is_fine: Whether it was closed without a failure. Rank 0 may then take its time.
            failure_told: Whether a failure was reported, and rank 0 was left to end by itself.
        """
        self._channels -= 1
        self._has_finished |= is_fine
        self._failure_told |= failure_told
        if not (self._channels or self._failure_told):
            self._watch = self._watching()

    def _watching(self) -> Periodic:
        return Periodic(self._look, _LOOKING, "drivetrain-ranks")

    def _look(self) -> None:
        """Give up some seconds after a rank has failed."""
        failed = self._failed()
        if failed is not None:
            self._failed_for += _LOOKING
            if self._failed_for > (_PATIENCE if self._has_finished else _GRACE):
                end_all(self.children)
                self._exit(f"rank {failed.rank} failed first: it {ending(failed.poll() or 0)}")

    def _exit(self, why: str | None) -> None:
        remove_store_folder(self._variables)
        sys.stdout.flush()
        sys.stderr.write(f"drivetrain: {why}\n" if why else "")
        sys.stderr.flush()
        failed = self._failed()
        theirs = (failed.poll() if failed is not None else None) or 1
        os._exit(max(theirs, 1) if self.exit_code is None else self.exit_code)

    def _failed(self) -> Child | None:
        fine = (None, 0, self.agreed_code)
        return next((each for each in self.children if each.poll() not in fine), None)

    def _finish(self) -> None:
        """Wait for the ranks at the end of rank 0, after its last line and its traceback, if any."""
        gc.freeze()
        self._watch.stop()
        raised = hasattr(sys, "last_value") or self._failure_told
        late: list[Child] = []
        try:
            late = wait_for(self.children, _GRACE if raised else _PATIENCE)
        finally:  # also after Ctrl-C
            end_all(self.children)
            remove_store_folder(self._variables)
        failed = self._failed()
        error = getattr(sys, "last_value", None)
        if failed is None or (error is not None and (self._failure_told or not is_consequence(error))):
            return
        if error is not None:  # it only says that a connection was lost
            self._exit(f"rank {failed.rank} failed first: it {ending(failed.poll() or 0)}")
        if self._failure_told:
            self._exit(None)
        if late:
            self._exit(f"rank {late[0].rank} still ran {_PATIENCE:g} s after rank 0 ended, and was killed")
        self._exit(f"rank {failed.rank} failed: it {ending(failed.poll() or 0)}")


def launched() -> _Launched | None:
    """Return the ranks that this process has started, or None."""
    return _launched
