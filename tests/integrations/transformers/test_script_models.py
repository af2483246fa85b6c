"""Models and files as scripts have them: any module, dict outputs, labels by **kwargs, special tokens."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model, padded, rows
from tests.integrations.transformers.test_trainer import SAVING, arguments, trainer
from tests.support.messages import warned
from torch import Tensor, nn

from drivetrain.core.errors import CheckpointError, ConfigError

hf = Lazy("drivetrain.integrations.transformers")
transformers = Lazy("transformers")

SAMPLES = [{"x": torch.tensor([n % 5, 1.0]), "labels": float(n % 3), "other": 3.0} for n in range(16)]
FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda loss, y: (loss, y),
    "mapping": lambda loss, y: {"y": y, "loss": loss},
    "attribute": lambda loss, y: SimpleNamespace(loss=loss, y=y),
}


class Line(nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.form = nn.Linear(2, 1), form

    def forward(self, x: Tensor, labels: Any = None, **others: Any) -> Any:
        y = self.layer(x)[:, 0]
        return FORMS[self.form](nn.functional.mse_loss(y, labels.float()), y)


def test_any_module_that_returns_its_loss_trains_with_transformers_numbers(tmp_path: Path) -> None:
    given = {"train_dataset": SAMPLES, "eval_dataset": SAMPLES}
    theirs = Line("tuple")
    options = {"label_names": ["labels", "other"], "eval_strategy": "steps", "eval_steps": 4}
    expected = transformers.Trainer(theirs, arguments(tmp_path / "theirs", **options), **given)
    expected.train()
    found = expected.predict(SAMPLES)
    for form in FORMS:
        ours = Line(form)
        script = hf.Trainer(ours, arguments(tmp_path / form, **options, **SAVING), **given)
        with warned("Line: it is no model of transformers"):
            script.train()
        assert torch.allclose(ours.layer.weight, theirs.layer.weight, atol=1e-6)
        predicted = script.predict(SAMPLES)
        assert predicted.predictions == pytest.approx(found.predictions, abs=1e-6)
        assert [each.tolist() for each in predicted.label_ids] == [each.tolist() for each in found.label_ids]
    again = Line("tuple")
    script = hf.Trainer(again, arguments(tmp_path / "tuple", **options, **SAVING, max_steps=5), **given)
    with warned("Line: it is no model of transformers"):
        script.train(resume_from_checkpoint=True)
    script.save_model()
    assert (tmp_path / "tuple" / "model.safetensors").exists()


def test_the_tokenizers_special_tokens_are_in_the_files(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models

    words = Tokenizer(models.WordLevel({"<pad>": 0, "<end>": 4, "<unk>": 2}, unk_token="<unk>"))
    names = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    processor = transformers.PreTrainedTokenizerFast(tokenizer_object=words, **names)
    language = model("gpt2")
    language.config.eos_token_id = language.generation_config.eos_token_id = 2
    given = {"train_dataset": rows("gpt2", 8), "data_collator": padded, "processing_class": processor}
    script = hf.Trainer(language, arguments(tmp_path, max_steps=1, **SAVING), **given)
    script.train()
    for name in ("config", "generation_config"):
        saved = json.loads((tmp_path / "pretrained" / f"{name}.json").read_text())
        assert saved["pad_token_id"] == 0
        assert saved["eos_token_id"] in (4, [4, 2])


def test_lines_are_printed_without_a_progress_bar(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = trainer(tmp_path, max_steps=1)
    script.train()
    assert "'loss'" in capsys.readouterr().out
    script.remove_callback(transformers.PrinterCallback)
    script.train()
    assert "'loss'" not in capsys.readouterr().out


def test_what_could_not_be_loaded_again_is_named_before_the_first_step(tmp_path: Path) -> None:
    saved = trainer(tmp_path, max_steps=2, **SAVING)
    saved.train()
    missing = str(tmp_path / "checkpoint-9")
    found = f"find a valid checkpoint at {re.escape(missing)}: there is no checkpoint-9. .*has checkpoint-2"
    for given, folder, words in (
        (missing, tmp_path, found),
        (True, tmp_path / "new", "No valid checkpoint found in output directory"),
    ):
        with pytest.raises(CheckpointError, match=words) as refused:
            trainer(folder, **SAVING).train(resume_from_checkpoint=given)
        assert isinstance(refused.value, ValueError)  # as scripts expect that begin anew then
    script = trainer(tmp_path / "shared", **SAVING)
    layers = script.model.bert.encoder.layer
    layers[1] = layers[0]
    with pytest.raises(ConfigError, match="shares tensors that its _tied_weights_keys do not name"):
        script.train()
    assert script.state.global_step == 0
