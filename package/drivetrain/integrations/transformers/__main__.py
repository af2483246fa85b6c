"""Run a script with drivetrain's Trainer in the place of transformers' own.

python -m drivetrain.integrations.transformers script.py [ARGUMENT ...]
"""

from __future__ import annotations

import os
import runpy
import sys

from drivetrain.integrations.transformers.script.replacing import replace_trainer


def main() -> None:
    """Replace transformers' Trainer, and run the script as `python script.py` would."""
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python -m drivetrain.integrations.transformers script.py [ARGUMENT ...]")
    if not os.path.isfile(sys.argv[1]):
        sys.exit(f"{sys.argv[1]!r} is no file: give the path of a script")
    replace_trainer()
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
