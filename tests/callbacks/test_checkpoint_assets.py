"""The files of a task, of callbacks and of a Trainer are in every checkpoint of a fit."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback
from drivetrain.checkpoint import copy_assets, verify
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.task.model_info import ModelInfo


class Words:  # counts how often it is written, and draws random numbers for it
    def __init__(self, text: str, name: str = "words.txt") -> None:
        self.text, self.name, self.times = text, name, 0

    def save_pretrained(self, save_directory: str) -> None:
        self.times += 1
        random.random(), torch.rand(3)
        Path(save_directory, self.name).write_text(self.text, encoding="utf-8")


def stored(checkpoint: Any, folder: Path) -> dict[str, str]:  # the assets of a checkpoint, by name
    copied = [Path(each) for each in copy_assets(checkpoint, folder)]
    return {each.relative_to(folder).as_posix(): each.read_text(encoding="utf-8") for each in copied}


def often(**options: Any) -> CheckpointConfig:
    return CheckpointConfig(every="2 steps", keep_last=None, by=None, **options)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_assets_are_made_once_and_are_in_every_checkpoint(asynchronous: bool, tmp_path: Path) -> None:
    words, task, plain = Words("a b"), Regression(dropout=0.5), Regression(dropout=0.5)
    policy = often(asynchronous=asynchronous)
    quiet(max_epochs=1, checkpoint=policy, run_dir=tmp_path / "run", assets=[words]).fit(task, pairs())
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*"))
    assert names == ["step-00000002", "step-00000004", "step-00000005"]
    for name in names:
        path = str(tmp_path / "run" / "checkpoints" / name)
        verify(path)
        assert stored(path, tmp_path / name) == {"words.txt": "a b"}
    assert (tmp_path / "run" / "assets" / "words.txt").read_text(encoding="utf-8") == "a b"
    assert words.times == 1
    quiet(max_epochs=1, checkpoint=policy, run_dir=tmp_path / "without").fit(plain, pairs())
    assert weights(task) == weights(plain)  # the numbers that an asset draws are not those of the run


class WithWords(Regression):
    def model_info(self) -> ModelInfo:
        return ModelInfo(assets={name: Words("task") for name in ("task", "both", "all")})


def test_a_task_and_callbacks_give_assets_and_the_trainers_replace_them(tmp_path: Path) -> None:
    class Adds(LambdaCallback):
        def on_fit_start(self, run: Any) -> None:
            run.add_assets({"callback": Words("callback"), "both": Words("callback")})
            run.add_assets({"all": Words("callback")})

    settings = {"max_steps": 1, "checkpoint": often(), "run_dir": tmp_path / "run"}
    trainer = quiet(**settings, callbacks=[Adds()], assets={"all": Words("trainer")})
    result = trainer.fit(WithWords(), pairs())
    assert stored(result.last_checkpoint, tmp_path / "out") == {
        "task/words.txt": "task",
        "both/words.txt": "callback",
        "callback/words.txt": "callback",
        "all/words.txt": "trainer",
    }


def test_a_resumed_run_stores_what_it_is_given_now(tmp_path: Path) -> None:
    settings = {"checkpoint": often(), "run_dir": tmp_path / "run"}
    first = quiet(**settings, max_steps=2, assets=[Words("old")]).fit(Regression(), pairs())
    second = quiet(**settings, max_steps=4, assets=[Words("new")]).fit(Regression(), pairs(), resume="auto")
    assert stored(first.last_checkpoint, tmp_path / "1") == {"words.txt": "old"}
    assert stored(second.last_checkpoint, tmp_path / "2") == {"words.txt": "new"}
    assert (tmp_path / "run" / "assets" / "words.txt").read_text(encoding="utf-8") == "new"


def test_assets_go_to_the_address_of_the_checkpoints(tmp_path: Path) -> None:
    place = f"memory://{tmp_path.name}/run"
    policy = CheckpointConfig(every="2 steps", keep_last=1, by=None, directory=place)
    trainer = quiet(max_epochs=1, checkpoint=policy, run_dir=tmp_path, assets={"text": Words("a b")})
    result = trainer.fit(Regression(), pairs())
    files = file_system(place)
    assert set(files.entries(f"{place}/checkpoints")) == {"index.json", "step-00000005"}
    assert stored(result.last_checkpoint, tmp_path / "out") == {"text/words.txt": "a b"}
    assert set(files.entries(f"{place}/assets/text")) == {"words.txt"}


def on_ranks(directory: Path) -> int:
    words = Words("a b")
    trainer = quiet(strategy="ddp", max_epochs=1, checkpoint=often(), run_dir=directory, assets=[words])
    trainer.fit(WithWords(), pairs(16))
    return words.times


def test_one_rank_makes_the_assets_of_all(tmp_path: Path) -> None:
    assert on_two_ranks(on_ranks, tmp_path / "run") == [1, 0]
    verify(str(tmp_path / "run" / "checkpoints" / "step-00000004"))
    found = stored(tmp_path / "run", tmp_path / "out")
    assert set(found) == {"words.txt", "task/words.txt", "both/words.txt", "all/words.txt"}
