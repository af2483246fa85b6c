"""Predictions streamed to files."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain.checkpoint.prediction_files import read_predictions


def predict_step(self: Any, batch: Any) -> Any:
    outputs = self(batch[0])
    return {"value": outputs, "parts": [outputs > 0, (len(outputs), "text", None)]}


def test_predict_save_to_writes_what_predict_would_have_returned(tmp_path: Path) -> None:
    task = variant(predict_step=predict_step)()
    kept = quiet().predict(task, pairs(5))
    files = quiet().predict(task, pairs(5), save_to=tmp_path / "new" / "predictions")
    assert [file.name for file in files] == [f"predictions-{number:06d}.safetensors" for number in range(3)]
    for file, right in zip(files, kept, strict=True):
        read = read_predictions(file)
        assert torch.equal(read["value"], right["value"])
        assert torch.equal(read["parts"][0], right["parts"][0])
        assert read["parts"][1] == right["parts"][1]
    (file,) = quiet().predict(Regression(), pairs(2), save_to=tmp_path)
    (tensor,) = load_file(file).values()
    assert tensor.shape == (2, 1)
