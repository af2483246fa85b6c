"""A training of which rank 1 is slow."""

import time

import torch
from tests.support.tasks import Regression, pairs, quiet

from drivetrain.callbacks import Callback, Throughput, stragglers

stragglers.LEAST = 1.0


class Slow(Regression):
    def forward(self, features):
        time.sleep(1.0 if torch.distributed.get_rank() == 1 else 0.25)
        return super().forward(features)


class Shows(Callback):
    def on_log(self, run):
        if run.is_main and "throughput/slowest_rank" in run.logged:
            names = ("slowest_rank", "slowest_rank_ratio", "waiting_share")
            print(*(run.logged[f"throughput/{name}"] for name in names), flush=True)


trainer = quiet(max_steps=15, strategy="ddp", devices=2, log_every=5, callbacks=[Throughput(), Shows()])
trainer.fit(Slow(), pairs(80))
