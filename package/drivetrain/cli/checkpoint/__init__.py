"""`drivetrain checkpoint`: list, show, verify, export, push, compare and import checkpoints."""
