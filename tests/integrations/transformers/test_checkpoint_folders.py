"""The folders checkpoint-N of a script: what others find there, and what a resume takes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model
from tests.integrations.transformers.test_trainer import arguments, equal, even, losses, padded, trainer
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused

from drivetrain import Callback, ConfigError
from drivetrain.checkpoint.saving.io import verify
from drivetrain.core.errors import CheckpointError

folders = Lazy("drivetrain.integrations.transformers.script.checkpoint_folders")
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
    files = "checkpoints config.json model.safetensors optimizer.pt scheduler.pt trainer_state.json"
    assert sorted(each.name for each in last.iterdir()) == [*files.split(), "training_args.bin"]
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


WARM = {"lr_scheduler_type": "cosine", "weight_decay": 0.1, "warmup_steps": 1}
RARE = {"lr_scheduler_type": "linear", "logging_steps": 500}


@pytest.mark.parametrize("options", [WARM, RARE, {"optim": "sgd", "optim_args": "momentum=0.9"}])
def test_transformers_own_trainer_goes_on_from_a_folder(options: Any, tmp_path: Path) -> None:
    given = {**EACH, **options, "hub_token": "a secret", "restore_callback_states_from_checkpoint": True}
    ours, back = trainer(tmp_path, **given), trainer(tmp_path / "back", transformers.Trainer, **given)
    ours.train()
    back.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    equal(back, ours)
    assert losses(back) == losses(ours)
    assert b"a secret" not in (tmp_path / "checkpoint-4" / "training_args.bin").read_bytes()
    ours.state = transformers.TrainerState.load_from_json(str(tmp_path / "checkpoint-4/trainer_state.json"))
    ours._load_callback_state()
    assert (ours.state.global_step, ours.control.should_training_stop) == (4, True)


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
    assert hf.get_last_checkpoint(tmp_path) == str(tmp_path / "checkpoints" / "step-00000002")
    trainer(tmp_path, **EACH).train(resume_from_checkpoint=True)
    assert not list(tmp_path.glob(".saving-*"))
    assert _names(tmp_path) == [*(f"checkpoint-{n}" for n in (1, 2, 3, 4)), "checkpoints"]
    whole = trainer(tmp_path / "whole", max_steps=2, **EACH)
    whole.train()
    _same(tmp_path / "checkpoint-2", whole.model)
    states = [each / "checkpoint-2" / "trainer_state.json" for each in (tmp_path, tmp_path / "whole")]
    one, other = (transformers.TrainerState.load_from_json(str(each)) for each in states)
    assert (one.global_step, one.log_history) == (2, other.log_history)


class Killed(BaseException):
    """Stands for a SIGKILL: nothing of the save's own runs after it."""


def test_folders_that_an_interrupted_pruning_has_left_go_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise Killed

    limited = {**EACH, "save_total_limit": 2}
    trainer(tmp_path, max_steps=2, **limited).train()
    theirs = shutil.copytree(tmp_path / "checkpoint-1", tmp_path / "checkpoint-900")  # of somebody else
    (theirs / "checkpoints" / "step-00000001").rename(theirs / "checkpoints" / "step-00000900")
    monkeypatch.setattr(folders.CheckpointFolders, "commit", killed)
    with pytest.raises(Killed):
        trainer(tmp_path, max_steps=4, **limited).train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    monkeypatch.undo()
    trainer(tmp_path, max_steps=4, **limited).train(resume_from_checkpoint=tmp_path / "checkpoint-2")
    assert _names(tmp_path) == ["checkpoint-3", "checkpoint-4", "checkpoint-900", "checkpoints"]


class Starts(Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []

    def on_fit_start(self, run: Any) -> None:
        self.steps.append(run.progress.steps)


def _resumed(folder: Path, given: Any, expected: Any, start: int) -> None:
    made = trainer(folder, max_steps=4, callbacks=[begin := Starts()], **EACH)
    made.train(resume_from_checkpoint=given)
    equal(made, expected)
    assert begin.steps == [start]


def test_what_is_left_of_a_checkpoint_is_found_and_what_is_gone_comes_back(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", max_steps=4, **EACH)
    whole.train()
    trainer(tmp_path / "run", max_steps=3, **EACH).train()
    for place, (given, *gone) in enumerate(
        (
            (True, "checkpoint-3/checkpoints"),
            ("checkpoint-3", "checkpoint-3/checkpoints"),
            (True, "checkpoints/step-00000003"),
            ("checkpoint-3", "checkpoints/step-00000003"),
            (True, "checkpoints"),
        )
    ):
        folder = tmp_path / str(place)
        shutil.copytree(tmp_path / "run", folder)
        for each in gone:
            shutil.rmtree(folder / each)
        _resumed(folder, given if given is True else folder / given, whole, 3)
        assert _names(folder) == [*(f"checkpoint-{n}" for n in (1, 2, 3, 4)), "checkpoints"]
        assert (folder / STEP_3).is_dir()


def test_training_goes_back_to_earlier_checkpoints_and_to_those_of_other_folders(tmp_path: Path) -> None:
    whole = trainer(tmp_path / "whole", max_steps=4, **EACH)
    whole.train()
    made = trainer(tmp_path / "run", max_steps=3, **EACH)
    made.train()
    (tmp_path / "run" / "latest").symlink_to("checkpoint-3")
    _resumed(tmp_path / "run", tmp_path / "run" / "latest", whole, 3)
    with warned("begins anew.*earlier-1"):
        trainer(tmp_path / "run", max_steps=3, **EACH).train()
    with warned("goes on from .*earlier-1.*are now in .*earlier-2"):
        _resumed(tmp_path / "run", tmp_path / "run" / "earlier-1" / "checkpoint-2", whole, 2)
    assert _names(tmp_path / "run") == ["checkpoint-3", "checkpoint-4", "checkpoints"]
    (tmp_path / "run" / "checkpoint-3").rename(tmp_path / "run" / "checkpoint-best")
    with warned("goes on from .*are now in .*earlier-3"):
        _resumed(tmp_path / "run", tmp_path / "run" / "checkpoint-best", whole, 3)


def test_what_cannot_be_resumed_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer(tmp_path / "run", max_steps=1, save_only_model=True, **EACH).train()
    assert not (tmp_path / "run" / "checkpoint-1" / "optimizer.pt").exists()
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()

    def resume(given: Any, folder: str = "run") -> Any:
        return lambda: trainer(tmp_path / folder, max_steps=2, **EACH).train(resume_from_checkpoint=given)

    def started_again() -> None:
        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_MAX_RESTARTS": "3"}.items():
            monkeypatch.setenv(name, value)
        trainer(tmp_path / "run", save_only_model=True, **EACH).train()

    words = "give True for the newest checkpoint in output_dir, or the path of one"
    cases = {
        "weights alone": (resume(True), "save_only_model=True", "from_pretrained"),
        "a number": (resume(500), "resume_from_checkpoint=500", words),
        "a file": (resume(tmp_path / "file"), "it is a file", "has checkpoint-1"),
        "a folder": (resume(tmp_path / "folder"), "no checkpoint in it", "has checkpoint-1"),
        "nothing": (resume(""), "there is no folder of this name"),
        "an output_dir that is a file": (resume(None, "file"), "cannot create output_dir", "file"),
        "weights alone, restarted": (started_again, "--max-restarts", "save_only_model=True"),
    }
    assert_refused((CheckpointError, ConfigError), cases)


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
