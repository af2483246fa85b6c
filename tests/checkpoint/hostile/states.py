"""State that is not what a run, an engine or a task left, although every hash is right."""

import json

import torch
import xxhash
from tests.checkpoint.hostile.cases import CASES, case, checkpoint_of, replace, resume, rewrite
from tests.support.held import in_files
from tests.support.tasks import Regression, pairs, quiet
from torchmetrics import MeanMetric

from drivetrain import CheckpointConfig, EarlyStopping, Engine, OptimizerConfig
from drivetrain.checkpoint import DirectoryCheckpointIO, Snapshot, pack
from drivetrain.task.optim.state import load_state_by_name, state_by_name


def with_state(value):
    def make(d):
        replace(checkpoint_of(d), "state.json", json.dumps(value).encode("utf-8"))
        return resume(d)

    return make


def deep(levels):
    value: object = 1
    for _ in range(levels):
        value = [value]
    return value


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
    "the_wrong_types": dict.fromkeys(
        [
            "seed",
            "optimizers",
            "schedules",
            "buffer",
            "callbacks",
            "loggers",
            "module_extras",
            "strategy",
            "data",
        ],
        3,
    ),
}.items():
    CASES[f"a_state_{name}"] = with_state(value)


def with_held(file, content, **changed):
    """A manifest that holds this as a file's content, which need not be what its size and hash say."""

    def make(d):
        data = content.encode("utf-8", "surrogatepass") if isinstance(content, str) else b""
        told = {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data), **changed}

        def change(body):
            hashes = {name: each for name, each in body["files"][file].items() if "tensors" in name}
            digest = {} if hashes else {"xxh3_128": told["xxh3_128"]}
            body["files"][file] |= {"content": content, "bytes": told["bytes"], **digest}

        rewrite(checkpoint_of(d), change)
        return resume(d)

    return make


for name, make in {
    "null": with_held("state.json", None),
    "a_number": with_held("state.json", 3),
    "a_list": with_held("state.json", ["{}"]),
    "no_ascii": with_held("state.json", '"\u00e9"'),
    "a_surrogate": with_held("state.json", "\ud800"),
    "no_json": with_held("state.json", "{"),
    "a_pickle": with_held("state.json", "cos\nsystem\n(S'true'\ntR."),
    "deep": with_held("state.json", "[" * 100_000 + "]" * 100_000),
    "another_size": with_held("state.json", "{}", bytes=3),
    "another_hash": with_held("state.json", "{}", xxh3_128="0" * 32),
    "no_base64": with_held("state.safetensors", "{}"),
    "no_tensors": with_held("state.safetensors", "AAAA", bytes=3),
    "an_endless_header": with_held("state.safetensors", "/////////38=", bytes=8),
    "a_size_beyond": with_held("state.safetensors", "AAAA", bytes=1 << 62),
}.items():
    CASES[f"a_manifest_holds_{name}"] = make


def change_state(checkpoint, place, value):
    """Put a value, or with KeyError nothing, at a place in the state."""
    state = json.loads((in_files(checkpoint) / "state.json").read_text(encoding="utf-8"))
    spot = state
    for key in place[:-1]:
        spot = spot[key]
    if value is KeyError:
        del spot[place[-1]]
    else:
        spot[place[-1]] = value
    replace(checkpoint, "state.json", json.dumps(state).encode("utf-8"))


def with_changed_state(place, value):
    def make(d):
        change_state(checkpoint_of(d), place, value)
        return resume(d)

    return make


OPTIMIZER = ("optimizers", "default")
GROUP = (*OPTIMIZER, "groups", 0)
PYTHON = ("host_streams", "python")
NUMPY = ("host_streams", "numpy")
PENDING = ("buffer", "pending")

