"""Nothing replaces a file that drivetrain has not made, and a program can be started again."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import warned
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointError, ConfigError, CSVLogger, JSONLinesLogger, TensorBoardLogger
from drivetrain.checkpoint import export_weights
from drivetrain.cli.main import main

PRECIOUS = "precious"


def _fit(**options: Any) -> None:
    quiet(max_steps=2, log_every=1, checkpoint=False, run_dir="run", **options).fit(Regression(), pairs(8))


def _own_logger(kind: Any) -> None:
    logger = kind("run")
    logger.log_config({"lr": 0.1})
    logger.log_metrics({"loss": 1.0}, 1)
    logger.close()


def _command(*words: str) -> Callable[[], None]:
    def run() -> None:
        if main(words) == 2:
            raise ConfigError("refused")

    return run


def _export() -> None:
    export_weights({"a": torch.ones(2), "b": torch.ones(2)}, "run/model.safetensors")


def _export_parts() -> None:
    tensors = {"a": torch.ones(2), "b": torch.ones(2)}
    export_weights(tensors, "run/model.safetensors", max_shard_size=8)


DOORS: dict[str, tuple[str, Callable[[], Any]]] = {
    "a fit's table": ("metrics.csv", lambda: _fit(loggers="csv")),
    "a fit's lines": ("metrics.jsonl", lambda: _fit(loggers="jsonl")),
    "a fit's configuration": ("config.json", lambda: _fit(loggers="csv")),
    "a logger's table": ("metrics.csv", lambda: _own_logger(CSVLogger)),
    "a logger's lines": ("metrics.jsonl", lambda: _own_logger(JSONLinesLogger)),
    "a logger's configuration": ("config.json", lambda: _own_logger(CSVLogger)),
    "a report": ("page.html", _command("runs", "report", "other", "--output", "run/page.html")),
    "weights": ("model.safetensors", _export),
    "weights in parts": ("model-00001-of-00002.safetensors", _export_parts),
    "an index": ("model.safetensors.index.json", _export_parts),
    "one file for parts": ("model-00002-of-00003.safetensors", _export_parts),
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("run").mkdir()
    return tmp_path / "run"


@pytest.mark.parametrize("door", DOORS)
def test_a_file_of_somebody_else_is_refused_by_name_and_an_own_one_is_replaced(door: str, here: Path) -> None:
    name, act = DOORS[door]
    if door == "a report":
        quiet(max_steps=1, checkpoint=False, run_dir="other", loggers="csv").fit(Regression(), pairs(8))
    for text in (PRECIOUS, json.dumps({"lr": 0.1, "library": PRECIOUS})):
        (here / name).write_text(text)
        with pytest.raises((ConfigError, CheckpointError)) as refused:
            act()
        assert name in str(refused.value) or "refused" in str(refused.value)
        assert (here / name).read_text() == text
        (here / name).unlink()
    target = here.parent / "target"
    target.write_text("")
    (here / name).symlink_to(target)
    with pytest.raises((ConfigError, CheckpointError)):
        act()
    assert target.read_text() == ""
    (here / name).unlink()
    act()
    act()
    assert door == "one file for parts" or (here / name).stat().st_size


def test_a_link_of_a_fixed_temporary_name_or_to_a_log_leads_nowhere(here: Path) -> None:
    options = {"loggers": ("csv", "jsonl"), "log_every": 1, "run_dir": "run"}
    quiet(max_steps=2, checkpoint=True, **options).fit(Regression(), pairs(8))
    target = here.parent / "target"
    for name in ("config.json.tmp", ".saving-config.json", ".saving-model.safetensors"):
        target.write_text(PRECIOUS)
        (here / name).symlink_to(target)
    quiet(max_steps=3, checkpoint=True, **options).fit(Regression(), pairs(8), resume="auto")
    assert target.read_text() == PRECIOUS
    for name in ("ledger.jsonl", "metrics.jsonl", "metrics.csv"):
        kept = (here / name).rename(here.parent / name)
        before = kept.read_bytes()
        (here / name).symlink_to(kept)
        words = "not written through links"
        with warned(words) if name == "ledger.jsonl" else pytest.raises(OSError, match=words):
            quiet(max_steps=4, checkpoint=True, **options).fit(Regression(), pairs(8), resume="auto")
        assert kept.read_bytes() == before
        kept.rename(here / name)


def test_event_files_and_weights_of_others_stay_where_they_are(here: Path) -> None:
    theirs = here / "events.out.tfevents.1700000000.host.1.0"
    theirs.write_text(PRECIOUS)
    for _ in range(2):
        _own_logger(TensorBoardLogger)
    assert theirs.read_text() == PRECIOUS
    (here / "model.safetensors").write_text(PRECIOUS)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        quiet(max_steps=1, checkpoint=True, run_dir="run").fit(Regression(), pairs(8), resume="auto")
    assert (here / "model.safetensors").read_text() == PRECIOUS
