"""The example of a mixture of experts beside Mixtral, and its counts of experts on two ranks."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch.utils.data import DataLoader

from drivetrain import FSDPConfig

EXAMPLES = Path(__file__).parents[3] / "examples"
pytestmark = pytest.mark.nightly


def example() -> Any:
    sys.path.insert(0, str(EXAMPLES))
    try:
        import mixture_of_experts
    finally:
        sys.path.remove(str(EXAMPLES))
    return mixture_of_experts


@pytest.fixture(autouse=True)
def _forgotten(transformers_library: None) -> Any:
    yield
    for name in ("gpt", "mixture_of_experts"):
        sys.modules.pop(name, None)


def test_the_layer_and_its_balance_are_those_of_mixtral() -> None:
    from transformers import MixtralConfig
    from transformers.models.mixtral import modeling_mixtral as mixtral

    torch.manual_seed(0)
    ours = example().Mixture(16, 4)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2}
    theirs = mixtral.MixtralSparseMoeBlock(MixtralConfig(**sizes, experts_implementation="eager"))
    weights = {"gate.weight": "router.weight"}
    weights |= {f"experts.{name}_proj": f"experts.{name}" for name in ("gate_up", "down")}
    state = ours.state_dict()
    theirs.load_state_dict({name: 20 * state[own] for name, own in weights.items()})
    ours.load_state_dict({name: 20 * each for name, each in state.items()})
    x = torch.randn(3, 5, 16)
    mixed, scores = ours(x)
    torch.testing.assert_close(mixed, theirs(x))
    layers = (scores, -scores)
    expected = mixtral.load_balancing_loss_func(layers, 4, 2)
    torch.testing.assert_close(example().balance(torch.cat(layers), 2), expected)


def evaluated(devices: int) -> dict[str, float]:
    module = example()
    torch.manual_seed(0)
    task = module.SparseGPT(width=16)
    data = DataLoader(module.Windows(bytes(range(256)) * 9, 16), batch_size=4 // devices)
    strategy = FSDPConfig(expert_parallel=True) if devices > 1 else "cpu"
    trainer = quiet(max_steps=3, strategy=strategy, devices=devices)
    return dict(trainer.validate(task, data))


def test_experts_are_counted_over_all_ranks() -> None:
    alone, found = evaluated(1), on_two_ranks(evaluated, 2)
    names = [f"validation/experts/{number}" for number in range(4)]
    assert sum(alone[name] for name in names) == pytest.approx(1.0)
    for rank in found:
        assert [rank[name] for name in names] == pytest.approx([alone[name] for name in names], abs=1e-3)
