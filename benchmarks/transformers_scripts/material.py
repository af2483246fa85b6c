"""Tiny models and small data for the scripts: docstrings of the standard library, Unicode's Korean names."""

from __future__ import annotations

import ast
import json
import random
import sysconfig
import unicodedata
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TOPICS = {"network": ("asyncio", "http", "urllib"), "text": ("email", "xml", "html"), "tests": ("unittest",)}


def sentences() -> list[dict[str, Any]]:
    """Docstrings and their topics."""
    rows = []
    for topic, packages in TOPICS.items():
        for package in packages:
            for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / package).rglob("*.py")):
                for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                    if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                        rows.append({"sentence": " ".join(text.split())[:200], "label": topic})
    return rows


def translations() -> list[dict[str, Any]]:
    """Words of two Korean syllables in both scripts."""
    chosen, rows = random.Random(0), []
    for _ in range(500):
        word = "".join(chr(chosen.randrange(0xAC00, 0xD7A4)) for _ in range(2))
        latin = " ".join(unicodedata.name(each).rsplit(" ", 1)[1].lower() for each in word)
        rows.append({"translation": {"ko": word, "en": latin}})
    return rows


def tokenizer(texts: Iterable[str], **special: str) -> Any:
    """A WordPiece tokenizer of these texts."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"} | special
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=[*names.values()], show_progress=False)
    made.train_from_iterator(texts, trainer)
    begin, end = ("" if "eos" in special else f"{names['cls']} "), names["sep"]
    ids = [(name, made.token_to_id(name)) for name in (names["cls"], names["sep"])]
    pair = f"{begin}$A {end} $B:1 {end}:1"
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A {end}", pair=pair, special_tokens=ids
    )
    given = {f"{name}_token": each for name, each in names.items()}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=128, **given)


def make(folder: Path) -> None:
    """Write the data of both scripts, and their models with tokenizers."""
    folder.mkdir(parents=True)
    texts, pairs = sentences(), translations()
    for name, rows, train in (("glue", texts, 160), ("translation", pairs, 400)):
        rows = random.Random(1).sample(rows, train + 60)
        for part, chosen in {"train": rows[:train], "validation": rows[train:]}.items():
            lines = [json.dumps(row) for row in chosen]
            (folder / f"{name}_{part}.json").write_text("\n".join(lines), encoding="utf-8")
    words = [each["sentence"] for each in texts]
    words += [each for row in pairs for each in row["translation"].values()]
    english, seq2seq = tokenizer(words), tokenizer(words, sep="</s>", eos="</s>")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    sizes |= dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=len(english), **sizes))
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": seq2seq.eos_token_id}
    config = transformers.T5Config(vocab_size=len(seq2seq), **sizes, **ids)
    for model, its_tokenizer, name in (
        (bert, english, "bert"),
        (transformers.T5ForConditionalGeneration(config), seq2seq, "t5"),
    ):
        model.save_pretrained(folder / name)
        its_tokenizer.save_pretrained(folder / name)
