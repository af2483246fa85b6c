"""Early stopping: when it stops a fit, and when it must not."""

import math

import pytest
from tests.support.outcome import weights
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.callbacks import EarlyStopping
from drivetrain.core.errors import ConfigError, NonFiniteError
from drivetrain.testing.distributed import run_distributed


def losses(*values):
    return [{"loss": value} for value in values]


def fit(drive, stopping, *values, **arguments):
    return drive(
        stopping, epochs=len(values), updates_per_epoch=1, results=losses(*values), **arguments
    ).fit()


def test_a_fit_stops_after_patience_validations_without_improvement(drive):
    run = fit(drive, EarlyStopping(patience=2), 0.5, 0.31, 0.4, 0.35, 0.1)
    assert run.progress.epoch == 4
    assert run.stopped_early == "early stopping: validation/loss did not improve on 0.31 for 2 evaluations"


def test_an_improvement_starts_the_count_again(drive):
    run = fit(drive, EarlyStopping(patience=2), 0.5, 0.6, 0.4, 0.6, 0.3, 0.6)
    assert run.stopped_early is None


def test_mode_max_takes_more_for_better(drive):
    values = [{"loss": 1.0, "accuracy": value} for value in (0.5, 0.6, 0.7, 0.6, 0.9)]
    stopping = EarlyStopping("validation/accuracy", mode="max", patience=1)
    run = drive(stopping, epochs=5, updates_per_epoch=1, results=values).fit()
    assert run.progress.epoch == 4
    assert stopping.best == pytest.approx(0.7)


@pytest.mark.parametrize(
    ("mode", "threshold_mode", "first", "too_little", "enough"),
    [
        ("min", "abs", 1.0, 0.91, 0.89),
        ("max", "abs", 1.0, 1.09, 1.11),
        ("min", "rel", 10.0, 9.1, 8.9),
        ("max", "rel", 10.0, 10.9, 11.1),
        # With a negative best value a plain factor would turn the threshold's sense around.
        ("min", "rel", -10.0, -10.9, -11.1),
        ("max", "rel", -10.0, -9.1, -8.9),
    ],
)
def test_an_improvement_must_exceed_the_threshold(drive, mode, threshold_mode, first, too_little, enough):
    def stops(second):
        stopping = EarlyStopping(mode=mode, patience=1, threshold=0.1, threshold_mode=threshold_mode)
        return fit(drive, stopping, first, second).stopped_early is not None

    assert stops(too_little)
    assert not stops(enough)


def test_nan_counts_as_no_improvement_and_the_reason_says_so(drive):
    run = fit(drive, EarlyStopping(patience=2), 0.5, math.nan, math.nan, 0.1, on_nonfinite="skip")
    assert run.progress.epoch == 3
    assert run.stopped_early == (
        "early stopping: validation/loss did not improve on 0.5 for 2 evaluations; it is nan now"
    )


def test_a_metric_that_is_never_finite_stops_the_fit(drive):
    run = fit(drive, EarlyStopping(patience=1), math.nan, 0.1, on_nonfinite="skip")
    assert run.stopped_early == "early stopping: validation/loss was not finite for 1 evaluation; it is nan"


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_metric_that_is_not_finite_ends_the_fit_as_on_nonfinite_says(drive, value):
    values = [{"loss": 1.0, "f1": each} for each in (0.5, value, 0.7)]
    arguments = {"epochs": 3, "updates_per_epoch": 1, "results": values}
    stopping = EarlyStopping("validation/f1", patience=3)
    run = drive(stopping, on_nonfinite="stop", **arguments).fit()
    assert run.progress.epoch == 2
    assert run.stopped_early == f"'validation/f1' is {value} after update 2"
    with pytest.raises(NonFiniteError, match=f"'validation/f1' is {value} after update 2"):
        drive(stopping, **arguments).fit()


def test_a_value_after_nan_can_still_improve(drive):
    stopping = EarlyStopping(patience=2)
    run = fit(drive, stopping, math.nan, 0.5, math.inf, 0.4, on_nonfinite="skip")
    assert run.stopped_early is None
    assert stopping.best == pytest.approx(0.4)


def test_reaching_a_value_that_is_good_enough_stops_at_once(drive):
    run = fit(drive, EarlyStopping(stop_at=0.25), 0.5, 0.25, 0.125)
    assert run.progress.epoch == 2
    assert run.stopped_early == "early stopping: validation/loss is 0.25 and reached 0.25"


