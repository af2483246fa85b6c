"""A run whose directory somebody removes while it goes on: what it says, what it makes again."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.saving import at, let_writing_end, names, told, train


@pytest.mark.parametrize("policy", ["raise", "warn"])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_directory_that_vanishes_is_made_again_and_what_was_in_it_is_named(
    tmp_path: Path, policy: str, asynchronous: bool
) -> None:
    run = tmp_path / "run"
    named: list[str] = []

    def vanish() -> None:
        let_writing_end()
        named.extend(each for each in names(run) if each.startswith("update"))
        shutil.rmtree(run)

    keeps = {"keep_last": 1, "best": 1, "by": "validation/loss", "mode": "max"}  # the first one, as it falls
    with heard() as caught:
        _, result = train(
            run,
            at(7, vanish),
            loggers=("csv", "tensorboard"),
            log_every=1,
            keeps=keeps,
            validate_every="4 steps",
            asynchronous=asynchronous,
            on_save_error=policy,
        )
    texts = [each for each in caught if "checkpoints of this run" in each]
    assert len(texts) == 1, texts
    assert named == ["update-00000004", "update-00000006"]
    assert "update-00000004 (the best), update-00000006. Still there: none." in texts[0]
    assert result.best_checkpoint == str(run / "checkpoints" / "update-00000008")
    assert names(run) == ["index.json", "update-00000008", "update-00000012"]
    assert "trainer" in json.loads((run / "config.json").read_text(encoding="utf-8"))


def test_a_run_goes_on_from_what_was_saved_in_a_directory_made_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with heard():
        train(run, at(7, lambda: shutil.rmtree(run)), loggers=("csv",), log_every=1)
    assert names(run) == ["index.json", "update-00000010", "update-00000012"]
    rows = (run / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert [row.split(",")[0] for row in rows] == ["step", *map(str, range(7, 13))]
    task, _ = train(run, max_steps=14, loggers=("csv",), log_every=1)
    assert weights(task) == weights(train(tmp_path / "undisturbed", max_steps=14)[0])


def test_a_directory_that_vanishes_and_cannot_be_made_again_is_not_called_good(tmp_path: Path) -> None:
    run = tmp_path / "run"

    def vanish() -> None:
        shutil.rmtree(run)
        run.write_text("in its place", encoding="utf-8")

    with told("was not saved: cannot", besides="update-00000004, update-00000006. Still there: none") as text:
        train(run, at(7, vanish), at(9, run.unlink))
    assert "update-00000006, is not there any more" in text[0]
    assert names(run) == ["index.json", "update-00000010", "update-00000012"]
