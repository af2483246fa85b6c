"""Small local data and tiny models for the scripts, in a folder: `python material.py FOLDER`.

The text is that of Python's standard library, the images are scikit-learn's digits, the speech is a
telephone's tones, and the two scripts of the translation are Unicode's: Korean syllables and Latin letters.
"""

from __future__ import annotations

import ast
import json
import keyword
import random
import sys
import sysconfig
import unicodedata
from collections.abc import Iterable, Iterator
from io import StringIO
from pathlib import Path
from tokenize import NAME, NUMBER, OP, STRING, generate_tokens
from typing import Any

import numpy as np
import torch
import transformers
from PIL import Image
from sklearn.datasets import load_digits
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

TOPICS = {"network": ("asyncio", "http", "urllib"), "text": ("email", "xml", "html"), "tests": ("unittest",)}
TAGS = ["other", "keyword", "called", "attribute", "operator", "literal"]
RATE = 4000
"""Samples of a second of sound."""
_SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def documented(package: str) -> Iterator[tuple[str, str]]:
    """The names and docstrings of a package's functions and classes."""
    folder = Path(sysconfig.get_paths()["stdlib"]) / package
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and (text := ast.get_docstring(node)):
                yield node.name, " ".join(text.split())


def sentences() -> list[dict[str, Any]]:
    """Sentences and their topics."""
    return [
        {"sentence": text[:200], "label": topic}
        for topic, packages in TOPICS.items()
        for package in packages
        for _, text in documented(package)
    ]


def summaries() -> list[dict[str, Any]]:
    """Docstrings and their first sentences."""
    texts = [
        text.split(". ", 1) for package in ("asyncio", "email", "http") for _, text in documented(package)
    ]
    return [{"text": each[1][:300], "summary": each[0][:60]} for each in texts if len(each) == 2 and each[0]]


def questions() -> list[dict[str, Any]]:
    """Three documented names each, and the question what one of them does."""
    known = [
        (n, t.split(". ")[0][:50]) for package in ("email", "http", "asyncio") for n, t in documented(package)
    ]
    rows = []
    for start in range(0, len(known) - 2, 3):
        three = known[start : start + 3]
        asked, answer = three[start % 3]
        context = " ; ".join(f"{name} : {text}" for name, text in three)
        begins = context.index(f"{asked} : {answer}") + len(asked) + 3
        answers = {"text": [answer], "answer_start": [begins]}
        rows.append({"id": str(start), "question": asked, "context": context, "answers": answers})
    return rows


def tagged() -> list[dict[str, Any]]:
    """Lines of code as tokens, and what each token is."""
    rows = []
    for path in sorted((Path(sysconfig.get_paths()["stdlib"]) / "email").glob("*.py")):
        line: list[Any] = []
        for token in generate_tokens(StringIO(path.read_text(encoding="utf-8")).readline):
            if token.type in (NAME, NUMBER, OP, STRING):
                line.append(token)
            elif len(line) > 3:
                rows.append({"tokens": [each.string[:20] for each in line[:24]], "ner_tags": tags(line[:24])})
                line = []
    return rows


def tags(line: list[Any]) -> list[str]:
    """What each token of a line is."""
    found = []
    texts = ["", *(each.string for each in line), ""]
    for before, token, after in zip(texts, line, texts[2:], strict=False):
        kinds = {OP: "operator", NUMBER: "literal", STRING: "literal"}
        kind = kinds.get(token.type, "other")
        if token.type == NAME:
            kind = "called" if after == "(" else "attribute" if before == "." else "other"
            kind = "keyword" if keyword.iskeyword(token.string) else kind
        found.append(kind)
    return found


def translations() -> list[dict[str, Any]]:
    """Words of two Korean syllables in both scripts."""
    chosen, rows = random.Random(0), []
    for _ in range(500):
        word = "".join(chr(chosen.randrange(0xAC00, 0xD7A4)) for _ in range(2))
        latin = " ".join(unicodedata.name(each).rsplit(" ", 1)[1].lower() for each in word)
        rows.append({"translation": {"ko": word, "en": latin}})
    return rows


def sounds() -> list[dict[str, Any]]:
    """Numbers of three digits as a telephone's tones."""
    chosen, rows = random.Random(0), []
    for _ in range(120):
        digits = [chosen.randrange(10) for _ in range(3)]
        rows.append({"audio": tones(digits).tolist(), "text": "".join(map(str, digits))})
    return rows


