"""Docstrings, comments, messages and pages keep to plain English: few sentences that must be read twice.

`python tests/test_prose.py [PATH ...]` lists the sentences that match a pattern. One may be fine, so only
their share is limited.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PLACES = ["package", "docs", "README.md", "CONTRIBUTING.md", "examples"]
LIMIT = 20
"""Sentences listed of a thousand."""
LONGEST = 34
"""Words of a sentence."""

PATTERNS = {
    "a preposition before a relative": r"\b(of|in|by|from|with|at|to|for|on) (which|whom|whose)\b",
    "an inverted sentence": r"\b(Within it|Of (it|these|those)|With it|(Nor|So) (is|does|has|do|are|can))\b",
    "such": r"\b(such a one|such ones|no such one|Such an?|as such a)\b",
    "a first word": r"^(What|See (that|to it)|That which|(Whether|How) what|Those|One that|None (for|to))\b",
    "a word of our own": r"\b(alike|stands? in|stand-ins?|(is|are|was) told|takes back|taken back"
    r"|of one's own|is wanting|at hand|wherefrom|whereof|there(in|of|by)|hereby|lest|hands them on|be it)\b",
    "but for": r"\bbut (for|where|when|what|that|by|those)\b(?! also)",
    "in its place": r"\bin (its|their|one's) place\b",
    "has not": r"\b(has|have|does|do) not (one|any of it|got)\b|\b(has|have) none\b",
    "an old word": r"\b(shall|whether or no|ere|thus|whence|hence|upon which|as yet|(is|are) to be)\b",
}


def texts(path: Path) -> Iterator[tuple[int, str]]:
    """Each docstring, longer text and comment of a source, or each paragraph of a page, with its line."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        yield from _paragraphs(source)
        return
    tree = ast.parse(source)
    docstrings = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            docstrings |= {node.body[0].value} if text else set()  # type: ignore[attr-defined]
            yield node.lineno if hasattr(node, "lineno") else 1, re.sub(r"(?s)```.*?```", " ", text)
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(each.value) if isinstance(each, ast.Constant) else "X" for each in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in docstrings:
            text = node.value
        else:
            continue
        if text.count(" ") >= 5:
            yield node.lineno, text
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.string.count(" ") >= 3:
            yield token.start[0], token.string.lstrip("# ")


def _paragraphs(page: str) -> Iterator[tuple[int, str]]:
    fenced, start, kept = False, 1, []
    for number, line in enumerate([*page.splitlines(), ""], 1):
        is_fence = line.lstrip().startswith("```")
        fenced ^= is_fence
        own = line.lstrip().startswith(("|", "#", "-", "*", ">", "<", "!"))
        if fenced or is_fence or own or not line.strip():
            if kept:
                yield start, " ".join(kept)
            kept = []
            if line.lstrip().startswith(("-", "*", ">")) and not fenced:
                yield number, line.lstrip("-*> ")
            continue
        if not kept:
            start = number
        kept.append(line.strip())


def sentences(text: str) -> Iterator[str]:
    """Those of three words or more."""
    joined = re.sub(r"\s+", " ", re.sub(r"\n\s*\n|\n(?=\s*[-*|] )|\n(?=\s*\w+: )", ". ", text))
    for sentence in re.split(r"(?<=[.!?])\s+", joined):
        if sentence.strip(" .").count(" ") >= 2:
            yield sentence.strip(" .")


def listed(places: list[str]) -> tuple[list[str], int]:
    """The sentences that match a pattern or are long, and the number of all."""
    found, total = [], 0
    for place in map(ROOT.joinpath, places):
        paths = (
            sorted(p for p in place.rglob("*") if p.suffix in (".py", ".md")) if place.is_dir() else [place]
        )
        for path in paths:
            for line, text in texts(path):
                for sentence in sentences(text):
                    total += 1
                    why = [name for name, pattern in PATTERNS.items() if re.search(pattern, sentence)]
                    if len(sentence.split()) > LONGEST:
                        why.append("a long sentence")
                    if why:
                        where = path.relative_to(ROOT)
                        found.append(f"{where}:{line}: {', '.join(why)}: {sentence[:150]}")
    return found, total


def test_few_sentences_must_be_read_twice() -> None:
    found, total = listed(PLACES)
    assert 1000 * len(found) <= LIMIT * total, "\n".join(found)


def test_a_hard_sentence_is_listed() -> None:
    hard = "See that every parameter of which a strategy takes a part has a dimension for it."
    assert [name for name, pattern in PATTERNS.items() if re.search(pattern, hard)] == [
        "a preposition before a relative",
        "a first word",
    ]
    plain = "Check that every sharded parameter has at least one dimension."
    assert not any(re.search(pattern, plain) for pattern in PATTERNS.values())


if __name__ == "__main__":
    lines, count = listed(sys.argv[1:] or PLACES)
    sys.stdout.write(
        "\n".join([*lines, f"{len(lines)} of {count} sentences: {1000 * len(lines) / count:.0f} per 1,000"])
    )
    sys.stdout.write("\n")
