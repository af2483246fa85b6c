from drivetrain.task.cross_entropy import cross_entropy as cross_entropy
