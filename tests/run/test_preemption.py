"""A signal ends a fit in order, saved, with an exit code that says what to do; a second one at once."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.failing import undisturbed
from tests.support.forked import Forked
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, ConfigError, LambdaCallback, Preempted, PreemptionConfig, Trainer
from drivetrain.checkpoint.locate import CHECKPOINTS
from drivetrain.checkpoint.saving.index import read_index
from drivetrain.distributed import signals

pytestmark = pytest.mark.skipif(
    sys.platform == "win32", reason="needs signals that a process can send itself"
)

needs_gloo = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")


def sends(number: int, hook: str = "on_step_end", update: int = 3) -> LambdaCallback:
    """A callback that sends this process a signal, once."""
    left = [1]

    def send(run: Any) -> None:
        if run.progress.updates >= update and left:
            left.pop()
            os.kill(os.getpid(), number)
            until = time.monotonic() + 2.0
            while not run.stopping.held and time.monotonic() < until:  # a busy machine may hear it late
                time.sleep(0.001)

    return LambdaCallback(**{hook: send})


def saved_at(run_dir: Path) -> int:
    entries = read_index(str(run_dir / CHECKPOINTS))
    assert entries
    return max(each.update for each in entries)


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [
        (signal.SIGTERM, Preempted, 75),
        (signal.SIGUSR1, Preempted, 75),
        (signal.SIGUSR2, Preempted, 75),
        (signal.SIGINT, KeyboardInterrupt, None),
    ],
)
@pytest.mark.parametrize(
    "hook", ["on_step_start", "on_step_end", "on_epoch_end", "on_evaluation_start", "on_save"]
)
def test_a_signal_ends_a_fit_once_its_update_is_saved(
    tmp_path: Path, number: int, kind: type[BaseException], code: int | None, hook: str
) -> None:
    straight, task, heard, ends = Regression(), Regression(), [], []
    quiet(max_epochs=3).fit(straight, pairs(), pairs(4))
    noting = LambdaCallback(
        on_exception=lambda run: heard.append(run.exception), on_fit_end=lambda run: ends.append(run)
    )
    with pytest.raises(kind) as caught:
        quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True, callbacks=[sends(number, hook), noting]).fit(
            task, pairs(), pairs(4)
        )
    assert getattr(caught.value, "code", None) == code
    assert heard == [caught.value]
    assert ends == [], "the fit has not come to its end"
    assert not (tmp_path / "model.safetensors").exists()
    assert 3 <= saved_at(tmp_path) <= 6
    quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True).fit(task, pairs(), pairs(4), resume="auto")
    assert weights(task) == weights(straight)


def test_a_fit_that_a_signal_ends_has_no_time_for_a_first_validation() -> None:
    stages: list[str] = []
    note = LambdaCallback(on_evaluation_start=lambda run: stages.append(run.stage))
    with pytest.raises(Preempted):
        quiet(max_epochs=1, callbacks=[sends(signal.SIGTERM), note]).fit(Regression(), pairs(), pairs())
    assert stages == []


def test_what_was_there_before_is_there_afterwards() -> None:
    before = {each: signal.getsignal(each) for each in signal.valid_signals()}
    with pytest.raises(Preempted):
        quiet(max_epochs=1, callbacks=[sends(signal.SIGTERM)]).fit(Regression(), pairs())
    assert {each: signal.getsignal(each) for each in signal.valid_signals()} == before
    assert signal.set_wakeup_fd(-1) == -1
    quiet(max_epochs=1).fit(Regression(), pairs())
    assert {each: signal.getsignal(each) for each in signal.valid_signals()} == before


def test_without_it_signals_do_what_they_do() -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        quiet(max_epochs=1, preemption=False, callbacks=[sends(signal.SIGINT)]).fit(Regression(), pairs())
    assert not caught.value.args, "raised where it came, and not at the end of the update"


def test_a_signal_that_comes_when_the_fit_is_over_is_not_lost(tmp_path: Path) -> None:
    trainer = quiet(
        max_epochs=1, run_dir=tmp_path, checkpoint=True, callbacks=[sends(signal.SIGTERM, "on_fit_end")]
    )
    with pytest.raises(Preempted):
        trainer.fit(Regression(), pairs())
    assert (tmp_path / "model.safetensors").exists()


def test_a_stop_and_a_signal_at_once_end_the_program() -> None:
    def stop(run: Any) -> None:
        run.stop("enough")

    with pytest.raises(Preempted):
        quiet(
            max_epochs=1, callbacks=[LambdaCallback(on_step_end=stop), sends(signal.SIGTERM, update=1)]
        ).fit(Regression(), pairs())


@pytest.fixture
def untold() -> Iterator[None]:
    signals._warned.clear()
    yield
    signals._warned.clear()


def test_a_handler_of_the_programs_own_stays_and_that_is_said_once(untold: None) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    trainer = quiet(max_epochs=1, callbacks=[sends(signal.SIGUSR1)])
    try:
        with warned("the program has its own handler for SIGUSR1, which stays"):
            assert trainer.fit(Regression(), pairs()).progress.updates == 5
        quiet(max_epochs=1).fit(Regression(), pairs())
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert heard == [signal.SIGUSR1]


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of handlers that are not Python's")
def test_a_handler_that_is_not_pythons_stays_too(untold: None) -> None:
    with open("stacks.txt", "w", encoding="utf-8") as file:
        faulthandler.register(signal.SIGUSR2, file=file)
        try:
            with warned("the program has its own handler for SIGUSR2, which stays"):
                quiet(max_epochs=1, callbacks=[sends(signal.SIGUSR2)]).fit(Regression(), pairs())
        finally:
            faulthandler.unregister(signal.SIGUSR2)
    assert "most recent call first" in Path("stacks.txt").read_text(encoding="utf-8")


def test_an_ignored_signal_stays_ignored() -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        result = quiet(max_epochs=1, callbacks=[sends(signal.SIGINT)]).fit(Regression(), pairs())
    finally:
        signal.signal(signal.SIGINT, before)
    assert result.progress.updates == 5


def test_a_handler_that_a_callback_sets_is_not_taken_away() -> None:
    def own(number: int, frame: Any) -> None:
        """Nothing."""

    before = signal.getsignal(signal.SIGUSR1)
    quiet(
        max_epochs=1, callbacks=[LambdaCallback(on_fit_start=lambda run: signal.signal(signal.SIGUSR1, own))]
    ).fit(Regression(), pairs())
    assert signal.signal(signal.SIGUSR1, before) is own


def test_in_another_thread_there_are_no_signals(untold: None) -> None:
    found: list[Any] = []

    def fit(**options: Any) -> None:
        found.append(quiet(max_epochs=1, **options).fit(Regression(), pairs()).progress.updates)

    thread = threading.Thread(target=fit)
    thread.start()
    thread.join()
    assert found == [5]


def test_a_loop_of_ones_own_ends_likewise(tmp_path: Path) -> None:
    seen = []

    def loop() -> None:
        for step in quiet(max_epochs=3, run_dir=tmp_path, checkpoint=True).steps(Regression(), pairs()):
            seen.append(step.update)
            if step.update == 3:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)

    with pytest.raises(Preempted):
        loop()
    assert seen == [0, 1, 2, 3]
    assert saved_at(tmp_path) == 4


def test_workers_of_the_data_are_not_ended_with_the_group(tmp_path: Path) -> None:
    """They leave it, so that what is sent to all ends them through the fit alone."""

    def groups(run: Any) -> None:
        if run.progress.updates == 2:
            for each in torch.multiprocessing.active_children():
                found.append(os.getpgid(each.pid) == os.getpgid(0))

    found: list[bool] = []
    quiet(max_epochs=1, callbacks=[LambdaCallback(on_step_end=groups)]).fit(
        Regression(), pairs(40, num_workers=2)
    )
    assert found == [False, False]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"requeue": "SIGTREM"}, "Did you mean 'SIGTERM'"),
        ({"requeue": ["SIGKILL"]}, "unknown signal"),
        ({"stop": ["TERM"]}, "SIGTERM is in both requeue and stop"),
        ({"deadline": 0}, "above 0"),
        ({"deadline": "soon"}, "must be a time such as 30 or '2 minutes', 'auto' or None, not 'soon'"),
        ({"requeue": 3.5}, "takes signals"),
        ({"requeue_signal": "SIGUSR1"}, "Here it is called 'requeue'"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PreemptionConfig(**options)


def test_signals_are_given_by_name_or_number() -> None:
    assert PreemptionConfig(requeue="SIGTERM,USR1").requeues == ("SIGTERM", "SIGUSR1"), "as in a command"
    assert PreemptionConfig(deadline="2 minutes").seconds(signal.SIGUSR1) == 120
    config = PreemptionConfig(requeue=["USR1", signal.SIGTERM], stop="SIGINT", deadline=100)
    assert (config.requeue, config.stop) == (("SIGUSR1", "SIGTERM"), ("SIGINT",))
    assert config.seconds(signal.SIGUSR1) == 100
    assert config.seconds(signal.SIGINT) is None
    assert PreemptionConfig().seconds(signal.SIGTERM) == 25
    assert PreemptionConfig().seconds(signal.SIGUSR1) is None
    with pytest.raises(ConfigError, match="preemption has no option 'dead_line'"):
        Trainer(preemption={"dead_line": 3})


PROGRAM = """
import os, sys, time
from tests.support.tasks import Regression, pairs
from drivetrain import CheckpointConfig, LambdaCallback, Trainer

