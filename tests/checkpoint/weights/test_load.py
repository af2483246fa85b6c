"""Weights are read from wherever they are, and what is no good is refused with what to do about it."""

import json
import os
import shutil

import pytest
import torch
from safetensors.torch import save_file
from tests.support.messages import warned
from tests.support.refusals import assert_refused

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, DamagedCheckpointError, Snapshot
from drivetrain.checkpoint.weights.export import export_weights
from drivetrain.checkpoint.weights.files import divide, dump_index, parse_index
from drivetrain.checkpoint.weights.load import load_weights
from drivetrain.core.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def make(value=1.0):
    return {name: torch.full((4,), value) for name in ("a", "b", "c")}


def value(source):  # the one number that all of the tensors of `make` have
    found = load_weights(source)
    assert sorted(found) == ["a", "b", "c"]
    (number,) = torch.stack(list(found.values())).unique().tolist()
    return number


def snapshot(number):
    return Snapshot({"model": make(number), "optimizer": {"a/step": torch.ones(1)}}, {})


@pytest.fixture
def folder(tmp_path):
    export_weights(make(), tmp_path / "hub" / "model.safetensors", max_shard_size=32)
    (tmp_path / "hub" / "config.json").write_text("{}", encoding="utf-8")
    (tmp_path / "hub" / "pytorch_model.bin").write_bytes(b"not looked at")
    return tmp_path / "hub"


@pytest.fixture
def run(tmp_path):
    manager = CheckpointManager(str(tmp_path / "run" / "checkpoints"), CheckpointConfig(keep_last=2))
    for number in (1, 2):
        manager.save(number, 0, {}, lambda number=number: snapshot(number), resume=True, best=False)
    export_weights(make(3), tmp_path / "run" / "model.safetensors")
    return tmp_path / "run"


def test_load_weights_reads_a_file_a_folder_and_an_index(folder, tmp_path):
    for source in (folder, str(folder), folder / INDEX, folder / "model.safetensors"):
        assert value(source) == 1
    save_file(make(7), folder / "model.safetensors")  # of a single file and several the single one counts
    assert value(folder) == 7
    assert value(folder / INDEX) == 1
    save_file(make(5), tmp_path / "weights")
    assert value(tmp_path / "weights") == 5
    save_file(make(6), tmp_path / "model.safetensors")
    assert value(tmp_path) == value(tmp_path / "model.safetensors") == 6


def test_of_a_run_the_newest_good_checkpoint_counts(run):
    newest = run / "checkpoints" / "step-00000002"
    assert value(run) == value(run / "checkpoints") == value(newest) == 2
    assert value(run / "checkpoints" / "step-00000001") == 1
    assert value(run / "model.safetensors") == 3
    with open(newest / "model.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\1")
    with warned(r"step-00000002' is damaged and skipped"):
        assert value(run) == 1
    with pytest.raises(DamagedCheckpointError, match=r"step-00000002"):
        load_weights(newest)
    for path in run.glob("checkpoints/*/manifest.json"):
        path.write_text("{", encoding="utf-8")
    with warned("skipped"), pytest.raises(DamagedCheckpointError, match="only damaged checkpoints"):
        load_weights(run)  # not made up for in silence by the finished weights
    shutil.rmtree(run / "checkpoints")
    assert value(run) == 3


def test_a_checkpoint_without_a_manifest_to_verify_it_is_refused(run):
    manifest = run / "checkpoints" / "step-00000002" / "manifest.json"
    manifest.unlink()
    with pytest.raises(DamagedCheckpointError, match=r"manifest.json is missing, .*give the file"):
        load_weights(manifest.parent)
    makers = [lambda: manifest.symlink_to("nothing"), manifest.mkdir, lambda: os.mkfifo(manifest)]
    for make_it, remove in zip(makers, (manifest.unlink, manifest.rmdir, manifest.unlink), strict=True):
        make_it()
        with pytest.raises(DamagedCheckpointError, match=r"manifest.json is no file"):
            load_weights(manifest.parent)
        remove()
    assert value(manifest.parent / "model.safetensors") == 2


@pytest.mark.skipif(os.name == "nt", reason="no symbolic links here")
def test_links_into_a_cache_of_models_are_followed(folder, tmp_path):
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(tmp_path / "blobs" / str(number))
        (tmp_path / "snapshot" / path.name).symlink_to(f"../blobs/{number}")
    (tmp_path / "link").symlink_to("snapshot")
    assert value(tmp_path / "snapshot") == value(tmp_path / "link") == 1


