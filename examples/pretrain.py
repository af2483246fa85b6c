"""Pretraining in small: a GPT on two sources of packed documents, with a global batch in tokens.

    python examples/pretrain.py --tokens 400_000
    python examples/pretrain.py --tokens 800_000 --run-dir run --devices 2    # killed by Ctrl-C twice
    python examples/pretrain.py --tokens 800_000 --run-dir run --devices 1    # goes on with the same batches

The documents are the .py files of Python's standard library and of the installed packages, byte by byte. Of
the tokens 70% are the library's. No byte attends to another document.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from torch.nn import functional as F

from drivetrain import CheckpointConfig, Throughput, Trainer
from drivetrain.data import mixture, packed
from gpt import GPT


class PackedGPT(GPT):
    """The GPT of gpt.py on rows of several documents."""

    def forward(self, input_ids, position_ids, attention_mask):
        return self.scores(input_ids, position_ids, attention_mask)

    def loss(self, outputs, batch):  # nats per byte; the first byte of a document has no label
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def loss_weight(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()

    def tokens(self, batch):
        return batch["input_ids"].numel()


def documents(folder: str, megabytes: float) -> list[torch.Tensor]:
    """Return the bytes of the .py files below a folder, in the order of their names, up to a size."""
    root, found, size = Path(folder), [], 0
    for path in sorted(root.rglob("*.py")):
        inside = path.relative_to(root).parts
        if "site-packages" in inside or not path.stat().st_size:
            continue
        found.append(torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long())
        size += len(found[-1])
        if size >= 1e6 * megabytes:
            break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=400_000, help="tokens to train on")
    parser.add_argument(
        "--batch-tokens", type=int, default=8_192, help="tokens of a step, over all processes"
    )
    parser.add_argument("--megabytes", type=float, default=2.0, help="size of each source")
    parser.add_argument("--width", type=int, default=128, help="the model's width; a multiple of 8")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two checkpoints")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    parser.add_argument("--run-dir", default=None, help="where files go; a run there is resumed")
    options = parser.parse_args()

    torch.manual_seed(0)
    task = PackedGPT(width=options.width)
    paths = sysconfig.get_paths()
    sources = {
        name: packed(documents(paths[place], options.megabytes), task.context, boundary="mask")
        for name, place in {"library": "stdlib", "packages": "purelib"}.items()
    }
    trainer = Trainer(
        max_tokens=options.tokens,
        batch_size=4,
        gradient_accumulation_steps=f"{options.batch_tokens} tokens",
        max_grad_norm=1.0,
        callbacks=[Throughput()],
        checkpoint=CheckpointConfig(every=options.save_every),
        log_every=10,
        run_dir=options.run_dir,
        strategy=options.strategy,
        devices=options.devices or "auto",
        precision=options.precision,
    )
    data = mixture(sources, {"library": 0.7, "packages": 0.3}, until="forever")
    result = trainer.fit(task, data, resume=options.run_dir and "auto")
    loss = result.metrics["train/loss"]
    print(f"{result.stop_reason}: {result.progress.tokens:,} tokens in {result.progress.steps} steps")
    print(f"training loss {loss:.4f} nats per byte")


if __name__ == "__main__":
    main()
