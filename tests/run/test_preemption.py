"""A signal ends a fit in order, saved, with an exit code that says what to do; a second one at once."""

import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.forked import Forked, undisturbed
from tests.support.fragile import GOOD, NAN, Fragile, marked
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback, PreemptionConfig
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.checkpoint.saving.run_directory import CHECKPOINTS
from drivetrain.core.errors import Preempted
from drivetrain.distributed import signals

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="needs signals")
needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
PROGRAM = Path(__file__).with_name("programs") / "preempted.py"


def hears(number: signal.Signals, hook: str = "on_step_end", step: int = 3) -> LambdaCallback:
    """Let the run hear of a signal, once: its handling is called, and no signal is sent."""
    left = [1]

    def hear(run: Any) -> None:
        if run.progress.steps >= step and left:
            left.pop()
            heard_by = signals.current()
            assert heard_by is not None
            assert number in heard_by.handled
            heard_by._hear(number)

    return LambdaCallback(**{hook: hear})


def saved_at(run_dir: Path) -> int:
    entries = read_index(str(run_dir / CHECKPOINTS))
    assert entries
    return max(each.step for each in entries)


HOOKS = ("on_step_start", "on_step_end", "on_epoch_end", "on_evaluation_start", "on_save")


@pytest.mark.parametrize(
    ("number", "hook"), [*((signal.SIGTERM, hook) for hook in HOOKS), (signal.SIGINT, "on_step_end")]
)
def test_a_signal_ends_a_fit_once_its_step_is_saved_and_a_resume_is_exact(
    tmp_path: Path, number: signal.Signals, hook: str
) -> None:
    straight, task, heard, ends = Regression(), Regression(), list[Any](), list[Any]()
    quiet(max_epochs=3).fit(straight, pairs(), pairs(4))
    noting = LambdaCallback(on_exception=lambda run: heard.append(run.exception), on_fit_end=ends.append)
    options: dict[str, Any] = {"max_epochs": 3, "run_dir": tmp_path, "checkpoint": True}
    kind = Preempted if number is signal.SIGTERM else KeyboardInterrupt
    with pytest.raises(kind) as caught:
        quiet(callbacks=[hears(number, hook), noting], **options).fit(task, pairs(), pairs(4))
    assert getattr(caught.value, "code", None) == (75 if kind is Preempted else None)
    assert heard == [caught.value]
    assert ends == [], "the fit has not come to its end"
    assert not (tmp_path / "model.safetensors").exists()
    assert 3 <= saved_at(tmp_path) <= 6
    quiet(**options).fit(task, pairs(), pairs(4), resume="auto")
    assert weights(task) == weights(straight)


def test_signal_handlers_are_restored_after_a_fit() -> None:
    def own(number: int, frame: Any) -> None:
        """Nothing."""

    before = {each: signal.getsignal(each) for each in signal.valid_signals()}
    with pytest.raises(Preempted):
        quiet(max_epochs=1, callbacks=[hears(signal.SIGTERM)]).fit(Regression(), pairs())
    quiet(max_epochs=1).fit(Regression(), pairs())
    assert {each: signal.getsignal(each) for each in signal.valid_signals()} == before
    assert signal.set_wakeup_fd(-1) == -1
    # One that a callback sets stays.
    sets = LambdaCallback(on_fit_start=lambda run: signal.signal(signal.SIGUSR1, own))
    quiet(max_epochs=1, callbacks=[sets]).fit(Regression(), pairs())
    assert signal.signal(signal.SIGUSR1, before[signal.SIGUSR1]) is own


