"""Freezing of parameters: what moves when, what a fit leaves behind, and resumes."""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.outcome import outcome, weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Duel, duels, pairs, quiet
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import CheckpointConfig, OptimizerConfig, ParameterGroup, Run, TaskModule
from drivetrain.callbacks import Callback, Freeze, LambdaCallback, WeightAverage
from drivetrain.checkpoint.weights.load import load_weights
from drivetrain.core.errors import ConfigError
from drivetrain.testing.strategies.job import StopAfter


# An encoder of two layers with a norm and dropout, and a head; the encoder has a rate of its own.
class Net(TaskModule):
    def __init__(self, optimizer: Any = "adamw", norm: Any = nn.LayerNorm, dropout: float = 0.0) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            layers = nn.Linear(4, 8), norm(8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(dropout)
            self.encoder = nn.Sequential(*layers)
            self.head = nn.Linear(8, 1)
        self.optimizer = optimizer

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x))

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        if not isinstance(self.optimizer, str):
            return self.optimizer
        options: Any = {"momentum": 0.9} if self.optimizer == "sgd" else {}
        options["groups"] = [ParameterGroup("encoder.*", lr_scale=0.5)]
        return OptimizerConfig(self.optimizer, lr=0.02, weight_decay=0.1, decay_all=True, **options)


FIRST, SECOND = ("encoder.0.weight", "encoder.0.bias"), ("encoder.3.weight", "encoder.3.bias")
NORM, HEAD = ("encoder.1.weight", "encoder.1.bias"), ("head.weight", "head.bias")
ALL = {*FIRST, *NORM, *SECOND, *HEAD}


class Seen(Callback):  # the weights after each step, and the norms of the gradients
    def __init__(self) -> None:
        self.after: list[dict[str, Tensor]] = []
        self.norms: list[float] = []

    def on_step_end(self, run: Run) -> None:
        run.engine.strategy.reshard(run.engine.model)
        named = run.task.named_parameters()
        self.after.append({name: run.full_tensor(each).detach().clone() for name, each in named})
        if run.result.grad_norm is not None:
            self.norms.append(float(run.result.grad_norm))

    def movers(self) -> list[set[str]]:  # the names that each step but the first has changed
        steps = pairwise(self.after)
        return [{name for name in now if not torch.equal(now[name], old[name])} for old, now in steps]


def fitted(freeze: Any, task: TaskModule | None = None, data: Any = None, **options: Any) -> tuple[Any, Seen]:
    task, seen = Net() if task is None else task, Seen()
    callbacks = [*([freeze] if freeze else []), *options.pop("callbacks", ()), seen]
    trainer = quiet(**{"max_epochs": 3, "max_grad_norm": 0.5, "callbacks": callbacks, **options})
    trainer.fit(task, pairs(20) if data is None else data)
    return task, seen


@pytest.mark.parametrize("name", ["sgd", "adamw", "muon"])
def test_frozen_parameters_move_from_their_point_on(name: str) -> None:
    optimizer = OptimizerConfig("muon", lr=0.02, weight_decay=0.1) if name == "muon" else name
    points: dict[Any, int] = {"7 steps": 7, "1 epoch": 10, "0.25 epochs": 3, "9 samples": 5, None: 30}
    start = dict(Net().named_parameters())
    for until, frozen in points.items():
        _, seen = fitted(Freeze("encoder", until=until), Net(optimizer))
        assert seen.movers()[: frozen - 1] == [set(HEAD)] * (frozen - 1)
        assert all(torch.equal(seen.after[frozen - 1][each], start[each]) for each in ALL - {*HEAD})
        assert seen.movers()[frozen - 1 :] == [ALL] * (30 - frozen)


