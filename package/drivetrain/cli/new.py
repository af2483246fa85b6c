"""`drivetrain new`: write a small project that trains."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from drivetrain.cli.parser import Parser
from drivetrain.core.errors import ConfigError


def run(words: Sequence[str]) -> int:
    """Write the project, say what to do with it, and return the exit code."""
    parser = Parser(
        prog="drivetrain new",
        description="Write a small project that trains into a new folder: a task with its data, a"
        " configuration file and a test.",
    )
    parser.add_argument("name", metavar="NAME", help="the folder's name, and that of its Python module")
    parser.add_common(json=False)
    name = parser.parse_args(words).name
    folder = Path(name)
    if not re.fullmatch(r"[^\W\d_]\w*", name) or keyword.iskeyword(name):
        raise ConfigError(
            f"{name!r} cannot name a Python module: take a letter, then letters, digits and underscores,"
            " such as my_task"
        )
    if folder.exists():
        raise ConfigError(f"{folder.absolute()} exists already; take another name")
    if find_spec(name) is not None:
        raise ConfigError(f"{name!r} is already the name of a module that Python finds; take another name")
    try:
        folder.mkdir()
        for each in resources.files(__package__).joinpath("project").iterdir():
            text = each.read_text(encoding="utf-8").replace("NAME", name)
            file = folder / each.name.removesuffix(".txt").replace("NAME", name)
            file.write_text(text.replace("CLASS", name.title().replace("_", "")), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder.absolute()} cannot be written: {error.strerror}") from error
    print(f"{name}/ has {name}.py, config.yaml and test_{name}.py. To train and to test it:")
    print(f"  cd {name}\n  drivetrain fit --config config.yaml\n  pytest")
    return 0
