"""accelerate prepares, the engine steps: the same numbers, and accelerate's own state as it was before."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.running import FSDP_YAML, run
from tests.strategies.conforming import conforms
from tests.strategies.resuming import check_resume
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import AccelerateConfig, ConfigError, LambdaCallback, StrategyError, Trainer
from drivetrain.strategies import SingleDevice, Strategy, select_strategy
from drivetrain.strategies.accelerate.options import asked
from drivetrain.strategies.fsdp.strategy import FSDP
from drivetrain.strategies.precision.registry import as_precision
from drivetrain.testing.strategies.check import check_strategy

accelerate = pytest.importorskip("accelerate")

from accelerate.state import AcceleratorState, GradientState, PartialState  # noqa: E402
from accelerate.utils import AutocastKwargs, DistributedDataParallelKwargs, InitProcessGroupKwargs  # noqa: E402

from drivetrain.strategies.accelerate.accelerate import Accelerate  # noqa: E402

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

FULL = as_precision("32")


def replicated(world_size: int) -> Accelerate:
    return Accelerate(world_size=world_size)


CHECKED = ["same_as_the_big_batch", "resume_is_bitwise"]


def test_accelerate_steps_equal_those_of_one_process() -> None:
    conforms(replicated, "steps", "generator_steps", "frozen_and_tied")


@pytest.mark.landing
def test_accelerate_conforms() -> None:
    more = ["evaluation_counts_each_sample_once", "all_ranks_see_the_same"]
    check_strategy(replicated, checks=[*CHECKED, *more])


def test_accelerate_ddp_options_conform() -> None:
    handler = DistributedDataParallelKwargs(find_unused_parameters=True)
    config = AccelerateConfig(options={"kwargs_handlers": [handler]})
    conforms(lambda size: Accelerate(config, world_size=size), "steps", "parameters_may_be_unfrozen")


@pytest.mark.nightly
def test_accelerate_conforms_in_all_else_and_its_checkpoints_go_everywhere() -> None:
    check_strategy(replicated, checks=CHECKED, precision="bf16-mixed", tolerance=5e-3)
    check_strategy(replicated, 2)
    makers: Any = {"single": lambda _: SingleDevice("cpu"), "fsdp": lambda _: FSDP(world_size=2)}
    makers |= {"replicated": lambda _: replicated(2)}
    assert check_resume(makers, world_sizes=(1, 2)) == 9


def _seen(make: Callable[[int], Strategy]) -> list[str]:
    seen, task = [], Regression()
    look = LambdaCallback(on_step_end=lambda run: seen.append(type(run.engine.model).__name__))
    quiet(strategy=make(2), devices=2, max_steps=1, callbacks=[look]).fit(task, pairs(8))
    return [*seen, *(type(each).__name__ for each in task.parameters())]


def test_accelerate_wraps_the_model_which_is_ordinary_afterwards() -> None:
    assert (
        on_two_ranks(lambda: _seen(replicated)) == [["DistributedDataParallel", "Parameter", "Parameter"]] * 2
    )


def test_under_the_fsdp_plugin_our_own_fsdp_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert isinstance(select_strategy("accelerate", FULL), FSDP)


def _shared() -> list[dict[str, Any]]:
    return [dict(each._shared_state) for each in (PartialState, AcceleratorState, GradientState)]


def planted(self: Any, batch: Any) -> Any:
    raise KeyError("planted")


def test_accelerates_own_state_is_afterwards_as_it_was(request: pytest.FixtureRequest) -> None:
    PartialState(cpu=True)  # accelerate knows of this process already
    request.addfinalizer(PartialState._reset_state)
    before = _shared()  # and the environment, which is checked for every test
    assert any(before)
    config = AccelerateConfig(options={"mixed_precision": "bf16"})
    quiet(strategy=config, max_epochs=1).fit(Regression(), pairs(8))
    assert _shared() == before
    with pytest.raises(KeyError, match="planted"):
        quiet(strategy=config, max_epochs=1).fit(variant(training_step=planted)(), pairs(8))
    assert _shared() == before


class Dtypes(Regression):
    def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
        self.computed = self.line(batch[0]).dtype
        return super().loss(outputs.float(), batch)


def test_mixed_precision_is_the_accelerators() -> None:
    task = Dtypes()
    trainer = quiet(strategy=AccelerateConfig(options={"mixed_precision": "bf16"}), max_epochs=1)
    assert as_precision(trainer.precision).name == "bf16-mixed"
    trainer.fit(task, pairs(8))
    assert task.computed is torch.bfloat16
    quiet(strategy="accelerate", max_epochs=1).fit(task, pairs(8))
    assert task.computed is torch.float32
    off = {"mixed_precision": "bf16", "kwargs_handlers": [AutocastKwargs(enabled=False)]}
    quiet(strategy=AccelerateConfig(options=off), max_epochs=1).fit(task, pairs(8))
    assert task.computed is torch.float32


def test_accelerate_config_refusals() -> None:
    def of(options: Any) -> Any:
        return lambda: AccelerateConfig(options=options)

    def fit(config: AccelerateConfig, **options: Any) -> None:
        quiet(strategy=config, max_epochs=1, **options).fit(Regression(), pairs(8))

    def fitted(**options: Any) -> Any:
        return lambda: fit(AccelerateConfig(options=options))

    def file(name: str, text: str = "") -> Any:
        if text:
            Path(name).write_text(text, encoding="utf-8")
        return lambda: Trainer(max_epochs=1, strategy=AccelerateConfig(config_file=name))

    def sharded(precision: str = "auto", **options: Any) -> Any:
        made = AccelerateConfig(config_file=FSDP_YAML, options=options)
        return lambda: Trainer(max_epochs=1, strategy=made, precision=precision)

    before, group = _shared(), InitProcessGroupKwargs()
    alone = "distributed_type: 'NO'\n"
    cases: dict[str, Any] = {
        "DeepSpeed": (of({"deepspeed_plugin": object()}), "DeepSpeedConfig(config=...)"),
        "Megatron": (of({"megatron_lm_plugin": object()}), "FSDPConfig(tensor_parallel=...)"),
        "compile": (of({"dynamo_backend": "inductor"}), "give Trainer(compile=True)"),
        "plugin": (of({"fsdp_plugin": object()}), "give Trainer(strategy=FSDPConfig(...))"),
        "fp8": (fitted(mixed_precision="fp8"), "mixed_precision='fp8'", "'no', 'bf16'"),
        "group": (fitted(kwargs_handlers=[group]), "AccelerateConfig(timeout=..."),
        "steps": (of({"gradient_accumulation_steps": 4}), "Trainer(gradient_accumulation_steps=...)"),
        "kind": (file("xla.yaml", "distributed_type: XLA\n"), "does not support XLA"),
        "file's plugin": (file("zero.yaml", "distributed_type: DEEPSPEED\n"), "DeepSpeedConfig(config"),
        "plugin's handlers": (sharded(kwargs_handlers=[group]), "no effect with the FSDP plugin"),
        "plugin's precision": (sharded(precision="32"), "mixed_precision='bf16'; give"),
        "no file": (file("none.yaml"), "cannot be read"),
        "key": (file("key.yaml", f"{alone}unknown: 1\n"), "cannot be read", "unknown"),
    }
    assert_refused((ConfigError, StrategyError), cases)
    assert _shared() == before


FSDP2 = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}


def test_missing_accelerate_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drivetrain.strategies.base.is_installed", lambda name: False)
    with pytest.raises(StrategyError, match=r"'accelerate' is not installed: pip install 'drivetrain\[accel"):
        Trainer(max_epochs=1, strategy="accelerate")


def test_a_file_with_the_plugin_trains_by_our_own_fsdp_as_under_the_launcher() -> None:
    layers = "fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n  fsdp_transformer_layer_cls_to_wrap: Linear"
    sharding = "fsdp_reshard_after_forward: SHARD_GRAD_OP\n  fsdp_offload_params: false"
    text = "distributed_type: FSDP\nmixed_precision: bf16\nuse_cpu: true\nnum_processes: 4\nfsdp_config:"
    for number, version in enumerate(("fsdp_version: 1", "fsdp_state_dict_type: SHARDED_STATE_DICT")):
        path = Path(f"{number}.yaml")
        path.write_text(f"{text}\n  {version}\n  {layers}\n  {sharding}\n", encoding="utf-8")
        config = AccelerateConfig(config_file=path, timeout=60)
        trainer = Trainer(max_epochs=1, devices=2, strategy=config)
        made = trainer.select_strategy()
        assert isinstance(made, FSDP)
        assert (made.device.type, made.world_size, made.config.timeout) == ("cpu", 2, 60)
        assert (made.config.sharding, made.config.wrap) == ("shard_grad_op", ("Linear",))
        assert config.asked_precision == "bf16-mixed"


@pytest.mark.landing
def test_config_file_is_enough_without_accelerate_launch() -> None:
    ended = run("launched.py", accelerate=str(FSDP_YAML), devices=2)
    assert ended.code == 0, ended.errors
    for found in map(json.loads, ended.out.splitlines()):
        assert (found["strategy"], found["block"], found["samples"]) == ("fsdp", "FSDPBlock", 16)
        assert found["precision"] == "bf16-mixed"


def test_config_file_is_read_and_counts_alone() -> None:
    config = AccelerateConfig(config_file=FSDP_YAML)
    fsdp = {"sharding": "full_shard", "wrap": ("Block",)}
    assert asked(config, {"ACCELERATE_MIXED_PRECISION": "fp16"}) == ("bf16", "cpu", fsdp)
    assert config.asked_precision == "bf16-mixed"
    plain = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nmixed_precision: no\n"
    Path("plain.yaml").write_text(plain, encoding="utf-8")
    assert asked(AccelerateConfig(config_file="plain.yaml"), FSDP2) == ("no", None, None)
    none = AccelerateConfig()  # without a file the environment counts
    assert asked(none, {}) == (None, None, None)
    mixed = {"ACCELERATE_MIXED_PRECISION": "bf16", "ACCELERATE_USE_CPU": "True"}
    assert asked(none, mixed) == ("bf16", "cpu", None)
    assert asked(none, FSDP2) == (None, None, {**fsdp, "wrap": ()})
