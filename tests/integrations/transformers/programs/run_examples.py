"""Run examples one after the other: `run_examples.py FOLDER NAME STEPS NAME STEPS ...`."""

import runpy
import sys

folder, *given = sys.argv[1:]
for name, steps in zip(given[::2], given[1::2], strict=True):
    print("== " + name, flush=True)
    sys.argv = [name, "--steps", steps]
    runpy.run_path(f"{folder}/{name}.py", run_name="__main__")
