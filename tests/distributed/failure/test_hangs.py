"""`hang_timeout` ends a run in which nothing moves, names the rank that is behind, and ends no sound run."""

import re
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.running import run_all, stacks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback
from drivetrain.checkpoint.saving.background import Background
from drivetrain.checkpoint.storage import filesystem
from drivetrain.distributed.failure.location import Phase, phase_of_thread
from drivetrain.run import session

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
SLEEPS = {"where": "step end", "act": "time.sleep(1000)"}


def names_the_sleeping_rank(ended: Any, size: int, limit: float) -> None:
    assert ended.code == 75, ended.errors
    others = "ranks 0 and 1 wait" if size == 3 else "rank 0 waits"
    assert re.fullmatch(
        rf"drivetrain: no progress for {limit:g} s; rank {size - 1} is behind, in training, after step 3,"
        rf" in on_step_end of Acts; {others} in \w+ \(\w+.py:\d+\), in training, after step 3, in the"
        r" (forward|backward|step)",
        ended.errors[-1],
    ), ended.errors[-1]
    found = stacks(ended)
    assert sorted(found) == [f"rank{rank}.txt" for rank in range(size)]
    assert "in on_step_end" in found[f"rank{size - 1}.txt"]
    assert all("in train_step" in each for each in found.values()), "the main threads are there"
    made = r"^collective \d+ of group 0: (\S+).*: (.*)$"
    last = [re.findall(made, found[each], re.M)[-1] for each in sorted(found)]
    assert last == [*[("gloo:all_reduce", "not ended")] * (size - 1), ("gloo:all_reduce", "ended")]


@needs_gloo
@pytest.mark.real("ranks hang and are ended")
def test_a_rank_that_sleeps_or_whose_data_does_not_come_ends_all_and_is_named() -> None:
    data = {"where": "dataset", "act": "time.sleep(1000)", "hang_timeout": 6.0}
    holds = {**SLEEPS, "act": "import re; re.match('(a+)+$', 40 * 'a' + 'b')", "hang_timeout": 6.0}
    sleeps = {"devices": 3, "hang_timeout": 6.0, **SLEEPS}
    found = run_all("training.py", {"sleeps": sleeps, "data": data, "holds the interpreter": holds})
    assert found["holds the interpreter"].code == 75
    names_the_sleeping_rank(found["sleeps"], 3, 6.0)
    assert found["data"].code == 75, found["data"].errors
    assert re.search(
        r"rank 1 is behind, in training, after step \d+, waiting for batch \d+ of epoch 0 .*__getitem__"
        r".*; rank 0 waits in backward",
        found["data"].errors[-1],
    ), found["data"].errors[-1]


# What moves in a run, and how a run counts in which nothing moves: no test waits for a limit.


def seen(look: Callable[[], Any]) -> Any:  # what another thread sees of this one
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(look()))
    thread.start()
    thread.join()
    return found[0]


def comes_to(phase: Phase, thread: int) -> bool:
    deadline = time.monotonic() + 60
    while phase_of_thread(thread)[0] != phase and time.monotonic() < deadline:
        time.sleep(0.005)
    return phase_of_thread(thread)[0] == phase


def test_every_batch_of_an_evaluation_and_every_report_is_progress() -> None:
    """Of a validation of its own, of one in a hook, and of a run that holds another."""
    signs: list[Any] = []

    class Notes(Regression):
        def validation_step(self, batch: Any) -> Any:
            signs.append(session._signs())
            return super().validation_step(batch)

    def validates(run: Any) -> None:
        quiet().validate(Notes(), pairs(6))
        for _ in range(2):
            run.report_progress()
            signs.append(session._signs())

    quiet(max_steps=2, callbacks=[LambdaCallback(on_fit_end=validates)]).fit(Notes(), pairs(), pairs(8))
    assert len(signs) == 4 + 3 + 2
    assert len({tuple(each) for each in signs}) == len(signs)


def test_before_the_first_step_a_rank_has_no_progress() -> None:
    progress: list[Any] = []

    def note(run: Any) -> None:
        progress.append(session._status(run).progress())

    noting = LambdaCallback(on_fit_start=note, on_step_end=note)
    quiet(max_steps=1, callbacks=[noting]).fit(Regression(), pairs())
    assert progress[0] is None
    assert progress[1] is not None


def test_the_body_of_a_loop_has_no_limit() -> None:
    runs: list[Any] = []
    noting = LambdaCallback(on_fit_start=runs.append)
    for _ in quiet(max_steps=2, callbacks=[noting]).steps(Regression(), pairs()):
        assert seen(session._watchdog(1.0, runs[0])._phase) == Phase.OUTSIDE


def test_a_wait_for_a_save_or_a_removal_has_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    main, found = threading.get_ident(), []
    behind = Background()
    behind.start(lambda: found.append(comes_to(Phase.OPAQUE, main)))
    behind.wait()
    assert found == [True]
    remove = shutil.rmtree

    def slowly(path: Any, *arguments: Any, **options: Any) -> None:
        if ".removing" in str(path):
            assert threading.get_ident() != main
            found.append(comes_to(Phase.OPAQUE, main))
        remove(path, *arguments, **options)

    monkeypatch.setattr(filesystem.shutil, "rmtree", slowly)
    policy = CheckpointConfig(every="2 steps", keep_last=1, by=None, asynchronous=True)
    hooked: list[Any] = []
    hook = LambdaCallback(on_checkpoint_saved=lambda _: hooked.append(seen(lambda: phase_of_thread(main)[0])))
    quiet(max_steps=4, run_dir=tmp_path, checkpoint=policy, callbacks=[hook]).fit(Regression(), pairs())
    assert len(found) > 1
    assert all(found)
    assert set(hooked) == {Phase.WORKS}
