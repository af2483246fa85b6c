"""The benchmarks are programs: they import one another by name, from their own directory."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
