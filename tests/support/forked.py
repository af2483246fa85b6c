"""Python programs that begin with torch and drivetrain imported: copies of a process that has done so.

Run as a program this is the process that is copied. It listens at a socket, and makes a copy a request.
A copy is a program of its own: a session, standard streams, an environment and a directory, `sys.argv`, what
the interpreter does at its end, and an exit code. The ranks that such a program starts are copies as well.
"""

import atexit
import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

JOB = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ROOT = Path(__file__).parents[2]
_starting = threading.Lock()
_server: tuple[subprocess.Popen[bytes], str] | None = None


def undisturbed() -> dict[str, str]:  # an environment in which a program is alone, whatever the tests run in
    environment = {name: value for name, value in os.environ.items() if name not in JOB}
    return {**environment, "OMP_NUM_THREADS": "1"}


class Forked:  # A program that runs, in a session of its own; the part of `subprocess.Popen` that tests use
    def __init__(self, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> None:
        out, err = os.pipe(), os.pipe()
        request = {"arguments": list(arguments), "cwd": str(cwd), "env": dict(env)}
        self._told = socket.socket(socket.AF_UNIX)
        self._told.connect(_address())
        content = json.dumps(request).encode()
        socket.send_fds(self._told, [len(content).to_bytes(4, "big")], [out[1], err[1]])
        self._told.sendall(content)
        for each in (out[1], err[1]):
            os.close(each)
        self._ends = (out[0], err[0])
        self._file = self._told.makefile("r", encoding="utf-8")
        self.pid = int(self._file.readline())
        self.returncode: int | None = None

    def communicate(self, timeout: float) -> tuple[str, str]:
        """What it has written, once all its processes have ended."""
        deadline = time.monotonic() + timeout
        found: dict[int, bytes] = dict.fromkeys(self._ends, b"")
        with selectors.DefaultSelector() as selector:
            for each in self._ends:
                selector.register(each, selectors.EVENT_READ)
            while selector.get_map():
                for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                    content = os.read(key.fd, 1 << 16)
                    found[key.fd] += content
                    if not content:
                        selector.unregister(key.fd)
                if time.monotonic() > deadline:
                    raise subprocess.TimeoutExpired("program", timeout)
        self._told.settimeout(max(0.1, deadline - time.monotonic()))
        self.returncode = int(self._file.readline())
        for each in self._ends:
            os.close(each)
        self._file.close()
        self._told.close()
        out, err = (found[each].decode(errors="replace") for each in self._ends)
        return out, err


def run_forked(
    arguments: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None, timeout: float = 90.0
) -> subprocess.CompletedProcess[str]:
    """A program as `subprocess.run` runs it; after the timeout its whole session is killed."""
    process = Forked(arguments, cwd, os.environ if env is None else env)
    try:
        out, err = process.communicate(timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    assert process.returncode is not None
    return subprocess.CompletedProcess(list(arguments), process.returncode, out, err)


def _address() -> str:
    global _server
    with _starting:
        if _server is None:
            path = os.path.join(tempfile.mkdtemp(prefix="forked"), "socket")
            command = [sys.executable, "-m", "tests.support.forked", path, str(os.getpid())]
            paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
            environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
            process = subprocess.Popen(
                command, cwd=_ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
            )
            atexit.register(process.kill)
            _server = process, path
            deadline = time.monotonic() + 120
            while not os.path.exists(path) and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)
        assert os.path.exists(_server[1]), "the process that is copied did not start"
        return _server[1]


def _serve(path: str, parent: int) -> None:
    import torch
    import torch.distributed.fsdp
    import torch.nn.parallel

    import drivetrain

    for name in drivetrain.__all__:
        getattr(drivetrain, name)
    torch.set_num_threads(1)
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f"{path}.new")
    listener.listen(64)
    os.rename(f"{path}.new", path)
    listener.settimeout(0.01)
    running: dict[int, socket.socket] = {}
    while os.getppid() == parent:
        with contextlib.suppress(TimeoutError):
            connection, _ = listener.accept()
            head, streams, _, _ = socket.recv_fds(connection, 4, 2)
            connection.settimeout(None)
            request = json.loads(_read(connection, int.from_bytes(head, "big")))
            pid = os.fork()
            if pid == 0:
                listener.close()
                connection.close()
                for each in running.values():
                    each.close()
                _begin(request, streams)
            for each in streams:
                os.close(each)
            connection.sendall(f"{pid}\n".encode())
            running[pid] = connection
        for pid in list(running):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                with contextlib.suppress(OSError), running.pop(pid) as connection:
                    connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _read(connection: socket.socket, size: int) -> bytes:
    found = b""
    while len(found) < size:
        found += connection.recv(size - len(found))
    return found


def _begin(request: dict[str, Any], streams: Sequence[int]) -> NoReturn:
    os.setsid()
    for each, number in zip(streams, (1, 2), strict=True):
        os.dup2(each, number)
        os.close(each)
    _run(request["arguments"], request["cwd"], request["env"])


def _run(arguments: Sequence[str], cwd: str, environment: Mapping[str, str]) -> NoReturn:
    """Be a program, from its first line to the interpreter's end."""
    from torch import distributed

    from drivetrain.distributed.launch import programs as launch
    from drivetrain.distributed.launch.children import started

    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    started.clear()
    distributed.set_debug_level_from_env()
    launch._DIRECTORY = cwd
    launch.subprocess = types.SimpleNamespace(Popen=_Copy, DEVNULL=subprocess.DEVNULL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # On the new descriptors, in the program's encoding: those of the process that is copied may be of a file.
    encoding = environment.get("PYTHONIOENCODING")
    sys.stdout = open(1, "w", encoding=encoding, closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", 1, encoding=encoding, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.argv = list(arguments)
    sys.orig_argv = [sys.executable, *arguments]
    sys.path[:0] = [cwd, *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    main = types.ModuleType("__main__")
    main.__file__ = os.path.join(cwd, arguments[0])
    sys.modules["__main__"] = main
    code = 0
    try:
        exec(compile(Path(main.__file__).read_text(encoding="utf-8"), main.__file__, "exec"), main.__dict__)
    except BaseException as error:
        code = _told(error)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _told(error: BaseException) -> int:
    """What the interpreter does with an error that nobody takes: tells it; returns the exit code."""
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return error.code or 0
        sys.stderr.write(f"{error.code}\n")
        return 1
    at = error.__traceback__
    error.__traceback__ = None if at is None else at.tb_next  # without this file
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    sys.excepthook(type(error), error, error.__traceback__)
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


class _Copy:  # A rank that a program starts: the same program, with another environment
    def __init__(self, command: Sequence[str], cwd: str, env: Mapping[str, str], stdin: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self.returncode: int | None = None
        self._asking = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            nothing = os.open(os.devnull, os.O_RDONLY)
            os.dup2(nothing, 0)
            os.close(nothing)
            _run(command[1:], cwd, env)

    def poll(self) -> int | None:  # its exit code, or None
        with self._asking:
            if self.returncode is None:
                ended, status = os.waitpid(self.pid, os.WNOHANG)
                self.returncode = os.waitstatus_to_exitcode(status) if ended else None
            return self.returncode


if __name__ == "__main__":
    _serve(sys.argv[1], int(sys.argv[2]))
