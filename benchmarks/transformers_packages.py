"""Train tiny models with trainers of TRL and sentence-transformers, on transformers' Trainer and on ours.

PYTHONPATH=package python benchmarks/transformers_packages.py

It needs trl and sentence-transformers, which the environment of the tests lacks. Each trainer runs twice, in
processes of their own. Data comes in its order, and models have no dropout.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from typing import Any

KINDS = {
    "SFTTrainer": "trl",
    "DPOTrainer": "trl",
    "RewardTrainer": "trl",
    "KTOTrainer": "trl",
    "SentenceTransformerTrainer": "sentence-transformers",
    "CrossEncoderTrainer": "sentence-transformers",
}
WORDS = "<pad> <bos> <eos> <unk> user assistant the cat dog sat ran on mat hill red blue sky is green grass"
WORDS += " what colour why not yes no"
TEXTS = [
    "the cat sat on the mat",
    "the dog ran on the hill why not",
    "the sky is blue",
    "green grass is green",
    "what colour is the sky yes",
    "the red dog sat",
    "no cat ran",
    "why is the grass green",
]


def in_order(dataset: Any, batch_size: int, drop_last: bool, **_: Any) -> Any:
    """Return the batches of a dataset in its order, for sentence-transformers."""
    from torch.utils.data import BatchSampler

    return BatchSampler(range(len(dataset)), batch_size, drop_last)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    made = Tokenizer(models.WordLevel({word: n for n, word in enumerate(WORDS.split())}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def _llama(kind: str, **options: Any) -> Any:
    import torch
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(WORDS.split()),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        **options,
    )
    return getattr(transformers, kind)(config)


def _of_trl(name: str, common: dict[str, Any]) -> Any:
    import trl
    from datasets import Dataset

    preference = {"prompt": TEXTS, "chosen": ["yes the cat"] * 8, "rejected": ["no dog ran on"] * 8}
    columns: dict[str, dict[str, list[Any]]] = {
        "SFTTrainer": {"prompt": TEXTS, "completion": [f" {each}" for each in TEXTS[::-1]]},
        "DPOTrainer": preference,
        "RewardTrainer": {
            "chosen": [f"{each} yes" for each in TEXTS],
            "rejected": [f"{each} no no" for each in TEXTS],
        },
        "KTOTrainer": {
            "prompt": TEXTS,
            "completion": ["yes the cat", "no dog ran on"] * 4,
            "label": [True, False] * 4,
        },
    }
    data = Dataset.from_dict(columns[name])
    args = getattr(trl, name.replace("Trainer", "Config"))(
        max_length=24,
        bf16=False,
        gradient_checkpointing=False,
        train_sampling_strategy="sequential",
        **common,
    )
    classifies = name == "RewardTrainer"
    model = (
        _llama("LlamaForSequenceClassification", num_labels=1) if classifies else _llama("LlamaForCausalLM")
    )
    more = {"ref_model": _llama("LlamaForCausalLM")} if name in ("DPOTrainer", "KTOTrainer") else {}
    return getattr(trl, name)(
        model,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(4)),
        processing_class=_tokenizer(),
        **more,
    )


def _of_sentences(name: str, common: dict[str, Any], folder: str) -> Any:
    import sentence_transformers as package
    import torch
    import transformers
    from datasets import Dataset
    from sentence_transformers.cross_encoder.losses import BinaryCrossEntropyLoss
    from sentence_transformers.sentence_transformer import losses, modules

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS.split()),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=1,
    )
    pairs = name == "CrossEncoderTrainer"
    bert = (transformers.BertForSequenceClassification if pairs else transformers.BertModel)(config)
    bert.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)
    if pairs:
        model = package.CrossEncoder(folder, num_labels=1, device="cpu")
        loss = BinaryCrossEntropyLoss(model)
    else:
        parts = [modules.Transformer(folder), modules.Pooling(16)]
        model = package.SentenceTransformer(modules=parts, device="cpu")
        loss = losses.CosineSimilarityLoss(model)
    labels = [float(n % 2) if pairs else n / 8 for n in range(8)]
    data = Dataset.from_dict({"anchor": TEXTS, "positive": TEXTS[1:] + TEXTS[:1], "label": labels})
    args = getattr(package, name.replace("Trainer", "TrainingArguments"))(batch_sampler=in_order, **common)
    return getattr(package, name)(
        model, args=args, train_dataset=data, eval_dataset=data.select(range(4)), loss=loss
    )


def run(name: str, ours: bool, folder: str) -> dict[str, Any]:
    """Return the history of one trainer and the sum of the sizes of its weights."""
    if ours:
        from drivetrain.integrations.transformers import replace_trainer

        replace_trainer()
    common = {
        "output_dir": f"{folder}/out",
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": 4,
        "num_train_epochs": 2,
        "logging_steps": 1,
        "learning_rate": 1e-2,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 1,
    }
    of_trl = KINDS[name] == "trl"
    trainer = _of_trl(name, common) if of_trl else _of_sentences(name, common, f"{folder}/bert")
    assert any(each.__module__.startswith("drivetrain.") for each in type(trainer).__mro__) == ours
    trainer.train()
    weights = sum(each.double().abs().sum().item() for each in trainer.model.parameters())
    return {"history": trainer.state.log_history, "weights": weights}


def main() -> None:
    """Print the table, each row from two processes."""
    if len(sys.argv) > 1:
        name, ours, folder = sys.argv[1:]
        print("\n" + json.dumps(run(name, ours == "ours", folder)))
        return
    print("| trainer | last loss: transformers / drivetrain | eval loss | largest difference |")
    print("| --- | --- | --- | --- |")
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "CI": "1", "OMP_NUM_THREADS": "1"}
    for name, package in KINDS.items():
        found = []
        for whose in ("theirs", "ours"):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-W", "ignore", __file__, name, whose, folder]
                done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
            found.append(json.loads(done.stdout.splitlines()[-1]))
        theirs, ours = (each["history"] for each in found)
        timed = ("runtime", "per_second", "total_flos")
        apart = [
            abs(row[key] - other[key])
            for row, other in zip(theirs, ours, strict=True)
            for key in row
            if not any(each in key for each in timed)
        ]
        cells = []
        for key in ("loss", "eval_loss"):
            values = ([row[key] for row in rows if key in row][-1] for rows in (theirs, ours))
            cells.append(" / ".join(f"{each:.6f}" for each in values))
        print(
            f"| {package} {version(package)}, {name} | {' | '.join(cells)} | {max(apart):.1e} |", flush=True
        )


if __name__ == "__main__":
    main()