@pytest.mark.parametrize(
    ("mode", "limit", "values", "epoch"),
    [
        ("min", 0.6, (0.5, 0.55, 0.6, 0.1), 3),
        ("max", 0.125, (0.5, 0.25, 0.125, 0.9), 3),
        ("min", 9.0, (8.9,), 1),
    ],
)
def test_a_value_that_is_bad_enough_stops_at_once(drive, mode, limit, values, epoch):
    run = fit(drive, EarlyStopping(mode=mode, patience=9, diverged_at=limit), *values)
    assert run.progress.epoch == epoch
    told = f"early stopping: validation/loss is {limit:.6g} and diverged beyond {limit:.6g}"
    assert run.stopped_early == (told if len(values) > 1 else None)


def test_a_run_that_diverged_stays_stopped_when_it_is_resumed(drive, tmp_path):
    stopping = lambda: EarlyStopping(patience=9, diverged_at=5.0)  # noqa: E731
    assert fit(drive, stopping(), 0.5, 6.0, 0.1, run_dir=tmp_path).progress.epoch == 2
    resumed = drive(stopping(), epochs=9, updates_per_epoch=1, results=losses(0.1), run_dir=tmp_path)
    assert resumed.fit(resume="auto").progress.epoch == 2


def test_without_check_finite_a_metric_that_is_not_finite_is_no_improvement(drive):
    values = [{"loss": 1.0, "f1": each} for each in (0.5, math.nan, math.inf, 0.7)]
    stopping = EarlyStopping("validation/f1", mode="max", patience=2, check_finite=False, stop_at=0.9)
    run = drive(stopping, epochs=4, updates_per_epoch=1, results=values).fit()
    assert run.progress.epoch == 3
    assert run.stopped_early.endswith("did not improve on 0.5 for 2 evaluations; it is inf now")


def test_a_loss_of_a_validation_that_is_not_finite_ends_the_fit_in_any_case(drive):
    with pytest.raises(NonFiniteError, match="'validation/loss' is nan"):
        fit(drive, EarlyStopping(check_finite=False), 0.5, math.nan, 0.1)


def test_a_metric_that_need_not_be_logged_is_judged_where_it_is(drive):
    assert fit(drive, EarlyStopping("validation/f1", strict=False), 0.5, 0.6).stopped_early is None
    values = [{"loss": 1.0}, {"loss": 1.0, "f1": 0.5}, {"loss": 1.0}, {"loss": 1.0, "f1": 0.6}]
    run = drive(
        EarlyStopping("validation/f1", patience=1, strict=False),
        epochs=4,
        updates_per_epoch=1,
        results=values,
    ).fit()
    assert run.progress.epoch == 4
    assert run.stopped_early == "early stopping: validation/f1 did not improve on 0.5 for 1 evaluation"
    assert drive(EarlyStopping(strict=False)).fit().stopped_early is None, "it never validates"


def stop_on_two(run_dir):
    class Uneven(Regression):
        def training_step(self, batch):
            return self(batch[0]).square().mean()  # other values on each rank

    stopping = EarlyStopping("train/loss", patience=2, threshold=10.0)
    trainer = quiet(
        strategy="ddp",
        devices=2,
        max_epochs=4,
        log_every=1,
        callbacks=[stopping],
        run_dir=run_dir,
        checkpoint=True,
    )
    result = trainer.fit(Uneven(), pairs(12))
    return result.progress.updates, result.stop_reason


def test_all_ranks_stop_after_the_same_update(tmp_path):
    first, second = run_distributed(stop_on_two, tmp_path, world_size=2)
    assert first == second
    assert first[0] == 3
    assert "did not improve" in first[1]


def test_a_resumed_fit_stops_where_the_undisturbed_one_does_with_the_same_weights(tmp_path):
    def stopped(name, **options):
        task = Regression(dropout=0.5)
        trainer = quiet(
            **{
                "max_epochs": 20,
                "log_every": "2 steps",
                "run_dir": tmp_path / name,
                "checkpoint": True,
                **options,
            },
            callbacks=[EarlyStopping("train/loss", patience=4)],
        )
        result = trainer.fit(task, pairs(), resume="auto")
        return result.progress.updates, result.stop_reason, weights(task)

    straight = stopped("straight")
    assert "did not improve" in straight[1]
    for updates in range(3, straight[0], 4):
        stopped("parts", max_steps=updates)
    assert stopped("parts") == straight


def test_no_stop_before_min_epochs(drive):
    run = fit(drive, EarlyStopping(patience=1, min_epochs=4), 0.5, 0.6, 0.6, 0.6, 0.6)
    assert run.progress.epoch == 4


def test_a_resumed_fit_goes_on_counting(drive, tmp_path):
    fit(drive, EarlyStopping(patience=3), 0.5, 0.6, 0.6, run_dir=tmp_path)
    resumed = drive(
        EarlyStopping(patience=3), epochs=9, updates_per_epoch=1, results=losses(0.6, 0.6), run_dir=tmp_path
    ).fit(resume="auto")
    assert resumed.progress.epoch == 4
    assert resumed.stopped_early == (
        "early stopping: validation/loss did not improve on 0.5 for 3 evaluations"
    )


