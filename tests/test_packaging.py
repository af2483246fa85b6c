"""What `pip install .` installs: the wheel is built from the checkout's own files and looked into."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import drivetrain

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    source = tmp_path_factory.mktemp("source")
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "package", source / "package", ignore=ignored)
    target = tmp_path_factory.mktemp("wheel")
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target)]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, str(source)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (built,) = target.glob("*.whl")
    return zipfile.ZipFile(built)


def test_every_module_and_the_typing_marker_are_in_the_wheel(wheel: zipfile.ZipFile) -> None:
    names = set(wheel.namelist())
    package = ROOT / "package"
    for path in (*package.rglob("*.py"), package / "drivetrain" / "py.typed"):
        assert path.relative_to(package).as_posix() in names


def test_the_metadata_names_version_dependencies_and_extras(wheel: zipfile.ZipFile) -> None:
    (metadata,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    fields = Parser().parsestr(wheel.read(metadata).decode())
    assert fields["Version"] == drivetrain.__version__
    assert fields["Requires-Python"] == ">=3.11"
    required = {each.split(">")[0] for each in fields.get_all("Requires-Dist", []) if "extra" not in each}
    core = {"torch", "safetensors", "torchmetrics", "tensorboard", "tqdm", "numpy", "xxhash"}
    core |= {"jsonargparse", "docstring-parser"}
    assert required == core
    assert {"deepspeed", "accelerate", "xla", "examples", "test"} <= set(fields.get_all("Provides-Extra", []))


def test_the_command_is_installed(wheel: zipfile.ZipFile) -> None:
    (entries,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "drivetrain = drivetrain.cli.main:main" in wheel.read(entries).decode()