def tones(digits: Iterable[int]) -> np.ndarray[Any, Any]:
    """Two sines for each digit (ITU-T Q.23), and a pause after each."""
    time = np.arange(RATE // 20) / RATE
    low, high = (697, 770, 852, 941), (1209, 1336, 1477)
    pieces = []
    for digit in digits:
        row, column = (3, 1) if digit == 0 else divmod(digit - 1, 3)
        tone = np.sin(2 * np.pi * low[row] * time) + np.sin(2 * np.pi * high[column] * time)
        pieces += [tone, np.zeros(RATE // 40)]
    return np.concatenate(pieces).astype(np.float32).round(4)


def tokenizer(texts: Iterable[str], **special: str) -> Any:
    """A WordPiece tokenizer of these texts."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.Lowercase()])
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    names = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"} | special
    made.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=600, special_tokens=[*names.values()])
    )
    begin, end = ("" if "eos" in special else f"{names['cls']} "), names["sep"]
    ids = [(name, made.token_to_id(name)) for name in (names["cls"], names["sep"])]
    made.post_processor = processors.TemplateProcessing(
        single=f"{begin}$A {end}", pair=f"{begin}$A {end} $B:1 {end}:1", special_tokens=ids
    )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, model_max_length=128, **{f"{name}_token": each for name, each in names.items()}
    )


def write(folder: Path, name: str, rows: list[dict[str, Any]], train: int, validation: int) -> None:
    """Write the two files of a script, from rows in a random order that is always the same."""
    rows = random.Random(1).sample(rows, train + validation)
    for part, chosen in {"train": rows[:train], "validation": rows[train:]}.items():
        lines = [json.dumps(row) for row in chosen]
        (folder / f"{name}_{part}.json").write_text("\n".join(lines), encoding="utf-8")


def write_images(folder: Path) -> None:
    """Write the digits as files, in a folder for each class."""
    digits = load_digits()
    for number in range(200):
        part = "train" if number < 160 else "validation"
        place = folder / "images" / part / str(digits.target[number])
        place.mkdir(parents=True, exist_ok=True)
        Image.fromarray((digits.images[number] * 15).astype(np.uint8)).convert("RGB").save(
            place / f"{number}.png"
        )


def make(folder: Path) -> None:
    """Write everything."""
    folder.mkdir(parents=True, exist_ok=True)
    texts, code, pairs = sentences(), tagged(), translations()
    write(folder, "glue", texts, 160, 60)
    write(folder, "clm", [{"text": each["sentence"]} for each in texts], 160, 60)
    write(folder, "translation", pairs, 400, 60)
    write(folder, "summarization", summaries(), 120, 30)
    write(folder, "qa", questions(), 120, 40)
    write(folder, "ner", code, 160, 60)
    write(folder, "speech", sounds(), 100, 20)
    write_images(folder)
    words = [each["sentence"] for each in texts] + [" ".join(each["tokens"]) for each in code]
    words += [each for row in pairs for each in row["translation"].values()]
    english, seq2seq = tokenizer(words), tokenizer(words, sep="</s>", eos="</s>")
    size = len(english)
    torch.manual_seed(0)
    bert = transformers.BertModel(transformers.BertConfig(vocab_size=size, **_SMALL))
    gpt2 = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=size,
            n_embd=32,
            n_layer=2,
            n_head=2,
            n_positions=128,
            bos_token_id=2,
            eos_token_id=3,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=size,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            bos_token_id=2,
            eos_token_id=3,
        )
    )
    t5 = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=len(seq2seq),
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            dropout_rate=0.0,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=seq2seq.eos_token_id,
        )
    )
    vit = transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=2, **_SMALL))
    wav2vec2 = transformers.Wav2Vec2Model(
        transformers.Wav2Vec2Config(
            **_SMALL,
            conv_dim=(32, 32),
            conv_kernel=(10, 5),
            conv_stride=(5, 4),
            num_feat_extract_layers=2,
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
            feat_extract_norm="layer",
            do_stable_layer_norm=True,
            layerdrop=0.0,
            apply_spec_augment=False,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            feat_proj_dropout=0.0,
            final_dropout=0.0,
        )
    )
    made = {"bert": bert, "gpt2": gpt2, "llama": llama, "t5": t5, "vit": vit, "wav2vec2": wav2vec2}
    for name, model in made.items():
        model.save_pretrained(folder / name)
    for name in ("bert", "gpt2", "llama"):
        english.save_pretrained(folder / name)
    seq2seq.save_pretrained(folder / "t5")
    transformers.ViTImageProcessorPil(
        size={"height": 8, "width": 8}, image_mean=[0.5] * 3, image_std=[0.5] * 3
    ).save_pretrained(folder / "vit")
    transformers.Wav2Vec2FeatureExtractor(sampling_rate=RATE).save_pretrained(folder / "wav2vec2")


if __name__ == "__main__":
    make(Path(sys.argv[1]))
