"""Preferences by DPO: a small Llama learns which of two answers is the better one, beside a frozen reference.

    python examples/sft.py --run-dir sft
    python examples/dpo.py --model sft/pretrained --run-dir dpo    # killed; the same command goes on

The loss is that of Rafailov et al., "Direct Preference Optimization", 2023 (arXiv 2305.18290). The chosen
answer is a function's docstring, the rejected one has its words in reverse. Checkpoints and finished weights
leave the reference out; a resume checks that it is still the same one.
"""

from __future__ import annotations

import argparse
import copy

import torch
import transformers
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from drivetrain import CheckpointConfig, OptimizerConfig, StepOutput, TaskModule, Trainer
from drivetrain.task import ModelInfo
from sft import chats, masked, new_model, new_tokenizer


class Preference(TaskModule):
    """A policy and its reference, which is a copy of the policy as it is at the start.

    Batches have "input_ids" and "labels", each of shape (pairs, 2, tokens): first the chosen answer, then the
    rejected one. Labels are -100 but for the tokens of the answers.
    """

    def __init__(self, model: transformers.PreTrainedModel, beta: float = 0.1):
        super().__init__()
        self.model = model
        self.reference = copy.deepcopy(model).requires_grad_(False)
        self.beta = beta

    def train(self, mode: bool = True):
        """Set the policy's mode; the reference is always evaluated, without dropout."""
        super().train(mode)
        self.reference.eval()
        return self

    def model_info(self):
        of_reference = [name for name, _ in self.named_parameters() if name.startswith("reference.")]
        return ModelInfo(left_out=of_reference, block_classes=self.model._no_split_modules)

    def forward(self, input_ids):
        return self.model(input_ids, use_cache=False).logits

    def answer_scores(self, model, batch):
        """Return the logarithm of each answer's probability, of shape (pairs, 2)."""
        tokens, labels = batch["input_ids"].flatten(0, 1), batch["labels"].flatten(0, 1)
        scores = (
            model(tokens, use_cache=False).logits[:, :-1].float()
        )  # padding comes last: no mask is needed
        each = F.cross_entropy(scores.transpose(1, 2), labels[:, 1:], reduction="none")  # 0 for -100
        return -each.sum(dim=1).view(-1, 2)

    def training_step(self, batch):
        with torch.no_grad():
            before = self.answer_scores(self.reference, batch)
        rewards = self.beta * (self.answer_scores(self.model, batch) - before)
        margin = rewards[:, 0] - rewards[:, 1]
        logged = {"accuracy": (margin > 0).float().mean(), "margin": margin.mean()}
        return StepOutput(-F.logsigmoid(margin).mean(), metrics=logged)

    validation_step = training_step

    def configure_optimizers(self):
        return OptimizerConfig("adamw", lr=1e-3, schedule="linear", warmup_ratio=0.1)


def pairs(texts, tokenizer):
    """Return for each chat its tokens with the last answer, and with that answer's words in reverse."""
    samples = []
    for *before, answer in texts:
        reverse = {**answer, "content": " ".join(reversed(answer["content"].split()))}
        both = [masked([before[-1], each], tokenizer) for each in (answer, reverse)]
        samples.append({name: [torch.tensor(each[name]) for each in both] for name in both[0]})
    return samples


def collated(samples):
    """Return a batch of pairs, padded to its longest answer."""
    count, fill = len(samples), {"input_ids": 0, "labels": -100}
    flat = {name: [row for sample in samples for row in sample[name]] for name in fill}
    padded = {name: pad_sequence(rows, True, fill[name]) for name, rows in flat.items()}
    return {name: rows.view(count, 2, -1) for name, rows in padded.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder with a model and a tokenizer; by default both are new")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    parser.add_argument("--run-dir", help="where files go; a run there is resumed")
    options = parser.parse_args()

    texts = chats()
    if options.model:
        tokenizer = transformers.AutoTokenizer.from_pretrained(options.model)
        model = transformers.AutoModelForCausalLM.from_pretrained(options.model)
    else:
        tokenizer = new_tokenizer(texts[40:])
        model = new_model(tokenizer, width=64)
    samples = pairs(texts, tokenizer)
    task = Preference(model)
    trainer = Trainer(
        max_steps=options.steps,
        batch_size=8,
        max_grad_norm=1.0,
        collate=collated,
        checkpoint=CheckpointConfig(every=20),
        log_every=10,
        run_dir=options.run_dir,
        strategy=options.strategy,
        devices=options.devices or "auto",
        precision=options.precision,
    )
    data = torch.utils.data.Subset(samples, range(40, len(samples)))
    others = torch.utils.data.Subset(samples, range(40))
    trainer.fit(task, data, resume=options.run_dir and "auto")
    found = trainer.validate(task, others)
    print(f"other pairs: {found['validation/accuracy']:.1%} right, margin {found['validation/margin']:.3f}")


if __name__ == "__main__":
    main()
