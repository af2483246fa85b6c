"""From an OptimizerConfig to an optimizer and its learning rate."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.build import apply_factor, build_optimizer, build_schedule, remember_base_rates
from drivetrain.task.optim.config import OPTIMIZERS, OptimizerConfig
from drivetrain.task.optim.groups import ParameterGroup
from drivetrain.task.optim.quantized import QUANTIZED
from drivetrain.task.optim.schedules import PlateauSchedule


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, updates: int) -> list[float]:
    """Fit a fixed target; the losses."""
    generator = torch.Generator().manual_seed(1)
    dtype = next(model.parameters()).dtype
    inputs = torch.randn(32, 4, generator=generator).to(dtype)
    target = torch.stack([inputs.sum(1), inputs[:, 0] * inputs[:, 1]], 1).to(dtype)
    losses = []
    for _ in range(updates):
        loss = nn.functional.mse_loss(model(inputs), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# One takes sparse gradients only; those of torchao, which compiles them, have tests of their own.
BUILT_IN = [name for name in OPTIMIZERS if name not in ("sparseadam", *QUANTIZED)]


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_optimizer_learns_from_its_name_alone(name):
    model = net()
    losses = train(model, build_optimizer(OptimizerConfig(name, lr=1e-2), model), 30)
    assert losses[-1] < losses[0]


def test_sparse_adam_trains_a_sparse_embedding():
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = build_optimizer(OptimizerConfig("sparseadam"), table)
    before = table.weight.detach().clone()
    table(torch.tensor([2, 5])).sum().backward()
    optimizer.step()
    moved = (table.weight != before).any(1)
    assert moved.nonzero().flatten().tolist() == [2, 5]


def test_sparse_gradients_do_not_meet_a_fused_kernel():
    table = nn.Embedding(10, 3, sparse=True)
    optimizer = build_optimizer(OptimizerConfig("sgd"), table)
    table(torch.tensor([2])).sum().backward()
    optimizer.step()


def test_options_reach_the_optimizer():
    optimizer = build_optimizer(OptimizerConfig("sgd", lr=0.1, momentum=0.9, nesterov=True), net())
    assert isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]) == (0.9, True)


def test_a_class_and_a_factory_serve_as_well_as_a_name():
    def factory(param_groups, lr, **options):
        return torch.optim.SGD(param_groups, lr=lr, **options)

    for name in (torch.optim.SGD, factory):
        optimizer = build_optimizer(OptimizerConfig(name, lr=0.1, weight_decay=0.2, momentum=0.5), net())
        decays = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        assert decays == [(0.1, 0.2), (0.1, 0.0)]
        assert optimizer.param_groups[0]["momentum"] == 0.5


def test_a_factory_that_asks_for_the_module_is_given_it():
    seen = []

    def factory(param_groups, lr, module):
        seen.append(module)
        return torch.optim.SGD(param_groups, lr=lr)

    model = net()
    build_optimizer(OptimizerConfig(factory), model)
    assert seen == [model]


def test_fused_is_used_where_it_exists_and_only_there():
    def fused(name, model=None, **settings):
        return build_optimizer(OptimizerConfig(name, **settings), model or net()).param_groups[0].get("fused")

    assert all(fused(name) is True for name in ("sgd", "adam", "adamw"))
    assert fused("adamw", fused=False) is False
    assert fused("adamw", foreach=True) is None
    assert fused("rmsprop") is None
    assert fused("rmsprop", fused=False) is None
    assert fused("adamw", net().to("meta")) is None


def test_insisting_on_fused_where_it_cannot_be_is_an_error():
    with pytest.raises(ConfigError, match="has no fused implementation"):
        OptimizerConfig("rmsprop", fused=True)
    with pytest.raises(ConfigError, match=r"'sgd' has no sound fused.* torch\.bfloat16 .*on cpu"):
        build_optimizer(OptimizerConfig("sgd", fused=True), net(torch.bfloat16))
    with pytest.raises(ConfigError, match="float32 parameters on meta"):
        build_optimizer(OptimizerConfig("adamw", fused=True), net().to("meta"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", BUILT_IN)
def test_an_update_is_the_same_in_every_dtype_up_to_rounding(name, dtype):
    """Forty weights are more than a vector register holds: torch's fused SGD has been wrong just there."""

    def trained(dtype: torch.dtype) -> torch.Tensor:
        model = nn.Linear(40, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        model = model.to(dtype)
        options = {"momentum": 0.5} if name == "sgd" else {}
        optimizer = build_optimizer(OptimizerConfig(name, lr=0.125, **options), model)
        for _ in range(3):
            model(torch.linspace(0.5, 1, 40).to(dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().double()

    expected = trained(torch.float64)
    assert torch.allclose(trained(dtype), expected, atol=0.02)
    assert (expected != 1).all()


@pytest.mark.parametrize("name", ["adam", "adamw", "nadam", "radam", "rmsprop", "muon"])
@pytest.mark.parametrize("fused", [None, False])
def test_float16_weights_stay_finite(name, fused):
    model = net(torch.float16)
    # A parameter without influence has the gradient 0, and 0 / (sqrt(0) + eps) is NaN when eps underflows.
    model.idle = nn.Parameter(torch.ones(3, dtype=torch.float16))
    model.idle.register_hook(lambda gradient: gradient)
    optimizer = build_optimizer(OptimizerConfig(name, lr=1e-3, fused=fused), model)
    for _ in range(5):
        (model(torch.ones(2, 4, dtype=torch.float16)).sum() + (model.idle * 0).sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_users_eps_is_kept_in_float16_and_the_default_elsewhere():
    eps = [
        build_optimizer(OptimizerConfig("adamw", **options), net(dtype)).param_groups[0]["eps"]
        for dtype, options in ((torch.float16, {}), (torch.float16, {"eps": 1e-3}), (torch.bfloat16, {}))
    ]
    assert eps == [1e-4, 1e-3, 1e-8]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"name": "adamv"}, "unknown optimizer 'adamv'. Did you mean 'adam"),
        ({"name": 3}, "must be a name, a class or a factory"),
        ({"name": "lbfgs"}, "closure"),
        ({"name": torch.optim.LBFGS}, "closure"),
        ({"beta": (0.9, 0.99)}, "'adamw' has no option 'beta'. Did you mean 'betas'"),
        ({"name": torch.optim.SGD, "momentun": 1}, "'SGD' has no option 'momentun'. Did you mean 'momentum'"),
        ({"warmup": 10}, "Did you mean 'warmup_steps'"),
        ({"params": []}, "no option 'params'"),
        ({"name": lambda groups: None}, "takes no lr"),
        ({"name": "rprop", "weight_decay": 0.1}, "'rprop' has no weight decay"),
        ({"lr": 0}, "lr must be a finite number above 0"),
        ({"lr": "1e-3"}, "lr must be a finite number above 0"),
        ({"weight_decay": -0.1}, "weight_decay must be"),
        ({"max_grad_norm": 0}, "max_grad_norm must be"),
        ({"warmup_steps": 1.5}, "warmup_steps must be a whole number"),
        ({"warmup_ratio": 1.0}, "warmup_ratio must be a finite number at least 0 and below 1"),
        ({"warmup_steps": 5, "warmup_ratio": 0.1}, "exclude one another"),
        ({"total_steps": 0}, "total_steps must be a whole number, at least 1"),
        ({"decay_all": "no"}, "decay_all must be True or False"),
        ({"fused": "yes"}, "fused must be True or False"),
        ({"groups": [{"pattern": "*"}]}, "must be ParameterGroup objects"),
        ({"groups": ParameterGroup("head.*", momentum=1)}, r"'head\.\*', has no option 'momentum'"),
        ({"parameters": [3]}, "must be globs"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"schedule": "cosine", "schedule_options": {"power": 2}}, "'cosine' has no option 'power'"),
        ({"schedule": "cosine", "schedule_options": {"min_ratio": 2}}, "min_ratio"),
        ({"schedule": 0.5}, "must be a name or a function"),
        ({"schedule": torch.optim.lr_scheduler.StepLR}, "not a torch scheduler"),
        ({"schedule": PlateauSchedule()}, "reduce_on_plateau"),
        ({"schedule": lambda update: 1.0, "schedule_options": {"a": 1}}, "for named schedules"),
    ],
)
def test_a_configuration_that_cannot_work_is_refused_when_it_is_written(settings, message):
    with pytest.raises(ConfigError, match=message):
        OptimizerConfig(**settings)


