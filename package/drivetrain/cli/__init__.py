"""The command line: `drivetrain fit`, `validate`, `test`, `predict`, `plan` and `env`."""
