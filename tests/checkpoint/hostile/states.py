"""State that is not what a run, an engine or a task left, although every hash is right."""

import json

import torch
import xxhash
from tests.checkpoint.hostile.cases import case, checkpoint_of, enter, replace, resume, rewrite
from tests.support.held import in_files
from tests.support.tasks import Regression

from drivetrain import Engine
from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, pack
from drivetrain.task.optim.state import load_state_by_name, state_by_name


def encoded(value):
    return json.dumps(value).encode("utf-8")


def with_state(value):
    return lambda d: replace(checkpoint_of(d), "state.json", encoded(value)) or resume(d)


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


PARTS = ["seed", "optimizers", "schedules", "buffer", "callbacks", "loggers", "module_extras", "strategy"]
for name, value in {
    "a_list": [],
    "a_number": 3,
    "null": None,
    "empty": {},
    "deep": deep(900),
    "a_long_integer": {"$int": "0x" + "f" * 3_000_000},
    "bad_bytes": {"$bytes": "!"},
    "an_unknown_tag": {"$object": "os.system"},
    "two_tags": {"$tuple": [], "$int": "0x1"},
    "an_absent_tensor": {"$tensor": "nothing"},
    "the_wrong_types": dict.fromkeys([*PARTS, "data"], 3),
}.items():
    enter(f"a_state_{name}", with_state(value))


def with_held(file, content, **changed):  # a file's content in the manifest, whatever size and hash say
    def make(d):
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else b""
        told = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data), **changed}

        def change(body):
            if any("tensors" in name for name in body["files"][file]):
                del told["xxh3_128"]
            body["files"][file] |= {"content": content, **told}

        rewrite(checkpoint_of(d), change)
        return resume(d)

    return make


STATE, TENSORS = "state.json", "state.safetensors"
for name, make in {
    "null": with_held(STATE, None),
    "a_number": with_held(STATE, 3),
    "a_list": with_held(STATE, ["{}"]),
    "no_ascii": with_held(STATE, '"\u00e9"'),
    "a_surrogate": with_held(STATE, "\ud800"),
    "no_json": with_held(STATE, "{"),
    "a_pickle": with_held(STATE, "cos\nsystem\n(S'true'\ntR."),
    "deep": with_held(STATE, "[" * 100_000 + "]" * 100_000),
    "another_size": with_held(STATE, "{}", bytes=3),
    "another_hash": with_held(STATE, "{}", xxh3_128="0" * 32),
    "no_base64": with_held(TENSORS, "{}"),
    "no_tensors": with_held(TENSORS, "AAAA", bytes=3),
    "an_endless_header": with_held(TENSORS, "/////////38=", bytes=8),
    "a_size_beyond": with_held(TENSORS, "AAAA", bytes=1 << 62),
}.items():
    enter(f"a_manifest_holds_{name}", make)


def change_state(checkpoint, place, value):  # put a value, or with KeyError nothing, at a place in the state
    state = json.loads((in_files(checkpoint) / "state.json").read_text(encoding="utf-8"))
    spot = state
    for key in place[:-1]:
        spot = spot[key]
    if value is KeyError:
        del spot[place[-1]]
    else:
        spot[place[-1]] = value
    replace(checkpoint, "state.json", encoded(state))


def with_changed_state(place, value, epochs=2):
    return lambda d: change_state(checkpoint_of(d), place, value) or resume(d, epochs)


OPTIMIZER = ("optimizers", "default")
GROUP = (*OPTIMIZER, "groups", 0)
PYTHON, NUMPY = ("host_streams", "python"), ("host_streams", "numpy")
PENDING = ("buffer", "pending")
SUMS = {"$tensor": "buffer.pending.0.values"}
for place, values in {
    ("optimizers",): [{}, []],
    OPTIMIZER: [3],
    (*OPTIMIZER, "optimizer"): [["SGD"]],
    (*OPTIMIZER, "groups"): [[3], {}],
    (*GROUP, "parameters"): [["absent"], [["line.weight"], "line.bias"]],
    (*OPTIMIZER, "parameters"): [{"line.weight": 3}],
    (*OPTIMIZER, "slots"): [{"line.weight/momentum": "float32[1, 4]"}],
    (*OPTIMIZER, "scalars"): [{"stranger/step": 1}, {"": 1}],
    ("schedules",): [3, {}],
    ("schedules", "default"): [3, {"scale": "x"}],
    ("buffer",): [[], {"sums": 3}],
    PENDING: [3, [3]],
    (*PENDING, 0): [{"names": 3}],
    (*PENDING, 0, "names"): [3, [3], ["loss", "other"]],
    (*PENDING, 0, "values"): [3, {"$tensor": "host_streams.python.words"}],
    (*PENDING, 0, "weights"): [["x"], [1]],
    (*PENDING, 0, "steps"): ["x"],
    ("buffer", "adds"): ["x", 1 << 40],
    ("buffer", "folded"): [[3], [{"names": ["loss"], "sums": SUMS}]],
    ("callbacks",): [3],
    ("loggers",): [[1]],
    ("module_extras",): [3, {"stranger": 3}],
    ("host_streams",): [{"python": [1, 2]}, 3, KeyError],
    (*PYTHON, "words"): [[1], {"$array": "buffer.pending.0.values"}],
    (*PYTHON, "gauss"): ["x"],
    (*NUMPY, "name"): ["PCG64"],
    (*NUMPY, "keys"): [[]],
    (*NUMPY, "position"): [-1, -1_000_000_000, 1 << 30],
    (*NUMPY, "cached"): ["x"],
    ("metrics",): [3, {"loss": "x"}],
    ("timing",): ["long", {"data": "x"}, KeyError],
    ("values",): [3, {"a": "x"}],
    ("seed",): [[0], KeyError],
    ("strategy",): [KeyError],
    ("data",): [KeyError],
}.items():
    for number, value in enumerate(values):
        name = f"a_run_with_another_{'.'.join(map(str, place))}_{number}"
        enter(name, with_changed_state(place, value), "runs")
