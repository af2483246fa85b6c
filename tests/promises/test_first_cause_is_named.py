"""Failures end all processes within seconds, and the last line gives the first cause, its rank and step."""

import os
from pathlib import Path

import pytest
from tests.promises.example import QUIET, Line, batches
from tests.support.forked import run_forked

from drivetrain import DataError, Trainer

ROOT = Path(__file__).parents[2]


def test_the_last_line_of_a_job_names_the_rank_that_failed_first_and_its_step(tmp_path: Path) -> None:
    program = Path(__file__).with_name("programs") / "fails_on_rank_1.py"
    done = run_forked([str(program)], tmp_path, {**os.environ, "PYTHONPATH": str(ROOT)}, timeout=600)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    for words in ("rank 1 failed first", "after step 2", "ValueError: boom"):
        assert words in last
    assert "rank 0 failed" not in done.stderr


def test_an_error_in_the_data_says_where_the_run_stood() -> None:
    trainer = Trainer(max_epochs=1, strategy="cpu", checkpoint=False, **QUIET)
    with pytest.raises(DataError) as caught:
        trainer.fit(Line(), [*batches(6, 2), {"x": "no tensor"}])
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    for words in ("batch 3 of epoch 0", "after step 3"):
        assert words in told
