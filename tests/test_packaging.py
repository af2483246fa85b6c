"""What `pip install .` installs: the wheel is built from the checkout's own files and looked into."""

import shutil
import subprocess
import sys
import zipfile
from email.parser import Parser
from pathlib import Path

import pytest

import drivetrain

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "package"


@pytest.mark.landing
def test_the_wheel_has_every_module_the_metadata_and_the_command(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "wheel"
    shutil.copytree(PACKAGE, source / "package", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("setup.cfg", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source / name)
    words = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(target), str(source)]
    command = [sys.executable, "-m", "pip", "wheel", *words]
    subprocess.run(command, check=True, capture_output=True, timeout=3600)
    (built,) = target.glob("*.whl")
    with zipfile.ZipFile(built) as wheel:
        names = wheel.namelist()
        (metadata,) = (wheel.read(name) for name in names if name.endswith(".dist-info/METADATA"))
        (entries,) = (wheel.read(name) for name in names if name.endswith("entry_points.txt"))
    modules = [*PACKAGE.rglob("*.py"), PACKAGE / "drivetrain" / "py.typed"]
    assert {path.relative_to(PACKAGE).as_posix() for path in modules} <= set(names)
    assert b"drivetrain = drivetrain.cli.main:main" in entries
    fields = Parser().parsestr(metadata.decode())
    assert (fields["Version"], fields["Requires-Python"]) == (drivetrain.__version__, ">=3.11")
    required = {each.split(">")[0] for each in fields.get_all("Requires-Dist", []) if "extra" not in each}
    core = "torch safetensors torchmetrics tensorboard tqdm numpy xxhash jsonargparse docstring-parser"
    assert required == set(core.split())
    assert {"deepspeed", "accelerate", "xla", "examples", "test"} <= set(fields.get_all("Provides-Extra", []))