def by_hand(points: Mapping[str, int], name: str, steps: int) -> tuple[Net, list[float]]:
    """Train as torch's users do: one optimizer over all, and `requires_grad` set by hand."""
    task = Net(name)
    kind, options = (torch.optim.SGD, {"momentum": 0.9}) if name == "sgd" else (torch.optim.AdamW, {})
    groups = [{"params": task.encoder.parameters(), "lr": 0.01}, {"params": task.head.parameters()}]
    optimizer = kind(groups, lr=0.02, weight_decay=0.1, **options)
    norms, batches = [], list(pairs(20))
    for step in range(steps):
        for parameter_name, each in task.named_parameters():
            frozen = any(parameter_name.startswith(p) and step < until for p, until in points.items())
            each.requires_grad_(not frozen)
        batch = batches[step % 10]
        optimizer.zero_grad()
        task.loss(task(batch[0]), batch).backward()
        norms.append(float(nn.utils.clip_grad_norm_(task.parameters(), 0.5)))
        optimizer.step()
    return task, norms


@pytest.mark.parametrize("name", ["sgd", "adamw"])
def test_gradual_unfreezing_is_that_of_a_loop_by_hand(name: str) -> None:
    freeze = Freeze({"encoder.[01]": "17 steps", "encoder": "1 epoch"})
    task, seen = fitted(freeze, Net(name))
    expected, norms = by_hand({"encoder.0": 17, "encoder.1": 17, "encoder.3": 10}, name, 30)
    for each, value in expected.named_parameters():
        torch.testing.assert_close(task.get_parameter(each), value, rtol=1e-6, atol=1e-7)
    assert seen.norms == pytest.approx(norms, rel=1e-5)


@pytest.mark.parametrize("until", [None, "1 epoch"])
def test_what_is_frozen_for_the_whole_fit_is_in_no_optimizer(until: str | None) -> None:
    found: dict[str, set[str]] = {}

    def look(run: Run) -> None:
        if run.progress.steps == 5:
            names = {each: name for name, each in run.task.named_parameters()}
            (updater,) = run.engine.updaters.values()
            groups = updater.optimizer.param_groups
            found["parameters"] = {names[each] for group in groups for each in group["params"]}
            found["state"] = {names[each] for each in updater.optimizer.state}
            found["gradients"] = {names[each] for each in names if each.grad is not None}

    freeze = Freeze("encoder", until=until)
    trainable = quiet(max_epochs=1, callbacks=[freeze]).plan(Net(), pairs(20)).trainable
    assert until or trainable == 9
    fitted(freeze, callbacks=[LambdaCallback(on_step_end=look)])
    in_optimizer = set(HEAD) if until is None else ALL
    assert found == {"parameters": in_optimizer, "state": set(HEAD), "gradients": set()}


def test_patterns_name_parameters_and_modules_and_the_first_match_wins() -> None:
    for freeze, trained in (
        (Freeze("encoder.3"), {*FIRST, *NORM, *HEAD}),
        (Freeze(["*.0.weight", "*.bias"]), {"encoder.1.weight", "encoder.3.weight", "head.weight"}),
        (Freeze("*", exclude="head"), set(HEAD)),
        (Freeze({"encoder.3.weight": "1 step", "encoder.?": None}), {"encoder.3.weight", *HEAD}),
        (Freeze({"encoder.?": "29 steps", "*bias": None}), {"head.weight"}),
    ):
        assert fitted(freeze)[1].movers()[5] == trained


def flags(task: nn.Module) -> Any:
    modes = {name: each.training for name, each in task.named_modules()}
    return modes, {name: each.requires_grad for name, each in task.named_parameters()}


def test_after_a_fit_or_an_error_all_is_as_before() -> None:
    task = Net(norm=nn.BatchNorm1d)
    task.encoder[3].bias.requires_grad_(False)
    task.encoder[4].eval()
    before, start = flags(task), weights(task.encoder[3])
    freeze = Freeze({"encoder.0": "5 steps", "encoder": None})
    for _ in range(2):  # the second fit by the same callback
        _, seen = fitted(freeze, task)
        assert flags(task) == before
        assert seen.movers()[2] == set(HEAD)
        assert seen.movers()[7] == {*FIRST, *HEAD}
    assert weights(task.encoder[3]) == start

    def fail(run: Run) -> None:
        if run.progress.steps == 3:
            raise ValueError("broken")

    for until in (None, "1 epoch"):
        failing = LambdaCallback(on_step_start=fail)
        with pytest.raises(ValueError, match="broken"):
            fitted(Freeze("encoder", until=until), task, callbacks=[failing])
        assert flags(task) == before


