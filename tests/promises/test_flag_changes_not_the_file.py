"""One flag changes the strategy; the user's file stays: one process, DDP and FSDP train the same."""

from typing import Any

import numpy as np
from tests.promises.example import QUIET, Line, batches
from tests.support.ranks import on_two_ranks

from drivetrain import LambdaCallback, Run, Trainer


def trained(strategy: str, devices: int) -> dict[str, Any]:
    """What a user writes; returns the whole weights and the validation's loss."""
    found: dict[str, Any] = {}

    def keep(run: Run) -> None:
        found.update({name: each.numpy().copy() for name, each in run.full_state_dict().items()})

    trainer = Trainer(
        max_epochs=3,
        strategy=strategy,
        devices=devices,
        max_grad_norm=0.5,
        gradient_accumulation_steps=2,
        checkpoint=False,
        callbacks=[LambdaCallback(on_fit_end=keep)],
        **QUIET,
    )
    result = trainer.fit(Line(), batches(22, 4 // devices), batches(5, 2))
    return {**found, "validation/loss": result.metrics["validation/loss"]}


def test_one_process_ddp_and_fsdp_train_the_same() -> None:
    expected = trained("single", 1)
    for strategy in ("ddp", "fsdp"):
        for found in on_two_ranks(trained, strategy, 2)[:1]:  # FSDP gives the whole weights to rank 0
            assert found.keys() == expected.keys()
            for name, value in expected.items():
                np.testing.assert_allclose(
                    found[name], value, rtol=1e-5, atol=1e-6, err_msg=f"{strategy}: {name}"
                )
