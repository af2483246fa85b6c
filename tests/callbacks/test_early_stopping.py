"""Early stopping: when it stops a fit, and when it must not."""

import math

import pytest
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import ConfigError, EarlyStopping, NonFiniteError
from drivetrain.callbacks import DeviceStats

NAN, INF = math.nan, math.inf


def losses(*values):
    return [{"loss": value} for value in values]


def fit(drive, stopping, *values, **arguments):
    """A fit of one step an epoch; the values are the losses of its validations, or all their metrics."""
    results = values if isinstance(values[0], dict) else losses(*values)
    return drive(stopping, epochs=len(values), steps_per_epoch=1, results=results, **arguments).fit()


def train(drive, stopping, losses, **arguments):
    left = list(losses)
    step = lambda task, batch: left.pop(0) + 0.0 * task(batch).sum()  # noqa: E731
    return drive(stopping, step=step, **arguments).fit()


def test_stops_after_patience_evaluations_without_improvement(drive):
    run = fit(drive, EarlyStopping(patience=2), 0.5, 0.31, 0.4, 0.35, 0.1)
    assert run.progress.epoch == 4
    assert run.stopped_early == "early stopping: validation/loss did not improve on 0.31 for 2 evaluations"
    # An improvement starts the count again.
    assert fit(drive, EarlyStopping(patience=2), 0.5, 0.6, 0.4, 0.6, 0.3, 0.6).stopped_early is None
    assert fit(drive, EarlyStopping(patience=1, min_epochs=4), 0.5, *[0.6] * 4).progress.epoch == 4
    stopping = EarlyStopping("validation/accuracy", mode="max", patience=1)
    values = [{"loss": 1.0, "accuracy": value} for value in (0.5, 0.6, 0.7, 0.6, 0.9)]
    assert fit(drive, stopping, *values).progress.epoch == 4
    assert stopping.best == pytest.approx(0.7)


def test_an_improvement_must_exceed_the_threshold(drive):
    for mode, threshold_mode, first, too_little, enough in (
        ("min", "abs", 1.0, 0.91, 0.89),
        ("max", "rel", 10.0, 10.9, 11.1),
        # With a negative best value a plain factor would turn the threshold's sense around.
        ("min", "rel", -10.0, -10.9, -11.1),
        ("max", "rel", -10.0, -9.1, -8.9),
    ):
        for second, stops in ((too_little, True), (enough, False)):
            stopping = EarlyStopping(mode=mode, patience=1, threshold=0.1, threshold_mode=threshold_mode)
            assert (fit(drive, stopping, first, second).stopped_early is not None) == stops, (mode, first)


def test_nan_counts_as_no_improvement_and_the_reason_says_so(drive):
    run = fit(drive, EarlyStopping(patience=2), 0.5, NAN, NAN, 0.1, on_nonfinite="skip")
    assert run.progress.epoch == 3
    assert run.stopped_early.endswith("did not improve on 0.5 for 2 evaluations; it is nan now")
    run = fit(drive, EarlyStopping(patience=1), NAN, 0.1, on_nonfinite="skip")
    assert run.stopped_early == "early stopping: validation/loss was not finite for 1 evaluation; it is nan"
    stopping = EarlyStopping(patience=2)  # a value after nan can still improve
    assert fit(drive, stopping, NAN, 0.5, INF, 0.4, on_nonfinite="skip").stopped_early is None


def test_a_metric_that_is_not_finite_ends_the_fit_as_on_nonfinite_and_check_finite_say(drive):
    values = [{"loss": 1.0, "f1": each} for each in (0.5, NAN, INF, 0.7)]
    stopping = EarlyStopping("validation/f1", patience=3)
    run = fit(drive, stopping, *values, on_nonfinite="stop")
    assert (run.progress.epoch, run.stopped_early) == (2, "'validation/f1' is nan after step 2")
    with pytest.raises(NonFiniteError, match="'validation/f1' is inf after step 1"):
        fit(drive, stopping, *values[2:])
    options = {"mode": "max", "patience": 2, "check_finite": False, "stop_at": 0.9}
    assert fit(drive, EarlyStopping("validation/f1", **options), *values).progress.epoch == 3
    with pytest.raises(NonFiniteError, match="'validation/loss' is nan"):  # a loss in any case
        fit(drive, EarlyStopping(check_finite=False), 0.5, NAN, 0.1)