class Statistics(nn.Sequential):  # kinds of modules with running statistics, with parameters and without
    def __init__(self, size: int) -> None:
        spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(size, size))
        super().__init__(nn.BatchNorm1d(size), nn.BatchNorm1d(size, affine=False), spectral)


def test_statistics_of_frozen_parts_stay_through_validations_and_train() -> None:
    task = Net(norm=Statistics)
    before, data = {name: each.clone() for name, each in task.named_buffers()}, pairs(20, 4)
    turn_on = LambdaCallback(on_epoch_start=lambda run: run.task.train())  # as users' code does
    trainer = quiet(max_epochs=3, validate_every="2 steps", callbacks=[Freeze("encoder"), turn_on])
    trainer.fit(task, data, pairs(4))
    assert all(torch.equal(now, before[name]) for name, now in task.named_buffers())
    assert all(each.training for each in task.modules())
    quiet(max_epochs=3, callbacks=[Freeze("encoder", until="1 epoch"), turn_on]).fit(task, data)
    counted = {name: now for name, now in task.named_buffers() if not name.endswith("num_batches_tracked")}
    assert not any(torch.equal(now, before[name]) for name, now in counted.items())


def test_a_norm_is_in_evaluation_mode_only_while_all_of_it_is_frozen() -> None:
    for freeze, expected in (
        (Freeze("encoder.1.weight"), [True] * 15),
        (Freeze({"encoder.1.weight": "6 steps", "encoder": "11 steps"}), [False] * 6 + [True] * 9),
        (Freeze("encoder", exclude="encoder.1"), [True] * 15),
    ):
        modes: list[list[bool]] = []
        note = LambdaCallback(
            on_micro_batch_end=lambda run, modes=modes: modes.append([e.training for e in run.task.encoder])
        )
        fitted(freeze, Net(norm=nn.BatchNorm1d, dropout=0.1), pairs(20, 4), callbacks=[note])
        assert [each[1] for each in modes] == expected
        assert all(each[4] for each in modes)  # dropout stays


def resumable(folder: Path, stop: int = 13, resume: str | None = None) -> Any:
    freeze = Freeze({"encoder.0": "8 steps", "encoder": "1 epoch"})
    task = Net("adamw", nn.BatchNorm1d, dropout=0.2)
    options: Any = {"max_steps": 13, "checkpoint": True, "validate_every": "3 steps", "log_every": 2}
    callbacks = [freeze, WeightAverage(decay=0.9), StopAfter(stop)]
    trainer = quiet(**options, run_dir=folder, loggers=("jsonl", "csv"), callbacks=callbacks)
    trainer.fit(task, pairs(20, 4, shuffle=True), pairs(4), resume=resume)
    return weights(task)


def test_resume_before_at_and_after_an_unfreezing_is_bitwise(tmp_path: Path) -> None:
    straight = resumable(tmp_path / "straight")
    whole = outcome(tmp_path / "straight")
    for steps in (3, 5, 8, 9):
        folder = tmp_path / str(steps)
        resumable(folder, steps)
        # A checkpoint has the state of what has trained.
        names = {each.removesuffix("/exp_avg") for each in outcome(folder)["optimizer"] if "exp_avg" in each}
        names = {each for each in names if "/" not in each}
        assert names == ({*HEAD} if steps < 6 else ALL - {*FIRST} if steps < 9 else ALL)
        assert resumable(folder, resume="auto") == straight
        found = outcome(folder)
        for part in ("weights", "optimizer", "progress", "model.safetensors"):
            assert found[part] == whole[part]


