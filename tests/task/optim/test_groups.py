"""Which parameters an optimizer trains, and with which settings."""

import torch
from tests.support.refusals import assert_refused
from torch import nn

from drivetrain.core.errors import ConfigError
from drivetrain.task.optim.build import build_optimizer
from drivetrain.task.optim.config import OptimizerConfig
from drivetrain.task.optim.groups import ParameterGroup


class RootMeanSquareNorm(nn.Module):  # a norm of somebody's own, with a weight of two dimensions
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
    known = {parameter: name for name, parameter in module.named_parameters()}
    groups = build_optimizer(OptimizerConfig(*arguments, **settings), module, names).param_groups
    return [{**group, "params": [known[each] for each in group["params"]]} for group in groups]


MATRICES = ["backbone.0.weight", "backbone.2.weight", "head.weight"]
SPARED = [
    *("backbone.0.bias", "backbone.1.weight", "backbone.1.bias", "backbone.2.bias"),
    *("norm.weight", "norm.bias", "own.weight", "head.bias"),
]


def test_weight_decay_spares_biases_and_norms_of_any_shape():
    decayed, spared = groups_of(Net(), "adamw", weight_decay=0.1)
    assert (decayed["params"], decayed["weight_decay"]) == (MATRICES, 0.1)
    assert (spared["params"], spared["weight_decay"]) == (SPARED, 0.0)
    (group,) = groups_of(Net(), "adamw")  # torch's AdamW would decay by 0.01
    assert group["weight_decay"] == 0.0
    decayed, spared = groups_of(Net(), "adamw", weight_decay=0.1, decayed=["head.bias", "norm.weight"])
    assert (decayed["params"], len(spared["params"])) == (["norm.weight", "head.bias"], 9)


def test_weight_decay_of_a_step_moves_matrices_and_neither_biases_nor_norms():
    net = Net()
    optimizer = build_optimizer(OptimizerConfig("adamw", lr=0.1, weight_decay=0.5), net)
    before = {}
    for name, each in net.named_parameters():
        nn.init.ones_(each)
        each.grad = torch.zeros_like(each)
        before[name] = each.detach().clone()
    optimizer.step()
    for name, each in net.named_parameters():
        expected = before[name] * (0.95 if name in MATRICES else 1.0)
        torch.testing.assert_close(each.detach(), expected, msg=name)


def test_a_pattern_gives_parameters_settings_of_their_own():
    rules = [ParameterGroup("backbone.*", lr_scale=0.5, momentum=0.8)]
    rest, backbone = groups_of(Net(), "sgd", lr=0.1, momentum=0.9, groups=rules)
    assert (rest["lr"], rest["momentum"], rest["params"][0]) == (0.1, 0.9, "norm.weight")
    assert (backbone["lr"], backbone["momentum"], backbone["initial_lr"]) == (0.05, 0.8, 0.05)
    assert all(name.startswith("backbone.") for name in backbone["params"])
    rules = [ParameterGroup("head.bias", lr=0.2), ParameterGroup("head.*", lr=0.3)]  # the first match wins
    groups = [(group["lr"], group["params"]) for group in groups_of(Net(), "sgd", lr=1.0, groups=rules)]
    assert groups[1:] == [(0.2, ["head.bias"]), (0.3, ["head.weight"])]
    rules = [ParameterGroup("head.*", weight_decay=0.3)]  # a group's weight decay reaches its biases
    groups = groups_of(Net(), "adamw", weight_decay=0.1, groups=rules)
    decays = [(group["weight_decay"], len(group["params"])) for group in groups]
    assert decays == [(0.1, 2), (0.0, 7), (0.3, 2)]


def test_an_optimizer_trains_what_is_not_frozen_of_its_part():
    net = Net()
    net.backbone.requires_grad_(False)
    (group,) = groups_of(net, "sgd")
    assert group["params"] == ["norm.weight", "norm.bias", "own.weight", "head.weight", "head.bias"]
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


def test_refusals_of_groups():
    def build(net=None, names=None, **settings):
        return lambda: build_optimizer(OptimizerConfig("sgd", **settings), net or Net(), names)

    def group(*arguments, **settings):
        return lambda: ParameterGroup(*arguments, **settings)

    left_over = [ParameterGroup("*"), ParameterGroup("head.*")]
    cases = {
        "no match": (build(groups=[ParameterGroup("heads.*", lr=1)]), "'heads.*' in groups", "'head"),
        "nothing left": (build(groups=left_over), "'head.*' is left with nothing"),
        "frozen": (build(Net().requires_grad_(False)), "none of its 11 parameters requires gradients"),
        "lr": (group("a", lr=-1), "lr of the parameter group 'a'"),
        "lr and scale": (group("a", lr=1, lr_scale=1), "exclude one another"),
    }
    assert_refused(ConfigError, cases)
