"""The learning rate among the logged values."""

from drivetrain.callbacks import LearningRateMonitor


def test_each_log_point_has_the_rate(drive):
    run = drive(LearningRateMonitor(), updates_per_epoch=4, log_every=2).fit()
    assert [point["lr"] for point in run.history] == [0.05, 0.05]
