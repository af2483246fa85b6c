"""The examples of fine-tuning have TRL's losses."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "programs" / "losses.py"
EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.nightly
@pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
def test_sft_dpo_and_grpo_have_the_losses_of_trl_on_one_batch(tmp_path: Path) -> None:
    paths = os.pathsep.join([str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if line}
    for name in ("sft", "dpo", "grpo"):
        ours, theirs = map(float, rows[name])
        assert ours == pytest.approx(theirs, rel=2e-6), name