for number, value in enumerate([3, *({each: 3} for each in ("buffer", "metrics", "callbacks", "values"))]):
    enter(f"a_finished_run_with_another_end_{number}", with_changed_state(("at_limit",), value, 1), "runs")


def with_progress(change):
    def make(d):
        rewrite(checkpoint_of(d), lambda body: body.update(progress=change and body["progress"] | change))
        return resume(d)

    return make


PROGRESS = [{}, {"steps": "many"}, {"steps": -1}, {"steps": True}, {"epoch": 1.5}, {"tokens": None}]
for number, change in enumerate([*PROGRESS, {"code": "import os"}]):
    enter(f"a_run_with_another_progress_{number}", with_progress(change))


def with_hparams(value):
    def make(d):
        replace(checkpoint_of(d), "hparams.json", encoded(value))
        return lambda: Regression.from_checkpoint(checkpoint_of(d))

    return make


OPTIONS = {"class": "OptimizerConfig", "values": {"name": "os.system"}}
HPARAMS = [
    *(3, [], {}, {"values": 3}, {"values": {"optimizer": {"$class": "os.system"}}}),
    *({"values": {"optimizer": {"$tensor": "line.weight"}}}, {"values": {"absent": 3}}),
    *({"values": {"__class__": 3, "self": 3}}, {"values": {}, "unstored": ["optimizer"]}),
    *({"values": {}, "dataclasses": {"optimizer": each}} for each in (OPTIONS, 3)),
    {"values": {}, "dataclasses": {"optimizer": {"class": "os.system", "values": {}}}},
]
for number, value in enumerate(HPARAMS):
    enter(f"hparams_{number}", with_hparams(value))


def with_engine_state(name, value):
    def make(d):
        def parts():
            model = torch.nn.Linear(3, 2)
            return {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}

        Engine(strategy="cpu").save(str(d / "e"), best=1.0, **parts())
        change_state(d / "e", (name,), value)
        return lambda: Engine(strategy="cpu").load(str(d / "e"), **parts())

    return make


GROUPS = [{"groups": []}, {"groups": [{"parameters": 3}]}]
for name, values in {
    "user": [KeyError, 3],
    "strategy": [KeyError],
    "module_extras": [3, KeyError],
    "optimizers": [{}, 3, {"default": 3}, *({"default": each} for each in GROUPS)],
}.items():
    for number, value in enumerate(values):
        enter(f"an_engine_with_another_{name}_{number}", with_engine_state(name, value))


def save_engine(d, user, groups):
    state, _ = pack({"user": user, "strategy": {}, "module_extras": {}, "optimizers": {}})
    DirectoryCheckpointIO().save(str(d / "e"), Snapshot(groups, {"state": state}, {"steps": 1}))


@case
def an_engine_state_of_another_shape(d):
    save_engine(d, 3, {"model": {}, "optimizer": {}, "state": {}})
    return lambda: Engine(strategy="cpu").load(str(d / "e"), something=3)


@case
def a_checkpoint_without_groups(d):
    save_engine(d, {}, {})
    return lambda: Engine(strategy="cpu").load(str(d / "e"), model=torch.nn.Linear(1, 1))


def fused(slot, shape):  # smaller than its parameter: the fused kernel would write beyond it
    def make(d):
        parameter = torch.nn.Parameter(torch.zeros(1_000_000))
        parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.AdamW([parameter], fused=True)
        optimizer.step()
        tensors, meta = state_by_name(optimizer, {parameter: "p"})
        tensors = {**tensors, f"p/{slot}": torch.ones(shape)}
        meta["slots"][f"p/{slot}"] = f"float32{list(shape)}"

        def go_on():
            load_state_by_name(optimizer, {parameter: "p"}, tensors, meta)
            optimizer.step()

        return go_on

    return make


enter("a_fused_moment_that_is_too_small", fused("exp_avg", (4,)))
enter("a_fused_step_that_is_no_scalar", fused("step", (2,)))
