"""Train on two ranks; rank 1 fails in its third step, and rank 0 then waits for it in vain."""

import torch
from tests.promises.example import QUIET, Line, batches

from drivetrain import Trainer


class Failing(Line):  # fails on one rank
    def training_step(self, batch):  # count the steps
        self.steps = getattr(self, "steps", 0) + 1
        if self.steps == 3 and torch.distributed.get_rank() == 1:
            raise ValueError("boom")
        return super().training_step(batch)


Trainer(max_epochs=1, strategy="ddp", devices=2, checkpoint=False, **QUIET).fit(Failing(), batches(16, 2))
