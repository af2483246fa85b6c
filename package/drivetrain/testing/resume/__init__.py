"""Check that a resumed run equals the undisturbed one: `assert_resumable`, `drivetrain check-resume`."""
