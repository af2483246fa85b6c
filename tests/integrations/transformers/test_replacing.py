"""Trainers of other packages that derive from transformers' Trainer, once ours has taken its place."""

import copy
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model
from tests.integrations.transformers.test_trainer import CLASSES, arguments
from torch.nn import functional as F

from drivetrain.core.errors import ConfigError

hf = Lazy("drivetrain.integrations.transformers")
transformers = Lazy("transformers")

DATA = [{"input_ids": [n % 9 + 1] * 6, "label": n % 2, "extra": n / 8, "other": "x"} for n in range(8)]


def _collate(samples: list[Any]) -> dict[str, Any]:
    return {name: torch.tensor([each[name] for each in samples]) for name in samples[0]}


def _package(base: Any) -> Any:  # as TRL and sentence-transformers write theirs
    class Package(base):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, data_collator=_collate, **options)
            reference = copy.deepcopy(self.model)
            self.reference = self.accelerator.prepare_model(reference, evaluation_mode=True)
            self.seen: dict[bool, list[float]] = {True: [], False: []}
            self.saved: list[Any] = []

        def _set_signature_columns_if_needed(self) -> None:
            if self._signature_columns is None:
                self._signature_columns = ["input_ids", "label", "extra"]

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            with torch.no_grad(), self.accelerator.autocast():
                kept = self.reference(input_ids=inputs["input_ids"]).logits
            outputs = model(input_ids=inputs["input_ids"])
            loss = F.cross_entropy(outputs.logits, inputs["label"]) + (outputs.logits - kept).square().mean()
            self.seen[self.model.training].append(inputs["extra"].sum().item())
            return (loss, outputs) if return_outputs else loss

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            mode = self.model.training
            logs["own" if mode else "eval_own"] = sum(self.seen[mode])
            super().log(logs, start_time)
            self.seen[mode].clear()

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            self.saved.append(self.state.global_step)

        def _save(self, output_dir: Any = None, state_dict: Any = None) -> None:
            Path(output_dir).mkdir(parents=True, exist_ok=True)
            (Path(output_dir) / "own.txt").write_text("own")

        def _push_from_checkpoint(self, checkpoint_folder: str) -> None: ...

    return Package


@pytest.fixture
def _restored(monkeypatch: pytest.MonkeyPatch) -> None:
    methods = importlib.import_module("drivetrain.integrations.transformers.script.methods")
    monkeypatch.setattr(methods, "REPLACED", set())
    for module in ("transformers", "transformers.trainer", "transformers.trainer_seq2seq"):
        for name in ("Trainer", "Seq2SeqTrainer"):
            loaded = importlib.import_module(module)
            if hasattr(loaded, name):
                monkeypatch.setattr(loaded, name, getattr(loaded, name))
    utils = importlib.import_module("transformers.trainer_utils")
    monkeypatch.setattr(utils, "get_last_checkpoint", utils.get_last_checkpoint)


@pytest.mark.usefixtures("_restored")
def test_a_packages_trainer_has_its_numbers_on_ours(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    early = ModuleType("early_package")
    vars(early)["Mine"] = type("Mine", (transformers.Trainer,), {})
    monkeypatch.setitem(sys.modules, "early_package", early)
    with pytest.raises(ConfigError, match="already in early_package"):
        hf.replace_trainer()
    monkeypatch.delitem(sys.modules, "early_package")
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "label_names": ["label"]}
    histories = []
    for name in ("theirs", "ours"):
        if name == "ours":
            script = tmp_path / "script.py"
            script.write_text("from transformers import Trainer\nassert 'drivetrain' in Trainer.__module__")
            monkeypatch.setattr(sys, "argv", ["module", str(script), "--option"])
            monkeypatch.setattr(sys, "path", [*sys.path])
            importlib.import_module("drivetrain.integrations.transformers.__main__").main()
            assert sys.argv == [str(script), "--option"]
        args = arguments(tmp_path / name, num_train_epochs=2, per_device_train_batch_size=4, **options)
        package = _package(transformers.Trainer)
        made = package(model(CLASSES), args, train_dataset=DATA, eval_dataset=DATA[:3])
        made.train()
        assert made.saved == [2, 4]
        made.save_model(tmp_path / name / "model")
        assert (tmp_path / name / "model" / "own.txt").exists()
        rows = made.state.log_history[:-1]
        histories.append([{k: v for k, v in row.items() if k in _COMPARED} for row in rows])
    assert package.__mro__[1] is hf.Trainer
    for expected, found in zip(*histories, strict=True):
        assert found == pytest.approx(expected, abs=1e-5)


_COMPARED = ("loss", "grad_norm", "learning_rate", "epoch", "own", "eval_own", "eval_loss")
