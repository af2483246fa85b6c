"""JSON that is hard to read, in the place of each file that is JSON."""

import shutil

import torch
from tests.checkpoint.hostile.cases import (
    CASES,
    checkpoint_of,
    harmless,
    load,
    open_directory,
    read_plain,
    replace,
)
from tests.support.tasks import Regression

from drivetrain.checkpoint import export_weights, read_manifest, resolve, verify
from drivetrain.checkpoint.format.strict_json import seal
from drivetrain.checkpoint.inspection.listing import list_checkpoints
from drivetrain.checkpoint.prediction_files import read_predictions


def manifest(d, content):
    (d / "c" / "manifest.json").write_bytes(content)
    path = str(d / "c")
    return [
        lambda: read_manifest(path),
        lambda: verify(path),
        load(d / "c"),
        lambda: resolve(d / "c") and load(d / "c")(),
        open_directory(d),
    ]


def large_manifest(d, content):
    (d / "c" / "manifest.json").write_bytes(content)
    return load(d / "c")


def index(d, content):
    (d / "index.json").write_bytes(content)
    shutil.rmtree(d / "c")  # else it is made anew from the checkpoints
    return [lambda: list_checkpoints(str(d)) and resolve(d), open_directory(d)]


def hparams(d, content):
    replace(checkpoint_of(d), "hparams.json", content)
    return [harmless(load(checkpoint_of(d))), lambda: Regression.from_checkpoint(d / "run")]


def index_of_weights(d, content):
    (d / "hub").mkdir()
    (d / "hub" / "model.safetensors.index.json").write_bytes(content)
    return read_plain(d / "hub")


def bad_predictions(d, content):
    path = d / "predictions-000000.safetensors"
    export_weights({"value": torch.ones(1)}, path)
    path.with_suffix(".json").write_bytes(content)
    return lambda: read_predictions(path)


def predictions(d, content):
    return harmless(bad_predictions(d, content))


WELL_FORMED = ("a_text", "null", "nothing")
"""What every place must tell from what it wants, not only the reader of JSON."""

PLACES = (manifest, index, hparams, index_of_weights, predictions)
"""What writes a text to each place, and reads it from there."""

BASE = 58 << 20
"""Bytes of a file that is nearly as large as any that is read."""


def text_case(place, content):
    return lambda d: place(d, content() if callable(content) else content)