def test_a_finished_optimizer_is_refused():
    with pytest.raises(ConfigError, match="not a finished SGD"):
        OptimizerConfig(torch.optim.SGD(net().parameters()))


def test_what_the_optimizer_itself_refuses_is_a_configuration_error():
    with pytest.raises(ConfigError, match="'adamw' refuses its settings: Invalid beta parameter"):
        build_optimizer(OptimizerConfig("adamw", betas=(2.0, 0.9)), net())
    with pytest.raises(ConfigError, match="gave a int, not a torch"):
        build_optimizer(OptimizerConfig(lambda groups, lr: 3), net())


def test_a_configuration_cannot_be_changed_and_survives_a_process_boundary():
    config = OptimizerConfig("sgd", momentum=0.9, groups=[ParameterGroup("a.*", lr=1)], schedule="cosine")
    with pytest.raises(AttributeError):
        config.lr = 2
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_schedule_covers_the_run_or_the_steps_asked_for():
    assert build_schedule(OptimizerConfig(schedule="linear"), 10)(5) == 0.5
    assert build_schedule(OptimizerConfig(schedule="linear", total_steps=20), 10)(5) == 0.75
    with pytest.raises(ConfigError, match="max_steps to the Trainer or total_steps to OptimizerConfig"):
        build_schedule(OptimizerConfig(schedule="linear"), None)


