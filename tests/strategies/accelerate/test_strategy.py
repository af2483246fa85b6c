"""accelerate prepares, the engine steps: the same numbers, and accelerate's own state as it was before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # here and not in each of the processes, which are copies of this one
import torch.distributed.fsdp
import torchmetrics  # noqa: F401  for the same reason
from tests.support.failing import JOB
from tests.support.launched import DEEP, FSDP_YAML
from tests.support.tasks import Regression, pairs, quiet
from torch import Tensor, nn

import drivetrain
from drivetrain import (
    AccelerateConfig,
    Callback,
    ConfigError,
    DDPConfig,
    StrategyError,
    Trainer,
)
from drivetrain.strategies import Hardware, SingleDevice, Strategy, choose, select_strategy
from drivetrain.strategies.accelerate.config import asked
from drivetrain.strategies.ddp import DDP
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import PRECISIONS, as_precision
from drivetrain.testing.distributed import run_distributed
from drivetrain.testing.strategies.check import check_strategy
from drivetrain.testing.strategies.resume import check_resume

accelerate = pytest.importorskip("accelerate")

from accelerate import Accelerator, FullyShardedDataParallelPlugin  # noqa: E402
from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import (  # noqa: E402
    AutocastKwargs,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)

from drivetrain.strategies.accelerate.strategy import Accelerate  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

FULL = as_precision("32")


def replicated(world_size: int) -> Accelerate:
    return Accelerate(world_size=world_size)


def plugin(**options: Any) -> AccelerateConfig:
    """With FSDP; made in the process that uses it, because the plugin notes itself in the environment."""
    made = FullyShardedDataParallelPlugin(fsdp_version=2, **options)
    return AccelerateConfig(options={"fsdp_plugin": made})


def sharded(world_size: int) -> Accelerate:
    return Accelerate(plugin(), world_size=world_size)


MAKERS: dict[str, Callable[[int], Strategy]] = {"replicated": replicated, "sharded": sharded}


@pytest.mark.parametrize(
    ("kind", "world_size"),
    [
        ("replicated", 2),
        *(pytest.param(*each, marks=pytest.mark.full) for each in [("sharded", 2), ("sharded", 1)]),
    ],
)
def test_accelerate_conforms(kind: str, world_size: int) -> None:
    check_strategy(MAKERS[kind], world_size)


def test_shards_of_the_weights_give_the_same_updates_and_resume_to_the_bit() -> None:
    check_strategy(sharded, checks=["same_as_the_big_batch", "resume_is_bitwise"])


@pytest.mark.full
@pytest.mark.parametrize("kind", MAKERS)
def test_accelerate_conforms_on_four_processes(kind: str) -> None:
    check_strategy(MAKERS[kind], 4, checks=["same_as_the_big_batch", "resume_is_bitwise"])


OPTIONS: dict[str, dict[str, Any]] = {
    "by_class": {
        "auto_wrap_policy": "transformer_based_wrap",
        "transformer_cls_names_to_wrap": ["Sequential"],
        "activation_checkpointing": True,
    },
    "by_size": {"auto_wrap_policy": "size_based_wrap", "min_num_params": 100, "reshard_after_forward": False},
    "ignored": {"ignored_modules": "head", "cpu_offload": True, "cpu_ram_efficient_loading": True},
}


@pytest.mark.full
@pytest.mark.parametrize("name", OPTIONS)
def test_the_options_of_the_fsdp_plugin_conform(name: str) -> None:
    def make(world_size: int) -> Accelerate:
        return Accelerate(plugin(**OPTIONS[name]), world_size=world_size)

    check_strategy(make, checks=["same_as_the_big_batch", "frozen_and_tied", "parameters_may_be_unfrozen"])


@pytest.mark.parametrize("options", [{"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_the_options_of_data_parallelism_conform(options: dict[str, Any]) -> None:
    config = AccelerateConfig(options={"kwargs_handlers": [DistributedDataParallelKwargs(**options)]})
    checks = ["same_as_the_big_batch", "parameters_may_be_unfrozen"]
    check_strategy(lambda world_size: Accelerate(config, world_size=world_size), checks=checks)


@pytest.mark.full
@pytest.mark.parametrize("kind", MAKERS)
def test_mixed_precision_conforms(kind: str) -> None:
    checks = ["same_as_the_big_batch", "resume_is_bitwise"]
    unfrozen = ["parameters_may_be_unfrozen"]
    check_strategy(MAKERS[kind], checks=unfrozen, precision="bf16-mixed", tolerance=0.05)
    check_strategy(MAKERS[kind], checks=checks, precision="bf16-mixed", tolerance=5e-3)


@pytest.mark.full
def test_checkpoints_go_from_and_to_every_other_strategy() -> None:
    makers = {
        "single": lambda world_size: SingleDevice("cpu"),
        "ddp": lambda world_size: DDP(world_size=2),
        "fsdp": lambda world_size: FSDP(world_size=2),
        "replicated": lambda world_size: replicated(2),
        "sharded": lambda world_size: sharded(2),
    }
    assert check_resume(makers, world_sizes=(1, 2)) == 25


class Seen(Callback):
    """What a run's parameters are, and what its model is."""

    shards = 0
    model = ""

    def on_step_end(self, run: Any) -> None:
        parameters = list(run.task.parameters())
        self.shards = sum(hasattr(each, "to_local") for each in parameters)
        self.model = type(run.engine.model).__name__


