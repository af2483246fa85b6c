"""`drivetrain checkpoint`: list, show, verify, export, push and import checkpoints."""
