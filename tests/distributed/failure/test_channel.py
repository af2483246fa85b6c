"""One rank fails, in whatever way: all end within seconds, and the last lines name the first cause."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import socket
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.support.failing import JOB, Ended
from torch import distributed
from torch._C._distributed_c10d import HashStore

from drivetrain.core.errors import RankFailure, StrategyError
from drivetrain.distributed.failure.channel import FailureChannel
from drivetrain.distributed.failure.messages import TIMING, Cause
from drivetrain.distributed.failure.silence import Silence, machine
from drivetrain.distributed.failure.stacks import stacks

program = pytest.mark.program
needs_gloo = pytest.mark.skipif(not distributed.is_gloo_available(), reason="needs gloo")


STOPPED = "kill(signal.SIGSTOP); time.sleep(5)"
"""A rank is stopped, and goes on only to write its stacks: it sleeps until it is ended."""


@needs_gloo
@program(join="if rank == 1: sys.exit(3)")
def test_a_rank_that_does_not_come_to_the_channel_is_named(ended: Ended) -> None:
    assert ended.code == 1
    assert ended.errors[-1].endswith("rank 1 failed first: it ended with exit code 3")


@needs_gloo
@pytest.mark.parametrize(
    "last",
    [
        pytest.param(last, marks=program(last=last))
        for last in ("pass", "time.sleep(0.7 * rank)", "time.sleep(0.7 * (1 - rank))")
    ],
)
def test_an_end_without_an_error_is_silent_whoever_is_first(ended: Ended, last: str) -> None:
    assert (ended.code, sorted(ended.out.splitlines()), ended.errors) == (
        0,
        ["rank 0 ended", "rank 1 ended"],
        [],
    )


ENDS = [
    (
        "if rank == 0: raise ValueError('boom')",
        1,
        r"drivetrain: rank 0 failed first, at update 7: ValueError: boom",
    ),
    (
        "if rank == 1: kill(signal.SIGKILL)",
        1,
        r"RankFailure: rank 1 failed first, last heard of at update 7: it was killed by SIGKILL",
    ),
    # A worker that it has started lives on for a while, and with it a copy of all that was open.
    (
        "if rank == 1 and os.fork(): kill(signal.SIGKILL)\n    if rank == 1: time.sleep(1.5); os._exit(0)",
        1,
        r"drivetrain: rank 1 failed first, last heard of at update 7: it was killed by SIGKILL",
    ),
    (
        "if rank == 0: kill(signal.SIGKILL)",
        -signal.SIGKILL,
        r"rank 0 failed first, last heard of at update 7: it was killed, perhaps",
    ),
    (
        f"if rank == 1: {STOPPED}",
        1,
        r"RankFailure: rank 1 failed first, last heard of at update 7: it is stopped \(by SIGSTOP",
    ),
    (
        f"if rank == 0: {STOPPED}",
        -signal.SIGKILL,
        r"rank 0 failed first, last heard of at update 7: it is stopped \(by SIGSTOP",
    ),
    (
        "if rank == 1: os._exit(0)",
        1,
        r"RankFailure: rank 1 failed first, .*: it ended with exit code 0; rank 0 was at update 7$",
    ),
    (
        "if rank == 1: os.abort()",
        1,
        r"RankFailure: rank 1 .*: it was killed by SIGABRT; its own messages are above",
    ),
    ("if rank == 1: sys.exit(3)", 1, r"rank 1 failed first, at update 7: SystemExit: 3"),
    ("if rank == 0: sys.exit(3)", 3, r"drivetrain: rank 0 failed first, at update 7: SystemExit: 3"),
    # Without an error, but too early for the other, whose own error says only that a connection ended.
    (
        "if rank == 1: sys.exit()",
        1,
        r"RankFailure: rank 1 .*: it had ended when rank 0, at update 7, waited for it \(RuntimeError",
    ),
    # What the end of a rank brings about on the other may be seen first; it is not the cause.
    (
        "if rank == 0: raise RuntimeError('gloo: connection reset')\n    time.sleep(0.3); raise KeyError(5)",
        1,
        r"rank 1 failed first, at update 7: KeyError: 5",
    ),
]


@needs_gloo
@pytest.mark.parametrize(
    ("code", "last"),
    [pytest.param(code, last, marks=program(act=act), id=act) for act, code, last in ENDS],
)
def test_all_end_and_the_last_line_names_the_first_cause(ended: Ended, code: int, last: str) -> None:
    assert ended.code == code
    assert re.search(last, ended.errors[-1]), "\n".join(ended.errors)
    assert "ended" not in ended.out
    assert sum("failed first" in each for each in ended.errors) <= 2, (
        "once by the rank itself, once by rank 0"
    )


@needs_gloo
@program(last="if rank == 1: time.sleep(0.5); raise ValueError('late')")
def test_a_rank_that_fails_after_the_others_have_ended_is_not_missed(ended: Ended) -> None:
    assert (ended.code, ended.out) == (1, "")
    assert ended.errors[-1].endswith("RankFailure: rank 1 failed first, at update 12: ValueError: late")


@needs_gloo
@program(act="if rank == 1: raise ValueError('boom')\n    else: time.sleep(60)")
def test_a_main_thread_that_does_not_come_back_is_ended_and_the_traceback_of_the_cause_shown(
    ended: Ended,
) -> None:
    assert (ended.code, ended.out) == (1, "")
    block = ended.errors[ended.errors.index("drivetrain: on rank 1:") :]
    assert any("in act" in each for each in block)
    assert block[-1].endswith("rank 1 failed first, at update 7: ValueError: boom")


@needs_gloo
@program(
    act="if rank == 1: raise ValueError('boom')\n    time.sleep(0.2); raise RuntimeError('gloo: timed out')",
    join="""
