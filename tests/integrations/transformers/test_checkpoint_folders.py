"""The folders checkpoint-N of a script: what others find there, and what a resume takes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model
from tests.integrations.transformers.test_trainer import arguments, equal, even, padded, trainer
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks

from drivetrain import Callback
from drivetrain.checkpoint.saving.io import verify

hf = Lazy("drivetrain.integrations.transformers")
peft = Lazy("peft")
transformers = Lazy("transformers")

EACH: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "lr_scheduler_type": "constant"}
STEP_3 = Path("checkpoints", "step-00000003")


def _names(folder: Path) -> list[str]:
    return sorted(each.name for each in folder.iterdir() if "checkpoint" in each.name)


def _same(folder: Path | str, expected: Any) -> None:
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(folder)
    for one, other in zip(loaded.parameters(), expected.parameters(), strict=True):
        assert torch.equal(one, other)


def test_each_checkpoint_has_a_folder_that_from_pretrained_loads_and_that_is_resumed(tmp_path: Path) -> None:
    made = trainer(tmp_path / "run", save_total_limit=2, max_steps=3, **EACH)
    made.train()
    assert _names(tmp_path / "run") == ["checkpoint-2", "checkpoint-3", "checkpoints"]
    last = tmp_path / "run" / "checkpoint-3"
    assert {each.name for each in last.iterdir()} == {
        "checkpoints",
        "config.json",
        "model.safetensors",
        "trainer_state.json",
    }
    _same(last, made.model)
    state = transformers.TrainerState.load_from_json(str(last / "trainer_state.json"))
    assert (state.global_step, len(state.log_history)) == (3, 3)
    assert transformers.trainer_utils.get_last_checkpoint(str(tmp_path / "run")) == str(last)
    heavy = STEP_3 / "optimizer.safetensors"
    assert (last / heavy).samefile(tmp_path / "run" / heavy)

    shutil.move(last, tmp_path / "moved" / "checkpoint-3")
    verify(str(tmp_path / "moved" / "checkpoint-3" / STEP_3))
    whole = trainer(tmp_path / "whole", max_steps=4, **EACH)
    whole.train()
    resumed = trainer(tmp_path / "other", max_steps=4, **EACH)
    resumed.train(resume_from_checkpoint=tmp_path / "moved" / "checkpoint-3")
    equal(resumed, whole)
    again = trainer(tmp_path / "run", max_steps=4, **EACH)
    again.train(resume_from_checkpoint=True)  # from step 2, because somebody has taken the folder of step 3
    equal(again, whole)
    assert [row["step"] for row in again.state.log_history if "loss" in row] == [1, 2, 3, 4]
    assert _names(tmp_path / "run") == ["checkpoint-2", "checkpoint-3", "checkpoint-4", "checkpoints"]
    (tmp_path / "run" / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"")
    with warned("is damaged and skipped"):
        assert hf.get_last_checkpoint(tmp_path / "run") == str(tmp_path / "run" / "checkpoint-3")


def test_a_folder_has_what_save_model_writes_and_a_broken_save_leaves_none(tmp_path: Path) -> None:
    class Scripted(hf.Trainer):  # type: ignore[name-defined,misc]
        def save_model(self, output_dir: Any = None, _internal_call: bool = False) -> None:
            super().save_model(output_dir, _internal_call)
            Path(output_dir, "mine.txt").write_text(str(self.state.global_step))
            if self.state.global_step == 2:
                raise OSError("the disk has gone")

    class Looks(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            assert Path(args.output_dir, f"checkpoint-{state.global_step}", "mine.txt").exists()

    with pytest.raises(OSError, match="has gone"):
        trainer(tmp_path, Scripted, callbacks=[Looks], **EACH).train()
    assert (tmp_path / "checkpoint-1" / "mine.txt").read_text() == "1"
    assert not (tmp_path / "checkpoint-2").exists()
    assert len(list(tmp_path.glob(".saving-checkpoint-2-*"))) == 1
    trainer(tmp_path, **EACH).train(resume_from_checkpoint=True)
    assert not list(tmp_path.glob(".saving-*"))
    assert _names(tmp_path) == [*(f"checkpoint-{n}" for n in (1, 2, 3, 4)), "checkpoints"]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_an_adapters_folder_has_the_adapter(tmp_path: Path) -> None:
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    args, data = arguments(tmp_path, max_steps=1, **EACH), even("llama", 8)
    made = hf.Trainer(peft.get_peft_model(model("llama"), adapter), args, padded, data)
    made.train()
    loaded = peft.PeftModel.from_pretrained(model("llama"), tmp_path / "checkpoint-1")
    for name, each in loaded.named_parameters():
        assert torch.equal(each, made.model.get_parameter(name))


def _sharded(folder: str) -> Any:
    class Keeps(Callback):
        def on_step_end(self, run: Any) -> None:
            with run.engine.checkpoint_layout():
                kept.append({name: _whole(each) for name, each in run.task.model.named_parameters()})

    kept: list[Any] = []
    made = trainer(folder, fsdp=True, max_steps=2, callbacks=[Keeps()], **EACH)
    made.train()
    made = trainer(folder, fsdp=True, max_steps=3, **EACH)
    assert made.train(resume_from_checkpoint=f"{folder}/checkpoint-2").global_step == 3
    return kept[-1]


def _whole(parameter: Any) -> Any:
    return getattr(parameter, "full_tensor", parameter.clone)().detach()


@pytest.mark.landing
def test_folders_of_sharded_models_have_whole_weights(tmp_path: Path) -> None:
    kept, _ = on_two_ranks(_sharded, str(tmp_path))
    loaded = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path / "checkpoint-2")
    for name, each in loaded.named_parameters():
        assert torch.equal(each, kept[name])