for number, (place, value) in enumerate(
    [
        (("optimizers",), {}),
        (("optimizers",), []),
        (OPTIMIZER, 3),
        ((*OPTIMIZER, "optimizer"), ["SGD"]),
        ((*OPTIMIZER, "groups"), [3]),
        ((*OPTIMIZER, "groups"), {}),
        ((*GROUP, "parameters"), ["absent"]),
        ((*GROUP, "parameters"), [["line.weight"], "line.bias"]),
        ((*OPTIMIZER, "parameters"), {"line.weight": 3}),
        ((*OPTIMIZER, "slots"), {"line.weight/momentum": "float32[1, 4]"}),
        ((*OPTIMIZER, "scalars"), {"stranger/step": 1}),
        ((*OPTIMIZER, "scalars"), {"": 1}),
        (("schedules",), 3),
        (("schedules",), {}),
        (("schedules", "default"), 3),
        (("schedules", "default"), {"scale": "x"}),
        (("buffer",), []),
        (("buffer",), {"sums": 3}),
        (PENDING, 3),
        (PENDING, [3]),
        ((*PENDING, 0), {"names": 3}),
        ((*PENDING, 0, "names"), 3),
        ((*PENDING, 0, "names"), [3]),
        ((*PENDING, 0, "names"), ["loss", "other"]),
        ((*PENDING, 0, "values"), 3),
        ((*PENDING, 0, "values"), {"$tensor": "host_streams.python.words"}),
        ((*PENDING, 0, "weights"), ["x"]),
        ((*PENDING, 0, "weights"), [1]),
        ((*PENDING, 0, "updates"), "x"),
        (("buffer", "adds"), "x"),
        (("buffer", "adds"), 1 << 40),
        (("buffer", "folded"), [3]),
        (("buffer", "folded"), [{"names": ["loss"], "sums": {"$tensor": "buffer.pending.0.values"}}]),
        (("callbacks",), 3),
        (("loggers",), [1]),
        (("module_extras",), 3),
        (("module_extras",), {"stranger": 3}),
        (("host_streams",), {"python": [1, 2]}),
        (("host_streams",), 3),
        ((*PYTHON, "words"), [1]),
        ((*PYTHON, "words"), {"$array": "buffer.pending.0.values"}),
        ((*PYTHON, "gauss"), "x"),
        ((*NUMPY, "name"), "PCG64"),
        ((*NUMPY, "keys"), []),
        ((*NUMPY, "position"), -1),
        ((*NUMPY, "position"), -1_000_000_000),
        ((*NUMPY, "position"), 1 << 30),
        ((*NUMPY, "cached"), "x"),
        (("metrics",), 3),
        (("metrics",), {"loss": "x"}),
        (("timing",), "long"),
        (("timing",), {"data": "x"}),
        (("values",), 3),
        (("values",), {"a": "x"}),
        (("seed",), KeyError),
        (("seed",), [0]),
        (("host_streams",), KeyError),
        (("strategy",), KeyError),
        (("timing",), KeyError),
        (("data",), KeyError),
    ]
):
    CASES[f"a_run_with_another_{place[-1]}_{number}"] = with_changed_state(place, value)


def with_progress(change):
    def make(d):
        def put(body):
            body["progress"] = {**body["progress"], **change} if change else {}

        rewrite(checkpoint_of(d), put)
        return resume(d)

    return make


for number, change in enumerate(
    [
        {},
        {"updates": "many"},
        {"updates": -1},
        {"updates": True},
        {"epoch": 1.5},
        {"tokens": None},
        {"code": "import os"},
    ]
):
    CASES[f"a_run_with_another_progress_{number}"] = with_progress(change)


class Measured(Regression):
    """With a declared metric, momentum, and so with a state in each of them."""

    def metrics(self):
        return {"error": MeanMetric()}

    def metric_inputs(self, outputs, batch):
        return ((outputs - batch[1]).abs().mean(),)

    def configure_optimizers(self):
        return OptimizerConfig("adamw", lr=0.1)


def with_a_richer_run(change):
    """A change to the checkpoint of a run with more in it."""

    def make(d):
        checkpoint = d / "rich" / "checkpoints" / "update-00000005"

        def fit(epochs, **options):
            stopping = EarlyStopping("validation/loss", patience=9)
            config = CheckpointConfig(by=None, best=0)
            quiet(max_epochs=epochs, checkpoint=config, callbacks=(stopping,), **options["trainer"]).fit(
                Measured(), pairs(), pairs(4, seed=1), resume=options.get("resume")
            )

        fit(1, trainer={"run_dir": d / "rich"})
        change(checkpoint)
        return lambda: fit(2, trainer={"run_dir": d / "other"}, resume=str(checkpoint))

    return make


