"""The report of runs: one page for a browser, which needs no network. `drivetrain runs report` writes it."""
