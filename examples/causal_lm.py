"""Language modelling with a small GPT-2 and a new tokenizer, on the standard library's docstrings.

python examples/causal_lm.py --steps 200
"""

from __future__ import annotations

import argparse
import ast
import math
import random
import sysconfig
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from drivetrain import OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask

LENGTH = 48


def docstrings() -> list[str]:
    """Return the docstrings of all modules of the library, one text for a module, in a random order."""
    texts = []
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        documented = [each for each in nodes if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        texts.append("\n".join(filter(None, map(ast.get_docstring, documented))))
    return random.Random(0).sample(texts, len(texts))


def train_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Return a byte-level BPE, as GPT-2's."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<end>"], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def blocks(texts: list[str], tokenizer: transformers.PreTrainedTokenizerFast) -> Dataset:
    """Return all texts, joined and cut into blocks."""
    ids = tokenizer("<end>".join(texts))["input_ids"]
    cut = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH, LENGTH)]
    return Dataset.from_dict({"input_ids": cut, "labels": cut})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    texts = docstrings()
    tokenizer = train_tokenizer(texts[20:])
    train, validation = blocks(texts[20:], tokenizer), blocks(texts[:20], tokenizer)

    torch.manual_seed(0)
    end = tokenizer.eos_token_id
    sizes = {"vocab_size": len(tokenizer), "n_positions": LENGTH, "n_embd": 64, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(**sizes, bos_token_id=end, eos_token_id=end)
    model = transformers.GPT2LMHeadModel(config)
    optimizer = OptimizerConfig("adamw", lr=3e-3, schedule="cosine", warmup_ratio=0.1)
    task = TransformersTask(model, processing_class=tokenizer, optimizer=optimizer)
    trainer = Trainer(
        max_steps=given.steps, batch_size=32, max_grad_norm=1.0, checkpoint=False, loggers=(), **how
    )
    before = math.exp(trainer.validate(task, validation)["validation/loss"])
    trainer.fit(task, train)
    after = math.exp(trainer.validate(task, validation)["validation/loss"])
    print(f"perplexity on other modules before {before:.1f}, after {after:.1f}")
    prompt = tokenizer("Return the", return_tensors="pt")
    print(tokenizer.decode(model.generate(**prompt, max_new_tokens=24, do_sample=True, top_k=20)[0]))


if __name__ == "__main__":
    main()
