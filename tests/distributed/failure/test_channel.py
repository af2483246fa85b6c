"""One rank fails, in whatever way: all end within seconds, and the last lines name the first cause."""

import errno
import json
import re
import signal
import socket
import threading
from dataclasses import replace
from typing import Any

import pytest
from tests.distributed.running import run_all, stacks
from tests.support.forked import JOB
from torch import distributed
from torch._C._distributed_c10d import HashStore

from drivetrain.core.errors import RankFailure, StrategyError
from drivetrain.distributed.failure.channel import FailureChannel, Status
from drivetrain.distributed.failure.heartbeat import Heartbeat, machine
from drivetrain.distributed.failure.messages import TIMING, Cause

pytestmark = [
    pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.skipif(machine() is None, reason="needs Linux, where it can be seen what a process does"),
]
real = pytest.mark.real("ranks are killed, stopped and interrupted")

# A rank is stopped, and sleeps until it is killed.
STOPPED = "kill(signal.SIGSTOP); time.sleep(600)"
# What a rank has started lives on as long as rank 0 does, and with it a copy of all that was open.
LEFT = "parent = Path(f'/proc/{os.getppid()}')\nif os.fork(): kill(signal.SIGKILL)\n"
LEFT += "until(lambda: not parent.exists()); os._exit(0)"
# Rank 1 goes on when rank 0 has left the channel, or has told of what was no cause.
LAST = (
    "note(lambda: channel._monitor._peers[0].state == 'left') if rank == 0 else until(Path('noted').exists)"
)
LATE = f"{LAST}\nif rank == 1: raise ValueError('late')"
FIRST = "if rank == 0: note(lambda: channel._monitor._aside); raise RuntimeError('gloo: connection reset')\n"
FIRST += "until(Path('noted').exists); raise KeyError(5)"
BOOM, DEBUG = "raise ValueError('boom')", {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}


def on(rank: int, act: str) -> dict[str, object]:
    return {"who": [rank], "act": act}


KILL = "kill(signal.SIGKILL)"
ONE, ZERO = "RankFailure: rank 1 failed first, ", "drivetrain: rank 0 failed first, at step 7: "
GONE = "failed first, last heard of at step 7: it "
ENDS = {
    "never comes": (
        {"join": "if rank == 1: sys.exit(3)"},
        1,
        "rank 1 failed first: it ended with exit code 3$",
    ),
    "raises on 0": (on(0, BOOM), 1, ZERO + "ValueError: boom"),
    "killed": (on(1, KILL), 1, f"RankFailure: rank 1 {GONE}was killed by SIGKILL"),
    "killed, and leaves a worker": (on(1, LEFT), 1, f"drivetrain: rank 1 {GONE}was killed by SIGKILL"),
    "rank 0 killed": (on(0, KILL), -signal.SIGKILL, f"rank 0 {GONE}was killed, perhaps"),
    "rank 0 stopped": (on(0, STOPPED), -signal.SIGKILL, rf"rank 0 {GONE}is stopped \(by SIGSTOP"),
    "exits with 0": (on(1, "os._exit(0)"), 1, ONE + ".*: it ended with exit code 0; rank 0 was at step 7$"),
    "aborts": (on(1, "os.abort()"), 1, ONE + ".*: it was killed by SIGABRT; its own messages are above"),
    "exit 3": (on(1, "sys.exit(3)"), 1, "rank 1 failed first, at step 7: SystemExit: 3"),
    "rank 0 exit 3": (on(0, "sys.exit(3)"), 3, ZERO + "SystemExit: 3"),
    # Without an error, but too early for the other, whose own error says only that a connection ended.
    "ends too early": (on(1, "sys.exit()"), 1, ONE + ".*: it had ended when rank 0, at step 7, waited"),
    # What the end of a rank brings about on the other may be seen first; it is not the cause.
    "consequence first": ({"act": FIRST}, 1, "rank 1 failed first, at step 7: KeyError: 5"),
    "late": ({"last": LATE}, 1, ONE + "at step 12: ValueError: late$"),
}


