"""The advice after running out of memory."""

from __future__ import annotations

from drivetrain.engine.memory_advice import memory_advice


def test_advice_leaves_out_what_is_done_already() -> None:
    assert "Trainer(micro_batch='auto')" in memory_advice(None)
    assert "a micro_batch smaller than 8, or 'auto'" in memory_advice(8)
    assert "micro_batch" not in memory_advice("auto")


def test_advice_names_what_the_trainer_itself_has() -> None:
    for name in ("memory={'activation_checkpointing': True}", "OptimizerConfig('adamw8bit')"):
        assert name in memory_advice(None)
        assert name not in memory_advice(None, training=False)
    assert "gradient_accumulation_steps" not in memory_advice(8, training=False)
