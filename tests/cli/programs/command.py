"""The command `drivetrain` as a program that can be forked."""

import sys

from drivetrain.cli.main import main

sys.exit(main())