def _seen(make: Callable[[int], Strategy]) -> tuple[int, str, int]:
    seen, task = Seen(), Regression()
    quiet(strategy=make(2), devices=2, max_epochs=1, callbacks=[seen]).fit(task, pairs(8))
    left = sum(hasattr(each, "to_local") for each in task.parameters())
    return seen.shards, seen.model, left


def test_the_model_is_really_wrapped_and_sharded_and_afterwards_an_ordinary_one() -> None:
    assert run_distributed(_seen, replicated) == [(0, "DistributedDataParallel", 0)] * 2
    assert run_distributed(_seen, sharded) == [(2, "FSDPStepModule", 0)] * 2


class Layer(nn.Module):
    """Counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(4, 4)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.line(x).tanh()


class Layered(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(Layer(), Layer())

    def forward(self, features: Tensor) -> Tensor:
        return self.line(self.layers(features))


def _computed(again: bool) -> tuple[list[int], list[str]]:
    policy = {"auto_wrap_policy": "transformer_based_wrap", "transformer_cls_names_to_wrap": ["Layer"]}
    config, task = plugin(activation_checkpointing=again, **policy), Layered()
    quiet(strategy=Accelerate(config), max_epochs=1).fit(task, pairs(2))
    return [each.calls for each in task.layers], list(task.state_dict())


def test_activation_checkpointing_computes_layers_again_under_their_own_names() -> None:
    names = list(Layered().state_dict())
    assert run_distributed(_computed, False, world_size=1) == [([1, 1], names)]
    assert run_distributed(_computed, True, world_size=1) == [([2, 2], names)]


def _shared() -> list[dict[str, Any]]:
    return [dict(each._shared_state) for each in (PartialState, AcceleratorState, GradientState)]


class Failing(Regression):
    def training_step(self, batch: Any) -> Tensor:
        raise RuntimeError("planted")


@pytest.fixture
def started() -> Iterator[None]:
    """accelerate knows of this process already."""
    PartialState(cpu=True)
    yield
    PartialState._reset_state()


@pytest.mark.usefixtures("started")
def test_accelerate_s_own_state_is_afterwards_as_it_was() -> None:
    before = _shared()  # and the environment, which is checked for every test
    assert any(before)
    config = AccelerateConfig(options={"mixed_precision": "bf16"})
    quiet(strategy=config, max_epochs=1).fit(Regression(), pairs(8))
    assert _shared() == before
    with pytest.raises(RuntimeError, match="planted"):
        quiet(strategy=config, max_epochs=1).fit(Failing(), pairs(8))
    assert _shared() == before


class Dtypes(Regression):
    def training_step(self, batch: Any) -> Any:
        outputs = self(batch[0])
        self.computed = outputs.dtype
        return drivetrain.StepOutput(self.loss(outputs, batch), outputs=outputs)


def test_mixed_precision_is_the_accelerator_s() -> None:
    task = Dtypes()
    trainer = quiet(strategy=AccelerateConfig(options={"mixed_precision": "bf16"}), max_epochs=1)
    assert as_precision(trainer.precision).name == "bf16-mixed"
    trainer.fit(task, pairs(8))
    assert task.computed is torch.bfloat16
    quiet(strategy="accelerate", precision="bf16-mixed", max_epochs=1).fit(task, pairs(8))
    assert task.computed is torch.bfloat16
    quiet(strategy="accelerate", max_epochs=1).fit(task, pairs(8))
    assert task.computed is torch.float32
    off = {"mixed_precision": "bf16", "kwargs_handlers": [AutocastKwargs(enabled=False)]}
    quiet(strategy=AccelerateConfig(options=off), max_epochs=1).fit(task, pairs(8))
    assert task.computed is torch.float32


def calls_in_a_steady_step(strategy: str) -> int:
    counts: list[int] = []
    package = str(Path(drivetrain.__file__).parent)

    class Counting(Callback):
        def on_step_end(self, run: Any) -> None:
            counts.append(0)

    def profile(frame: Any, event: str, argument: Any) -> None:
        if event == "call" and counts and frame.f_code.co_filename.startswith(package):
            counts[-1] += 1

    before = sys.getprofile()
    try:
        sys.setprofile(profile)
        options = {"log_every": None, "validate_every": None, "callbacks": [Counting()]}
        quiet(strategy=strategy, max_epochs=1, **options).fit(Regression(), list(pairs(40)))
    finally:
        sys.setprofile(before)
    steady = set(counts[3:-1])
    assert len(steady) == 1, counts
    return steady.pop()


def test_a_steady_step_makes_no_more_calls_than_without_accelerate() -> None:
    assert calls_in_a_steady_step("accelerate") == calls_in_a_steady_step("cpu")


class Unused(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Linear(2, 2)


def _unused() -> None:
    quiet(strategy=replicated(2), devices=2, max_epochs=1).fit(Unused(), pairs(8))


def test_parameters_that_a_step_leaves_out_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"got no gradient: spare\.weight, spare\.bias.*Kwargs"):
        run_distributed(_unused)


def _given(mixed: str) -> tuple[str, str, bool, int, list[float]]:
    accelerator = Accelerator(cpu=True, mixed_precision=mixed)
    before = _shared()
    trainer = quiet(strategy=AccelerateConfig(accelerator=accelerator), devices="auto", max_epochs=1)
    task = Dtypes()
    trainer.fit(task, pairs(8))
    left = len(accelerator._models) + len(accelerator._optimizers)
    weights = task.line.weight.detach().flatten().tolist()
    name = as_precision(trainer.precision).name
    return name, str(task.computed), _shared() == before, left, weights


def test_an_accelerator_that_is_there_is_used_and_left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # without it Accelerate warns that it sets it
    first, second = run_distributed(_given, "bf16")
    assert first[:4] == ("bf16-mixed", "torch.bfloat16", True, 0)
    assert first == second


def _refused(options: dict[str, Any], **arguments: Any) -> str:
    accelerator = Accelerator(cpu=True, **options)
    try:
        quiet(strategy=AccelerateConfig(accelerator=accelerator), max_epochs=1, **arguments)
    except StrategyError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("options", "arguments", "told"),
    [
        ({}, {"devices": 2}, "has 1 process(es), and the run 2. Start the processes first"),
        (
            {"mixed_precision": "bf16"},
            {"precision": "32"},
            "has mixed_precision='bf16'; give precision='auto'",
        ),
        ({}, {"precision": "bf16-mixed"}, "has mixed_precision='no'; give precision='auto' or '32'"),
        ({"dynamo_backend": "inductor"}, {}, "give Trainer(compile=True)"),
        ({"fsdp_plugin": "2"}, {}, "does not use its FSDP plugin"),
    ],
)
def test_an_accelerator_that_does_not_fit_is_refused(
    options: dict[str, Any], arguments: dict[str, Any], told: str
) -> None:
    def alone() -> str:
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            os.environ.pop(name)
        given = dict(options)
        if "fsdp_plugin" in given:
            given["fsdp_plugin"] = FullyShardedDataParallelPlugin(fsdp_version=2)
        return _refused(given, **arguments)

    assert told in run_distributed(alone, world_size=1)[0]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"deepspeed_plugin": object()}, "'zero0' to 'zero3', or DeepSpeedConfig"),
        ({"megatron_lm_plugin": object()}, "FSDPConfig(tensor_parallel=...)"),
        ({"parallelism_config": object()}, "FSDPConfig(sharding='hybrid', tensor_parallel=...)"),
        ({"dynamo_backend": "inductor"}, "give Trainer(compile=True)"),
        ({"gradient_accumulation_plugin": object()}, "give Trainer(gradient_accumulation_steps=...)"),
        (3, "must be a mapping of arguments of accelerate.Accelerator, not 3"),
        ({"step_scheduler_with_optimiser": True}, "Did you mean 'step_scheduler_with_optimizer'?"),
        ({"fsdp_plugin": 3}, "must be an accelerate.FullyShardedDataParallelPlugin, not 3"),
    ],
)
def test_options_that_the_engine_cannot_honour_say_what_to_do_instead(options: Any, why: str) -> None:
    with pytest.raises(ConfigError) as caught:
        AccelerateConfig(options=options)
    assert why in str(caught.value)


def test_an_accelerator_is_given_or_made_and_not_both() -> None:
    with pytest.raises(ConfigError, match=r"must be an accelerate\.Accelerator, not a str"):
        AccelerateConfig(accelerator="cpu")

    class Like:
        prepare_model = None

    with pytest.raises(ConfigError, match="not both"):
        AccelerateConfig(accelerator=Like(), options={"mixed_precision": "no"})
    with pytest.raises(ConfigError, match="timeout"):
        AccelerateConfig(timeout=-1)


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        (
            {"mixed_precision": "fp8"},
            StrategyError,
            "does not support mixed_precision='fp8'; allowed are 'no', 'bf16'",
        ),
        ({"device_placment": True}, ConfigError, "no option 'device_placment'. Did you mean 'device_pl"),
        ({"kwargs_handlers": [InitProcessGroupKwargs()]}, ConfigError, "AccelerateConfig.timeout=...."),
    ],
)
def test_what_accelerate_cannot_be_asked_for_is_refused(
    options: dict[str, Any], error: type[Exception], why: str
) -> None:
    before = _shared()
    with pytest.raises(error, match=why):
        quiet(strategy=AccelerateConfig(options=options), max_epochs=1).fit(Regression(), pairs(4))
    assert _shared() == before


def test_precisions_that_are_not_mixed_go_with_every_accelerator() -> None:
    open_, no = Accelerate(), Accelerate(AccelerateConfig(options={"mixed_precision": "no"}))
    both = (open_, no)
    allowed = {name: tuple(bool(each.supports(PRECISIONS[name])) for each in both) for name in PRECISIONS}
    assert allowed["32"] == allowed["64"] == allowed["bf16-true"] == (True, True)
    assert allowed["bf16-mixed"] == (True, False)
    assert allowed["16-mixed"] == (False, False)
    assert "no fp16 on CPUs, and would ignore it" in open_.supports(PRECISIONS["16-mixed"]).reason


def test_another_accumulation_than_the_trainer_s_is_refused() -> None:
    config = AccelerateConfig(options={"gradient_accumulation_steps": 4})
    quiet(strategy=config, gradient_accumulation_steps=4, max_epochs=1).fit(Regression(), pairs(8))
    with pytest.raises(ConfigError, match=r"steps=4, but the Trainer for 2: .*accumulation_steps=4"):
        quiet(strategy=config, gradient_accumulation_steps=2, max_epochs=1).fit(Regression(), pairs(8))


NO_LAUNCHER: dict[str, str] = {}
FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({}, (None, None, False, 1)),
        ({"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True"}, ("bf16", "cpu", False, 1)),
        ({**FSDP2, "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, (None, None, True, 4)),
    ],
)
def test_the_environment_of_accelerate_launch_is_read(variables: dict[str, str], expected: Any) -> None:
    assert asked(AccelerateConfig(), variables) == expected


@pytest.mark.parametrize(
    ("variables", "why"),
    [
        ({"ACCELERATE_USE_DEEPSPEED": "true"}, "does not support DEEPSPEED.*DeepSpeedConfig"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "does not support MEGATRON_LM"),
        ({"ACCELERATE_USE_FSDP": "true"}, "version 1 .*flattens parameters.*fsdp_version to 2, or .*'fsdp'"),
        ({"ACCELERATE_DYNAMO_BACKEND": "inductor"}, r"give Trainer\(compile=True\)"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "parallelism_config"),
        ({"ACCELERATE_MIXED_PRECISION": "fp8"}, "mixed_precision='fp8'"),
        ({"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "some"}, "gradient_accumulation_steps='some'"),
    ],
)
def test_what_the_environment_cannot_have_is_refused(variables: dict[str, str], why: str) -> None:
    with pytest.raises(StrategyError, match=why):
        select_strategy("accelerate", FULL, hardware=Hardware(), environment=variables)


def test_the_name_and_the_configuration_choose_it() -> None:
    gpus = Hardware(cuda=4)
    assert choose("accelerate", gpus)[:4] == ("accelerate", "cuda", 4, 4)
    assert choose("accelerate", Hardware(), None, 2)[:4] == ("accelerate", "cpu", 2, 2)
    config = AccelerateConfig(options={"cpu": True})
    made = select_strategy(config, FULL, 2, hardware=gpus, environment=NO_LAUNCHER)
    assert (made.name, made.device.type, made.world_size) == ("accelerate", "cpu", 2)
    cpu = {"ACCELERATE_USE_CPU": "true"}
    assert select_strategy("accelerate", FULL, hardware=gpus, environment=cpu).device.type == "cpu"
    # A strategy that is named counts more than a launcher's words.
    named = select_strategy(DDPConfig(), FULL, 2, hardware=Hardware(), environment=NO_LAUNCHER)
    assert named.name == "ddp"


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.strategies.base.is_installed", lambda name: False)
    with pytest.raises(StrategyError, match=r"'accelerate' is not installed: pip install 'drivetrain\[accel"):
        Trainer(max_epochs=1, strategy="accelerate")


PROGRAM = f"""{DEEP}
from drivetrain import AccelerateConfig, Callback

