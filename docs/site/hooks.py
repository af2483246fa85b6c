"""MkDocs hooks: pages of notebooks and of files outside docs/, tables of names, help, a check of docstrings.

A page may contain, each on a line of its own:

- `<!-- names: drivetrain.data -->`: a table of the module's public names;
- `<!-- rows: drivetrain.strategies.STRATEGIES -->`: the names in a registry;
- `<!-- help: checkpoint list -->`: the help of `drivetrain checkpoint list`.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import logging
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from drivetrain.cli.main import main as command_line

log = logging.getLogger("mkdocs.hooks.drivetrain")  # in strict mode, a warning of "mkdocs" fails the build

ROOT = Path(__file__).resolve().parents[2]
ROOT_PAGES = {"CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
"""Files at the root of the repository, by their names as pages of the site."""

FENCE = re.compile(r"^(`{3,}).*?^\1$", re.M | re.S)
LINK = re.compile(r"(?<=\]\()[^)\s]+(?=\))")
IDENTIFIER = re.compile(r"^::: ([\w.]+)$", re.M)
HEADING = re.compile(r'(<h2 id="(drivetrain[\w.]*)" class="doc doc-heading">.*?</h2>)', re.S)
CLASS_NAME = re.compile(
    r"<(a|autoref|pre|h\d)\b.*?</\1>|<code>(?:drivetrain\.[\w.]*)?([A-Z]\w+)</code>", re.S
)
"""A name to link; what may hold no link is matched first, and left as it is."""
CODE = re.compile(r"<pre\b.*?</pre>|(<code>)([^<]*)</code>", re.S)
CELL = re.compile(r"<(t[dh])\b([^>]*>(.*?)</t[dh]>)", re.S)
HYPHENED = re.compile(r"[\w-]*\w-\w[\w-]{,30}")
LONGEST_NAME = 34
"""Characters of code that fit beside the margins of a phone."""
COMMENT = re.compile(r"^<!-- (names|rows|help): ?(.*?) ?-->$", re.M)


def on_config(config: MkDocsConfig) -> None:
    """Let the pages be where mkdocs.yml is, which its own check refuses."""
    config.docs_dir = str(ROOT / "docs")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages of the files at the root, of notebooks, and of every other file that a page links to."""
    for name, uri in ROOT_PAGES.items():
        files.append(File.generated(config, uri, content=(ROOT / name).read_text(encoding="utf-8")))
    for file in [each for each in files if each.src_uri.endswith(".ipynb")]:  # which itself can be downloaded
        uri = file.src_uri.removesuffix(".ipynb") + ".md"
        files.append(File.generated(config, uri, content=_notebook_page(file)))
    linked = {source for file in files.documentation_pages() for source in _sources(file)}
    for source in sorted(linked):
        page = File.generated(
            config, f"source/{source}.md", content=_source_page(source), inclusion=InclusionLevel.NOT_IN_NAV
        )
        files.append(page)
    return files


def _sources(file: File) -> Iterator[str]:
    """The files of the repository, other than pages, that a page links to."""
    for target in LINK.findall(FENCE.sub("", file.content_string)):
        source = _outside(file.src_uri, target)
        if source and source not in ROOT_PAGES and (ROOT / source).exists():
            yield source


def _outside(page: str, target: str) -> str | None:
    """The path, from the repository's root, of a link's target; None for a page of docs/ or an address."""
    path = target.partition("#")[0]
    if not path or re.match(r"[a-z]+:", target):
        return None
    folder = "" if page in ROOT_PAGES.values() else posixpath.join("docs", posixpath.dirname(page))
    path = posixpath.normpath(posixpath.join(folder, path))
    return None if path.startswith(("docs/", "../")) else path