def test_a_signal_after_the_end_of_the_fit_or_with_a_stop_still_ends_the_program(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options: dict[str, Any] = {"max_epochs": 1, "run_dir": tmp_path, "checkpoint": True}
    with pytest.raises(Preempted):
        quiet(callbacks=[hears(signal.SIGTERM, "on_fit_end")], **options).fit(Regression(), pairs())
    assert (tmp_path / "model.safetensors").exists()
    last = capsys.readouterr().err.splitlines()[-1]
    assert re.search(r"ended by SIGTERM after step 5: the newest .*-00000005; .*; exit code 75$", last), last
    stop = LambdaCallback(on_step_end=lambda run: run.stop("enough"))
    with pytest.raises(Preempted):
        quiet(max_epochs=1, callbacks=[stop, hears(signal.SIGTERM, step=1)]).fit(Regression(), pairs())


@pytest.fixture
def handled() -> Iterator[Callable[..., tuple[signal.Signals, ...] | None]]:
    """Give what a fit handles while it trains; None for nothing."""

    def of_fit(**options: Any) -> tuple[signal.Signals, ...] | None:
        seen: list[Any] = []
        look = LambdaCallback(
            on_step_end=lambda run: seen.append(None if (it := signals.current()) is None else it.handled)
        )
        quiet(max_steps=1, callbacks=[look], **options).fit(Regression(), pairs())
        return seen[0]

    signals._warned.clear()
    yield of_fit
    signals._warned.clear()


def test_which_signals_a_fit_handles(handled: Any) -> None:
    """Not those with a handler of the program, of which it warns once, nor those that are ignored."""
    usual = {signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2}
    assert set(handled()) == usual
    assert handled(preemption=False) is None
    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        with warned("the program has its own handler for SIGUSR1, which stays") as texts:
            assert set(handled()) == set(handled()) == usual - {signal.SIGUSR1}
        assert len(texts) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert set(handled()) == usual - {signal.SIGINT}
    finally:
        signal.signal(signal.SIGINT, before)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(handled()))
    thread.start()
    thread.join()
    assert found == [None], "signals reach the main thread alone"


def test_a_signal_ends_a_steps_loop_likewise(tmp_path: Path) -> None:
    seen = []
    options: dict[str, Any] = {"run_dir": tmp_path, "checkpoint": True, "callbacks": [hears(signal.SIGTERM)]}

    def loop() -> None:
        for result in quiet(max_epochs=3, **options).steps(Regression(), pairs()):
            seen.append(result.step)

    with pytest.raises(Preempted):
        loop()
    assert seen == [0, 1, 2]
    assert saved_at(tmp_path) == 3


def test_preemption_config_takes_names_numbers_and_times() -> None:
    assert PreemptionConfig(requeue="SIGTERM,USR1").requeues == ("SIGTERM", "SIGUSR1"), "as in a command"
    assert PreemptionConfig(deadline="2 minutes").seconds(signal.SIGUSR1) == 120
    config = PreemptionConfig(requeue=["USR1", signal.SIGTERM], stop="SIGINT", deadline=100)
    assert (config.requeue, config.stop) == (("SIGUSR1", "SIGTERM"), ("SIGINT",))
    assert (config.seconds(signal.SIGUSR1), config.seconds(signal.SIGINT)) == (100, None)
    default = PreemptionConfig()
    assert (default.seconds(signal.SIGTERM), default.seconds(signal.SIGUSR1)) == (25, None)


NAMED = "fit(..., resume='runs/Name/checkpoints/step-00000003') goes on from it, or resume='auto' once the"


def test_the_last_line_after_a_signal_says_how_to_resume(capsys: pytest.CaptureFixture[str]) -> None:
    for options, words in (
        ({"run_dir": "run"}, "is run/checkpoints/step-00000003; resume='auto' goes on from it; "),
        ({}, f"{NAMED} Trainer has a run_dir; "),
        ({"checkpoint": False, "run_dir": "run"}, "nothing is saved, by checkpoint=False"),
    ):
        options = {"checkpoint": True, "callbacks": [hears(signal.SIGTERM)], **options}
        with pytest.raises(Preempted):
            quiet(max_epochs=1, **options).fit(Regression(), pairs())
        last = capsys.readouterr().err.splitlines()[-1]
        assert words in re.sub(r"Regression-[\d-]+", "Name", last)
        assert last.endswith("exit code 75")


def test_a_signal_to_a_run_that_is_not_resumable_asks_for_no_restart(tmp_path: Path) -> None:
    options = {"run_dir": tmp_path, "checkpoint": CheckpointConfig(resumable=False, by=None)}
    with pytest.raises(KeyboardInterrupt, match="ended by SIGTERM") as caught:
        quiet(max_epochs=3, callbacks=[hears(signal.SIGTERM)], **options).fit(Regression(), pairs())
    assert saved_at(tmp_path) >= 3
    assert any("no run can go on from it" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("log_every", "step"), [("100 steps", 5), ("3 steps", 6)])
