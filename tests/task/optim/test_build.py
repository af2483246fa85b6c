"""From an `OptimizerConfig` to an optimizer and its learning rate."""

import inspect
import pickle
from functools import partial

import pytest
import torch
from tests.support.refusals import assert_refused
from torch import nn

from drivetrain.core.calendar import Calendar
from drivetrain.core.errors import ConfigError
from drivetrain.core.intervals import Every
from drivetrain.task.optim.build import (
    apply_factor,
    build_optimizer,
    build_schedule,
    remember_base_rates,
    schedule_lengths,
)
from drivetrain.task.optim.config import OPTIMIZERS, OptimizerConfig
from drivetrain.task.optim.groups import ParameterGroup
from drivetrain.task.optim.quantized import QUANTIZED

# One takes sparse gradients only; those of torchao, which compiles them, have tests of their own.
BUILT_IN = [name for name in OPTIMIZERS if name not in ("sparseadam", *QUANTIZED)]


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)


def built(name="adamw", module=None, **options) -> torch.optim.Optimizer:
    return build_optimizer(OptimizerConfig(name, **options), net() if module is None else module)


@pytest.mark.parametrize("name", BUILT_IN)
def test_every_optimizer_makes_the_same_steps_in_float32_and_bfloat16_up_to_rounding(name):
    """Forty weights are more than a vector register holds: torch's fused SGD has been wrong just there."""

    def trained(dtype: torch.dtype) -> torch.Tensor:
        model = nn.Linear(40, 1, bias=False)
        nn.init.constant_(model.weight, 1.0)
        model = model.to(dtype)
        optimizer = built(name, model, lr=0.125, **({"momentum": 0.5} if name == "sgd" else {}))
        for _ in range(3):
            model(torch.linspace(0.5, 1, 40).to(dtype)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.weight.detach().double()

    expected = trained(torch.float64)
    assert (expected < 1).all(), "it descends"
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.allclose(trained(dtype), expected, atol=0.02)


def test_sparse_adam_trains_a_sparse_embedding_and_sgd_meets_no_fused_kernel():
    for name in ("sparseadam", "sgd"):
        table = nn.Embedding(10, 3, sparse=True)
        optimizer, before = built(name, table), table.weight.detach().clone()
        table(torch.tensor([2, 5])).sum().backward()
        optimizer.step()
        assert (table.weight != before).any(1).nonzero().flatten().tolist() == [2, 5]


def test_an_optimizer_that_finds_its_own_rate_gets_none_unless_one_is_given():
    class Finds(torch.optim.SGD):
        def __init__(self, params, lr=None, scale=True):
            super().__init__(params, lr=0.5)  # for groups that have none

    for options, rate in (({}, None), ({"lr": 1e-3}, 1e-3), ({"lr": None}, None), ({"scale": False}, 1e-3)):
        assert built(Finds, **options).param_groups[0]["lr"] == rate
    assert OptimizerConfig(torch.optim.SGD).lr == 1e-3


def test_options_reach_the_optimizer_of_a_name_a_class_or_a_factory():
    seen = []

    def factory(param_groups, lr, momentum, nesterov, module):
        seen.append(module)
        return torch.optim.SGD(param_groups, lr, momentum, nesterov=nesterov)

    for name in ("sgd", torch.optim.SGD, factory, lambda groups, lr, **kw: torch.optim.SGD(groups, lr, **kw)):
        optimizer = built(name, lr=0.1, weight_decay=0.2, momentum=0.9, nesterov=True)
        assert isinstance(optimizer, torch.optim.SGD)
        decays = [(group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        assert decays == [(0.1, 0.2), (0.1, 0.0)]
        assert (optimizer.param_groups[0]["momentum"], optimizer.param_groups[0]["nesterov"]) == (0.9, True)
    assert [type(each) for each in seen] == [nn.Sequential]


@pytest.mark.parametrize("name", BUILT_IN)
def test_defaults_may_be_given(name):
    factory = OptimizerConfig(name).factory
    given = inspect.signature(factory).parameters.values()
    skipped = {"params", "param_groups", "lr", "weight_decay", "fused", "module"}
    OptimizerConfig(name, **{each.name: each.default for each in given if each.name not in skipped})


def test_fused_is_used_where_it_exists_and_only_there():
    def fused(name, module=None, **settings):
        return built(name, module, **settings).param_groups[0].get("fused")

    assert all(fused(name) is True for name in ("sgd", "adam", "adamw"))
    assert fused("adamw", fused=False) is False
    assert fused("adamw", foreach=True) is None
    assert fused("adamw", net().to("meta")) is None
    assert fused("sgd", momentum=0.9, dampening=0.1) is None


@pytest.mark.parametrize("name", ["adam", "nadam", "radam", "rmsprop", "muon"])
def test_float16_weights_stay_finite(name):
    for fused in (None, False):
        model = net(torch.float16)
        # A parameter without influence has the gradient 0, and 0 / (sqrt(0) + eps) is NaN if eps underflows.
        model.idle = nn.Parameter(torch.ones(3, dtype=torch.float16))
        optimizer = built(name, model, lr=1e-3, fused=fused)
        for _ in range(5):
            (model[3](torch.ones(2, 8, dtype=torch.float16)).sum() + (model.idle * 0).sum()).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert all(parameter.isfinite().all() for parameter in model.parameters())


def test_the_users_eps_is_kept_in_float16_and_the_default_elsewhere():
    half = torch.float16
    cases = ((half, {}), (half, {"eps": 1e-3}), (torch.bfloat16, {}))
    for (dtype, options), eps in zip(cases, (1e-4, 1e-3, 1e-8), strict=True):
        assert built("adamw", net(dtype), **options).param_groups[0]["eps"] == eps


def test_refusals_of_optimizer_config():
    def config(name="adamw", **settings):
        return lambda: OptimizerConfig(name, **settings)

    half = net(torch.bfloat16)
    finished = torch.optim.SGD(net().parameters())
    parts, expanded = nn.Linear(4, 6), nn.Linear(4, 6)
    parts.weight = nn.Parameter(torch.randn(6, 8)[:, :4])
    expanded.weight = nn.Parameter(torch.randn(4).expand(6, 4))
    cases = {
        "a closure": (config("lbfgs"), "closure"),
        "finished": (config(finished), "not a finished SGD"),
        "an option": (config(beta=(0.9, 0.99)), "no option 'beta'", "'betas'"),
        "an option of ours": (config(warmup=10), "'warmup_steps'"),
        "no lr": (config(lambda groups: None), "takes no lr"),
        "no weight decay": (config("rprop", weight_decay=0.1), "'rprop' has no weight decay"),
        "lr": (config(lr=-1), "lr", "at least 0"),
        "two units": (
            lambda: build_schedule(OptimizerConfig(warmup_steps="9 tokens", total_steps=9), None),
            "warmup_steps='9 tokens', total_steps='9 steps'",
        ),
        "a warm-up by time": (config(warmup_steps="1 hour"), "steps, epochs or tokens"),
        "epochs of a stream": (
            lambda: build_schedule(OptimizerConfig(warmup_steps="1 epoch"), None),
            "data of known length",
        ),
        "two warm-ups": (config(warmup_steps=5, warmup_ratio=0.1), "exclude one another"),
        "not fused": (config("rmsprop", fused=True), "no fused implementation"),
        "fused and dampened": (
            config("sgd", groups=ParameterGroup("head.*", momentum=0.9, dampening=0.1), fused=True),
            "of all parameters or of none",
            "Leave fused at None",
        ),
        "fused over a part": (lambda: built("adamw", parts, fused=True), "strides (8, 1)", "fused at None"),
        "shared memory": (lambda: built("sgd", expanded), "shape (6, 4)", "elements that share memory"),
        "a group's option": (config(groups=ParameterGroup("head.*", momentum=1)), "'head.*'"),
        "schedule": (config(schedule="cosin"), "'cosine'"),
        "of torch": (config(schedule=partial(torch.optim.lr_scheduler.StepLR, step_size=2)), "class StepLR"),
        "fused in 16 bits": (lambda: built("sgd", half, fused=True), "torch.bfloat16", "on cpu"),
        "torch's own": (lambda: built(betas=(2.0, 0.9)), "'adamw' refuses", "Invalid beta parameter"),
        "a number for a pair": (lambda: built(betas=0.9), "'adamw' refuses its settings: 'float' object"),
        "a text for a number": (lambda: built(eps="1e-8"), "'adamw' refuses its settings: '<=' not"),
        "for a switch": (config(amsgrad="false"), "amsgrad of the optimizer 'adamw' must be True or False"),
        "in a group": (config(groups=ParameterGroup("*", amsgrad="no")), "'*' must be True or False"),
        "no optimizer": (lambda: built(lambda groups, lr: 3), "a int, which is no torch"),
        "no length": (lambda: build_schedule(OptimizerConfig(schedule="linear"), None), "total_steps"),
    }
    assert_refused(ConfigError, cases)


def test_a_config_cannot_be_changed_and_survives_a_process_boundary():
    config = OptimizerConfig("sgd", momentum=0.9, groups=[ParameterGroup("a.*", lr=1)], schedule="cosine")
    with pytest.raises(AttributeError):
        config.lr = 2
    assert pickle.loads(pickle.dumps(config)) == config


def test_the_schedule_covers_the_run_or_total_steps():
    assert build_schedule(OptimizerConfig(schedule="linear"), 10)(5) == 0.5
    assert build_schedule(OptimizerConfig(schedule="linear", total_steps=20), 10)(5) == 0.75
    assert build_schedule(OptimizerConfig(), 10) is None
    # A warm-up ratio is of all steps, rounded up.
    for ratio, total, warmup in ((0.1, 30, 3), (0.1, 31, 4), (0.07, 100, 7), (0.5, 1, 1)):
        schedule = build_schedule(OptimizerConfig(warmup_ratio=ratio), total)
        assert [schedule(warmup - 1) < 1, schedule(warmup)] == [True, 1]
    schedule = build_schedule(OptimizerConfig(schedule=lambda step: 0.5, warmup_steps=1), None)
    assert [schedule(step) for step in range(3)] == [0.25, 0.5, 0.5]


COSINE = {"schedule": "cosine"}
WITHOUT = "of tokens if its lengths are in tokens"
MIXES = [  # the lengths, the steps and tokens that limit the run, and the unit, the warm-up and the whole
    (COSINE, 50, None, ("steps", 0, 50)),
    (COSINE, 50, 900, ("tokens", 0, 900)),
    ({**COSINE, "warmup_steps": 5}, 50, 900, ("steps", 5, 50)),
    ({**COSINE, "warmup_steps": 5}, None, 900, WITHOUT),
    ({**COSINE, "warmup_steps": "5 steps", "total_steps": 40}, None, 900, ("steps", 5, 40)),
    ({**COSINE, "warmup_steps": "1 epoch"}, None, 900, WITHOUT),
    ({**COSINE, "warmup_steps": "1 epoch"}, 50, 900, ("steps", 20, 50)),
    ({**COSINE, "warmup_steps": "90 tokens"}, 50, None, WITHOUT),
    ({**COSINE, "warmup_steps": "90 tokens"}, 50, 900, ("tokens", 90, 900)),
    ({**COSINE, "warmup_steps": "90 tokens", "total_steps": "0.8K tokens"}, 50, None, ("tokens", 90, 800)),
    ({**COSINE, "warmup_steps": "0.2"}, 50, 900, ("tokens", 180, 900)),
    ({**COSINE, "warmup_steps": "0.2", "total_steps": 40}, 50, 900, ("steps", 8, 40)),
    ({**COSINE, "warmup_ratio": 0.2, "total_steps": "0.5"}, 50, None, ("steps", 5, 25)),
    ({"schedule": "warmup_stable_decay", "schedule_options": {"decay": 9}}, None, 900, WITHOUT),
    ({"schedule": lambda step: 1.0, "warmup_steps": "0.2"}, None, 900, "not known in steps"),
    ({"schedule": lambda step: 1.0, "warmup_steps": "0.2"}, 50, 900, ("steps", 10, 50)),
    ({"schedule": lambda step: 1.0, "warmup_steps": "9 tokens"}, 50, 900, "steps or tokens, and not both"),
]


def test_a_schedule_follows_one_unit_over_the_runs_limit_in_it() -> None:
    for given, steps, tokens, expected in MIXES:
        calendar, config = Calendar(length=20), OptimizerConfig(**given)
        calendar.whole = Every(tokens, "tokens") if tokens else Every(steps)
        if isinstance(expected, tuple):
            assert schedule_lengths(config, steps, calendar)[:3] == expected, given
        else:
            with pytest.raises(ConfigError, match=expected):
                build_schedule(config, steps, calendar)


def test_the_factor_scales_each_groups_base_rate_whatever_it_was_before():
    optimizer = built("sgd", lr=0.4, groups=[ParameterGroup("0.*", lr_scale=0.5)])
    for factor in (0.5, 0.0, 0.25):
        apply_factor(optimizer, factor)
        assert [group["lr"] for group in optimizer.param_groups] == [0.4 * factor, 0.2 * factor]
    rate = torch.tensor(0.5)  # a rate that is a tensor is changed in place
    optimizer = torch.optim.AdamW(net().parameters(), lr=rate, foreach=False)
    for factor in (0.5, 0.25):
        remember_base_rates(optimizer)  # once
        apply_factor(optimizer, factor)
    assert optimizer.param_groups[0]["lr"] is rate
    assert rate.item() == 0.125
