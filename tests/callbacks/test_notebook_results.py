"""A notebook shows plans, results and comparisons as tables with curves; a Trainer is a short text."""

import dataclasses
import pickle
import sys
from pathlib import Path

import pandas
import pytest
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import EarlyStopping, Trainer
from drivetrain.checkpoint import compare
from drivetrain.errors import MissingDependencyError
from drivetrain.testing import BenchmarkResult, BenchmarkRow


def test_what_people_look_at_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stops = EarlyStopping("validation/loss")
    trainer = Trainer(max_epochs=2, log_every="2 steps", precision="bf16-mixed", callbacks=[stops])
    text = (
        "Trainer(max_epochs=2, precision='bf16-mixed', log_every='2 steps', callbacks=[EarlyStopping(...)])"
    )
    assert (repr(trainer), repr(Trainer())) == (text, "Trainer()")
    assert trainer.plan(Regression(), pairs(), pairs(2))._repr_html_().count("<svg") == 1
    result = quiet(max_epochs=2, loggers="csv", run_dir=tmp_path, checkpoint=True).fit(Regression(), pairs())
    assert result._repr_html_().count("<svg") == 1
    assert "<svg" not in dataclasses.replace(result, history_path="gone")._repr_html_()
    assert result.to_pandas().equals(pandas.DataFrame(result.history))
    assert pickle.loads(pickle.dumps(result.plot()))._repr_png_()[0].startswith(b"\x89PNG"), "no pyplot"
    assert (
        "tensors are equal"
        in compare(result.last_checkpoint or "", str(result.last_checkpoint))._repr_html_()
    )
    assert "<b>" not in BenchmarkResult([BenchmarkRow(settings={"a": "<b>"}, failure="<b>")], 1)._repr_html_()
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(MissingDependencyError, match=r"FitResult.to_pandas needs.*drivetrain\[pandas\]"):
        result.to_pandas()