@real
def test_all_ranks_end_and_the_last_line_names_the_first_cause() -> None:
    wrong = []
    for name, ended in run_all("channel.py", {name: each[0] for name, each in ENDS.items()}).items():
        _, code, last = ENDS[name]
        named = sum("failed first" in each for each in ended.errors)  # by the rank itself, and by rank 0
        if (
            ended.code != code
            or not re.search(last, (ended.errors or [""])[-1])
            or "ended" in ended.out
            or named > 2
        ):
            wrong.append(f"{name}: {ended.code}, {ended.out!r}, {named} times\n" + "\n".join(ended.errors))
    assert not wrong, "\n\n".join(wrong)


# One call that never gives the interpreter to another thread, for longer than a rank may send no heartbeat.
BUSY = "next(filter((time.monotonic() + 3).__lt__, iter(time.monotonic, None)))"
DDP = """
from drivetrain.distributed.group import uncompared
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=uncompared())
model(torch.ones(1, 2)).sum().backward()
del model  # or torch's threads would rarely abort the program at its end
"""


@real
def test_an_end_without_a_failure_is_silent() -> None:
    """Whoever ends first, after a pause, while a rank cannot answer, and after the program's own Ctrl-C."""
    taken = "try: wait()\nexcept KeyboardInterrupt: time.sleep(6)"  # longer than one may be left unheard
    unwritten = 'assert not Path("run").exists(), "nothing is written without a failure"'
    cases: dict[str, Any] = {
        "rank 1 last": {"last": LAST},
        "rank 0 last": {"last": "rank or until(lambda: channel._monitor._peers[1].state == 'left')"},
        "pause": {"act": "until(lambda: beats > 12)", "who": [1], "hang_timeout": 600.0, "after": unwritten},
        "rank 0 computes": {"who": [0], "act": BUSY, "heartbeat": 0.1},
        "rank 1 computes": {"who": [1], "act": BUSY, "heartbeat": 0.1},
        "torch's debug mode": {"join": DDP, "variables": DEBUG},
        "Ctrl-C": {"act": taken, "interrupt": signal.SIGINT, "whole_group": True},
    }
    found = run_all("channel.py", cases)
    for name, ended in found.items():
        out = sorted(ended.out.splitlines())
        assert (name, ended.code, out, ended.errors) == (name, 0, ["rank 0 ended", "rank 1 ended"], [])


@real
def test_a_hang_ends_with_the_name_of_the_rank_that_is_behind() -> None:
    cases = {
        "skips a collective": {"skips": [0], "hang_timeout": 6.0},
        "sleeps": {"who": [1], "act": "threading.Event().wait()", "hang_timeout": 6.0},
    }
    found = run_all("channel.py", cases)
    assert [each.code for each in found.values()] == [75, 75]
    skips, sleeps = found.values()
    assert re.fullmatch(
        r"drivetrain: no progress for 6 s; rank 1 is behind, in all_reduce \(channel.py:\d+\), at step 11;"
        r" rank 0 has ended, at step 12",
        skips.errors[-1],
    ), skips.errors[-1]
    shown = skips.errors[skips.errors.index("drivetrain: the stacks of rank 1:") :]
    assert any("in all_reduce" in each for each in shown)
    assert re.fullmatch(
        r"drivetrain: no progress for 6 s; rank 1 is behind, at step 7; rank 0 waits in all_reduce"
        r" \(channel.py:\d+\), at step 7",
        sleeps.errors[-1],
    ), sleeps.errors[-1]
    assert sum("in act" in each for each in sleeps.errors) == 1, "the stacks tell what it does"
    assert "in act" in stacks(sleeps)["rank1.txt"]


