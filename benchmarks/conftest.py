"""The benchmarks import one another by name, also where pytest puts no directory on the path for them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
