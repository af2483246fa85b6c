"""Which parameters an optimizer trains, and with which settings."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.build import build_optimizer
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.groups import ParameterGroup


class RootMeanSquareNorm(nn.Module):
    """A norm of somebody's own, with a weight of two dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
        self.norm = nn.LayerNorm((4, 4))
        self.own = RootMeanSquareNorm()
        self.head = nn.Linear(4, 2)


def groups_of(module: nn.Module, *arguments, names=None, **settings) -> list[dict]:
    """The built optimizer's groups, with names in place of parameters."""
    known = {parameter: name for name, parameter in module.named_parameters()}
    optimizer = build_optimizer(OptimizerConfig(*arguments, **settings), module, names)
    return [
        {**group, "params": [known[each] for each in group["params"]]} for group in optimizer.param_groups
    ]


MATRICES = ["backbone.0.weight", "backbone.2.weight", "head.weight"]
SPARED = [
    *("backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "backbone.2.bias"),
    *("norm.weight", "norm.bias", "own.weight", "head.bias"),
]


def test_weight_decay_spares_biases_and_norms_of_any_shape():
    decayed, spared = groups_of(Net(), "adamw", weight_decay=0.1)
    assert (decayed["params"], decayed["weight_decay"]) == (MATRICES, 0.1)
    assert (spared["params"], spared["weight_decay"]) == (SPARED, 0.0)


def test_decay_all_spares_nothing():
    (group,) = groups_of(Net(), "adamw", weight_decay=0.1, decay_all=True)
    assert (len(group["params"]), group["weight_decay"]) == (11, 0.1)


def test_decayed_parameters_can_be_chosen_by_name():
    decayed, spared = groups_of(Net(), "adamw", weight_decay=0.1, decayed=["head.bias", "norm.weight"])
    assert (decayed["params"], len(spared["params"])) == (["norm.weight", "head.bias"], 9)
    with pytest.raises(ConfigError, match="which is no parameter"):
        groups_of(Net(), "adamw", weight_decay=0.1, decayed=["head.bia"])
    with pytest.raises(ConfigError, match="exclude one another"):
        OptimizerConfig("adamw", decay_all=True, decayed=["head.bias"])


def test_the_optimizers_own_default_decay_does_not_creep_in():
    (group,) = groups_of(Net(), "adamw")  # torch's AdamW would decay by 0.01
    assert group["weight_decay"] == 0.0


def test_a_pattern_gives_parameters_settings_of_their_own():
    rules = [ParameterGroup("backbone.*", lr_scale=0.5, momentum=0.8)]
    rest, backbone = groups_of(Net(), "sgd", lr=0.1, momentum=0.9, groups=rules)
    assert (rest["lr"], rest["momentum"], rest["params"][0]) == (0.1, 0.9, "norm.weight")
    assert (backbone["lr"], backbone["momentum"], backbone["initial_lr"]) == (0.05, 0.8, 0.05)
    assert all(name.startswith("backbone.") for name in backbone["params"])


def test_the_first_pattern_that_matches_wins():
    groups = groups_of(
        Net(), "sgd", lr=1.0, groups=[ParameterGroup("head.bias", lr=0.2), ParameterGroup("head.*", lr=0.3)]
    )
    assert [(group["lr"], group["params"]) for group in groups[1:]] == [
        (0.2, ["head.bias"]),
        (0.3, ["head.weight"]),
    ]


def test_a_groups_weight_decay_reaches_its_biases():
    groups = groups_of(Net(), "adamw", weight_decay=0.1, groups=[ParameterGroup("head.*", weight_decay=0.3)])
    assert [(group["weight_decay"], len(group["params"])) for group in groups] == [
        (0.1, 2),
        (0.0, 7),
        (0.3, 2),
    ]


def test_the_order_of_groups_depends_on_the_rules_alone():
    forwards, backwards = Net(), Net()
    backwards._modules = dict(reversed(backwards._modules.items()))
    rules = [ParameterGroup("head.*", lr=0.3), ParameterGroup("own.*", lr=0.2)]
    settings = {"weight_decay": 0.1, "groups": rules}
    pair = [groups_of(net, "adamw", **settings) for net in (forwards, backwards)]
    assert [set(group["params"]) for group in pair[0]] == [set(group["params"]) for group in pair[1]]


def test_frozen_parameters_are_left_out():
    net = Net()
    net.backbone.requires_grad_(False)
    (group,) = groups_of(net, "sgd")
    assert group["params"] == ["norm.weight", "norm.bias", "own.weight", "head.weight", "head.bias"]
    # a rule for what is frozen today is no mistake
    assert len(groups_of(net, "sgd", groups=[ParameterGroup("backbone.*", lr=0.1)])) == 1


def test_an_optimizer_can_be_given_a_part_of_the_module():
    (group,) = groups_of(Net(), "sgd", parameters="head.*")
    assert group["params"] == ["head.weight", "head.bias"]
    names = ["norm.weight", "norm.bias", "head.bias"]
    (group,) = groups_of(Net(), "sgd", parameters=["head.*", "*.weight"], names=names)
    assert group["params"] == ["norm.weight", "head.bias"]


def test_a_tied_parameter_is_trained_once_and_found_by_either_name():
    net = nn.ModuleDict({"embedding": nn.Embedding(5, 3), "head": nn.Linear(3, 5, bias=False)})
    net["head"].weight = net["embedding"].weight
    (group,) = groups_of(net, "sgd", lr=1.0, groups=[ParameterGroup("head.weight", lr=0.5)])
    assert (group["params"], group["lr"]) == (["embedding.weight"], 0.5)
    assert len(groups_of(net, "sgd", names=["head.weight"])) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"groups": [ParameterGroup("heads.*", lr=1)]},
            r"'heads\.\*' in groups matches no.*Did you mean 'head",
        ),
        ({"groups": [ParameterGroup("*"), ParameterGroup("head.*")]}, r"'head\.\*' is left with nothing"),
        ({"parameters": "heads.*"}, r"'heads\.\*' in parameters matches no parameter"),
    ],
)
def test_a_pattern_that_does_nothing_is_an_error(settings, message):
    with pytest.raises(ConfigError, match=message):
        build_optimizer(OptimizerConfig("sgd", **settings), Net())


def test_a_name_that_the_module_lacks_is_an_error():
    with pytest.raises(ConfigError, match=r"no parameter 'head.weights'. Did you mean 'head.weight'"):
        build_optimizer(OptimizerConfig("sgd"), Net(), ["head.weights"])


def test_nothing_to_train_is_an_error_that_says_why():
    with pytest.raises(ConfigError, match="none of its 11 parameters requires gradients"):
        build_optimizer(OptimizerConfig("sgd"), Net().requires_grad_(False))
    with pytest.raises(ConfigError, match="the module has no parameters"):
        build_optimizer(OptimizerConfig("sgd"), nn.ReLU())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": ""}, "must be a glob"),
        ({"pattern": 3}, "must be a glob"),
        ({"pattern": "a", "lr": 0}, "lr of the parameter group 'a' must be"),
        ({"pattern": "a", "lr_scale": -1}, "lr_scale of the parameter group 'a' must be"),
        ({"pattern": "a", "weight_decay": -1}, "weight_decay of the parameter group 'a' must be"),
        ({"pattern": "a", "lr": 1, "lr_scale": 1}, "exclude one another"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        ParameterGroup(**settings)
