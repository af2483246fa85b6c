"""Weights are read from wherever they are, and what is no good is refused with what to do about it."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tests.support.messages import warned

from drivetrain.checkpoint import (
    CheckpointConfig,
    CheckpointManager,
    DamagedCheckpointError,
    DirectoryCheckpointIO,
    Snapshot,
    export_weights,
    load_weights,
)
from drivetrain.core.errors import CheckpointError
from drivetrain.distributed.ranks import Ranks
from drivetrain.testing.distributed import run_distributed

INDEX = "model.safetensors.index.json"


def make(value=1.0):
    return {name: torch.full((4,), value) for name in ("a", "b", "c")}


def value(source):
    """The one number that all of the tensors of `make` have."""
    found = load_weights(source)
    assert sorted(found) == ["a", "b", "c"]
    (number,) = torch.stack(list(found.values())).unique().tolist()
    return number


def snapshot(number):
    return Snapshot({"model": make(number), "optimizer": {"a/step": torch.ones(1)}}, {})


@pytest.fixture
def folder(tmp_path):
    """A folder as Hugging Face's, of two files."""
    export_weights(make(), tmp_path / "hub" / "model.safetensors", max_shard_size=32)
    (tmp_path / "hub" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "hub" / "pytorch_model.bin").write_bytes(b"not looked at")
    return tmp_path / "hub"


@pytest.fixture
def run(tmp_path):
    """A finished run with two checkpoints."""
    manager = CheckpointManager(str(tmp_path / "run" / "checkpoints"), CheckpointConfig(keep_last=2))
    for number in (1, 2):
        manager.save(number, 0, {}, lambda number=number: snapshot(number), resume=True, keeper=False)
    export_weights(make(3), tmp_path / "run" / "model.safetensors")
    return tmp_path / "run"


def test_several_files_are_read_by_their_folder_their_index_and_the_path_of_the_export(folder):
    for source in (folder, str(folder), folder / INDEX, folder / "model.safetensors"):
        assert value(source) == 1


def test_a_file_is_read_whatever_it_is_called(tmp_path):
    save_file(make(5), tmp_path / "weights")
    assert value(tmp_path / "weights") == 5
    save_file(make(6), tmp_path / "model.safetensors")
    assert value(tmp_path) == value(tmp_path / "model.safetensors") == 6


def test_of_a_single_file_and_several_the_single_one_counts(folder):
    save_file(make(7), folder / "model.safetensors")
    assert value(folder) == 7
    assert value(folder / INDEX) == 1