def act(run):
    if run.progress.updates >= 3:
        with open(f"pid-{run.engine.strategy.rank}", "w") as file:
            file.write(str(os.getpid()))
        os.replace(file.name, f"training-{run.engine.strategy.rank}")
    time.sleep(0.03)

def slow(run):
    if run.stop_reason and os.environ.get("SLOW") and run.engine.strategy.rank == size - 1:
        time.sleep(float(os.environ["SLOW"]))

size = int(sys.argv[1])
trainer = Trainer(
    max_epochs=1000, strategy=sys.argv[2], devices=size, progress_bar=False, loggers=(), run_dir="run",
    checkpoint=CheckpointConfig(every="2 steps", by=None, resumable=not os.environ.get("WEIGHTS_ALONE")),
    callbacks=[LambdaCallback(on_step_end=act, on_save=slow)], preemption={"deadline": float(sys.argv[3])},
)
trainer.fit(Regression(), pairs(24, num_workers=int(sys.argv[4])), resume="auto")
"""


def ended(
    send: Callable[[int], None], words: list[str], launcher: list[str] | None = None, **variables: str
) -> tuple[int, list[str], float]:
    """A program that trains, once signals were sent: its exit code, its errors, how long that took."""
    Path("program.py").write_text(PROGRAM, encoding="utf-8")
    for each in Path().glob("training-*"):
        each.unlink()
    root = str(Path(__file__).parents[2])
    path = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    environment = {**undisturbed(), "PYTHONPATH": path, **variables}
    process: Forked | subprocess.Popen[str]
    if launcher is None:
        process = Forked(["program.py", *words], Path.cwd(), environment)
    else:
        process = subprocess.Popen(
            [sys.executable, *launcher, "program.py", *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + 60
        while len(list(Path().glob("training-*"))) < int(words[0]) and time.monotonic() < deadline:
            time.sleep(0.02)
        began = time.monotonic()
        send(process.pid)
        _, errors = process.communicate(timeout=240)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate(timeout=240)
        raise
    return process.returncode, errors.splitlines(), time.monotonic() - began


def to_all(number: int) -> Callable[[int], None]:
    return lambda pid: os.killpg(pid, number)


def to_one(number: int) -> Callable[[int], None]:
    return lambda pid: os.kill(pid, number)


@pytest.mark.full
def test_a_group_of_a_process_and_its_workers_ends_in_order() -> None:
    code, errors, _ = ended(to_all(signal.SIGTERM), ["1", "cpu", "20", "2"])
    assert code == 75, errors
    assert "ended by SIGTERM after update" in errors[-1]
    assert "resume='auto' goes on from it; exit code 75" in errors[-1]
    assert f"update-{saved_at(Path('run')):08}" in errors[-1]


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"run_dir": "run"}, "is run/checkpoints/update-00000003; resume='auto' goes on from it"),
        (
            {},
            (
                "fit(..., resume='runs/Name/checkpoints/update-00000003') goes on from it, or resume='auto'"
                " once the Trainer has a run_dir"
            ),
        ),
        (
            {"checkpoint": False, "run_dir": "run"},
            "nothing is saved, by checkpoint=False, and a program that is started again begins anew",
        ),
    ],
)
def test_the_last_words_say_what_goes_on(
    options: dict[str, Any], left: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trainer = Trainer(
        max_epochs=1,
        strategy="cpu",
        progress_bar=False,
        loggers=(),
        callbacks=[sends(signal.SIGTERM)],
        **options,
    )
    with pytest.raises(Preempted) as caught:
        trainer.fit(Regression(), pairs())
    told = re.sub(r"Regression-[\d-]+", "Name", capsys.readouterr().err.splitlines()[-1])
    assert told.endswith(f"{left}; exit code 75")
    notes = re.sub(r"Regression-[\d-]+", "Name", "".join(caught.value.__notes__))
    assert (left.partition(" is ")[2] or left) in notes or "nothing" in left


def test_the_deadline_ends_a_program_whose_save_takes_too_long() -> None:
    code, errors, took = ended(to_one(signal.SIGTERM), ["1", "cpu", "1", "0"], SLOW="120")
    assert code == 75, errors
    assert took < 60
    assert "the deadline: the fit was after update" in errors[-1]
    assert "the newest checkpoint is" in errors[-1]
    Trainer(run_dir="run", max_steps=saved_at(Path("run")) + 1, progress_bar=False, loggers=()).fit(
        Regression(), pairs(24), resume="auto"
    )


@needs_gloo
def test_the_deadline_of_one_rank_names_the_newest_checkpoint_on_the_last_line() -> None:
    def send(pid: int) -> None:
        os.kill(int(Path("training-1").read_text(encoding="utf-8")), signal.SIGTERM)

    code, errors, _ = ended(send, ["2", "ddp", "2", "0"], SLOW="120")
    assert code == 75, errors
    assert errors[-1].startswith(
        "drivetrain: ended by SIGTERM: a process failed before all was saved: the fit"
    )
    assert "the newest checkpoint is" in errors[-1]
    assert errors[-1].endswith("exit code 75")


def test_a_second_signal_ends_a_program_at_once() -> None:
    def twice(pid: int) -> None:
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.8)
        os.kill(pid, signal.SIGTERM)

    code, errors, took = ended(twice, ["1", "cpu", "60", "0"], SLOW="120")
    assert code == 75, errors
    assert took < 60
    assert "SIGTERM, the second signal" in errors[-1]


WRITES = PROGRAM.replace(
    "    time.sleep(0.03)", "    if run.progress.updates == 3: print('x' * (1 << 20), file=sys.stderr)"
)


@pytest.mark.parametrize(
    ("reads", "signals_", "deadline"), [(True, 1, "60"), (False, 2, "60"), (False, 1, "2")]
)
def test_a_signal_is_heard_while_a_line_waits_for_who_reads_it(
    reads: bool, signals_: int, deadline: str
) -> None:
    """The main thread then holds the lock of stderr, which nothing that a signal does may wait for."""
    Path("program.py").write_text(WRITES, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "program.py", "1", "cpu", deadline, "0"],
        stderr=subprocess.PIPE,
        text=True,
        env={**undisturbed(), "PYTHONPATH": path, "PYTHONUNBUFFERED": ""},
    )
    try:
        while not Path("training-0").exists():
            assert process.poll() is None
            time.sleep(0.02)
        for _ in range(signals_):
            time.sleep(0.8)
            process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=240)[1] if reads else ""
        assert process.wait(timeout=240) == 75, errors
    finally:
        process.kill()
        process.communicate()
    if reads:
        assert "ended by SIGTERM after update" in errors.splitlines()[-1]
        assert saved_at(Path("run")) >= 3, "and not only what was saved before"
    else:
        assert saved_at(Path("run")) == 2


TEES = """
import sys