@real
def test_the_stacks_of_all_ranks_that_can_write_them_are_saved() -> None:
    cases = {
        "boom": {"who": [1], "act": BOOM},
        "stopped": {"who": [1], "act": STOPPED},
        "gone": {"who": [1], "act": "kill(signal.SIGKILL)"},
    }
    found = run_all("channel.py", cases)
    assert {each.code for each in found.values()} == {1}
    written = {name: stacks(each) for name, each in found.items()}
    boom = written.pop("boom")
    assert sorted(boom) == ["rank0.txt", "rank1.txt"]
    assert "rank 1, at step 7\n" in boom["rank1.txt"]
    assert "ValueError: boom" in boom["rank1.txt"], "the traceback of what was raised"
    assert boom["rank0.txt"].startswith("rank 0, at step 7\n")
    assert "in all_reduce" in boom["rank0.txt"]
    for name, files in written.items():
        assert sorted(files) == ["rank0.txt"], name
        assert files["rank0.txt"].startswith("rank 0, at step 7\n"), "wherever it was when its peer was gone"
    told = r"RankFailure: rank 1 failed first, last heard of at step 7: it is stopped \(by SIGSTOP"
    assert re.search(told, found["stopped"].errors[-1])
    for each in found.values():
        assert "the stacks of all ranks" not in each.errors[-1], "the first cause is the last line"


LAST_WORD = "import atexit\nif rank == 1: atexit.register(lambda: sys.stderr.write('a last word\\n'))"


@real
def test_rank_0_has_the_last_word_with_the_traceback_of_the_cause() -> None:
    spoken = f"if rank == 1: {BOOM}\nuntil(channel._decided.is_set); raise OSError('timed out')"
    cases = {
        "main thread does not come back": {"act": f"if rank == 1: {BOOM}\ntime.sleep(600)"},
        "last word": {"act": spoken, "join": LAST_WORD},
        "debug mode": {"act": "distributed.all_reduce(torch.ones(2 + rank))", "variables": DEBUG},
    }
    found = run_all("channel.py", cases)
    assert [(each.code, each.out) for each in found.values()] == [(1, "")] * 3, found
    stuck, spoken, torchs = (each.errors for each in found.values())
    block = stuck[stuck.index("drivetrain: on rank 1:") :]
    assert any("in act" in each for each in block)
    assert block[-1].endswith("rank 1 failed first, at step 7: ValueError: boom")
    assert "a last word" in spoken
    assert spoken[-1].endswith("RankFailure: rank 1 failed first, at step 7: ValueError: boom")
    assert re.search("failed first, at step 7.*Detected mismatch between collectives", torchs[-1])


@real
def test_an_interrupt_ends_all_ranks_and_shows_one_traceback() -> None:
    cases = {
        "Ctrl-C": {"act": "wait()", "interrupt": signal.SIGINT, "whole_group": True},
        "while rank 0 waits": {"act": "wait()", "who": [1], "interrupt": signal.SIGINT},
        "SIGTERM": {"act": "wait()", "interrupt": signal.SIGTERM},
    }
    found = run_all("channel.py", cases)
    for name in ("Ctrl-C", "while rank 0 waits"):
        assert found[name].code == -signal.SIGINT
        assert found[name].errors[-1].endswith("KeyboardInterrupt")
    assert sum("Traceback" in each for each in found["Ctrl-C"].errors) == 1
    ended = found["SIGTERM"]
    assert (ended.code, ended.out) == (-signal.SIGTERM, "")
    assert "rank 0 failed first" in ended.errors[-1]


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


