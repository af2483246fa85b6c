"""Text classification with a BERT: which part of Python's standard library does a docstring come from?

    python examples/classify_text.py --steps 250

The model, its tokenizer and its weights are new; the text is that of the interpreter's own files.
"""

from __future__ import annotations

import argparse
import ast
import random
import sysconfig
from pathlib import Path

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers

from drivetrain import OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask

PARTS = ["asyncio", "email", "multiprocessing", "tkinter", "unittest", "xml"]


def docstrings() -> list[tuple[str, int]]:
    """Return all docstrings of the parts, with the part's number, in a random order."""
    root, found = Path(sysconfig.get_paths()["stdlib"]), []
    for label, part in enumerate(PARTS):
        for path in sorted((root / part).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                    found.append((text, label))
    return random.Random(0).sample(found, len(found))


def train_tokenizer(texts: list[str]) -> transformers.PreTrainedTokenizerFast:
    """Return a tokenizer with the most frequent pieces of words."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]"]
    tokenizer.train_from_iterator(texts, trainers.WordPieceTrainer(vocab_size=2000, special_tokens=special))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="[PAD]", unk_token="[UNK]", model_max_length=32
    )


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=250, help="optimizer steps")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    texts = docstrings()
    tokenizer = train_tokenizer([text for text, _ in texts[400:]])
    samples = [{**tokenizer(text, truncation=True), "label": label} for text, label in texts]
    train, test = Dataset.from_list(samples[400:]), Dataset.from_list(samples[:400])

    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_labels=len(PARTS), **sizes)
    model = transformers.BertForSequenceClassification(config)
    optimizer = OptimizerConfig("adamw", lr=2e-3, schedule="cosine", warmup_ratio=0.1)
    task = TransformersTask(model, processing_class=tokenizer, optimizer=optimizer, compute_metrics=accuracy)
    trainer = Trainer(
        max_steps=given.steps, batch_size=32, max_grad_norm=1.0, checkpoint=False, loggers=(), **how
    )
    trainer.fit(task, train)
    found = trainer.validate(task, test)["validation/accuracy"]
    most = max(sum(label == part for _, label in texts[:400]) for part in range(len(PARTS))) / 400
    print(
        f"{len(texts) - 400} docstrings; accuracy on 400 others {found:.1%}, the largest part is {most:.1%}"
    )


if __name__ == "__main__":
    main()