def test_a_constant_rate_needs_no_schedule():
    assert build_schedule(OptimizerConfig(), 10) is None
    assert build_schedule(OptimizerConfig(), None) is None


@pytest.mark.parametrize(
    ("ratio", "total", "warmup"), [(0.1, 30, 3), (0.1, 31, 4), (0.07, 100, 7), (0.5, 1, 1)]
)
def test_a_warm_up_ratio_is_of_all_updates_rounded_up(ratio, total, warmup):
    schedule = build_schedule(OptimizerConfig(warmup_ratio=ratio), total)
    assert [schedule(warmup - 1) < 1, schedule(warmup)] == [True, 1]


def test_a_warm_up_ratio_of_a_run_without_end_is_an_error():
    with pytest.raises(ConfigError, match="warmup_steps instead"):
        build_schedule(OptimizerConfig(warmup_ratio=0.1), None)


def test_a_function_is_a_schedule_and_is_warmed_up():
    schedule = build_schedule(OptimizerConfig(schedule=lambda update: 0.5, warmup_steps=1), None)
    assert [schedule(update) for update in range(3)] == [0.25, 0.5, 0.5]


def test_each_build_of_a_plateau_schedule_starts_afresh():
    config = OptimizerConfig(schedule="reduce_on_plateau", schedule_options={"patience": 0}, warmup_steps=1)
    first = build_schedule(config, None)
    assert isinstance(first, PlateauSchedule)
    first.observe({"validation/loss": 1.0})
    first.observe({"validation/loss": 1.0})
    assert (first(5), build_schedule(config, None)(5)) == (0.1, 1.0)


def test_the_factor_scales_each_groups_base_rate_whatever_it_was_before():
    model = net()
    config = OptimizerConfig("sgd", lr=0.4, groups=[ParameterGroup("0.*", lr_scale=0.5)])
    optimizer = build_optimizer(config, model)
    for factor in (0.5, 0.0, 0.25):
        apply_factor(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.4 * factor, 0.2 * factor]


def test_a_rate_that_is_a_tensor_is_changed_in_place():
    rate = torch.tensor(0.5)
    optimizer = torch.optim.AdamW(net().parameters(), lr=rate, foreach=False)
    remember_base_rates(optimizer)
    apply_factor(optimizer, 0.5)
    apply_factor(optimizer, 0.25)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125


def test_the_base_rate_is_remembered_once():
    optimizer = torch.optim.SGD(net().parameters(), lr=0.4)
    remember_base_rates(optimizer)
    apply_factor(optimizer, 0.5)
    remember_base_rates(optimizer)
    apply_factor(optimizer, 1.0)
    assert optimizer.param_groups[0]["lr"] == 0.4
