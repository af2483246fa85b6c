"""Token classification with a BERT: what each word of a line of Python is, told by the words around it.

    python examples/tag_tokens.py --steps 200

The lines and the tags are made from the standard library's files by Python's own `tokenize`.
"""

from __future__ import annotations

import argparse
import keyword
import random
import sysconfig
from itertools import groupby
from pathlib import Path
from tokenize import NAME, NUMBER, OP, STRING, TokenInfo, tokenize

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, trainers

from drivetrain import OptimizerConfig, Trainer
from drivetrain.integrations.transformers import TransformersTask

TAGS = ["variable", "keyword", "called", "attribute", "defined", "operator", "number", "string"]


def tag(before: str, token: TokenInfo, after: str) -> int:
    kind = "called" if after == "(" else "attribute" if before == "." else "variable"
    kind = "keyword" if keyword.iskeyword(token.string) else "defined" if before in ("def", "class") else kind
    return TAGS.index({OP: "operator", NUMBER: "number", STRING: "string"}.get(token.type, kind))


def lines() -> list[tuple[list[str], list[int]]]:
    """Return lines of code as words and tags, in a random order."""
    found = []
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / "asyncio").glob("*.py")):
        with path.open("rb") as file:
            kept = [each for each in tokenize(file.readline) if each.type in (NAME, NUMBER, OP, STRING)]
        for line in (list(each) for _, each in groupby(kept, key=lambda token: token.start[0])):
            words = ["", *(each.string for each in line), ""]
            found.append((words[1:-1], list(map(tag, words, line, words[2:]))))
    return random.Random(0).sample(found, len(found))


def accuracy(prediction: transformers.EvalPrediction) -> dict[str, float]:
    labelled = prediction.label_ids != -100
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids)[labelled].mean()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200, help="optimizer steps")
    parser.add_argument("--strategy", default="auto", help="such as cpu, ddp or fsdp")
    parser.add_argument("--devices", type=int, help="processes; by default as many as there are devices")
    parser.add_argument("--precision", default="auto", help="such as 32 or bf16-mixed")
    given = parser.parse_args()
    how = {"strategy": given.strategy, "devices": given.devices or "auto", "precision": given.precision}
    tagged = lines()
    tokenizer = Tokenizer(models.WordLevel(unk_token="<rare>"))
    trainer = trainers.WordLevelTrainer(vocab_size=600, special_tokens=["<pad>", "<rare>"])
    tokenizer.train_from_iterator((words for words, _ in tagged[500:]), trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>")
    samples = [{**tokenizer(words, is_split_into_words=True), "labels": tags} for words, tags in tagged]
    train, test = Dataset.from_list(samples[500:]), Dataset.from_list(samples[:500])
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    config = transformers.BertConfig(vocab_size=len(tokenizer), num_labels=len(TAGS), **sizes)
    optimizer = OptimizerConfig("adamw", lr=3e-3, schedule="cosine", warmup_ratio=0.1)
    model = transformers.BertForTokenClassification(config)
    task = TransformersTask(model, optimizer=optimizer, compute_metrics=accuracy)
    collate = transformers.DataCollatorForTokenClassification(tokenizer)
    trainer = Trainer(
        max_steps=given.steps, batch_size=32, collate=collate, checkpoint=False, loggers=(), **how
    )
    trainer.fit(task, train)
    found = trainer.validate(task, test)["validation/accuracy"]
    labels = [each for _, tags in tagged[:500] for each in tags]
    most = max(map(labels.count, range(len(TAGS)))) / len(labels)
    print(f"{len(labels)} words of other lines: {found:.1%} right; the most frequent tag is {most:.1%}")


if __name__ == "__main__":
    main()
