"""The page on XLA is code under test where torch_xla is."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "how-to" / "strategies" / "xla.md"


def test_the_program_of_the_page_prints_what_the_page_shows() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (program,) = re.findall(r"^```python\n(# file: train_xla.py\n.*?)^```$", text, re.M | re.S)
    (shown,) = re.findall(r"^```text\n(.*?)^```$", text, re.M | re.S)
    Path("train_xla.py").write_text(program, encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "train_xla.py"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "CPU_NUM_DEVICES": "4"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == shown
    assert done.stderr == ""
