"""A process that hangs under a watchdog, in several ways in which its report may fail."""

import json
import sys
import threading
from pathlib import Path

from drivetrain.distributed.failure import watchdog

kind = json.loads(sys.argv[1])["kind"]
directory = Path("made") / "here"
describe = {"no description": lambda: 1 / 0}.get(kind, lambda: "step 7, epoch 1")


def stuck_in_a_collective():
    threading.Event().wait()


if kind == "no standard error":
    sys.stderr = None
elif kind == "no directory":
    directory = Path("/dev/null/x")
with watchdog.Watchdog(0.3, lambda: 0, describe, directory):
    stuck_in_a_collective()