class Kinds(Callback):
    def on_step_end(self, run):
        self.found = sorted({{type(each).__name__ for each in run.task.modules()}} - {{"Deep", "Sequential"}})

kinds = Kinds()
strategy = AccelerateConfig(**json.loads(sys.argv[1])) if len(sys.argv) > 2 else "accelerate"
devices = int(sys.argv[2]) if len(sys.argv) > 2 else "auto"
trainer = Trainer(
    max_epochs=1, strategy=strategy, devices=devices, loggers=(), checkpoint=False, progress_bar=False,
    callbacks=[kinds],
)
result = trainer.fit(Deep(), [{{"x": torch.ones(2, 4)}}] * 8)
found = {{"precision": trainer.precision.name, "samples": result.progress.samples, "kinds": kinds.found}}
sys.stdout.write(json.dumps(found) + "\\n")
"""

EXPECTED = {"precision": "bf16-mixed", "samples": 16, "kinds": ["FSDPBlock", "Linear"]}


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in JOB:
        monkeypatch.delenv(name, raising=False)
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    Path("fsdp.yaml").write_text(FSDP_YAML, encoding="utf-8")


def told(*words: str) -> list[dict[str, Any]]:
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.full
@pytest.mark.usefixtures("program")
def test_accelerate_launch_tells_what_its_accelerator_is() -> None:
    launch = ["-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml", "--main_process_port=0"]
    assert told(*launch, "train.py") == [EXPECTED, EXPECTED]


@pytest.mark.usefixtures("program")
def test_a_file_of_accelerate_config_is_enough_without_its_launcher() -> None:
    # Of the processes that the program has started itself, rank 0 alone has this output.
    assert told("train.py", json.dumps({"config_file": "fsdp.yaml"}), "2")[0] == EXPECTED


def test_a_file_is_read_and_the_environment_does_not_count_beside_it() -> None:
    Path("fsdp.yaml").write_text(FSDP_YAML, encoding="utf-8")
    config = AccelerateConfig(config_file="fsdp.yaml")
    assert asked(config, {"ACCELERATE_MIXED_PRECISION": "fp16"}) == ("bf16", "cpu", True, 1)
    assert config.asked_precision == "bf16-mixed"
    plain = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: no\n"
    Path("plain.yaml").write_text(plain, encoding="utf-8")
    assert asked(AccelerateConfig(config_file="plain.yaml"), FSDP2) == ("no", None, False, 1)


@pytest.mark.parametrize(
    ("text", "error", "why"),
    [
        (None, ConfigError, "the file does not exist"),
        ("distributed_type: [", ConfigError, "cannot be read"),
        ("distributed_type: 'NO'\nunknown: 1\n", ConfigError, "cannot be read: .*unknown"),
        (
            "distributed_type: DEEPSPEED\nmixed_precision: bf16\n",
            StrategyError,
            "does not support DEEPSPEED",
        ),
        ("distributed_type: FSDP\nfsdp_config: {fsdp_version: 1}\n", StrategyError, "version 1 .*flattens"),
        (
            "distributed_type: 'NO'\ndynamo_config: {dynamo_backend: INDUCTOR}\n",
            StrategyError,
            "asked to compile",
        ),
    ],
)
def test_a_file_that_cannot_be_followed_is_refused(
    text: str | None, error: type[Exception], why: str
) -> None:
    if text is not None:
        Path("config.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(error, match=why):
        Trainer(max_epochs=1, strategy=AccelerateConfig(config_file="config.yaml"))
