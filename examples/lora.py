"""LoRA: a Llama that has learnt docstrings is adapted to code by a few per cent of its parameters.

python examples/lora.py --steps 150
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from pathlib import Path

import peft
import torch
import transformers
from datasets import Dataset

from drivetrain import OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask

LENGTH = 64


def texts() -> tuple[bytes, bytes]:
    """Return the docstrings of the standard library's modules, and the code of others, without docstrings."""
    words, code = [], []
    for number, path in enumerate(sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-t]*.py"))):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nodes = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef | ast.ClassDef)]
        if number % 2:
            words += filter(None, map(ast.get_docstring, nodes))
        else:
            code += [ast.unparse(each) for each in nodes if not ast.get_docstring(each)]
    return "\n".join(words).encode(), "\n".join(code).encode()


def blocks(text: bytes) -> Dataset:
    """Return a text cut into blocks of bytes."""
    ids = list(text)
    cut = [ids[start : start + LENGTH] for start in range(0, len(ids) - LENGTH, LENGTH)]
    return Dataset.from_dict({"input_ids": cut, "labels": cut})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=150, help="steps of each of the two trainings")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    words, code = texts()
    test = blocks(code[:10_000])

    def fit(model: torch.nn.Module, data: Dataset, rate: float) -> float:
        """Train a model, and return its loss on code that it has not seen."""
        optimizer = OptimizerConfig("adamw", lr=rate, schedule="cosine", warmup_ratio=0.1)
        options = {"max_grad_norm": 1.0, "checkpoint": False, "loggers": ()}
        trainer = Trainer(max_steps=given.steps, batch_size=16, **options, **how)
        task = TransformersTask(model, optimizer=optimizer)
        trainer.fit(task, data)
        return trainer.validate(task, test)["validation/loss"]

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes)
    base = transformers.LlamaForCausalLM(config)
    before = fit(base, blocks(words), 3e-3)
    settings = peft.LoraConfig(r=4, target_modules="all-linear")
    model = peft.get_peft_model(base, settings)
    after = fit(model, blocks(code[10_000:]), 1e-2)
    trained, total = model.get_nb_trainable_parameters()
    print(f"trained {trained:,} of {total:,} parameters ({trained / total:.1%})")
    print(f"loss on code before {before:.3f}, after {after:.3f} nats for a byte")


if __name__ == "__main__":
    main()
