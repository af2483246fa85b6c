"""What is recorded of a run, and what is not: times, which are in no two runs the same."""

import time
from typing import Any

import pytest
from tests.testing.resume.test_resumable import Fit, Net, loader, trainer

from drivetrain import Callback, CheckpointConfig
from drivetrain import callbacks as ours
from drivetrain.testing import assert_resumable
from drivetrain.testing.resume.check import Check, check_fit


def every_callback() -> list[Any]:
    log = ours.LambdaCallback(on_log=lambda run: run.log("epoch", run.progress.epoch))
    measure = [ours.CompileTime(), ours.DeviceStats(), ours.GradientNorms(per_layer=True)]
    measure += [
        ours.LearningRateMonitor(),
        ours.MemoryReport(show=False),
        ours.ModelSummary(),
        ours.SlowRank(),
        ours.Throughput(),
    ]
    act = [
        ours.Freeze("*bias", until="3 steps"),
        ours.WeightAverage(decay=0.9),
        ours.Samples([1], every="2 steps", generate=lambda task, prompts: ["one"]),
    ]
    act += [ours.EarlyStopping("validation/loss", patience=9)]
    act += [
        ours.LossSpike(window=10),
        ours.NonFiniteDetector(),
        ours.Profile({"wait": 2, "warmup": 1, "active": 1}),
    ]
    return [*measure, *act, log, ours.ProgressBar()]


@pytest.mark.heavy("a fit with all callbacks, three times")
def test_no_callback_of_the_library_is_taken_for_something_that_was_not_saved() -> None:
    exported = [getattr(ours, name) for name in ours.__all__]
    kinds = {each for each in exported if isinstance(each, type) and issubclass(each, Callback)}
    refused_on_a_cpu = {ours.XLAReport}
    # They need sequences, metrics to draw, a mixture, and a language model.
    others = {Callback, ours.SequenceLength, ours.PlotMetrics, ours.MixtureMonitor, ours.LMEval}
    assert {type(each) for each in every_callback()} >= kinds - others - refused_on_a_cpu

    def make() -> Any:
        made = trainer(callbacks=every_callback(), loggers=("csv", "jsonl"))
        return made, Net(), loader(), loader()

    assert_resumable(make)


class Clock(Callback):  # logs a time, though not at the first log point: a resumed run has it later
    def __init__(self) -> None:
        self.seconds: float | None = None

    def on_log(self, run: Any) -> None:
        if self.seconds is not None:
            run.log("pace/rounded", 0.0)  # equal in all runs by chance
        self.seconds = time.perf_counter()


class Declared(Clock):
    timed_names = ("pace/*",)


def timed(kind: type[Clock]) -> Fit:
    return trainer(callbacks=[kind()]), Net(), loader()


def test_a_callback_can_say_that_it_logs_times() -> None:
    with pytest.raises(AssertionError, match=r"the value 'pace/rounded' of step 6: nothing, expected 0\.0"):
        assert_resumable(lambda: timed(Clock))
    report = check_fit(lambda: timed(Declared), Check(8, 3, ignore=["pace/*"]))
    assert report.is_good
    assert "not compared, since any two runs log different values: pace/*" in str(report)


def test_two_steps_are_enough_also_where_there_are_no_more() -> None:
    def make() -> Fit:
        policy = CheckpointConfig(asynchronous=True)
        return trainer(max_steps=2, checkpoint=policy, callbacks=[ours.Throughput()]), Net(), loader()

    assert_resumable(make, steps=10)