import atexit
if rank == 1:
    atexit.register(lambda: time.sleep(0.2) or sys.stderr.write('a last word\\n'))
""",
)
def test_rank_0_has_the_last_word(ended: Ended) -> None:
    assert ended.code == 1
    assert "a last word" in ended.errors
    assert ended.errors[-1].endswith("RankFailure: rank 1 failed first, at update 7: ValueError: boom")


@needs_gloo
@program(act="return rank == 0", limit=2.0)
def test_a_skipped_collective_ends_with_the_name_of_the_rank_that_is_behind(ended: Ended) -> None:
    assert ended.code == 75
    assert re.fullmatch(
        r"drivetrain: no progress for 2 s; rank 1 is behind, in all_reduce \(program.py:\d+\), at update 11;"
        r" rank 0 has ended, at update 12",
        ended.errors[-1],
    ), ended.errors[-1]
    stacks = ended.errors[ended.errors.index("drivetrain: the stacks of rank 1:") :]
    assert any("in all_reduce" in each for each in stacks)


@needs_gloo
@pytest.mark.parametrize(
    "asleep",
    [
        pytest.param(each, marks=program(act=f"if rank == 1: {each}", limit=2.0))
        for each in (
            "time.sleep(1000)",
            "threading.Event().wait()",
            "__import__('select').select([], [], [])",
        )
    ],
)
def test_a_rank_that_sleeps_for_ever_is_named(ended: Ended, asleep: str) -> None:
    assert ended.code == 75
    assert re.fullmatch(
        r"drivetrain: no progress for 2 s; rank 1 is behind, at update 7; rank 0 waits in all_reduce"
        r" \(program.py:\d+\), at update 7",
        ended.errors[-1],
    ), ended.errors[-1]
    assert sum("in act" in each for each in ended.errors) == 1, "the stacks tell what it does"
    assert "in act" in written(ended, 1)


@needs_gloo
@program(
    act="if rank == 1: time.sleep(0.5); threading.Event().wait(0.5)",
    limit=10.0,
    after='assert not Path("run").exists(), "nothing is written without a failure"',
)
def test_a_pause_is_waited_for_and_leaves_nothing(ended: Ended) -> None:
    assert (ended.code, ended.errors) == (0, [])


# One call that never gives the interpreter to another thread, for longer than a rank may be silent.
BUSY = "next(filter((time.monotonic() + 3).__lt__, iter(time.monotonic, None)))"


@needs_gloo
@pytest.mark.skipif(machine() is None, reason="needs Linux, where it can be seen what a process does")
@pytest.mark.parametrize(
    "busy",
    [
        pytest.param(
            rank,
            marks=program(
                act=f"if rank == {rank}: {BUSY}",
                silence=0.1,
            ),
        )
        for rank in (0, 1)
    ],
)
def test_a_rank_that_computes_is_waited_for_while_it_cannot_answer(ended: Ended, busy: int) -> None:
    assert (ended.code, ended.errors) == (0, [])


def written(ended: Ended, rank: int) -> str:
    """The stacks of a rank, from where the last lines say that they are."""
    told = next(each for each in ended.errors if "the stacks of all ranks are in " in each)
    directory = Path(told.partition("the stacks of all ranks are in ")[2])
    assert sorted(each.name for each in directory.iterdir()) == ["rank0.txt", "rank1.txt"]
    return (directory / f"rank{rank}.txt").read_text(encoding="utf-8")


@needs_gloo
@program(act="if rank == 1: raise ValueError('boom')")
def test_the_stacks_of_all_ranks_are_saved(ended: Ended) -> None:
    failed, waits = written(ended, 1), written(ended, 0)
    assert "rank 1, at update 7\n" in failed
    assert "ValueError: boom" in failed, "the traceback of what was raised"
    assert waits.startswith("rank 0, at update 7\n")
    assert "in all_reduce" in waits
    told = [number for number, each in enumerate(ended.errors) if "the stacks of all ranks" in each]
    assert told[-1] < len(ended.errors) - 1, "the first cause is the last line"


@needs_gloo
@pytest.mark.skipif(machine() is None, reason="needs Linux, where a process can be made to write its stacks")
@pytest.mark.parametrize(
    "how",
    [
        pytest.param("stopped", marks=program(act=f"if rank == 1: {STOPPED}")),
        pytest.param("held", marks=program(act=f"if rank == 1: {BUSY}\n    else: raise ValueError()")),
    ],
)
def test_the_stacks_of_a_rank_that_cannot_write_them_are_saved(ended: Ended, how: str) -> None:
    assert ended.code == 1
    text = written(ended, 1)
    assert text.startswith("rank 1, asked by rank 0 because it did not answer")
    assert "in act" in text


def test_a_late_rank_adds_its_error_to_what_was_asked_of_it(tmp_path: Path) -> None:
    file = tmp_path / "failures" / "rank1.txt"
    stacks.write(file, "rank 1, asked by rank 0 because it did not answer")
    stacks.write(file, "rank 1, at update 7", ValueError("boom"))
    text = file.read_text(encoding="utf-8")
    assert text.startswith("rank 1, asked by rank 0")
    assert "\nrank 1, at update 7\n\nValueError: boom\n" in text


@needs_gloo
@program(act="if rank == 1: kill(signal.SIGKILL)")
def test_of_a_rank_that_is_gone_it_is_said_that_nothing_could_be_had(ended: Ended) -> None:
    assert "No stacks: the rank has ended" in written(ended, 1)
    assert "in all_reduce" in written(ended, 0)


@needs_gloo
@program(act="distributed.all_reduce(torch.ones(2 + rank))", TORCH_DISTRIBUTED_DEBUG="DETAIL")
def test_what_torchs_debug_mode_finds_is_in_the_last_lines(ended: Ended) -> None:
    assert ended.code == 1
    assert re.search("failed first, at update 7.*Detected mismatch between collectives", ended.errors[-1])


@needs_gloo
@program(
    join="""
