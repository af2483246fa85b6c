"""The tables of docs/reference/trainer-arguments.md, printed from the Trainer's docstring.

`python docs/site/print_trainer_arguments.py` writes the page. A code host shows it, unlike most pages of
the reference, which are made when the site is built.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

from drivetrain import Trainer

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "trainer-arguments.md"

_HEAD = """# Arguments of the Trainer

All arguments of `Trainer(...)` in eight groups, as its docstring has them. All are keyword-only. One of
`max_epochs`, `max_steps` and `max_time` must be given to train; every other has a default. On the site,
[Trainer](trainer.md) has the methods too.
"""


def page() -> str:
    """Return the page as Markdown."""
    lines = [_HEAD]
    _, *groups = re.split(r"(?m)^Attributes: (.*)\n", inspect.cleandoc(Trainer.__doc__ or ""))
    for title, text in zip(groups[::2], groups[1::2], strict=True):
        lines += [
            f"## {title}",
            "",
            "| argument | default | example | meaning |",
            "| --- | --- | --- | --- |",
        ]
        section = text.partition("\n\n")[0]
        for names, entry in re.findall(r"(?m)^    (\w[\w, ]*): ((?:.*\n?)(?:^ {8}.*\n?)*)", section):
            found = re.fullmatch(r"(.*) Default: (.*)\. Example: (.*)\.", " ".join(entry.split()))
            if found is None:
                raise ValueError(f"the entry of {names!r} lacks 'Default: ... Example: ...'")
            meaning, default, example = (each.replace("|", r"\|") for each in found.groups())
            lines.append(f"| `{names}` | `{default}` | `{example}` | {meaning} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
