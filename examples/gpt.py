"""A small GPT, byte by byte, on the source of Python's own standard library.

    python examples/gpt.py --minutes 2

The text is 10 MB of the interpreter's .py files; 250 kB of other files are kept for validation.

Two minutes on 2 cores (OMP_NUM_THREADS=2) reach 1.96 bits per byte on the validation text, after 1.6 MB read
in 1,593 steps at 17,000 bytes per second.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
import time
import zlib
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from drivetrain import Callback, LearningRateMonitor, OptimizerConfig, TaskModule, Throughput, Trainer


def rotate(heads: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary positions (Su et al., arXiv 2104.09864): turn pairs of channels by the token's angles."""
    cosine, sine = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    left, right = heads.chunk(2, dim=-1)
    return torch.cat((left * cosine - right * sine, left * sine + right * cosine), dim=-1)


class Block(nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width, bias=False)
        self.query_key_value = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width, bias=False), nn.GELU(), nn.Linear(4 * width, width, bias=False)
        )

    def attend(self, x, angles, mask=None):
        batch, length, width = x.shape
        heads = self.query_key_value(self.attention_norm(x)).view(batch, length, 3, self.heads, -1)
        query, key, value = heads.permute(2, 0, 3, 1, 4)
        query, key = rotate(query, angles), rotate(key, angles)
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))

    def forward(self, x, angles, mask=None):
        x = self.attend(x, angles, mask)
        return x + self.mlp(self.mlp_norm(x))


class GPT(TaskModule):
    def __init__(
        self,
        layers: int = 4,
        width: int = 128,
        heads: int = 4,
        context: int = 128,
        learning_rate: float = 3e-3,
    ):
        super().__init__()
        self.context = context
        self.learning_rate = learning_rate
        self.channels = width // heads
        self.embedding = nn.Embedding(256, width)  # also the output layer
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.ndim == 2:  # layers that write to the residual stream start smaller, as in GPT-2
                writes = name.endswith(("out.weight", "mlp.2.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if writes else 0.02)

    def forward(self, tokens):
        return self.scores(tokens, torch.arange(tokens.shape[1], device=tokens.device))

    def angles(self, positions):
        pair = torch.arange(0, self.channels, 2, device=positions.device)
        return positions[..., None] * 10_000.0 ** (-pair / self.channels)

    def scores(self, tokens, positions, mask=None):
        """Return the scores of the next bytes. Without a `mask` a byte attends to all before it."""
        x, angles = self.embedding(tokens), self.angles(positions)
        for block in self.blocks:
            x = block(x, angles, mask)
        return F.linear(self.norm(x), self.embedding.weight)

    def loss(self, outputs, batch):  # nats per byte
        return F.cross_entropy(outputs.flatten(0, 1), batch["targets"].flatten())

    def loss_weight(self, batch):  # the loss is a mean over the tokens, not over the windows
        return batch["targets"].numel()

    def tokens(self, batch):
        return batch["targets"].numel()

    def configure_optimizers(self):
        return OptimizerConfig(
            "adamw",
            lr=self.learning_rate,
            weight_decay=0.1,
            betas=(0.9, 0.95),
            schedule="cosine",
            warmup_ratio=0.05,
        )

    @torch.no_grad()
    def sample(self, prompt: bytes, length: int, temperature: float = 0.7) -> bytes:
        """Return `prompt` and the model's continuation of `length` bytes."""
        self.eval()
        text = torch.tensor([list(prompt)], device=self.embedding.weight.device)
        for _ in range(length):
            scores = self(text[:, -self.context :])[:, -1] / temperature
            text = torch.cat([text, torch.multinomial(scores.softmax(-1), 1)], dim=1)
        return bytes(text[0].tolist())


class Windows(Dataset):
    """A text cut into windows of `context` bytes; the targets are the bytes one further on."""

    def __init__(self, text: bytes, context: int):
        self.text = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.context = context

    def __len__(self):
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index):
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return {"tokens": window[:-1], "targets": window[1:]}


def standard_library(training: int = 10_000_000, validation: int = 250_000) -> tuple[bytes, bytes]:
    """Return training and validation text from disjoint files; equal wherever this Python is installed."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = {path.relative_to(root).as_posix(): path for path in root.rglob("*.py")}
    names = [name for name in files if not {"site-packages", "test", "tests"} & set(name.split("/"))]
    names.sort(key=lambda name: zlib.crc32(name.encode()))  # shuffled, and always in the same way
    texts = {"validation": bytearray(), "training": bytearray()}
    for name in names:
        part = "validation" if len(texts["validation"]) < validation else "training"
        texts[part] += files[name].read_bytes()
        if len(texts["training"]) >= training:
            break
    return bytes(texts["training"]), bytes(texts["validation"])


def steps_in(minutes: float, task: TaskModule, data: DataLoader, **arguments) -> int:
    """Measure how many steps fit into the time, so that the schedule ends just before it does."""
    trial = Trainer(max_steps=40, checkpoint=False, loggers=(), progress_bar=False, **arguments)
    for number, _ in enumerate(trial.steps(copy.deepcopy(task), data)):
        if number == 9:
            start = time.perf_counter()
    seconds = (time.perf_counter() - start) / 30
    return max(40, int(0.85 * minutes * 60 / seconds))


class PerByte(Callback):
    """Logs a validation's loss as perplexity and bits per byte."""

    def on_evaluation_end(self, run):
        loss = run.metrics["validation/loss"]
        run.log("validation/perplexity", math.exp(loss))
        run.log("validation/bits_per_byte", loss / math.log(2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=2.0, help="time to train")
    parser.add_argument(
        "--steps", type=int, help="steps; default: as many as fit into the minutes, measured first"
    )
    parser.add_argument("--megabytes", type=float, default=10.0, help="size of the training text")
    parser.add_argument("--width", type=int, default=128, help="the model's width; a multiple of 8")
    parser.add_argument("--sample", type=int, default=400, help="bytes to sample at the end")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    parser.add_argument("--run-dir", default=None, help="where files go; default: a new directory in runs/")
    options = parser.parse_args()

    torch.manual_seed(0)
    task = GPT(width=options.width)
    training, validation = standard_library(int(options.megabytes * 1e6), int(options.megabytes * 2.5e4))
    train_data = DataLoader(Windows(training, task.context), batch_size=4, shuffle=True)
    validation_data = DataLoader(Windows(validation, task.context), batch_size=64)
    how = {
        "strategy": options.strategy,
        "devices": options.devices or "auto",
        "precision": options.precision,
        "gradient_accumulation_steps": 2,
        "max_grad_norm": 1.0,
    }
    steps = options.steps or steps_in(options.minutes, task, train_data, **how)
    trainer = Trainer(
        max_steps=steps,
        max_time=f"{options.minutes} minutes",
        validate_every=max(1, steps // 2),
        log_every=max(1, steps // 40),
        callbacks=[PerByte(), Throughput(), LearningRateMonitor()],
        run_dir=options.run_dir,
        **how,
    )
    result = trainer.fit(task, train_data, validation_data)
    speed = result.metrics.get("throughput/tokens_per_second", 0.0)
    progress = result.progress
    print(f"{result.stop_reason}: {progress.tokens:,} bytes in {progress.seconds:.0f} s ({speed:,.0f}/s)")

    loss = trainer.validate(task, validation_data)["validation/loss"]
    print(f"validation: perplexity {math.exp(loss):.3f}, {loss / math.log(2):.3f} bits per byte")
    print(task.sample(b"def ", options.sample).decode(errors="replace"))


if __name__ == "__main__":
    main()