from drivetrain.distributed.group import uncompared
from torch.nn.parallel import DistributedDataParallel
model = DistributedDataParallel(torch.nn.Linear(2, 1), process_group=uncompared())
model(torch.ones(1, 2)).sum().backward()
del model  # or torch's threads would rarely abort the program at its end
""",
    TORCH_DISTRIBUTED_DEBUG="DETAIL",
)
def test_ddp_works_in_torchs_debug_mode_on_a_group_that_is_not_compared(ended: Ended) -> None:
    assert (ended.code, ended.errors) == (0, [])


WAIT = "open('waiting', 'w').close(); time.sleep(60)"


@needs_gloo
@program(act=WAIT, interrupt=signal.SIGINT, whole_group=True)
def test_ctrl_c_ends_all_ranks_and_shows_one_traceback(ended: Ended) -> None:
    assert ended.code == -signal.SIGINT
    assert ended.errors[-1].endswith("KeyboardInterrupt")
    assert sum("Traceback" in each for each in ended.errors) == 1


@needs_gloo
@program(act=WAIT, interrupt=signal.SIGTERM)
def test_a_termination_of_rank_0_ends_all_ranks(ended: Ended) -> None:
    assert (ended.code, ended.out) == (-signal.SIGTERM, "")
    assert "rank 0 failed first" in ended.errors[-1]


@needs_gloo
@pytest.mark.skipif(os.name == "nt", reason="needs signals")
@program(act=f"if rank == 1: {WAIT}", interrupt=signal.SIGINT)
def test_an_interrupt_is_heard_while_rank_0_waits_in_a_collective(ended: Ended) -> None:
    assert ended.code == -signal.SIGINT
    assert ended.errors[-1].endswith("KeyboardInterrupt")


@needs_gloo
@program(
    act=f"""
    try:
        {WAIT}
    except KeyboardInterrupt:
        time.sleep(2)  # longer than an interrupt may be left unheard