def on_ranks(folder: Path, stop: int = 9, resume: str | None = None, **more: Any) -> Any:
    task, freeze = Net(), Freeze({"encoder.0": "7 steps", "encoder": "1 epoch"})
    options: Any = {"max_steps": 9, "max_grad_norm": 0.5, "checkpoint": True, **more}
    trainer = quiet(**options, run_dir=folder, callbacks=[freeze, StopAfter(stop)])
    trainer.fit(task, pairs(20, 4 // more.get("devices", 1)), resume=resume)
    return {name: each.tolist() for name, each in task.state_dict().items()}


def straight_and_resumed(folder: Path, strategy: str) -> Any:
    more: Any = {"strategy": strategy, "devices": 2}
    on_ranks(folder / "parts", 5, **more)
    return on_ranks(folder / "straight", **more), on_ranks(folder / "parts", resume="auto", **more)


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_have_the_weights_of_one_process_and_resume_bitwise(strategy: str, tmp_path: Path) -> None:
    first, second = on_two_ranks(straight_and_resumed, tmp_path, strategy)
    assert first == second
    straight, resumed = first
    assert resumed == straight
    for name, value in on_ranks(tmp_path / "alone").items():
        torch.testing.assert_close(torch.tensor(straight[name]), torch.tensor(value), rtol=1e-6, atol=1e-6)


def test_checkpoint_of_trainable_parameters_has_none_that_are_frozen(tmp_path: Path) -> None:
    policy = CheckpointConfig(parameters="trainable")
    callbacks = [Freeze({"encoder.3": "2 steps", "encoder": None})]
    trainer = quiet(max_steps=4, run_dir=tmp_path, checkpoint=policy, callbacks=callbacks)
    result = trainer.fit(Net(), pairs(20))
    assert set(load_weights(result.last_checkpoint)) == {*SECOND, *HEAD}
    task = Net.from_checkpoint(result.last_checkpoint)
    assert all(each.requires_grad for each in task.parameters())
    assert torch.equal(task.head.weight, load_weights(result.model_path)["head.weight"])


def test_frozen_parameters_stay_with_every_kind_of_step() -> None:
    freeze = Freeze({"encoder.0": "5 steps", "encoder": "2 steps"})
    for options in (
        {"micro_batch": 1},
        {"gradient_accumulation_steps": 2, "max_epochs": 2},
        {"memory": {"activation_checkpointing": ("encoder.3",)}},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"max_grad_norm": None, "max_grad_value": 0.1},
    ):
        movers = fitted(freeze, **{"max_epochs": 1, **options})[1].movers()
        assert movers[0] == set(HEAD), options
        assert all(not each & {*FIRST} for each in movers[:4]), options
        assert {*movers[4], *movers[5]} == ALL or "precision" in options, options


def test_averages_of_frozen_weights_are_these_and_their_statistics_are_not_renewed() -> None:
    for kind in ("ema", "swa"):
        task = Net(norm=nn.BatchNorm1d)
        start = {name: each.clone() for name, each in task.state_dict().items()}
        average = WeightAverage(kind, every="1 step")
        fitted(Freeze("encoder", until="14 steps"), task, pairs(20, 4), callbacks=[average, StopAfter(12)])
        for name, each in task.state_dict().items():
            assert torch.equal(each, start[name]) != name.startswith("head"), name


def test_a_fit_that_freezes_without_a_meaning_is_refused() -> None:
    whole = "freezes all 8 trainable parameters of Net"
    for freeze, words, task in (
        (Freeze("encodr.*"), r"'encodr\.\*' of Freeze matches no parameter.*Did you mean 'encoder", Net()),
        (Freeze("*"), whole, Net()),
        (Freeze({"encoder": None, "encoder.0": "1 epoch"}), r"nothing to unfreeze .* 'encoder\.0'", Net()),
        (Freeze("generator", until="2 steps"), "all parameters of the optimizer 'generator'", Duel()),
    ):
        before, trainer = flags(task), quiet(max_epochs=1, callbacks=[freeze])
        with pytest.raises(ConfigError, match=words):
            trainer.fit(task, duels() if isinstance(task, Duel) else pairs(20))
        assert flags(task) == before