def test_of_a_run_the_newest_good_checkpoint_counts(run):
    newest = run / "checkpoints" / "update-00000002"
    assert value(run) == value(run / "checkpoints") == value(newest) == 2
    assert value(run / "checkpoints" / "update-00000001") == 1
    assert value(run / "model.safetensors") == 3
    with open(newest / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with warned(r"update-00000002' is damaged and skipped"):
        assert value(run) == 1
    with pytest.raises(DamagedCheckpointError, match=r"update-00000002"):
        load_weights(newest)


def test_of_a_run_without_checkpoints_the_finished_weights_count(run):
    shutil.rmtree(run / "checkpoints")
    assert value(run) == 3


def test_damaged_checkpoints_are_not_made_up_for_in_silence(run):
    for path in run.glob("checkpoints/*/manifest.json"):
        path.write_text("{", encoding="utf-8")
    with (
        warned("skipped"),
        pytest.raises(DamagedCheckpointError, match="no good checkpoint, only damaged ones"),
    ):
        load_weights(run)


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
def test_a_checkpoint_of_several_processes_is_read_whole(tmp_path):
    run_distributed(save_together, str(tmp_path / "kept"))
    assert len(list((tmp_path / "kept").glob("model-*-of-00002.safetensors"))) == 2
    assert value(tmp_path / "kept") == 4


def save_together(path):
    DirectoryCheckpointIO(ranks=Ranks.of_job()).save(path, snapshot(4))


def test_weights_in_an_object_store_are_read(tmp_path):
    address = f"memory://{tmp_path.name}/model.safetensors"
    written = export_weights(make(8), address, max_shard_size=16)
    assert written[-1] == f"{address}.index.json"
    assert value(address) == value(f"memory://{tmp_path.name}") == 8
    with pytest.raises(
        CheckpointError, match=r"no weights at 'memory://.*/model.safetensor'.*Near it are: .*"
    ):
        load_weights(address[:-1])
    export_weights(make(9), address)
    assert value(address) == value(f"memory://{tmp_path.name}") == 9
    with pytest.raises(CheckpointError, match="no weights at"):
        load_weights(written[0])


@pytest.mark.skipif(not hasattr(os, "symlink") or os.name == "nt", reason="no symbolic links here")
def test_links_into_a_cache_of_models_are_followed(folder, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{number}")
    (tmp_path / "link").symlink_to("snapshot")
    assert value(tmp_path / "snapshot") == value(tmp_path / "link") == 1


def test_a_file_that_the_index_names_and_nobody_fetched_is_named(folder):
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(
        DamagedCheckpointError,
        match=r"names 2 files, and 1 are missing.*model-00002-of-00002.safetensors",
    ):
        load_weights(folder)


@pytest.mark.parametrize(
    ("places", "message"),
    [
        ({"a": 1, "b": 1, "c": 2, "d": 2}, r"places 'd' in 'model-00002.*', but the file does not"),
        (
            {"a": 1, "b": 2, "c": 2},
            r"does not place 'b' in 'model-00001.*', but the file contains it",
        ),
        ({"a": 1, "c": 2}, r"does not place 'b' in 'model-00001.*', but the file contains it"),
        ({"a": 1, "b": 1}, None),
    ],
)
def test_an_index_must_say_what_is_in_the_files(folder, places, message):
    names = {name: f"model-0000{file}-of-00002.safetensors" for name, file in places.items()}
    (folder / INDEX).write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    if message is None:  # a file that it does not name is nobody's business
        assert sorted(load_weights(folder)) == ["a", "b"]
        return
    with pytest.raises(DamagedCheckpointError, match=message):
        load_weights(folder)


def test_an_index_cannot_lead_out_of_its_folder(folder, tmp_path):
    save_file(make(), tmp_path / "secret.safetensors")
    places = dict.fromkeys("abc", "../secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    with pytest.raises(
        DamagedCheckpointError, match=r"places 'a' in '../secret.safetensors'; allowed are plain names"
    ):
        load_weights(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "epoch=3.ckpt", "state.pkl"])
def test_a_file_of_torch_is_read_and_named_in_its_folder(tmp_path, name):
    torch.save({"w": torch.ones(1)}, tmp_path / name)
    assert list(load_weights(tmp_path / name)) == ["w"]
    with pytest.raises(CheckpointError, match=rf"Give the path of a file, such as '.*{name}'"):
        load_weights(tmp_path)


def test_several_files_of_torch_are_read_by_their_index(tmp_path):
    places = {"a": 1, "b": 1, "c": 2}
    for file in (1, 2):
        part = {name: each for name, each in make(5).items() if places[name] == file}
        torch.save(part, tmp_path / f"pytorch_model-{file}.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    names = {name: f"pytorch_model-{file}.bin" for name, file in places.items()}
    index.write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    assert value(index) == 5
    with pytest.raises(CheckpointError, match=r"Give the path of a file, such as '.*bin\.index\.json'"):
        load_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {**names, "c": "pytorch_model-1.bin"}}), encoding="utf-8")
    with pytest.raises(
        DamagedCheckpointError, match=r"places 'c' in 'pytorch_model-1.bin', but the file does"
    ):
        load_weights(index)


def test_what_is_there_instead_is_named(tmp_path):
    save_file(make(), tmp_path / "adapter.safetensors")
    with pytest.raises(
        CheckpointError,
        match=r"no weights in .*Looked for model.safetensors, model.safetensors.index.json, manifest.json of "
        r"a checkpoint, and checkpoints.*Give the path of a file, such as '.*adapter.safetensors'",
    ):
        load_weights(tmp_path)
    with pytest.raises(
        CheckpointError, match=r"no such file or directory. Near it are: '.*adapter.safetensors'"
    ):
        load_weights(tmp_path / "adaptor.safetensors")
    with pytest.raises(CheckpointError, match=r"There is nothing in '.*nowhere' either"):
        load_weights(tmp_path / "nowhere" / "model.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"no weights in '.*empty': it is empty"):
        load_weights(tmp_path / "empty")
    (tmp_path / "empty" / "notes.txt").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"no weights in '.*empty'. Looked for .*'checkpoints'\.$"):
        load_weights(tmp_path / "empty")


def test_a_damaged_file_is_named(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"\0" * 100)
    with pytest.raises(DamagedCheckpointError, match=r"model.safetensors' is not a safetensors file"):
        load_weights(tmp_path)
