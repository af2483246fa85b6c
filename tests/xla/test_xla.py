"""One device of XLA: the same numbers, one program for each step, and no wait for the device."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.xla import QUIET, Counts, apart, counts, make, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Engine, StrategyError, Trainer
from drivetrain.callbacks import LambdaCallback
from drivetrain.checkpoint import load_weights
from drivetrain.core.random_streams import device_generators
from drivetrain.strategies import STRATEGIES, Hardware
from drivetrain.testing import check_strategy
from drivetrain.testing.strategies.tasks import Sequences, Tokens

NAMES = [("xla", 1), ("xla_fsdp", 2)]
LANDING = [NAMES[0], pytest.param(*NAMES[1], marks=pytest.mark.landing)]
"""With how many devices each is held to what all must do."""

# Those for one process; what is drawn at random is its own, and not that of torch on a CPU.
CHECKS = ["same_as_the_big_batch", "a_process_may_begin_with_padding", "frozen_and_tied", "generator_steps"]
CHECKS += ["parameters_may_be_unfrozen", "evaluation_counts_each_sample_once", "checkpoints_have_plain_names"]
CHECKS += ["resume_is_bitwise", "resume_on_another_number_of_processes"]


@pytest.mark.landing
def test_xla_conforms() -> None:
    check_strategy(make("xla"), 1, checks=CHECKS)


def test_xla_conforms_in_every_precision() -> None:
    for precision, tolerance in {"bf16-mixed": 0.05, "bf16-true-nearest": 0.05, "64": 1e-12}.items():
        check_strategy(make("xla"), 1, checks=["frozen_and_tied"], precision=precision, tolerance=tolerance)


def counted(name: str, devices: int, samples: int, window: int, run_after: str = "micro_batch") -> Counts:
    """Three epochs of ragged micro-batches of four, with clipping, dropout and a rate that always changes."""
    seen = Counts()
    kind: Any = STRATEGIES[name]
    config = kind.config_type(run_after=run_after)
    task = Tokens(schedule="cosine", dropout=0.1)
    data = DataLoader(Sequences(samples), batch_size=4, shuffle=True)
    options = {"max_epochs": 3, "log_every": "1000 steps", "max_grad_norm": 0.5, "callbacks": [seen]}
    trainer(name, config, devices, gradient_accumulation_steps=window, **options).fit(task, data)
    return seen


@pytest.mark.parametrize(("name", "devices"), LANDING)
def test_step_is_one_program_that_is_compiled_no_more_after_the_second(name: str, devices: int) -> None:
    steps = apart(lambda: counted(name, devices, 16, 1).steps)
    assert len(steps) == 12
    assert steps[2:] == [{"compiled": 0, "run": 1, "copied": 0}] * 10
    assert all(each["copied"] == 0 for each in steps)


@pytest.mark.parametrize(("name", "devices"), NAMES)
def test_accumulation_runs_micro_batches_by_themselves_or_a_window_at_once(name: str, devices: int) -> None:
    for run_after, programs in (("micro_batch", 2), ("step", 1)):
        steps = apart(lambda after=run_after: counted(name, devices, 22, 2, after).steps)
        assert len(steps) == 9  # the third of an epoch has a micro-batch of two
        assert steps[6:] == [{"compiled": 0, "run": programs, "copied": 0}] * 3
        assert all(each["copied"] == 0 for each in steps)


@pytest.mark.parametrize(("name", "devices"), NAMES)
def test_run_after_step_conforms(name: str, devices: int) -> None:
    kind: Any = STRATEGIES[name]
    checks = ["same_as_the_big_batch", "generator_steps", "resume_is_bitwise"]
    check_strategy(make(name, kind.config_type(run_after="step"), devices), 1, checks=checks)


def own_loop(
    strategy: Any, steps: int, resume: str | None = None, save: str | None = None
) -> tuple[list[float], dict[str, Tensor], list[str]]:
    """Up to some steps in a loop of one's own: their norms, the weights, and the model's keys meanwhile."""
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(4, 2))
    engine = Engine(strategy=strategy)
    wrapped, optimizer = engine.prepare(model, lambda parameters: torch.optim.AdamW(parameters, lr=0.1))
    if resume is not None:
        engine.load(resume, model=wrapped, optimizer=optimizer)
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(4, 2, 3, 4, generator=generator).to(engine.device)
    norms = []
    for step in range(engine.progress.steps, steps):
        for batch, weight in zip(batches[step], (1.0, 3.0), strict=True):
            engine.backward((wrapped(batch) - batch.sum(-1, keepdim=True)).square().mean(), weight)
        norm = engine.step(optimizer, max_grad_norm=1.0).grad_norm
        assert norm is not None
        norms.append(float(norm))
    if save is not None:
        engine.save(save, model=wrapped, optimizer=optimizer)
    keys = list(wrapped.state_dict())
    engine.teardown()
    return norms, dict(model.state_dict()), keys


@pytest.mark.parametrize(("name", "devices"), LANDING)
def test_engine_has_the_numbers_names_and_checkpoints_of_the_cpu(name: str, devices: int) -> None:
    def run() -> None:
        strategy = make(name, devices=devices)
        norms, weights, keys = own_loop(strategy(1), 4)
        expected, alone, plain = own_loop("cpu", 4)
        assert keys == plain
        close = {"rtol": 1e-6, "atol": 1e-6}
        torch.testing.assert_close((norms, weights), (expected, alone), **close)
        own_loop(strategy(1), 2, save="theirs")
        later, same, _ = own_loop(strategy(1), 4, "theirs")
        assert later == norms[2:]
        assert all(torch.equal(same[each], weights[each]) for each in weights)
        torch.testing.assert_close(own_loop("cpu", 4, "theirs")[1], alone, **close)
        own_loop("cpu", 2, save="ours")
        torch.testing.assert_close(own_loop(strategy(1), 4, "ours")[1], alone, **close)

    apart(run)


@pytest.mark.landing
def test_log_point_and_evaluation_copy_once() -> None:
    def run() -> list[dict[str, int]]:
        found: list[dict[str, int]] = []
        note = LambdaCallback(**dict.fromkeys(("on_log", "on_step_end"), lambda run: found.append(counts())))
        data = DataLoader(Sequences(12, empty=None), batch_size=4)
        options = {"log_every": "3 steps", "validate_every": "1 epoch", "callbacks": [note]}
        trainer("xla", **{**options, "max_epochs": 3}).fit(Tokens(), data, data)
        return found

    *_, third, logged, validated = apart(run)
    assert logged["copied"] - third["copied"] == 1
    assert validated["copied"] - logged["copied"] == 1
    assert validated["run"] - logged["run"] == 4  # one for each batch, and one for their means
    assert validated["compiled"] == logged["compiled"]


def test_random_stream_is_a_function_of_its_seed_also_beyond_63_bits() -> None:
    def run() -> list[list[float]]:
        device = make("xla")(1).device
        (generator,) = device_generators(device)
        drawn = []
        for seed in (5, 2**62 + 1, 5):
            generator.manual_seed(seed)
            drawn.append(torch.rand(4, device=device).tolist())
        drawn.append(torch.rand(4, device=device).tolist())
        for _ in range(20):  # a state may be any number of 64 bits
            state: Any = generator.get_state()
            here = torch.rand(4, device=device).tolist()
            generator.set_state(state)
            assert torch.rand(4, device=device).tolist() == here
            generator.manual_seed(int(state.numpy()) & (2**63 - 1))
            torch.rand(1, device=device).tolist()
        return drawn

    first, other, again, later = apart(run)
    assert first == again
    assert len({*map(tuple, (first, other, later))}) == 3


def test_async_checkpoint_has_each_parameter(tmp_path: Path) -> None:
    def run() -> None:
        task = Tokens(tied=True)
        data = DataLoader(Sequences(12), batch_size=4)
        live: dict[str, Any] = {}

        def export(run: Any) -> None:
            live.update({name: value.cpu() for name, value in run.task.state_dict().items()})

        options = {"checkpoint": "async", "run_dir": tmp_path / "run"}
        callbacks = [LambdaCallback(on_step_end=export)]
        trainer("xla", max_epochs=1, callbacks=callbacks, **options).fit(task, data)
        (directory,) = (tmp_path / "run" / "checkpoints").glob("*/")
        stored = load_weights(str(directory))
        assert sorted(stored) == sorted(live)
        assert all(torch.equal(stored[name], live[name]) for name in live)

    apart(run)


def test_task_is_an_ordinary_one_in_the_hosts_memory_afterwards() -> None:
    def run() -> None:
        task = Tokens(tied=True)
        trainer("xla").fit(task, DataLoader(Sequences(12), batch_size=4))
        assert {each.device.type for each in task.parameters()} == {"cpu"}
        assert task.head.weight is task.embedding.weight
        assert task(torch.zeros(2, 5, dtype=torch.int64)).shape == (2, 4, 11)
        # And once more, from there, and from another device.
        trainer("xla").fit(task, DataLoader(Sequences(12), batch_size=4))
        Trainer(strategy="cpu", **QUIET).fit(task, DataLoader(Sequences(12), batch_size=4))

    apart(run)


def test_only_the_strategy_that_was_asked_for_loads_xla_and_sets_its_variable() -> None:
    def run() -> None:
        os.environ.pop("PJRT_DEVICE", None)
        Trainer(strategy="auto", **QUIET)
        Trainer(strategy="xla", **QUIET)
        assert "torch_xla" not in sys.modules
        assert "PJRT_DEVICE" not in os.environ
        make("xla")(1)
        assert os.environ["PJRT_DEVICE"] == "CPU"
        here = Hardware.here()
        assert (here.cuda, here.mps) == (0, False)  # whatever torch.accelerator says beside torch_xla

    apart(run)


def test_xla_order_of_opening_is_refused_with_the_way_out() -> None:
    def late() -> None:
        torch.ones(1, requires_grad=True).sum().backward()
        with pytest.raises(StrategyError, match=r"before XLA's device was opened.*Train under XLA first"):
            make("xla")(1)

    def both(first: str, second: str) -> None:  # one device and all of them
        make(first, devices=2)(1)
        with pytest.raises(StrategyError, match="in a separate program"):
            make(second, devices=2)(1)

    apart(late)
    apart(both, "xla", "xla_fsdp")
    apart(both, "xla_fsdp", "xla")
