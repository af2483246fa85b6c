"""Logs of a run that was cut off and resumed: as if nothing had happened."""

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from drivetrain import CheckpointConfig, LambdaCallback, TaskModule, Trainer


class Line(TaskModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 1)

    def forward(self, features):
        return self.net(features)

    def loss(self, outputs, batch):
        return outputs.square().mean()


def fit(run_dir, die_after=None, resume=None):
    def die(run):
        if run.progress.updates == die_after:
            raise KeyboardInterrupt

    torch.manual_seed(0)
    data = list(torch.randn(5, 2, 4, generator=torch.Generator().manual_seed(0)))
    trainer = Trainer(
        max_epochs=2,
        log_every=1,
        checkpoint=CheckpointConfig(every="3 steps", best=0),
        callbacks=[LambdaCallback(on_step_end=die)],
        loggers=("csv", "jsonl", "tensorboard"),
        progress_bar=False,
        run_dir=run_dir,
    )
    trainer.fit(Line(), data, data[:2], resume=resume)


def scalars(directory):
    reader = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    tags = reader.Tags()["scalars"]
    return {tag: [(each.step, each.value) for each in reader.Scalars(tag)] for tag in tags}


@pytest.mark.parametrize("die_after", [2, 5, 9], ids=["before a checkpoint", "before a validation", "late"])
def test_logs_of_a_resumed_run_equal_those_of_an_uninterrupted_one(tmp_path, die_after):
    fit(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        fit(tmp_path / "resumed", die_after=die_after)
    fit(tmp_path / "resumed", resume="auto")
    for name in ("metrics.csv", "metrics.jsonl"):
        assert (tmp_path / "resumed" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()
    assert scalars(tmp_path / "resumed") == scalars(tmp_path / "whole")
    assert len(scalars(tmp_path / "whole")["train/loss"]) == 10
