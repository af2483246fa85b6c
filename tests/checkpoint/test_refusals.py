"""What is refused before anything is read or written, with the word that helps."""

import dataclasses
import os
from datetime import timedelta
from functools import partial
from pathlib import Path, PureWindowsPath

import torch
from tests.support.refusals import assert_refused
from torch import nn

from drivetrain.checkpoint import CheckpointConfig, export_weights
from drivetrain.checkpoint.saving.assets import checked_assets, make_assets
from drivetrain.checkpoint.storage.schemes import file_system
from drivetrain.checkpoint.weights.dtypes import floating_dtype
from drivetrain.checkpoint.weights.rename import renamed
from drivetrain.checkpoint.weights.warm_start import load_weights_into
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.intervals import Every
from drivetrain.core.validation import byte_count


def test_the_defaults_are_those_of_the_design():
    expected = (2, None, "validation/loss", "auto", False, False, None, None, True)
    assert dataclasses.astuple(CheckpointConfig())[1:] == expected
    assert CheckpointConfig().interval == Every("1 epoch")
    assert CheckpointConfig(every=None).interval is None
    assert CheckpointConfig(by=None, best=3).best_count == 0
    for every in (500, "500 steps", Every("500 steps")):
        assert CheckpointConfig(every=every).interval == Every(500, "steps")
    assert CheckpointConfig(every=timedelta(hours=1)).interval == Every(3600, "seconds")
    for place in (Path("runs/one"), "s3://bucket/run", "s3:/bucket", PureWindowsPath("C:/run"), Path(".")):
        assert CheckpointConfig(directory=place).directory == place


def config(*words, **arguments):
    return partial(CheckpointConfig, **arguments), "CheckpointConfig", *words


def test_wrong_checkpoint_configs_are_refused():
    whole, place = "must be a whole number", "directory is a path, an address or None"
    table = {
        "keep_last -1": config(f"keep_last {whole}, at least 0", mode="min", keep_last=-1),
        "best 1.5": config(f"best {whole}", best=1.5),
        "by": config("by is a metric", by=""),
        "parameters": config("'trained'", "Did you mean 'trainable'", parameters="trained"),
        "asynchronous": config("asynchronous must be True or False", asynchronous=1),
        "directory": config(place, directory=""),
    }
    for name, ours in {"monitor": "by", "save_top_k": "best", "save_total_limit": "keep_last"}.items():
        table[name] = config(f"no argument '{name}'", f"called '{ours}'", **{name: 1})
    table["every"] = (partial(CheckpointConfig, every="1 fortnight"), "unit 'fortnight'")
    assert_refused(ConfigError, table)


def test_wrong_options_of_exports_are_refused(tmp_path):
    path, tensors = tmp_path / "w.safetensors", {"a": torch.ones(1)}
    export, big = partial(export_weights, tensors, path), {"big": torch.tensor([1.0, 1e6])}
    allowed, half = "Allowed: 'bf16', 'bfloat16'", ("'big'", "1e+06", "65504")
    table = {
        "dtype": (lambda: export(dtype="flaot32"), "'flaot32'", "Did you mean 'float32'?"),
        "a dict": (lambda: export_weights({"a": torch.ones(1), "b": {}}, path), "'b' is a dict"),
        "a directory": (lambda: export_weights(tensors, tmp_path), "is a directory", "model.safetensors'"),
        "a large number": (lambda: export_weights(big, path, dtype="fp16"), *half),
    }
    sizes = {1: 1, "50 GB": 50 * 10**9, "1.5 KB": 1500, " 2gib ": 2 << 30, "3 g": 3 * 10**9, "7": 7}
    assert {each: byte_count("memory=", each) for each in sizes} == sizes
    for given in (0, True, 1.5, "GB", "-5 GB", "5 XB"):
        table[f"size {given!r}"] = (
            lambda each=given: export(max_shard_size=each),
            "max_shard_size must be",
            "such as '5 GB'",
        )
    for given in ("int8", torch.float8_e4m3fn, 16):
        table[f"dtype {given!r}"] = (partial(floating_dtype, given), "cannot be converted", allowed)
    assert_refused((ConfigError, CheckpointError), table)
    assert os.listdir(tmp_path) == []


def test_wrong_sources_of_weights_and_renames_are_refused(tmp_path):
    def source(given, *words):
        return partial(load_weights_into, nn.Linear(2, 2), given, strict=False), *words

    def rename(given, *words):
        return partial(renamed, {"a": torch.ones(1)}, given, "a file"), *words

    nested = {"state_dict": {"w": torch.ones(1)}}
    assert_refused(
        (ConfigError, CheckpointError),
        {
            "a number": source(3, "a path or from tensors by name", "int"),
            "a module": source(nn.Linear(1, 1), "not from a Linear", "state_dict()"),
            "a state dict inside": source(nested, "Did you mean", "source['state_dict']?"),
            "a file": (lambda: file_system("File:///runs"), "is an address: give the path"),
            "a password": (lambda: file_system("s3://me:mine@bucket"), "me:<hidden>@", "credentials as its"),
            "nowhere": source(tmp_path / "nowhere", "no weights at", "nowhere"),
            "nothing": source({}, "nothing of the given mapping fits Linear", "2 missing"),
            "sparse": source({"weight": torch.eye(2).to_sparse()}, "'weight'", "torch.sparse_coo"),
            "no expression": rename({"(": "x"}, "'(': 'x'", "unterminated"),
            "no mapping": rename("a", "mapping of regular expressions", "function", "str"),
            "a function's number": rename(lambda name: 3, "rename('a') gave a int"),
        },
    )


def test_wrong_assets_are_refused(tmp_path):
    def write_note(folder):
        Path(folder, "note.txt").write_text("note", encoding="utf-8")

    def given(assets, *words):
        return lambda: make_assets(("it", checked_assets(assets, "it"))), *words

    with (tmp_path / "large").open("wb") as file:
        file.truncate((1 << 30) + 1)
    assert_refused(
        ConfigError,
        {
            "a number in a list": given([3], "it[0] is a int", "save_pretrained(folder)"),
            "a module": given([nn.Linear(1, 1)], "the module Linear", "model.config"),
            "an address": given(["s3://bucket/vocabulary"], "is read from a local path"),
            "a name that leads out": given({"../out": write_note}, "'../out'", "leads out"),
            "a device": given({"aux.txt": write_note}, "a device on Windows"),
            "no files": given([lambda folder: None], "it[0] has no files"),
            "too large": given([tmp_path / "large"], "1073741825 bytes", "at most 1073741824"),
        },
    )