class Tee:
    def __init__(self, stream):
        self.stream = stream

    def write(self, text):
        return self.stream.write(text)

    def flush(self):
        self.stream.flush()

sys.stderr = Tee(sys.stderr)
"""


@pytest.mark.full
def test_a_deadline_holds_where_stderr_is_something_else(tmp_path: Path) -> None:
    Path("program.py").write_text(TEES + WRITES, encoding="utf-8")
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    process = subprocess.Popen(
        [sys.executable, "program.py", "1", "cpu", "1", "0"],
        stderr=subprocess.PIPE,
        env={**undisturbed(), "PYTHONPATH": path, "PYTHONUNBUFFERED": ""},
    )
    try:
        while not Path("training-0").exists():
            assert process.poll() is None
            time.sleep(0.02)
        time.sleep(0.8)
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=240) == 75
    finally:
        process.kill()
        process.communicate()


def test_a_signal_is_heard_with_more_files_open_than_select_takes(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        with pytest.raises(Preempted):
            quiet(max_epochs=1, run_dir=tmp_path, checkpoint=True, callbacks=[sends(signal.SIGTERM)]).fit(
                Regression(), pairs()
            )
    finally:
        for each in files:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert saved_at(tmp_path) >= 3


@needs_gloo
@pytest.mark.parametrize(
    ("strategy", "send", "code"),
    [
        ("ddp", to_one(signal.SIGUSR1), 75),
        ("fsdp", to_all(signal.SIGTERM), 75),
        ("ddp", to_all(signal.SIGINT), -2),
    ],
)
def test_all_ranks_end_in_order(strategy: str, send: Callable[[int], None], code: int) -> None:
    found, errors, _ = ended(send, ["2", strategy, "20", "0"])
    assert found == code, errors
    if code == 75:
        assert errors[-1].endswith("exit code 75")
    saved_at(Path("run"))


@pytest.mark.full
@needs_gloo
def test_the_launcher_passes_a_signal_on_and_starts_nothing_again() -> None:
    launcher = ["-m", "drivetrain", "launch", "--devices", "2", "--max-restarts", "2"]
    code, errors, _ = ended(to_one(signal.SIGTERM), ["2", "ddp", "20", "0"], launcher)
    assert code == 75, errors
    assert errors[-1].endswith("exit code 75")
    assert not any("started again" in each for each in errors)


def test_a_run_that_nothing_can_resume_is_not_to_be_started_again(tmp_path: Path) -> None:
    policy = CheckpointConfig(resumable=False, by=None)
    trainer = quiet(max_epochs=3, run_dir=tmp_path, checkpoint=policy, callbacks=[sends(signal.SIGTERM)])
    with pytest.raises(KeyboardInterrupt, match="ended by SIGTERM") as caught:
        trainer.fit(Regression(), pairs())
    assert saved_at(tmp_path) >= 3
    assert any("no run can go on from it" in note for note in caught.value.__notes__)


@needs_gloo
@pytest.mark.parametrize(
    ("words", "variables", "code"),
    [
        (["1", "cpu", "20", "0"], {}, -2),
        (["2", "ddp", "20", "0"], {}, -2),
        (["1", "cpu", "1", "0"], {"SLOW": "30"}, 130),  # the deadline passes in the save
    ],
)
def test_the_exit_code_of_a_run_that_nothing_can_resume_does_not_ask_for_a_restart(
    words: list[str], variables: dict[str, str], code: int
) -> None:
    found, errors, _ = ended(to_one(signal.SIGTERM), words, WEIGHTS_ALONE="1", **variables)
    assert found == code, errors
    assert not any("exit code 75" in each for each in errors)
    saved_at(Path("run"))