for number, (place, value) in enumerate(
    [
        (("train_metrics",), 3),
        (("train_metrics",), {"error": 3}),
        (("train_metrics",), {"stranger": {}}),
        (("callbacks", "EarlyStopping"), 3),
        (("callbacks", "EarlyStopping"), {"best": "x", "without_improvement": 0}),
        (("callbacks", "EarlyStopping"), {"best": None, "without_improvement": []}),
        (("callbacks", "EarlyStopping"), {}),
    ]
):
    CASES[f"a_richer_run_with_another_{place[-1]}_{number}"] = with_a_richer_run(
        lambda checkpoint, place=place, value=value: change_state(checkpoint, place, value)
    )


def with_hparams(value):
    def make(d):
        replace(checkpoint_of(d), "hparams.json", json.dumps(value).encode("utf-8"))
        return lambda: Regression.from_checkpoint(checkpoint_of(d))

    return make


OPTIONS = {"class": "OptimizerConfig", "values": {"name": "os.system"}}

for number, value in enumerate(
    [
        3,
        [],
        {},
        {"values": 3},
        {"values": {"optimizer": {"$class": "os.system"}}},
        {"values": {"optimizer": {"$tensor": "line.weight"}}},
        {"values": {"absent": 3}},
        {"values": {"__class__": 3, "self": 3}},
        {"values": {}, "unstored": ["optimizer"]},
        {"values": {}, "dataclasses": {"optimizer": OPTIONS}},
        {"values": {}, "dataclasses": {"optimizer": 3}},
        {"values": {}, "dataclasses": {"optimizer": {"class": "os.system", "values": {}}}},
    ]
):
    CASES[f"hparams_{number}"] = with_hparams(value)


def with_engine_state(name, value):
    """A change to what `Engine.save` wrote."""

    def make(d):
        def parts():
            model = torch.nn.Linear(3, 2)
            return model, torch.optim.AdamW(model.parameters())

        path = str(d / "e")
        model, optimizer = parts()
        Engine(strategy="cpu").save(path, model=model, optimizer=optimizer, best=1.0)
        change_state(d / "e", (name,), value)

        def load():
            model, optimizer = parts()
            Engine(strategy="cpu").load(path, model=model, optimizer=optimizer)

        return load

    return make


for number, (name, value) in enumerate(
    [
        ("user", KeyError),
        ("user", 3),
        ("strategy", KeyError),
        ("module_extras", 3),
        ("module_extras", KeyError),
        ("optimizers", {}),
        ("optimizers", 3),
        ("optimizers", {"default": 3}),
        ("optimizers", {"default": {"groups": []}}),
        ("optimizers", {"default": {"groups": [{"parameters": 3}]}}),
    ]
):
    CASES[f"an_engine_with_another_{name}_{number}"] = with_engine_state(name, value)


@case
def an_engine_state_of_another_shape(d):
    state, tensors = pack({"user": 3, "strategy": {}, "module_extras": {}, "optimizers": {}})
    snapshot = Snapshot({"model": {}, "optimizer": {}, "state": tensors}, {"state": state}, {"updates": 1})
    DirectoryCheckpointIO().save(str(d / "e"), snapshot)
    return lambda: Engine(strategy="cpu").load(str(d / "e"), something=3)


@case
def a_checkpoint_without_groups(d):
    state, _ = pack({"user": {}, "strategy": {}, "module_extras": {}, "optimizers": {}})
    DirectoryCheckpointIO().save(str(d / "e"), Snapshot({}, {"state": state}, {"updates": 1}))
    return lambda: Engine(strategy="cpu").load(str(d / "e"), model=torch.nn.Linear(1, 1))


def fused(slot, shape):
    """A state of a fused optimizer that is smaller than its parameter: the kernel would write beyond it."""

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


CASES["a_fused_moment_that_is_too_small"] = fused("exp_avg", (4,))
CASES["a_fused_step_that_is_no_scalar"] = fused("step", (2,))
