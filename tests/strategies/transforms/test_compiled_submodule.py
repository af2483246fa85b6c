"""A run whose submodule is wrapped by torch.compile and one whose is not are the same run to a checkpoint."""

import pytest
import torch
from safetensors.torch import load_file
from tests.support.tasks import FEATURES, Regression, pairs, quiet
from torch import nn

from drivetrain import CheckpointConfig, OptimizerConfig, ParameterGroup


class Wrapped(Regression):
    """With its only layer compiled, or not, and an optimizer that names it."""

    def __init__(self, compiled: bool = False):
        super().__init__()
        self.block = nn.Linear(FEATURES, FEATURES)
        with torch.no_grad():
            self.block.weight.copy_(torch.eye(FEATURES))
            self.block.bias.zero_()
        if compiled:
            self.block = torch.compile(self.block, backend="eager")

    def forward(self, features):
        return self.line(self.block(features))

    def configure_optimizers(self):
        groups = [ParameterGroup("block.*", lr=0.01)]
        return OptimizerConfig("adamw", lr=0.05, groups=groups)


def fit(run_dir, compiled, epochs, resume=None):
    task = Wrapped(compiled)
    trainer = quiet(max_epochs=epochs, run_dir=run_dir, checkpoint=CheckpointConfig(by=None, best=0))
    trainer.fit(task, pairs(), resume=resume)
    return task


@pytest.mark.parametrize("compiled", [True, False])
def test_each_resumes_what_the_other_began(tmp_path, compiled):
    straight = fit(tmp_path / "straight", compiled=False, epochs=4)
    fit(tmp_path / "run", compiled=compiled, epochs=2)
    resumed = fit(tmp_path / "run", compiled=not compiled, epochs=4, resume="auto")
    for mine, theirs in zip(resumed.parameters(), straight.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    names = {"line.weight", "line.bias", "block.weight", "block.bias"}
    assert set(load_file(tmp_path / "run" / "model.safetensors")) == names