""",
    interrupt=signal.SIGINT,
    whole_group=True,
)
def test_an_interrupt_that_a_program_takes_itself_is_its_own(ended: Ended) -> None:
    assert (ended.code, ended.errors) == (0, [])


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


QUICK = replace(TIMING.scaled(0.3), silence=0.5)


def together(store: HashStore, act, world_size: int = 2, **options: object) -> list[object]:
    """Ranks as threads of this process: what each found."""
    found: list[object] = [None] * world_size

    def as_rank(rank: int) -> None:
        try:
            with FailureChannel(rank, world_size, store, timing=QUICK, **options) as channel:
                found[rank] = act(rank, channel)
        except BaseException as error:
            found[rank] = error

    threads = [threading.Thread(target=as_rank, args=(rank,)) for rank in range(world_size)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
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


def test_a_channel_outlives_a_look_that_fails(alone: None, capfd: pytest.CaptureFixture[str]) -> None:
    """Such as one for which there is no file descriptor left: the others are still heard."""

    def broken() -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    def act(rank: int, channel: FailureChannel) -> str:
        time.sleep(0.5)  # a few looks
        if rank == 1:
            raise ValueError("boom")
        assert channel._decided.wait(20)
        return "heard"

    class Failing(Silence):
        def tick(self) -> str | None:
            return broken() and None

    def outcomes() -> list[object]:
        return together(HashStore(), act, describe=lambda: str(broken()), progress=broken, signs=broken)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("drivetrain.distributed.failure.channel.Silence", Failing)
        first, second = outcomes()
    assert isinstance(second, ValueError)
    assert isinstance(first, RankFailure)
    assert "rank 1 failed first" in str(first)
    assert "the failure channel of rank 1: OSError(24, 'Too many open files')" in capfd.readouterr().err


def test_a_rank_0_that_cannot_be_reached_is_an_error(alone: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store = HashStore()
    offer = {"port": port, "token": "", "machine": None, "hosts": ["127.0.0.1"]}
    store.set("drivetrain/failure/at/1", json.dumps(offer))
    with (
        pytest.raises(
            StrategyError, match=rf"rank 1 cannot reach rank 0 at port {port} \(127.0.0.1: .*refused"
        ),
        FailureChannel(1, 2, store),
    ):
        pass


def test_a_channel_needs_a_store() -> None:
    with pytest.raises(StrategyError, match="needs a process group"), FailureChannel(1, 2):
        pass


def raised(error: BaseException) -> BaseException:
    """The error, with a traceback that ends in this very file."""
    try:
        raise error
    except BaseException as found:
        return found


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer"), "consequence"),
        (RuntimeError("[gloo/unbound_buffer.cc:84] Timed out waiting 1800000ms for recv"), "consequence"),
        (RuntimeError("NCCL communicator was aborted on rank 1."), "consequence"),
        (distributed.DistBackendError("NCCL error"), "consequence"),
        (distributed.DistStoreError("wait timeout after 300000ms, keys: /a"), "consequence"),
        (ValueError("timeout=-1"), "error"),
        (RuntimeError("size mismatch"), "error"),
        (torch.OutOfMemoryError("no room"), "error"),
        # A data server's, say: nothing in them is torch's.
        (RuntimeError("request to shard-7 timed out"), "error"),
        (RuntimeError("upstream timeout: connection reset by peer"), "error"),
        (ConnectionResetError(104, "Connection reset by peer"), "error"),
        (TimeoutError("timed out"), "error"),
    ],
)
def test_what_a_gone_rank_brings_about_is_told_from_errors_of_its_own(
    error: BaseException, kind: str
) -> None:
    assert Cause.of_error(0, "", raised(error)).kind == kind


def test_a_cause_or_a_note_of_another_rank_makes_a_consequence() -> None:
    wrapped = StrategyError("the process group could not be formed")
    wrapped.__cause__ = distributed.DistNetworkError("Connection reset by peer")
    told = ValueError("of all")
    told.add_note("drivetrain: this happened on rank 3")
    assert [Cause.of_error(0, "", each).kind for each in (wrapped, told)] == ["consequence"] * 2


def test_another_ranks_failure_is_an_error_that_says_where() -> None:
    cause = Cause("error", 3, "update 9", "ValueError: boom", '  File "train.py", line 1, in step\n')
    assert Cause.from_json(json.loads(json.dumps(cause.to_json()))) == cause
    failure = cause.failure()
    assert isinstance(failure, RankFailure)
    assert str(failure) == "rank 3 failed first, at update 9: ValueError: boom"
    assert "in step" in str(failure.__cause__)
