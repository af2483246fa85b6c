"""A pool of two ranks that lives as long as the tests: a call costs a tenth of what two new processes cost.

torch's `MultiProcContinuousTest` does the same, but it belongs to unittest, and a function must be a method
of its class. Functions, arguments and results are sent by cloudpickle, which takes closures.
"""

import atexit
import contextlib
import gc
import math
import multiprocessing
import os
import random
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import cloudpickle
import numpy as np
import torch
import torch.distributed

from drivetrain.distributed import processes
from drivetrain.distributed.launch.calls import resume_garbage_collection, without_garbage_collection
from drivetrain.distributed.launch.children import environment_of
from drivetrain.distributed.sockets import reserved_port
from drivetrain.testing import run_distributed

LIMIT = 300.0
"""Seconds that a call may take."""

_GRACE = 0.5
"""Seconds to wait after a failure for reports of earlier ones."""

_pool: list[tuple[Any, Connection]] = []
cpu_seconds = 0.0
"""What the ranks have computed so far, which this process's own times have not."""


def on_two_ranks(function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call a function on two ranks with a gloo process group; return the results by rank.

    Each call begins as a fork of this process would: with its directory, environment and random generators.
    Names that this process has registered or replaced after the pool began are unknown to the ranks; a test
    of those, and one in which a rank dies, takes `drivetrain.testing.run_distributed`.

    Raises:
        RuntimeError: A call raised or a rank died; has the first traceback. The next call gets a new pool.
        TimeoutError: The call took longer than `LIMIT`.
    """
    if sys.platform != "linux":
        return run_distributed(function, *arguments)
    if not _pool or not all(process.is_alive() for process, _ in _pool):
        end_pool()
        _begin()
    state = (os.getcwd(), dict(os.environ), torch.get_rng_state(), random.getstate(), np.random.get_state())
    with reserved_port() as port:
        work = cloudpickle.dumps((port, state, function, arguments))
        try:
            for _, pipe in _pool:
                pipe.send_bytes(work)
            return _results()
        except BaseException:
            end_pool()
            raise


def end_pool() -> None:  # kill the ranks, if there are any
    for process, pipe in _pool:
        process.kill()
        process.join()
        pipe.close()
    _pool.clear()


def _begin() -> None:
    context: Any = multiprocessing.get_context("fork")
    for rank in range(2):
        here, there = context.Pipe()
        others = [pipe for _, pipe in _pool]
        process = context.Process(target=_serve, args=(rank, os.getpid(), there, [*others, here]))
        with without_garbage_collection():
            process.start()
        there.close()
        _pool.append((process, here))
        # The pool is no business of a test that counts this process's children, as of a loader.
        multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    atexit.unregister(end_pool)
    atexit.register(end_pool)  # before multiprocessing waits for its processes


def _results() -> list[Any]:
    global cpu_seconds
    results: dict[int, Any] = {}
    failures: list[tuple[float, int, str]] = []
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(_pool)}
    deadline = time.monotonic() + LIMIT
    while waiting:
        ready = wait(list(waiting), _GRACE if failures else max(0.0, deadline - time.monotonic()))
        if not ready and not failures:
            raise TimeoutError(f"ranks {sorted(waiting.values())} have not ended within {LIMIT:g} seconds")
        if not ready:
            break
        for each in ready:
            assert isinstance(each, Connection)
            rank = waiting.pop(each)
            try:
                moment, failed, value, seconds = cloudpickle.loads(each.recv_bytes())
            except (EOFError, ConnectionError):
                process = _pool[rank][0]
                process.join()
                # A kill is a cause. An exit without an exception follows from another rank's failure.
                moment = 0.0 if process.exitcode < 0 else math.inf
                failed, seconds = True, 0.0
                value = f"it died with exit code {process.exitcode} and reported no exception"
            cpu_seconds += seconds
            results[rank] = value
            if failed:
                failures.append((moment, rank, value))
    if failures:
        _, rank, text = min(failures)
        raise RuntimeError(f"rank {rank} failed:\n{text}")
    return [results[0], results[1]]


def _serve(rank: int, parent: int, pipe: Connection, others: list[Connection]) -> NoReturn:
    for each in others:
        each.close()
    resume_garbage_collection()
    while True:
        with contextlib.suppress(EOFError, ConnectionError):
            while not pipe.poll(1.0):
                if os.getppid() != parent:
                    os._exit(0)
            before = sum(os.times()[:4])
            failed, value = _call(rank, pipe.recv_bytes())
            seconds = sum(os.times()[:4]) - before
            pipe.send_bytes(cloudpickle.dumps((time.monotonic(), failed, value, seconds)))
            sys.stdout.flush()
            sys.stderr.flush()
            if not failed:
                continue
        os._exit(0)


def _call(rank: int, work: bytes) -> tuple[bool, Any]:
    try:
        port, (directory, environment, torchs, pythons, numpys), function, arguments = cloudpickle.loads(work)
        os.chdir(directory)
        os.environ.clear()
        os.environ.update({**environment, **environment_of(rank, 2, port, threads=None)})
        processes._asked_alone = None
        torch.set_rng_state(torchs)
        random.setstate(pythons)
        np.random.set_state(numpys)
        torch.set_num_threads(1)
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=LIMIT))
        value = function(*arguments)
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)
        torch.set_grad_enabled(True)
        gc.collect()  # what a fit has left must not be a later call's
        gc.freeze()  # what is here for good, such as FSDP, is not walked through again
        return False, value
    except BaseException:
        return True, traceback.format_exc()
