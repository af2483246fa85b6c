from drivetrain.engine.metrics.epoch_metric import EpochMetric as EpochMetric