def test_a_second_fit_with_the_same_callback_begins_anew(drive):
    stopping = EarlyStopping(patience=2)
    assert fit(drive, stopping, 0.1, 0.2, 0.2).stopped_early is not None
    assert fit(drive, stopping, 0.5, 0.4, 0.3).stopped_early is None
    assert stopping.best == pytest.approx(0.3)


def test_validating_outside_a_fit_changes_nothing(drive):
    stopping = EarlyStopping(patience=1)
    run = fit(drive, stopping, 0.1)
    run.task.results = losses(0.9)
    assert run.trainer.validate(run.task, run.validation_data)["validation/loss"] == pytest.approx(0.9)
    assert (stopping.best, stopping.without_improvement) == (pytest.approx(0.1), 0)


def test_a_metric_that_is_not_logged_is_told_the_nearest(drive):
    run = drive(EarlyStopping("validation/los"), epochs=2, updates_per_epoch=1, results=losses(0.5, 0.4))
    with pytest.raises(
        ConfigError, match=r"'validation/los', which is not logged. Did you mean 'validation/loss'"
    ):
        run.fit()
    assert run.progress.epoch == 1  # at the first validation, not at the end


def test_a_fit_that_never_validates_is_refused_before_it_trains(drive):
    run = drive(EarlyStopping())
    with pytest.raises(ConfigError, match=r"this fit never validates\. Give `fit` validation_data"):
        run.fit()
    assert run.progress.updates == 0


def train(drive, stopping, losses, **arguments):
    """A fit without validation; `losses` are those of its updates."""
    left = list(losses)
    step = lambda task, batch: left.pop(0) + 0.0 * task(batch).sum()  # noqa: E731
    return drive(stopping, step=step, **arguments).fit()


def test_a_metric_of_training_stops_a_fit_that_never_validates(drive):
    losses = [0.5, 0.3, 0.4, 0.35, 0.1, 0.1]
    run = train(drive, EarlyStopping("train/loss", patience=2), losses, updates_per_epoch=6, log_every=1)
    assert run.progress.updates == 4
    assert run.stopped_early == "early stopping: train/loss did not improve on 0.3 for 2 log points"


def test_a_metric_of_training_is_judged_once_per_epoch_if_the_log_interval_is_longer(drive):
    losses = [3.0, 1.0, 1.0, 2.0, 1.0, 2.0, 9.0, 9.0]  # means of an epoch: 2, 1.5, 1.5, 9
    stopping = EarlyStopping("train/loss", patience=1)
    run = train(drive, stopping, losses, epochs=4, updates_per_epoch=2, log_every=50)
    assert run.progress.epoch == 3
    assert run.stopped_early == "early stopping: train/loss did not improve on 1.5 for 1 log point"


def test_a_metric_of_training_that_is_not_logged_is_told_the_nearest(drive):
    with pytest.raises(ConfigError, match=r"'train/los', which is not logged. Did you mean 'train/loss'"):
        train(drive, EarlyStopping("train/los"), [0.5] * 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mode": "mn"}, r"mode='mn'. Did you mean 'min'"),
        ({"threshold_mode": "relative"}, r"threshold_mode='relative'.*Allowed: 'abs', 'rel'"),
        ({"patience": 0}, "patience must be a whole number, at least 1, not 0"),
        ({"patience": 1.5}, "patience must be a whole number, at least 1, not 1.5"),
        ({"min_epochs": -1}, "min_epochs must be a whole number, at least 0, not -1"),
        ({"metric": None}, "metric=None; give a name such as 'validation/loss'"),
        ({"threshold": "0.1"}, "threshold.*'0.1'"),
        ({"threshold": -0.1}, "threshold=-0.1; give a finite number, at least 0"),
        ({"stop_at": "low"}, "stop_at.*'low'"),
        ({"diverged_at": math.nan}, "diverged_at.*nan"),
        ({"strict": 1}, "strict.*1"),
        ({"check_finite": None}, "check_finite.*None"),
        ({"stop_at": 0.5, "diverged_at": 0.5}, "diverged_at is the worse of the two"),
        ({"stop_at": 0.5, "diverged_at": 0.9, "mode": "max"}, "diverged_at is the worse of the two"),
        ({"min_delta": 0.1}, "threshold"),
        ({"stopping_threshold": 0.1}, "stop_at"),
        ({"divergence_threshold": 9.0}, "diverged_at"),
    ],
)
def test_wrong_arguments_are_refused_with_what_is_allowed(arguments, message):
    with pytest.raises(ConfigError, match=message):
        EarlyStopping(**arguments)
