"""Quantisation-aware training: the digits model learns to work with weights of two bits.

    python examples/quantize.py

torchao's `QATConfig` makes each linear layer round its weights in the forward, as the quantised layer will,
while the weights themselves train on in float32. Rounding after the training costs nearly half of the
accuracy here.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
from pathlib import Path

import torch
from torchao.quantization import IntxWeightOnlyConfig, PerAxis, quantize_
from torchao.quantization.qat import QATConfig

from digits import Digits, DigitsData
from drivetrain import CheckpointConfig, Trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--bits", type=int, default=2, choices=range(2, 9), help="bits of a weight")
    parser.add_argument("--epochs", type=int, default=30, help="epochs of each of the two trainings")
    parser.add_argument("--run-dir", type=Path, help="where the runs go; by default they are deleted")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    if (given.devices or 1) > 1 and given.run_dir is None:
        parser.error("several processes share a folder: give --run-dir")
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    data = DigitsData()
    # Weights in integers, one scale for each row of a weight. Activations stay in float32.
    scheme = IntxWeightOnlyConfig(getattr(torch, f"int{given.bits}"), PerAxis(0))
    with tempfile.TemporaryDirectory() as temporary:
        runs = given.run_dir or Path(temporary)

        def trainer(name: str) -> Trainer:
            policy = CheckpointConfig(every=f"{max(1, given.epochs // 4)} epochs")
            options = {"run_dir": runs / name, "loggers": (), "progress_bar": False}
            return Trainer(max_epochs=given.epochs, checkpoint=policy, **options, **how)

        def report(name: str, task: Digits) -> None:
            accuracy = trainer(name).test(task, data)["test/accuracy"]
            print(f"{name:28} test accuracy {accuracy:.1%}")

        torch.manual_seed(0)
        task = Digits(hidden=256, learning_rate=3e-3)
        trainer("float").fit(task, data)
        report("float", task)

        rounded = copy.deepcopy(task)
        quantize_(rounded, scheme)
        report("quantised after training", rounded)

        quantize_(task, QATConfig(scheme, step="prepare"))
        trainer("aware").fit(task, data)
        report("trained aware, not quantised", task)

        # The run's weights are float32 under the names of the plain task, which quantises as before.
        finished = Digits.from_checkpoint(runs / "aware")
        quantize_(finished, scheme)
        report("trained aware, quantised", finished)

        path = runs / "quantised.pt"
        torch.save(finished.state_dict(), path)
        loaded = Digits(hidden=256)
        quantize_(loaded, scheme)  # so that its weights have the form of those in the file
        loaded.load_state_dict(torch.load(path, weights_only=True))
        report("loaded", loaded)
        before, after = (each.stat().st_size for each in (runs / "aware" / "model.safetensors", path))
        print(f"{before:,} bytes in float32, {after:,} quantised")


if __name__ == "__main__":
    main()