def _notebook_page(file: File) -> str:
    """Return a notebook with its stored outputs as Markdown, and a link to the file itself."""
    parts = []
    for cell in json.loads(file.content_string)["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] != "code":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        parts += filter(None, map(_shown, cell["outputs"]))
    parts.append(f"[This page as a notebook]({posixpath.basename(file.src_uri)})")
    return "\n\n".join(parts) + "\n"


def _shown(output: dict[str, Any]) -> str:
    """Return an output as a notebook shows it: a picture, HTML, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        width, content = output["metadata"]["image/png"]["width"], "".join(data["image/png"]).strip()
        return f'<img src="data:image/png;base64,{content}" width="{width}" alt="figure">'
    if "text/html" in data:
        return f'<div class="notebook-output">{"".join(data["text/html"])}</div>'
    text = "".join(output.get("text") or data["text/plain"]).rstrip()
    return f"```output\n{text}\n```" if text else ""


def _source_page(source: str) -> str:
    path = ROOT / source
    if path.is_dir():
        names = "".join(f"- `{each.name}`\n" for each in sorted(path.iterdir()) if each.suffix)
        return f"# {source}\n\n{names}"
    language = {".py": "python", ".sh": "bash"}.get(path.suffix, "text")
    return f"# {source}\n\n````{language}\n{path.read_text(encoding='utf-8')}````\n"


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Point links out of docs/ to the pages made for them, and fill in tables and help."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        page.meta["search"] = {"exclude": True}
        return markdown
    if "/" not in uri:
        page.meta["hide"] = ["navigation"]  # the sidebar would hold this page alone
    if uri == "README.md":
        page.meta |= {"template": "home.html", "hide": ["navigation", "toc"]}

    def moved(match: re.Match[str]) -> str:
        outside = _outside(uri, match[0])
        path, hash, anchor = match[0].partition("#")
        name, kind = posixpath.splitext(path)
        if kind == ".ipynb" and posixpath.basename(uri) != posixpath.basename(f"{name}.md"):
            path = f"{name}.md"
        if outside is None:  # a page of docs/, to which a page of the root links by that name
            return (path.removeprefix("docs/") if uri in ROOT_PAGES.values() else path) + hash + anchor
        home = ROOT_PAGES.get(outside, f"source/{outside}.md")
        return posixpath.relpath(home, posixpath.dirname(uri) or ".") + hash + anchor

    parts, end = [], 0
    for fence in FENCE.finditer(markdown):
        parts += [LINK.sub(moved, markdown[end : fence.start()]), fence[0]]
        end = fence.end()
    markdown = "".join([*parts, LINK.sub(moved, markdown[end:])])
    return COMMENT.sub(lambda match: _filled(match[1], match[2], config), markdown)


def _filled(kind: str, of: str, config: MkDocsConfig) -> str:
    if kind == "names":
        return _names(of, config)
    return _rows(of) if kind == "rows" else _help(of)


def _documented(identifier: str, config: MkDocsConfig) -> Any:
    """An object as mkdocstrings reads it."""
    handler = config.plugins["mkdocstrings"].get_handler("python")  # type: ignore[attr-defined]
    return handler.collect(identifier, handler.get_options({}))


def _names(module: str, config: MkDocsConfig) -> str:
    """A table of a module's public names, each linked to where it is documented."""
    lines = ["| Name | Summary |", "| --- | --- |"]
    # Read, not imported: an integration's module refuses to load without the library that it is for.
    for name in map(str, _documented(module, config).exports or ()):
        if name.startswith("__"):
            continue
        thing = _documented(f"{module}.{name}", config)
        text = thing.docstring.value if thing.docstring else ""
        summary = " ".join(text.partition("\n\n")[0].split()).replace("|", "\\|")
        lines.append(f"| [`{name}`][{thing.canonical_path}] | {summary} |")
    return "\n".join(lines)


def _rows(registry: str) -> str:
    """The names in a registry; torch's optimizers are left out, as they depend on torch's version."""
    module, _, name = registry.rpartition(".")
    names = list(getattr(importlib.import_module(module), name))
    torchs = {each.lower() for each in vars(torch.optim)} if name == "OPTIMIZERS" else set()
    listed = ", ".join(f'`"{each}"`' for each in names if each not in torchs or each == "muon")
    return f"Names: {listed}{', and every class of `torch.optim` by its lower-case name' if torchs else ''}."


def _help(command: str) -> str:
    """The help of a command, 88 columns wide; of `drivetrain fit`, with the texts of all arguments."""
    text = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="88"), contextlib.redirect_stdout(text):
        command_line([*command.split(), "--help", *(["all"] if command == "fit" else [])])
    return f"```text\n{text.getvalue().rstrip()}\n```"


def on_page_content(html: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Show how to import each documented object, and link names of classes and constants to it.

    A name is linked each time in the reference, and once on other pages.
    """
    in_reference = page.file.src_uri.startswith("reference/")
    documented = [each for file in files.documentation_pages() for each in _identifiers(file)]
    places = {each.rpartition(".")[2]: each for each in documented}
    linked: set[str] = set()

    def imported(match: re.Match[str]) -> str:
        module, _, name = match[2].rpartition(".")
        return f"{match[1]}\n<p class='doc-import'><code>from {module} import {name}</code></p>"

    def link(match: re.Match[str]) -> str:
        name = match[2]
        if name not in places or name in linked:
            return match[0]
        if not in_reference:
            linked.add(name)
        return f'<autoref identifier="{places[name]}">{match[0]}</autoref>'

    html = HEADING.sub(imported, CODE.sub(_unbroken, CELL.sub(_wide, html)))
    return html if page.file.src_uri.startswith("source/") else CLASS_NAME.sub(link, html)


def _unbroken(match: re.Match[str]) -> str:
    """Keep each word of code on one line, and let a longer one break after its punctuation."""
    if not match[2]:  # a whole block
        return match[0]
    if " " not in match[2] and len(match[2]) <= LONGEST_NAME:
        return f'<code class="name">{match[2]}</code>'
    return f"<code>{' '.join(map(_word, match[2].split(' ')))}</code>"


def _word(word: str) -> str:
    if len(word) <= LONGEST_NAME:
        return f'<span class="name">{word}</span>'
    word = re.sub(r"(?<=[\w\])])([._/=(,]+)(?=\w)", r"\1<wbr>", word)
    return HYPHENED.sub(r'<span class="name">\g<0></span>', word)


def _wide(match: re.Match[str]) -> str:
    """Give a cell of a table that has several words, or a sentence, a width that one can read."""
    length = len(re.sub(r"<[^>]*>", "", match[3]))
    kind = "sentence" if length > 40 else "words"
    return f'<{match[1]} class="{kind}"{match[2]}' if length > 18 else match[0]


def on_env(env: Any, config: MkDocsConfig, files: Files) -> Any:
    """Warn of every public object on a page that has no docstring."""
    for file in files.documentation_pages():
        for identifier in _identifiers(file):
            for bare in _undocumented(_documented(identifier, config)):
                log.warning(f"{file.src_uri}: {bare} has no docstring")
    return env


def _identifiers(file: File) -> list[str]:
    """The objects that a page documents."""
    return IDENTIFIER.findall(file.content_string) if file.src_uri.startswith("reference/") else []


def _undocumented(thing: Any) -> Iterator[str]:
    thing = thing.final_target if thing.is_alias else thing
    if not thing.has_docstring:
        yield thing.path
    if not thing.is_class:
        return
    inherited = {name for base in thing.mro() for name, each in base.members.items() if each.has_docstring}
    for name, member in thing.members.items():
        if name.startswith("_") or member.is_attribute or member.has_docstring or name in inherited:
            continue
        yield member.path