def test_a_signal_after_a_nan_asks_for_no_restart_that_would_meet_the_same(
    log_every: str, step: int, tmp_path: Path
) -> None:  # the NaN is found in the save that the signal asks for, or at a log point just before
    data = marked([NAN if index == 8 else GOOD for index in range(24)], 2)
    policy = CheckpointConfig(every="3 steps", by=None, best=0)
    for number in (signal.SIGTERM, signal.SIGINT):
        options: Any = {"run_dir": tmp_path / number.name, "checkpoint": policy, "on_nonfinite": "stop"}
        trainer = quiet(max_epochs=1, log_every=log_every, callbacks=[hears(number, step=step)], **options)
        if number is signal.SIGTERM:
            told = str(trainer.fit(Fragile(), data).stop_reason)
        else:
            with pytest.raises(KeyboardInterrupt) as caught:
                trainer.fit(Fragile(), data)
            told = caught.value.__notes__[0].removeprefix("drivetrain: ")
        assert told.startswith("NaN or infinite at step 4 on rank 0: 'loss'")
        assert told.endswith("step-00000003")
        assert saved_at(tmp_path / number.name) == 3


def ended(send: Callable[[int], None], words: str, **more: str) -> tuple[int, list[str]]:
    """Run the program, send it signals once it trains; its exit code and errors."""
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    environment = {**undisturbed(), "PYTHONPATH": path, **more}
    process = Forked([str(PROGRAM), *words.split()], Path.cwd(), environment)
    try:
        deadline = time.monotonic() + 240
        while len(list(Path().glob("training-*"))) < int(words.split()[0]):
            assert time.monotonic() < deadline, "it does not train"
            time.sleep(0.02)
        send(process.pid)
        _, errors = process.communicate(timeout=240)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=240)
        raise
    assert process.returncode is not None
    return process.returncode, (errors or "").splitlines()


def to_all(number: int) -> Callable[[int], None]:
    return lambda pid: os.killpg(pid, number)


def to_one(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


@pytest.mark.real
def test_a_program_with_many_open_files_and_its_loader_workers_end_in_order_with_code_75() -> None:
    code, errors = ended(to_all(signal.SIGTERM), "1 cpu 240 2", FILES="many")
    assert code == 75, errors
    assert "ended by SIGTERM after step" in errors[-1]
    assert "resume='auto' goes on from it; exit code 75" in errors[-1]
    assert f"step-{saved_at(Path('run')):08}" in errors[-1]


@pytest.mark.real
def test_the_deadline_ends_a_program_whose_save_takes_too_long() -> None:
    code, errors = ended(to_one(signal.SIGTERM), "1 cpu 1 0", SLOW="600")
    assert code == 75, errors
    assert "the deadline: the fit was after step" in errors[-1]
    assert "the newest checkpoint is" in errors[-1]
    quiet(run_dir="run", max_steps=saved_at(Path("run")) + 1).fit(Regression(), pairs(24), resume="auto")


@pytest.mark.real
@pytest.mark.skipif(sys.platform != "linux", reason="needs pidfd_open")
def test_the_deadline_holds_while_a_line_waits_for_who_reads_it() -> None:
    """The main thread then holds the lock of stderr, which nothing that a signal does may wait for."""

    def unread(pid: int) -> None:
        process = os.pidfd_open(pid)
        os.kill(pid, signal.SIGTERM)
        assert select.select([process], [], [], 240)[0], "it does not end"
        os.close(process)

    code, _ = ended(unread, "1 cpu 1 0", WRITES="much")
    assert code == 75
    assert saved_at(Path("run")) == 2


@pytest.mark.real
def test_a_second_signal_ends_a_program_at_once() -> None:
    def twice(pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGUSR1)

    code, errors = ended(twice, "1 cpu 240 0", SLOW="600")
    assert code == 75, errors
    assert ", the second signal" in errors[-1]


@pytest.mark.real
@needs_gloo
@pytest.mark.parametrize(
    ("send", "code"), [(to_one(signal.SIGUSR1), 75), (to_all(signal.SIGINT), -2)], ids=["one", "all"]
)
def test_a_signal_to_one_rank_or_all_ends_all_ranks_in_order(send: Callable[[int], None], code: int) -> None:
    found, errors = ended(send, "2 ddp 240 0")
    assert found == code, errors
    assert code != 75 or errors[-1].endswith("exit code 75")
    assert saved_at(Path("run")) >= 3
