"""A MkDocs hook: llms.txt and llms-full.txt, the site for programs that read it as text (https://llmstxt.org).

`llms.txt` lists the pages of the guides and of the reference with a sentence on each. `llms-full.txt` has
these pages whole; where the site shows an object, it has its signature and docstring, and its members'.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

SECTIONS = {"how-to/": "How to", "reference/": "Reference"}
OBJECT = re.compile(r"^::: ([\w.]+)$", re.M)
LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


class Text(NamedTuple):
    """A page: its title, its address below the site's, and its Markdown."""

    title: str
    url: str
    markdown: str


_texts: dict[str, Text] = {}  # by the page's file
_order: list[str] = []  # the files, as the navigation has them


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> None:
    """Note the order of the pages."""
    _order[:] = [page.file.src_uri for page in nav.pages]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> None:
    """Keep a page's text, after the other hooks have filled in its tables."""
    if page.file.src_uri.startswith(tuple(SECTIONS)):
        handler = config.plugins["mkdocstrings"].get_handler("python")  # type: ignore[attr-defined]
        found = {name: handler.collect(name, handler.get_options({})) for name in OBJECT.findall(markdown)}
        whole = OBJECT.sub(lambda match: described(match[1], found[match[1]]), markdown)
        _texts[page.file.src_uri] = Text(str(page.title), page.url, whole)


def on_post_build(config: MkDocsConfig) -> None:
    """Write both files."""
    texts = {name: _texts[name] for name in _order if name in _texts}
    start = f"# {config.site_name}\n\n> {config.site_description}\n"
    lines, pages = [start], [start]
    for folder, title in SECTIONS.items():
        found = [text for name, text in texts.items() if name.startswith(folder)]
        lines += [f"## {title}\n", *map(listed, found), ""]
        pages += [f"<!-- {text.url} -->\n\n{text.markdown.strip()}\n" for text in found]
    root = Path(config.site_dir)
    (root / "llms.txt").write_text("\n".join(lines), encoding="utf-8")
    (root / "llms-full.txt").write_text("\n".join(pages), encoding="utf-8")


def listed(text: Text) -> str:
    """Return a page's line of llms.txt: its address, and the first sentence after its heading."""
    plain = [each for each in text.markdown.split("\n\n") if re.match(r"\w|\*\*|`(?!``)", each)]
    told = [" ".join(each.split()) for each in plain if not each.startswith("How to use")]
    first = LINK.sub(r"\1", told[0]).removeprefix("**Goal:** ") if told else ""
    sentence = re.split(r"(?<=[.])\s", first)[0]
    return f"- [{text.title}]({text.url}): {sentence}"


def described(path: str, thing: Any) -> str:
    """Return an object's signature and docstring, and those of its documented members."""
    thing = thing.final_target if thing.is_alias else thing
    parts = [f"## {path}", *_text(thing)]
    for name, member in thing.members.items() if thing.is_class else ():
        if not (name.startswith("_") or member.is_alias) and member.has_docstring:
            parts += [f"### {thing.name}.{name}", *_text(member)]
    return "\n\n".join(parts)


def _text(thing: Any) -> list[str]:
    signature = str(thing.signature()) if thing.is_class or thing.is_function else ""
    shown = [f"```python\n{signature}\n```"] if signature else []
    return shown + ([thing.docstring.value] if thing.has_docstring else [])