def test_stop_at_and_diverged_at_stop_at_once(drive, tmp_path):
    run = fit(drive, EarlyStopping(stop_at=0.25), 0.5, 0.25, 0.125)
    assert run.progress.epoch == 2
    assert run.stopped_early == "early stopping: validation/loss is 0.25 and reached 0.25"
    for mode, limit, values, epoch in (
        ("min", 0.6, (0.5, 0.55, 0.6, 0.1), 3),
        ("max", 0.125, (0.5, 0.25, 0.125, 0.9), 3),
        ("min", 9.0, (8.9,), 1),
    ):
        run = fit(drive, EarlyStopping(mode=mode, patience=9, diverged_at=limit), *values)
        assert run.progress.epoch == epoch
        told = f"early stopping: validation/loss is {limit:.6g}, diverged beyond {limit:.6g}"
        assert run.stopped_early == (told if len(values) > 1 else None)
    # A run that diverged stays stopped when it is resumed.
    given = {"patience": 9, "diverged_at": 5.0}
    fit(drive, EarlyStopping(**given), 0.5, 6.0, 0.1, run_dir=tmp_path)
    run = drive(EarlyStopping(**given), epochs=9, steps_per_epoch=1, results=losses(0.1), run_dir=tmp_path)
    assert run.fit(resume="auto").progress.epoch == 2


def test_resumed_fit_stops_where_the_undisturbed_one_does_with_the_same_weights(tmp_path):
    def stopped(name, **options):
        task = Regression(dropout=0.5)
        options = {"max_epochs": 20, "log_every": "2 steps", "checkpoint": True, **options}
        stopping = [EarlyStopping("train/loss", patience=4)]
        trainer = quiet(**options, run_dir=tmp_path / name, callbacks=stopping)
        result = trainer.fit(task, pairs(), resume="auto")
        return result.progress.steps, result.stop_reason, weights(task)

    straight = stopped("straight")
    assert "did not improve" in straight[1]
    for steps in range(3, straight[0], 4):
        stopped("parts", max_steps=steps)
    assert stopped("parts") == straight


def test_a_second_fit_begins_anew_and_a_validation_outside_a_fit_changes_nothing(drive):
    stopping = EarlyStopping(patience=2)
    assert fit(drive, stopping, 0.1, 0.2, 0.2).stopped_early is not None
    run = fit(drive, stopping, 0.5, 0.4, 0.3)
    assert run.stopped_early is None
    run.task.results = losses(0.9)
    assert run.trainer.validate(run.task, run.validation_data)["validation/loss"] == pytest.approx(0.9)
    assert (stopping.best, stopping.without_improvement) == (pytest.approx(0.3), 0)


def test_a_metric_that_is_not_logged_is_refused_at_the_first_evaluation_with_the_nearest(drive):
    run = drive(EarlyStopping("validation/los"), epochs=2, steps_per_epoch=1, results=losses(0.5, 0.4))
    with pytest.raises(ConfigError, match=r"'validation/los', .*Did you mean 'validation/loss'"):
        run.fit()
    assert run.progress.epoch == 1
    losses_of, callbacks = [], [EarlyStopping("los"), DeviceStats()]
    task = variant(
        loss=lambda self, *given: losses_of.append(Regression.loss(self, *given)) or losses_of[-1]
    )()
    with pytest.raises(ConfigError, match="'los'"):
        quiet(max_epochs=3, callbacks=callbacks).fit(task, pairs(4), pairs(4))
    assert len(losses_of) == 4  # of one epoch: no callback of ours logs such a name
    with pytest.raises(ConfigError, match=r"'train/los', .* Did you mean 'train/loss'"):
        train(drive, EarlyStopping("train/los"), [0.5] * 4)
    run = drive(EarlyStopping())
    with pytest.raises(ConfigError, match=r"this fit never validates\. Give `fit` validation_data"):
        run.fit()
    assert run.progress.steps == 0


def test_a_metric_of_training_is_judged_at_log_points_and_at_the_end_of_long_epochs(drive):
    stopping = EarlyStopping("train/loss", patience=2)
    run = train(drive, stopping, [0.5, 0.3, 0.4, 0.35, 0.1, 0.1], steps_per_epoch=6, log_every=1)
    assert run.progress.steps == 4
    assert run.stopped_early == "early stopping: train/loss did not improve on 0.3 for 2 log points"
    values = [3.0, 1.0, 1.0, 2.0, 1.0, 2.0, 9.0, 9.0]  # means of an epoch: 2, 1.5, 1.5, 9
    stopping = EarlyStopping("train/loss", patience=1)
    run = train(drive, stopping, values, epochs=4, steps_per_epoch=2, log_every=50)
    assert run.progress.epoch == 3
    assert run.stopped_early == "early stopping: train/loss did not improve on 1.5 for 1 log point"
