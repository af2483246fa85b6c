"""JSON that is hard to read, in the place of each file that is JSON."""

import shutil

import torch
from tests.checkpoint.hostile import cases
from tests.support.tasks import Regression

from drivetrain.checkpoint import export_weights, read_manifest, resolve
from drivetrain.checkpoint.format.strict_json import seal
from drivetrain.checkpoint.inspection.listing import list_checkpoints
from drivetrain.checkpoint.prediction_files import read_predictions


def large_manifest(d, content):
    (d / "c" / "manifest.json").write_bytes(content)
    return cases.load(d / "c")


def manifest(d, content):
    large_manifest(d, content)
    others = [lambda: read_manifest(str(d / "c")), lambda: resolve(d / "c") and cases.load(d / "c")()]
    return [*cases.load_and_verify(d / "c"), *others, cases.open_directory(d)]


def index(d, content):
    (d / "index.json").write_bytes(content)
    shutil.rmtree(d / "c")  # else it is made anew from the checkpoints
    return [lambda: list_checkpoints(str(d)) and resolve(d), cases.open_directory(d)]


def hparams(d, content):
    cases.replace(cases.checkpoint_of(d), "hparams.json", content)
    return [cases.harmless(cases.load(cases.checkpoint_of(d))), lambda: Regression.from_checkpoint(d / "run")]


def index_of_weights(d, content):
    (d / "hub").mkdir()
    (d / "hub" / "model.safetensors.index.json").write_bytes(content)
    return cases.read_plain(d / "hub")


def bad_predictions(d, content):
    path = d / "predictions-000000.safetensors"
    export_weights({"value": torch.ones(1)}, path)
    path.with_suffix(".json").write_bytes(content)
    return lambda: read_predictions(path)


def predictions(d, content):
    return cases.harmless(bad_predictions(d, content))


def text_case(name, place, content):
    make = lambda d: place(d, content() if callable(content) else content)  # noqa: E731
    cases.enter(f"{place.__name__}_{name}", make, "large" if callable(content) else None)


BASE = 58 << 20  # bytes of a file that is nearly as large as any that is read


def keys(count):
    return lambda: b"{" + b",".join(b'"%d":1' % number for number in range(count)) + b"}"


def numbers(digits):
    return lambda: b"[" + b",".join([b"9" * digits] * (BASE // (digits + 1))) + b"]"


TEXTS = {
    "deep_lists": lambda: b"[" * (63 << 20),
    "deep_objects": lambda: b'{"a":' * (10 << 20),
    "depth_within_limits": lambda: b"[" * 190_000 + b"]" * 190_000,
    "as_many_floats_as_are_read": lambda: b"[" + b"1.25e-7," * 3_900_000 + b"1]",
    "as_many_texts_as_are_read": lambda: b"[" + b",".join(b'"%08x"' % n for n in range(3_900_000)) + b"]",
    "long_integers": numbers(4301),
    "integers_as_long_as_are_read": numbers(4300),
    "a_text_that_takes_four_times_its_size": lambda: b'["' + b"a" * BASE + "\U0001f600".encode() + b'"]',
    "an_escape_that_takes_four_times_its_size": lambda: b'["' + b"a" * BASE + rb"\ud83d\ude00" + b'"]',
    "many_numbers": lambda: b"[" + b"1," * (31 << 20) + b"1]",
    "many_lists": lambda: b"[" + b"[]," * (20 << 20) + b"1]",
    "many_keys": keys(4_000_000),
    "as_many_keys_as_are_read": keys(290_000),
    "a_long_number": lambda: b"[" + b"9" * (60 << 20) + b"]",
    "a_long_text": lambda: b'["' + b"a" * (60 << 20) + b'"]',
    "too_long": lambda: b" " * (65 << 20) + b"{}",
    "the_same_key_twice": b'{"values":{},"values":{}}',
    "a_float_of_many_digits": lambda: b'{"a":' + b"9" * BASE + b'.5,"values":{}}',
    "nan": b'{"a":NaN,"values":{}}',
    "bad_utf8": b'{"values":{},"a":"\xff"}',
    "zeros": b"\0" * 4096,
    # What every place must tell from what it wants, not only the reader of JSON.
    "nothing": b"",
    "a_text": b'"manifest"',
    "null": b"null",
}
PLACES = (manifest, index, hparams, index_of_weights, predictions)
for number, (name, content) in enumerate(TEXTS.items()):
    # All places read by the same few lines: what is no JSON is put into one of them. What is large is made by
    # a function, and takes seconds.
    places = PLACES if name in ("nothing", "a_text", "null") else (PLACES[number % len(PLACES)],)
    for place in (large_manifest, hparams) if callable(content) else places:
        text_case(f"of_{name}", place, content)


def sealed(checkpoints, version=1):
    return seal({"format_version": version, "checkpoints": checkpoints}, "it")


ENTRY = {"name": "a", "order": 1, "step": 1, "epoch": 0, "metrics": {}, "resume": [""], "best": {}}
NAMES = ("../../x", "/etc", ".saving-x", "x" * 5000, "a\0b", "\ud800", "C:x")
CHANGES = [{"order": 1 << 2000}, {"step": -1}, {"epoch": 0.5}, {"metrics": {"a": []}}, {"best": 1}]
for number, change in enumerate([*({"name": name} for name in NAMES), *CHANGES]):
    text_case(f"with_another_entry_{number}", index, sealed([{**ENTRY, **change}]))
for name, content in {
    "a_name_twice": sealed([ENTRY, ENTRY]),
    "a_list_for_an_entry": sealed([[]]),
    "no_list": sealed({"a": 1}),
    "a_huge_version": sealed([], 1 << 2000),
    "many_entries": lambda: sealed([{**ENTRY, "name": f"x{number}"} for number in range(37_000)]),
}.items():
    text_case(f"with_{name}", index, content)

for name, place in {
    "places_outside": b"../w.safetensors",
    "a_place_with_a_surrogate": rb"\ud800.safetensors",
    "a_place_with_a_zero": rb"\u0000.safetensors",
    "a_long_place": b"x" * 5000 + b".safetensors",
    "a_pickle": b"w.bin",
    "itself": b"model.safetensors.index.json",
}.items():
    text_case(f"with_{name}", index_of_weights, b'{"weight_map":{"w":"%b"}}' % place)
MANY = b",".join(b'"%d":"%d.safetensors"' % (number, number) for number in range(100_000))
text_case("with_many_places", index_of_weights, lambda: b'{"weight_map":{' + MANY + b"}}")

for name, content in {
    "an_absent_tensor": b'{"$tensor":"other"}',
    "an_unknown_tag": b'{"$object":"os.system"}',
    "a_text_for_a_tuple": b'{"$tuple":"ab"}',
    "half_a_pair": b'{"$dict":[[1]]}',
    "a_key_twice": b'{"$dict":[[1,2],[1,3]]}',
    "a_key_that_is_a_list": b'{"$dict":[[[],2]]}',
    "a_float_of_other_bits": b'{"$float":"0"}',
    "depth": b"[" * 200 + b"]" * 200,
    "tags_in_tags": b'{"$tuple":[' * 90 + b'{"$dict":[[[],1]]}' + b"]}" * 90,
}.items():
    text_case(f"with_{name}", bad_predictions, content)
