"""Reinforcement of a language model by GRPO: it learns to sort digits from rewards for its own answers.

    python examples/grpo.py --steps 300
    python examples/grpo.py --run-dir run --strategy ddp --devices 2    # killed; the same command goes on

A prompt is two digits and "=". In each step the current weights write a group of answers to each prompt;
an answer is rewarded for every digit in its place and for its end, and the loss compares it with the rest of
its group (Shao et al., arXiv 2402.03300, without a reference). Each step trains on its answers twice.
"""

from __future__ import annotations

import argparse

import torch
import transformers
from torch.nn import functional as F

from drivetrain import CheckpointConfig, OptimizerConfig, StepOutput, TaskModule, Trainer

EQUALS, END = 10, 11
DIGITS = 2


class Sorter(TaskModule):
    """A policy that writes `DIGITS` digits and an end after a prompt.

    Args:
        group: Answers to a prompt, which are compared with one another.
        passes: Optimizer steps on the same answers.
        clip: How far the probability of a token may move in a step, as a share, before its gradient ends.
    """

    def __init__(self, width: int = 64, group: int = 16, passes: int = 2, clip: float = 0.2):
        super().__init__()
        sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2}
        sizes |= {"num_attention_heads": 4, "vocab_size": END + 1, "max_position_embeddings": 16}
        ends = {"bos_token_id": None, "eos_token_id": END, "pad_token_id": None}
        self.policy = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **ends))
        self.group, self.passes, self.clip = group, passes, clip

    def forward(self, tokens):
        return self.policy(tokens, use_cache=False).logits.float()

    @torch.no_grad()
    def write(self, prompts, greedy=False):
        """Return the prompts with answers of one length, so that all ranks make as many passes."""
        tokens = prompts
        for _ in range(DIGITS + 1):
            scores = self(tokens)[:, -1]
            drawn = scores.argmax(-1, keepdim=True) if greedy else torch.multinomial(scores.softmax(-1), 1)
            tokens = torch.cat([tokens, drawn], dim=1)
        return tokens

    def reward(self, prompts, answers):
        """Return the share of right tokens in each answer."""
        wanted = F.pad(prompts[:, :DIGITS].sort(dim=1).values, (0, 1), value=END)
        return (answers == wanted).float().mean(dim=1)

    def token_scores(self, tokens):
        """Return the logarithm of the probability of each token of the answers."""
        scores, answers = self(tokens)[:, DIGITS:-1].log_softmax(-1), tokens[:, DIGITS + 1 :]
        return scores.gather(2, answers[..., None]).squeeze(2)

    def surrogate(self, tokens, before, advantages, mask):
        """Return GRPO's loss: each answer's mean over its tokens, and the mean over all answers."""
        ratio = (self.token_scores(tokens) - before).exp()
        clipped = ratio.clamp(1 - self.clip, 1 + self.clip)
        each = -torch.min(ratio * advantages[:, None], clipped * advantages[:, None])
        return ((each * mask).sum(dim=1) / mask.sum(dim=1)).mean()

    def training_step(self, batch):
        prompts = batch["prompt"]
        tokens = self.write(prompts.repeat_interleave(self.group, dim=0))
        answers = tokens[:, DIGITS + 1 :]
        rewards = self.reward(tokens, answers).view(-1, self.group)
        deviation = rewards - rewards.mean(dim=1, keepdim=True)
        advantages = (deviation / (rewards.std(dim=1, keepdim=True) + 1e-4)).flatten()
        is_end = (answers == END).long()
        mask = (is_end.cumsum(dim=1) - is_end == 0).float()  # up to the first end, with it
        with torch.no_grad():
            before = self.token_scores(tokens)
        for _ in range(self.passes):  # at each yield the optimizer makes a step
            yield "policy", self.surrogate(tokens, before, advantages, mask)
        return {"reward": rewards.mean(), "length": mask.sum(dim=1).mean()}

    def validation_step(self, batch):
        prompts = batch["prompt"]
        answers = self.write(prompts, greedy=True)[:, DIGITS + 1 :]
        reward = self.reward(prompts, answers)
        return StepOutput(None, metrics={"reward": reward.mean(), "right": (reward == 1).float().mean()})

    def configure_optimizers(self):
        return {"policy": OptimizerConfig("adamw", lr=2e-3, schedule="linear", max_grad_norm=1.0)}


def all_prompts() -> torch.Tensor:
    """Return every prompt, in an order that is always the same."""
    numbers = torch.cartesian_prod(*[torch.arange(10)] * DIGITS)
    prompts = F.pad(numbers, (0, 1), value=EQUALS)
    return prompts[torch.randperm(len(prompts), generator=torch.Generator().manual_seed(0))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="batches of prompts")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    parser.add_argument("--run-dir", help="where files go; a run there is resumed")
    options = parser.parse_args()

    torch.manual_seed(0)
    task, prompts = Sorter(), all_prompts()
    others, data = {"prompt": prompts[:20]}, {"prompt": prompts[20:]}
    trainer = Trainer(
        max_steps=options.steps,
        batch_size=16 // (options.devices or 1),
        checkpoint=CheckpointConfig(every=20),
        log_every=20,
        run_dir=options.run_dir,
        strategy=options.strategy,
        devices=options.devices or "auto",
        precision=options.precision,
    )
    for result in trainer.steps(task, data, resume=options.run_dir and "auto"):
        if result.step % 50 == 0:
            print(f"step {result.step}: reward {result.metrics['reward']:.3f}")
    found = trainer.validate(task, others)
    print(f"other prompts: reward {found['validation/reward']:.3f}, {found['validation/right']:.1%} sorted")


if __name__ == "__main__":
    main()
