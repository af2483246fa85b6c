"""A GPT whose layers choose among experts: a balance term of the loss, and the share of each expert.

    python examples/mixture_of_experts.py --run-dir run --strategy fsdp --devices 2    # killed; this goes on
    python examples/mixture_of_experts.py --expert-parallel --devices 2    # half of the experts in each

It is gpt.py's GPT on its text. Each layer sends a byte to two experts, as Mixtral does, and drops none. The
balance (Fedus et al., arXiv 2101.03961) has a weight of its own. A metric counts all processes' choices.
"""

from __future__ import annotations

import argparse

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader
from torchmetrics import Metric

from drivetrain import CheckpointConfig, FSDPConfig, Term, Trainer
from drivetrain.strategies import ExpertParallel
from drivetrain.task import ModelInfo
from gpt import GPT, Block, Windows, standard_library


class Experts(nn.Module):  # all of them, or under `ExpertParallel` those of this process
    def __init__(self, width: int, experts: int):
        super().__init__()
        self.gate_up = nn.Parameter(0.02 * torch.randn(experts, 4 * width, width))
        self.down = nn.Parameter(0.02 * torch.randn(experts, width, 2 * width))

    def forward(self, tokens, counts):  # tokens are sorted by expert, and counts has their numbers
        outputs = []
        for number, part in enumerate(tokens.split(counts.tolist())):  # some may be empty
            gate, up = F.linear(part, self.gate_up[number]).chunk(2, dim=-1)
            outputs.append(F.linear(F.silu(gate) * up, self.down[number]))
        return torch.cat(outputs)


class Mixture(nn.Module):  # experts and their router, which chooses `chosen` of them for each token
    def __init__(self, width: int, experts: int, chosen: int = 2):
        super().__init__()
        self.chosen = chosen
        self.router = nn.Linear(width, experts, bias=False)
        nn.init.normal_(self.router.weight, std=0.02)
        self.experts = Experts(width, experts)

    def forward(self, x):  # returns the outputs, and the router's scores, of shape (tokens, experts)
        tokens = x.flatten(0, 1)
        scores = self.router(tokens)
        shares, numbers = scores.float().softmax(-1).topk(self.chosen, dim=-1)
        shares = (shares / shares.sum(dim=-1, keepdim=True)).to(x.dtype)
        order = numbers.flatten().argsort(stable=True)
        counts = numbers.flatten().bincount(minlength=scores.shape[-1])
        out = self.experts(tokens[order // self.chosen], counts) * shares.flatten()[order, None]
        return torch.zeros_like(tokens).index_add(0, order // self.chosen, out.to(x.dtype)).view_as(x), scores


class SparseBlock(Block):
    def __init__(self, width: int, heads: int, experts: int):
        super().__init__(width, heads)
        self.mlp = Mixture(width, experts)

    def forward(self, x, angles, mask=None):
        x = self.attend(x, angles, mask)
        mixed, scores = self.mlp(self.mlp_norm(x))
        return x + mixed, scores


class Shares(Metric):  # of each expert in all choices, in the order of the experts
    def __init__(self, experts: int):
        super().__init__()
        self.add_state("counts", torch.zeros(experts), dist_reduce_fx="sum")

    def update(self, numbers):
        self.counts += torch.bincount(numbers.flatten(), minlength=len(self.counts))

    def compute(self):
        return self.counts / self.counts.sum()


def balance(scores: torch.Tensor, chosen: int) -> torch.Tensor:  # `chosen` if all are used alike, else more
    shares = scores.float().softmax(dim=-1)
    counts = F.one_hot(shares.topk(chosen, dim=-1).indices, scores.shape[1]).sum(dim=1).float()
    return scores.shape[1] * (counts.mean(dim=0) * shares.mean(dim=0)).sum()


class SparseGPT(GPT):
    def __init__(self, layers: int = 2, width: int = 64, heads: int = 4, experts: int = 4, scale=0.01):
        super().__init__(layers=layers, width=width, heads=heads)
        self.blocks = nn.ModuleList(SparseBlock(width, heads, experts) for _ in range(layers))
        self.experts, self.scale = experts, scale

    def forward(self, tokens):
        angles = self.angles(torch.arange(tokens.shape[1], device=tokens.device))
        x, routed = self.embedding(tokens), []
        for block in self.blocks:
            x, scores = block(x, angles)
            routed.append(scores)
        return F.linear(self.norm(x), self.embedding.weight), torch.cat(routed)

    def loss(self, outputs, batch):
        scores, routed = outputs
        term = Term(balance(routed, self.blocks[0].mlp.chosen), weight=len(routed), scale=self.scale)
        return {"loss": super().loss(scores, batch), "balance": term}

    def model_info(self):
        return ModelInfo(parallel_plan={"blocks.*.mlp.experts": ExpertParallel()})

    def metrics(self):
        return {"experts": Shares(self.experts)}

    def metric_inputs(self, outputs, batch):
        return (outputs[1].topk(self.blocks[0].mlp.chosen, dim=-1).indices,)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps")
    parser.add_argument("--megabytes", type=float, default=1.0, help="size of the training text")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--expert-parallel", action="store_true", help="fsdp that divides the experts")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    parser.add_argument("--run-dir", help="where files go; a run there is resumed")
    options = parser.parse_args()
    if options.expert_parallel:  # in place of --strategy
        options.strategy = FSDPConfig(expert_parallel=True)
    torch.manual_seed(0)
    task = SparseGPT()
    sizes = int(options.megabytes * 1e6), int(options.megabytes * 25e3)
    train, others = (Windows(text, task.context) for text in standard_library(*sizes))
    trainer = Trainer(
        max_steps=options.steps,
        checkpoint=CheckpointConfig(every=20),
        run_dir=options.run_dir,
        strategy=options.strategy,
        devices=options.devices or "auto",
        precision=options.precision,
    )
    data = DataLoader(train, batch_size=16 // (options.devices or 1), shuffle=True)
    trainer.fit(task, data, resume=options.run_dir and "auto")
    found = trainer.validate(task, DataLoader(others, batch_size=64))
    print(f"nats for a byte: {found['validation/loss']:.4f}; balance {found['validation/balance']:.4f}")
    shares = (f"{found[f'validation/experts/{number}']:.1%}" for number in range(task.experts))
    print("share of each expert:", *shares)


if __name__ == "__main__":
    main()
