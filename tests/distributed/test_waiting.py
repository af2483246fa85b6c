"""Ranks that wait for one another for ever are told from those that only wait."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.failing import run_together, undisturbed
from torch import distributed

from drivetrain.distributed.waiting import only_gloo

pytestmark = pytest.mark.skipif(
    not (distributed.is_gloo_available() and sys.platform.startswith("linux")),
    reason="needs gloo, and Linux, which tells what a process does",
)


@pytest.mark.parametrize(
    ("act", "waiting"),
    [
        ("return rank == 0", r"rank 0 at its end, at update 12; rank 1 in all_reduce \(N\), at update 11"),
        # It has left the channel, and does not come back to what the others still wait for.
        ("return rank == 1", r"rank 0 in all_reduce \(N\), at update 11; rank 1 at its end, at update 12"),
        (
            "if rank == 0: distributed.barrier()",
            r"rank 0 in barrier \(N\), at update 7; rank 1 in all_reduce \(N\), at update 7",
        ),
        ("distributed.recv(torch.ones(1), 1 - rank)", r"ranks 0 and 1 in recv \(N\), at update 7"),
    ],
)
def test_ranks_that_wait_for_one_another_are_ended_and_told_where(act: str, waiting: str) -> None:
    code, _, errors = run_together(act, after="time.sleep(40 * rank)")
    assert code == 1
    told = f"(RankFailure|drivetrain): the ranks wait for one another: {waiting}$"
    assert re.search(told.replace("N", r"program\.py:\d+"), errors[-1]), errors[-1]
    assert sum("wait for one another" in each for each in errors) == 1


POLL = """
    until = time.monotonic() + 2
    more = torch.ones(1)
    while more:  # as a program does that waits for a file, say
        more.fill_(time.monotonic() < until)
        distributed.broadcast(more, 0)
        time.sleep(0.05 * (1 - rank))
"""


@pytest.mark.parametrize("act", ["time.sleep(2.5 * rank)", "time.sleep(2.5 * (1 - rank))", POLL.strip()])
def test_ranks_that_wait_for_one_that_works_are_left_in_peace(act: str) -> None:
    code, out, errors = run_together(act, deadlock=0.6)
    assert (code, sorted(out.splitlines()), errors) == (0, ["rank 0 ended", "rank 1 ended"], [])


TRAINING = """
import sys
import torch
from torch import nn
from drivetrain import Callback, TaskModule, Trainer

class Line(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(2, 1)

    def loss(self, outputs, batch):
        return outputs.square().mean()

    def forward(self, x):
        return self.net(x)

class OnRank0(Callback):
    def on_step_end(self, run):
        if run.progress.updates == 3 and torch.distributed.get_rank() == 0:
            torch.distributed.barrier()

quiet = {"loggers": (), "progress_bar": False, "checkpoint": False}
trainer = Trainer(max_epochs=1, strategy="ddp", devices=2, callbacks=[OnRank0()], **quiet)
trainer.fit(Line(), [{"x": torch.ones(2, 2)} for _ in range(20)])
"""


def run(program: str) -> subprocess.CompletedProcess[str]:
    """A program as it is, run to its end."""
    Path("program.py").write_text(program, encoding="utf-8")
    return subprocess.run(
        [sys.executable, "program.py"],
        capture_output=True,
        text=True,
        timeout=60,
        env=undisturbed(),
        check=False,
    )


def test_a_barrier_on_one_rank_of_a_training_is_found_without_any_option() -> None:
    done = run(TRAINING)
    assert done.returncode == 1
    line = {each.split("(")[0].strip(): number for number, each in enumerate(TRAINING.splitlines(), 1)}
    assert done.stderr.splitlines()[-1].endswith(
        "the ranks wait for one another:"
        f" rank 0 in barrier (program.py:{line['torch.distributed.barrier']}), in training, after update 3,"
        f" in on_step_end of OnRank0; rank 1 in backward (program.py:{line['trainer.fit']}), in training,"
        " after update 3, in the backward"
    )


LOOKS = """
import json, socket, sys, threading, time
from pathlib import Path
import torch
from torch import distributed
from drivetrain.distributed.launch import ensure_ranks
from drivetrain.distributed.waiting import Waiting

rank = ensure_ranks(2).rank
distributed.init_process_group("gloo")
if rank == 1:
    while not Path("enough").exists():
        time.sleep(0.05)
else:
    waiting = Waiting()
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    far = server.accept()[0]
    near.setblocking(False)

    def looks(between, number=6):
        found = []
        for _ in range(number):
            between()
            waiting.look()
            found.append(waiting.looks)
        return found

    def rest():
        time.sleep(0.1)

    def bytes_come():
        time.sleep(0.1)
        near.send(b".")

    def compute():
        until = time.monotonic() + 0.1
        while time.monotonic() < until:
            pass

    def watch():
        time.sleep(0.5)
        lines = [looks(rest), looks(bytes_come), looks(rest), looks(compute), looks(rest)]
        try:
            while True:
                near.send(bytes(1 << 16))  # more than anybody reads
        except BlockingIOError:
            lines.append(looks(rest))
        lines.append([waiting.place])
        Path("enough").touch()
        sys.stdout.write("\\n".join(map(json.dumps, lines)) + "\\n")

    thread = threading.Thread(target=watch)
    thread.start()
distributed.all_reduce(torch.ones(1))
if rank == 0:
    thread.join()
distributed.destroy_process_group()
"""


def test_a_process_is_at_rest_only_while_nothing_moves() -> None:
    done = run(LOOKS)
    assert done.returncode == 0, done.stderr
    *lines, place = [json.loads(line) for line in done.stdout.splitlines()]
    rest, bytes_come, rest_again, compute, rest_at_last, unread = lines
    assert rest == [0, 1, 2, 3, 4, 5]
    assert bytes_come[1:] == [0] * 5, "what comes may be what is waited for"
    assert rest_again[-4:] == [*range(rest_again[-4], rest_again[-4] + 4)]
    assert compute == [0] * 6, "a thread computes, and may have something to say"
    assert rest_at_last[-1] >= 4
    assert unread == [0] * 6, "something is under way"
    at = next(n for n, line in enumerate(LOOKS.splitlines(), 1) if line.startswith("distributed.all_reduce"))
    assert place == [f"all_reduce (program.py:{at})"]


def testonly_gloo_is_waited_for_where_it_can_be_seen() -> None:
    assert not only_gloo(), "no process group"
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        assert only_gloo()
        distributed.new_group(backend="fake", timeout=None)
        assert not only_gloo()
    finally:
        distributed.destroy_process_group()