def together(store: HashStore, act, world_size: int = 2, **options: object) -> list[object]:
    """Ranks as threads of this process, which the channel never ends: what each found."""
    found: list[object] = [None] * world_size
    patient = replace(TIMING.scaled(100), heartbeat=5.0)

    def as_rank(rank: int) -> None:
        try:
            with FailureChannel(rank, world_size, store, timing=patient, **options) as channel:
                found[rank] = act(rank, channel)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(world_size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(300)
    return found


def test_a_channel_can_be_opened_again_on_the_same_store(alone: None) -> None:
    store = HashStore()
    for _ in range(3):
        assert together(store, lambda rank, channel: rank, world_size=3) == [0, 1, 2]


def test_one_process_needs_no_channel() -> None:
    before = threading.active_count()  # other tests may have left torch's own
    with FailureChannel(0, 1) as channel:
        assert threading.active_count() == before
        channel.report(ValueError())
    assert threading.active_count() == before


def test_rank_0_reads_at_most_1024_heartbeats_a_second() -> None:
    channels = {size: FailureChannel(0, size) for size in (64, 1024, 10_000)}
    read = {size: round(size * 5 / each._timing.heartbeat) for size, each in channels.items()}
    assert read == {64: 64, 1024: 1024, 10_000: 1024}


def test_a_channel_outlives_a_look_that_fails(alone: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Such as one for which there is no file descriptor left: the others are still heard."""
    looked = threading.Event()

    def broken() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    class Failing(Heartbeat):
        def tick(self) -> str | None:
            looked.set()
            return broken() and None

    def act(rank: int, channel: FailureChannel) -> str:
        assert looked.wait(300)
        if rank == 1:
            raise ValueError("boom")
        assert channel._decided.wait(300)
        return "heard"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drivetrain.distributed.failure.channel.Heartbeat", Failing)
        first, second = together(HashStore(), act, status=Status(lambda: str(broken()), broken, broken))
    assert isinstance(second, ValueError)
    assert isinstance(first, RankFailure)
    assert "rank 1 failed first" in str(first)
    assert "the failure channel of rank 1: OSError(24, 'Too many open files')" in capfd.readouterr().err


def test_a_rank_0_that_cannot_be_reached_is_an_error(alone: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = HashStore()
    offer = {"port": port, "token": "", "machine": None, "hosts": ["127.0.0.1"], "pid": 1, "began": ""}
    store.set("drivetrain/failure/at/1", json.dumps(offer))
    message = rf"rank 1 cannot reach rank 0 at port {port} \(127.0.0.1: .*refused"
    with pytest.raises(StrategyError, match=message), FailureChannel(1, 2, store):
        pass
    with pytest.raises(StrategyError, match="needs a process group"), FailureChannel(1, 2):
        pass


def raised(error: BaseException) -> BaseException:  # the error, with a traceback that ends in this very file
    try:
        raise error
    except BaseException as found:
        return found


def test_what_a_gone_rank_brings_about_is_told_from_errors_of_its_own() -> None:
    wrapped = StrategyError("the process group could not be formed")
    wrapped.__cause__ = distributed.DistNetworkError("Connection reset by peer")
    told = ValueError("of all")
    told.add_note("drivetrain: this happened on rank 3")
    consequences = (
        RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"),
        RuntimeError("[gloo/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv"),
        distributed.DistBackendError("NCCL error"),
        distributed.DistStoreError("wait timeout after 300000ms, keys: /a"),
        wrapped,
        told,
    )
    errors = (
        ValueError("timeout=-1"),
        RuntimeError("size mismatch"),
        # A data server's, say: nothing in them is torch's.
        RuntimeError("request to shard-7 timed out"),
        RuntimeError("upstream timeout: connection reset by peer"),
        ConnectionResetError(104, "Connection reset by peer"),
    )
    for kind, several in (("consequence", consequences), ("error", errors)):
        assert [Cause.of_error(0, "", raised(each)).kind for each in several] == [kind] * len(several)
    group = ExceptionGroup("two", [ValueError("one"), ExceptionGroup("more", [KeyError("a")])])
    assert all(
        each in Cause.of_error(0, "", group).what for each in ("two", "ValueError: one", "KeyError: 'a'")
    )


def test_another_ranks_failure_is_an_error_that_says_where() -> None:
    cause = Cause("error", 3, "step 9", "ValueError: boom", '  File "train.py", line 1, in step\n')
    assert Cause.from_json(json.loads(json.dumps(cause.to_json()))) == cause
    failure = cause.failure()
    assert isinstance(failure, RankFailure)
    assert str(failure) == "rank 3 failed first, at step 9: ValueError: boom"
    assert "in step" in str(failure.__cause__)