TEXTS = {
    "deep_lists": lambda: b"[" * (63 << 20),
    "deep_objects": lambda: b'{"a":' * (10 << 20),
    "depth_within_limits": lambda: b"[" * 190_000 + b"]" * 190_000,
    "as_many_floats_as_are_read": lambda: b"[" + b"1.25e-7," * 3_900_000 + b"1]",
    "as_many_texts_as_are_read": lambda: (
        b"[" + b",".join(b'"%08x"' % number for number in range(3_900_000)) + b"]"
    ),
    "long_integers": lambda: b"[" + b",".join([b"9" * 4301] * (BASE // 4302)) + b"]",
    "integers_as_long_as_are_read": lambda: b"[" + b",".join([b"9" * 4300] * (BASE // 4301)) + b"]",
    "a_text_that_takes_four_times_its_size": lambda: b'["' + b"a" * BASE + "\U0001f600".encode() + b'"]',
    "an_escape_that_takes_four_times_its_size": lambda: b'["' + b"a" * BASE + rb"\ud83d\ude00" + b'"]',
    "many_numbers": lambda: b"[" + b"1," * (31 << 20) + b"1]",
    "many_lists": lambda: b"[" + b"[]," * (20 << 20) + b"1]",
    "many_keys": lambda: b"{" + b",".join(b'"%d":1' % number for number in range(4_000_000)) + b"}",
    "as_many_keys_as_are_read": lambda: (
        b"{" + b",".join(b'"%d":1' % number for number in range(290_000)) + b"}"
    ),
    "a_long_number": lambda: b"[" + b"9" * (60 << 20) + b"]",
    "a_long_text": lambda: b'["' + b"a" * (60 << 20) + b'"]',
    "too_long": lambda: b" " * (65 << 20) + b"{}",
    "the_same_key_twice": b'{"values":{},"values":{}}',
    "infinity": b'{"a":1e999,"values":{},"xxh3_128":"x"}',
    "minus_infinity": b'{"a":-1e999,"values":{},"xxh3_128":"x"}',
    "a_float_of_many_digits": lambda: b'{"a":' + b"9" * BASE + b'.5,"values":{}}',
    "nan": b'{"a":NaN,"values":{}}',
    "bad_utf8": b'{"values":{},"a":"\xff"}',
    "a_byte_order_mark": b'\xef\xbb\xbf{"values":{}}',
    "nothing": b"",
    "zeros": b"\0" * 4096,
    "a_text": b'"manifest"',
    "null": b"null",
}

for number, (name, content) in enumerate(TEXTS.items()):
    # All places read by the same few lines: what is no JSON is put into one of them. What is large is made by
    # a function, and takes seconds.
    places = PLACES if name in WELL_FORMED else (PLACES[number % len(PLACES)],)
    for place in (large_manifest, hparams) if callable(content) else places:
        CASES[f"{place.__name__}_of_{name}"] = text_case(place, content)


def entries(*changes):
    """An index with these entries, sealed."""
    entry = {"name": "a", "order": 1, "update": 1, "epoch": 0, "metrics": {}, "resume": True, "keeper": False}
    return seal({"format_version": 1, "checkpoints": [{**entry, **each} for each in changes]}, "it")


for name, content in {
    "a_path_that_leads_out": lambda: entries({"name": "../../x"}),
    "an_absolute_path": lambda: entries({"name": "/etc"}),
    "a_hidden_name": lambda: entries({"name": ".saving-x"}),
    "a_long_name": lambda: entries({"name": "x" * 5000}),
    "a_name_with_a_zero": lambda: entries({"name": "a\0b"}),
    "a_lone_surrogate": lambda: entries({"name": "\ud800"}),
    "a_drive": lambda: entries({"name": "C:x"}),
    "a_name_twice": lambda: entries({}, {}),
    "a_huge_order": lambda: entries({"order": 1 << 2000}),
    "a_negative_update": lambda: entries({"update": -1}),
    "a_fraction": lambda: entries({"epoch": 0.5}),
    "a_metric_that_is_a_list": lambda: entries({"metrics": {"a": []}}),
    "a_flag_that_is_a_number": lambda: entries({"keeper": 1}),
    "a_list_in_an_entry's_place": lambda: seal({"format_version": 1, "checkpoints": [[]]}, "it"),
    "no_list": lambda: seal({"format_version": 1, "checkpoints": {"a": 1}}, "it"),
    "a_huge_version": lambda: seal({"format_version": 1 << 2000, "checkpoints": []}, "it"),
    "many_entries": lambda: entries(*({"name": f"x{number}"} for number in range(37_000))),
}.items():
    CASES[f"index_with_{name}"] = text_case(index, content)


for name, text in {
    "places_outside": b'{"weight_map":{"w":"../w.safetensors"}}',
    "a_place_with_a_surrogate": rb'{"weight_map":{"w":"\ud800.safetensors"}}',
    "a_place_with_a_zero": rb'{"weight_map":{"w":"\u0000.safetensors"}}',
    "a_long_place": b'{"weight_map":{"w":"' + b"x" * 5000 + b'.safetensors"}}',
    "a_pickle": b'{"weight_map":{"w":"w.bin"}}',
    "itself": b'{"weight_map":{"w":"model.safetensors.index.json"}}',
    "many_places": lambda: (
        b'{"weight_map":{' + b",".join(b'"%d":"%d.safetensors"' % (n, n) for n in range(100_000)) + b"}}"
    ),
}.items():
    CASES[f"index_of_weights_with_{name}"] = text_case(index_of_weights, text)

for name, text in {
    "an_absent_tensor": b'{"$tensor":"other"}',
    "an_unknown_tag": b'{"$object":"os.system"}',
    "a_text_for_a_tuple": b'{"$tuple":"ab"}',
    "half_a_pair": b'{"$dict":[[1]]}',
    "a_key_twice": b'{"$dict":[[1,2],[1,3]]}',
    "a_key_that_is_a_list": b'{"$dict":[[[],2]]}',
    "a_float_of_other_bits": b'{"$float":"0"}',
    "depth": b"[" * 200 + b"]" * 200,
    "tags_in_tags": b'{"$tuple":[' * 90 + b'{"$dict":[[{"$tuple":[]},1]]}' + b"]}" * 90,
}.items():
    CASES[f"predictions_with_{name}"] = text_case(bad_predictions, text)
