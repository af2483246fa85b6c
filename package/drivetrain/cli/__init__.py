"""The command line: `drivetrain fit`, `validate`, `test`, `predict`, `plan`, `benchmark` and `env`."""
