"""Two machines on this one: each has a network, processes and a host name of its own (Linux namespaces)."""

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.distributed.running import LIMIT
from tests.support.forked import undisturbed

import drivetrain

HOSTS = {"first-host": "10.99.0.1", "second-host": "10.99.0.2"}
KINDS = ("--net", "--uts", "--pid", "--mount")
SECRET = "the-secret-of-the-test-on-two-machines"


def obstacle() -> str:  # why this machine cannot have two, or nothing
    if sys.platform != "linux":
        return "needs Linux"
    if not shutil.which("ip"):
        return "needs iproute2's ip"
    words = ["unshare", *KINDS, "--fork", "ip", "link", "add", "one", "type", "veth", "peer", "name", "two"]
    return subprocess.run(words, capture_output=True, text=True, check=False).stderr.strip()


class Machine:
    def __init__(self, host: str) -> None:
        words = ["unshare", *KINDS, "--fork", "--mount-proc", "--kill-child", "cat"]
        self._init = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._init.stdin is not None
        assert self._init.stdout is not None
        self._init.stdin.write("ready\n")
        self._init.stdin.flush()
        assert self._init.stdout.readline() == "ready\n"
        children = Path(f"/proc/{self._init.pid}/task/{self._init.pid}/children")
        self.pid = children.read_text(encoding="ascii").split()[0]
        # If the network went with its processes, the other machine would lose its own address too.
        self._network = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        names, resolver = Path("hosts"), Path("resolver")  # nobody is asked for a name
        known = {"localhost": "127.0.0.1", **HOSTS}
        names.write_text("".join(f"{at} {name}\n" for name, at in known.items()), encoding="ascii")
        resolver.touch()
        for line in (
            f"hostname {host}",
            f"mount --bind {names.resolve()} /etc/hosts",
            f"mount --bind {resolver.resolve()} /etc/resolv.conf",
            "ip link set lo up",
        ):
            self.do(line)

    def do(self, line: str) -> None:
        subprocess.run([*self._inside(), "sh", "-c", line], check=True)

    def start(self, line: str) -> subprocess.Popen[str]:
        """Start a line of a page here, as a user would, in the current directory of the test."""
        package = str(Path(drivetrain.__file__).parents[1])
        programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        variables = {"PATH": programs, "PYTHONPATH": package, "DRIVETRAIN_SECRET": SECRET}
        return subprocess.Popen(
            [*self._inside(), "sh", "-c", f"cd {Path.cwd()} && {line}"],
            env={**undisturbed(), **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def _inside(self) -> list[str]:
        return ["nsenter", "--target", self.pid, *KINDS]

    def end(self) -> None:
        self._init.kill()
        self._init.communicate()

    def close(self) -> None:
        self.end()
        os.close(self._network)


@contextmanager
def two_machines() -> Iterator[list[Machine]]:
    with ExitStack() as stack:
        machines = []
        for host in HOSTS:
            machines.append(Machine(host))
            stack.callback(machines[-1].close)
        ends = [f"dt{os.getpid()}{each}" for each in "ab"]
        cable = ["ip", "link", "add", ends[0], "type", "veth", "peer", "name", ends[1]]
        subprocess.run(cable, check=True)
        for end, machine, address in zip(ends, machines, HOSTS.values(), strict=True):
            subprocess.run(["ip", "link", "set", end, "netns", machine.pid], check=True)
            machine.do(f"ip addr add {address}/24 dev {end} && ip link set {end} up")
        yield machines


def ended(processes: list[subprocess.Popen[str]]) -> list[tuple[int, str, str]]:
    written = [each.communicate(timeout=LIMIT) for each in processes]
    return [(each.returncode, *both) for each, both in zip(processes, written, strict=True)]


def until(job: subprocess.Popen[str], steps: Path, reached: int, world_size: int) -> None:
    """Wait until a job of that size has made that many steps since it began."""
    deadline = time.monotonic() + LIMIT
    while time.monotonic() < deadline and job.poll() is None:
        made = steps.read_text(encoding="ascii").splitlines() if steps.exists() else []
        if [each.split()[1] for each in made[-reached:]] == [str(world_size)] * reached:
            return
        time.sleep(0.1)
    job.kill()
    raise AssertionError(
        f"no {reached} steps of {world_size} ranks in a row: {job.communicate(timeout=LIMIT)[1]}"
    )
