"""What any version of the format has written is read for ever."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from tests.checkpoint.make_corpus import CORPUS, grid, tree
from tests.support.outcome import bits
from tests.support.storage import everything
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig
from drivetrain.checkpoint import FORMAT_VERSION, DirectoryCheckpointIO, read_manifest, unpack, verify

VERSIONS = sorted(path.name for path in CORPUS.iterdir())


@pytest.mark.parametrize("version", VERSIONS)
def test_every_byte_dtype_shape_and_shard_is_read_as_it_was_written(version):
    assert [f"v{number}" for number in range(1, FORMAT_VERSION + 1)] == VERSIONS
    manifests = list((CORPUS / version).rglob("manifest.json"))
    assert len(manifests) >= 6
    for path in manifests:
        assert json.loads(path.read_text(encoding="utf-8"))["format_version"] == int(version[1:])
        verify(str(path.parent))
    found, expected = DirectoryCheckpointIO().load(str(CORPUS / version / "everything")), everything(1.0)
    assert found.tensors.keys() == expected.tensors.keys()
    assert all(bits(found.tensors[group]) == bits(each) for group, each in expected.tensors.items())
    assert found.objects["hparams"] == expected.objects["hparams"]
    assert found.progress == expected.progress
    assert math.isnan(found.metrics["train/loss"])
    for size in (1, 2, 4):
        path = str(CORPUS / version / f"sharded-by-{size}")
        found = DirectoryCheckpointIO().load(path)
        assert bits(found.tensors["model"]) == bits(grid())
        assert len(read_manifest(path).tensors["model"]["both"].pieces) == size
        state, expected = unpack(found.objects["state"], found.tensors["state"]), tree()
        assert torch.equal(state.pop("tensor"), expected.pop("tensor"))
        assert repr(state) == repr(expected)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_run_resumes_from_every_version(version, tmp_path):
    run_dir = Path(shutil.copytree(CORPUS / version / "run", tmp_path / "run"))
    config = CheckpointConfig(every="4 steps", keep_last=2, best=1)
    trainer = quiet(max_epochs=3, run_dir=run_dir, checkpoint=config, max_grad_norm=1.0)
    task = Regression.from_checkpoint(run_dir)
    result = trainer.fit(task, pairs(), pairs(4, seed=1), resume="auto")
    assert result.progress.steps == 15
    straight = Regression()
    quiet(max_epochs=3, max_grad_norm=1.0).fit(straight, pairs(), pairs(4, seed=1))
    for mine, theirs in zip(task.parameters(), straight.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)
    assert result.best_checkpoint is not None