def test_an_index_must_say_what_is_in_the_files_of_its_folder(folder, tmp_path):
    save_file(make(), tmp_path / "secret.safetensors")
    first, second = (f"model-0000{number}-of-00002.safetensors" for number in (1, 2))
    lacks, has = (f"does not place 'b' in '{first}'", "the file contains it"), "but the file does not"
    for places, words in (
        ({"a": first, "b": first, "c": second, "d": second}, (f"places 'd' in '{second}'", has)),
        ({"a": first, "b": second, "c": second}, lacks),
        ({"a": first, "c": second}, lacks),
        (dict.fromkeys("abc", "../secret.safetensors"), ("places 'a' in", "../secret", "plain names")),
    ):
        (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
        assert_refused(DamagedCheckpointError, {str(places): (lambda: load_weights(folder), *words)})
    places = {"a": first, "b": first}  # a file that it does not name is nobody's business
    (folder / INDEX).write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    assert sorted(load_weights(folder)) == ["a", "b"]


def test_files_of_torch_are_read_and_named_in_their_folder(tmp_path):
    torch.save({"w": torch.ones(1)}, tmp_path / "epoch=3.ckpt")
    assert list(load_weights(tmp_path / "epoch=3.ckpt")) == ["w"]
    places = {"a": 1, "b": 1, "c": 2}
    for file in (1, 2):
        part = {name: each for name, each in make(5).items() if places[name] == file}
        torch.save(part, tmp_path / f"pytorch_model-{file}.bin")
    index = tmp_path / "pytorch_model.bin.index.json"
    names = {name: f"pytorch_model-{file}.bin" for name, file in places.items()}
    index.write_text(json.dumps({"weight_map": names}), encoding="utf-8")
    assert value(index) == 5
    with pytest.raises(CheckpointError, match="Give the path of another file"):
        load_weights(tmp_path)
    index.write_text(json.dumps({"weight_map": {**names, "c": "pytorch_model-1.bin"}}), encoding="utf-8")
    with pytest.raises(DamagedCheckpointError, match=r"places 'c' in 'pytorch_model-1.bin'"):
        load_weights(index)


def test_tensors_are_divided_as_hugging_face_divides_them():
    for sizes, files in (
        ([], [[]]),
        ([0, 0], [[0, 1]]),
        ([6, 6, 2, 6, 2, 2], [[0], [1, 2], [3, 4, 5]]),
        ([10, 1], [[0], [1]]),
        ([11, 1, 12, 9], [[0], [2], [1, 3]]),  # what is too large does not end the file that is being filled
        ([11], [[0]]),
    ):
        tensors = {str(number): torch.empty(size, dtype=torch.uint8) for number, size in enumerate(sizes)}
        assert divide(tensors, 10) == [[str(number) for number in file] for file in files]


OUTSIDE = [*(f"{name}.safetensors" for name in ("../x", "/etc/x", "sub/x", "sub\\x", "C:x", "", ".hidden"))]
OUTSIDE += ["..", "x.safetensors\0", "x.safetensors\n", "", None, 3]


def test_an_index_is_read_back_and_leads_nowhere_but_beside_itself():
    data = dump_index(12, {"a": "x.safetensors", "b": "y.safetensors", "c": "x.safetensors"})
    assert json.loads(data)["metadata"] == {"total_size": 12, "written_by": "drivetrain"}
    assert parse_index(data, "it") == {"x.safetensors": ["a", "c"], "y.safetensors": ["b"]}
    for file in [*OUTSIDE, ["x.safetensors"]]:
        with pytest.raises(DamagedCheckpointError, match=r"the index places 'w' in .*"):
            parse_index(json.dumps({"weight_map": {"w": file}}).encode(), "the index")
    with pytest.raises(DamagedCheckpointError, match=r"'w-00001.npz', which is no .safetensors or .bin file"):
        parse_index(b'{"weight_map": {"w": "w-00001.npz"}}', "the index")
    for text in ("", "[]", "{}", '{"weight_map": {}}', '{"weight_map": [1]}', '{"weight_map": 1}'):
        with pytest.raises(DamagedCheckpointError, match=r"^the index "):
            parse_index(text.encode(), "the index")
