"""The source archive, what it installs, and the files about the project."""

import os
import re
import shutil
import subprocess
import sys
from configparser import ConfigParser
from importlib.metadata import Distribution
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from tests.support.lowest import lowest

import drivetrain

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "package"


@pytest.mark.landing
def test_the_source_archive_builds_and_installs_every_module_and_the_command(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    shutil.copytree(PACKAGE, source / "package", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    files = ["CHANGELOG.md", "CITATION.cff", "LICENSE", "MANIFEST.in", "README.md"]
    files += ["pyproject.toml", "setup.cfg", "setup.py"]
    for name in [*files, "tests/test_packaging.py"]:
        (source / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = "import setuptools.build_meta as each; each.build_sdist('dist')"

    def run(*words: str, cwd: Path) -> str:
        return subprocess.run(
            [sys.executable, *words], check=True, capture_output=True, text=True, timeout=3600, cwd=cwd
        ).stdout

    run("-c", build, cwd=source)
    (archive,) = (source / "dist").glob("*.tar.gz")
    shutil.unpack_archive(archive, tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert {path.name for path in unpacked.iterdir()} == {*files, "PKG-INFO", "package"}
    words = [
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--target",
        str(target),
        str(archive),
    ]
    run("-m", "pip", "install", *words, cwd=tmp_path)
    modules = [path for path in (PACKAGE / "drivetrain").rglob("*.*") if path.suffix != ".pyc"]
    installed = {path.relative_to(target) for path in target.rglob("*") if path.is_file()}
    assert {path.relative_to(PACKAGE) for path in modules} <= installed
    (folder,) = target.glob("*.dist-info")
    found = Distribution.at(folder)
    (command,) = found.entry_points
    assert (command.name, command.value) == ("drivetrain", "drivetrain.cli.main:main")
    fields = found.metadata
    assert (fields["Version"], fields["Requires-Python"]) == (drivetrain.__version__, ">=3.11")
    assert {"Author", "Home-page", "Keywords", "License", "Project-URL"} <= set(fields)
    required = {each.split(">")[0] for each in found.requires or [] if "extra" not in each}
    core = "torch safetensors torchmetrics tensorboard tqdm numpy xxhash jsonargparse docstring-parser"
    assert required == set(core.split())
    code = "import sys; sys.path.insert(0, sys.argv[1]); import drivetrain as d; d.__all__; print(d.__file__)"
    archived = shutil.make_archive(str(tmp_path / "archive"), "zip", target)
    for place in (str(target), archived):
        assert run("-I", "-c", code, place, cwd=tmp_path).startswith(place)


def test_the_files_about_the_project_agree() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (ruff,) = hooks["repos"]
    pinned = (ROOT / "tests" / "constraints.txt").read_text(encoding="utf-8").splitlines()
    assert "ruff=={}".format(ruff["rev"].removeprefix("v")) in pinned
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == drivetrain.__version__
    metadata = ConfigParser()
    metadata.read(ROOT / "setup.cfg", encoding="utf-8")
    lists = dict(metadata["options.extras_require"])
    assert len(set(lists.values())) == len(lists), "two extras are the same"
    assert citation["authors"] == [{"name": metadata["metadata"]["author"]}]


@pytest.mark.skipif(sys.platform != "linux", reason="the release runs with GNU's sed")
def test_the_released_readme_has_no_relative_link(tmp_path: Path) -> None:
    job = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text(encoding="utf-8"))["jobs"][
        "build"
    ]
    (step,) = (each for each in job["steps"] if "README's links" in each.get("name", ""))
    for name in ("README.md", "setup.cfg"):
        shutil.copy(ROOT / name, tmp_path)
    place = {
        "GITHUB_SERVER_URL": "https://host",
        "GITHUB_REPOSITORY": "owner/name",
        "GITHUB_REF_NAME": "v1.0",
    }
    environment = {**os.environ, **place, "RUNNER_TEMP": str(tmp_path)}
    subprocess.run(["bash", "-ec", step["run"]], check=True, cwd=tmp_path, env=environment)
    before, after = (
        re.findall(r"(!?)\[[^]]*\]\(([^)]+)\)", (folder / "README.md").read_text(encoding="utf-8"))
        for folder in (ROOT, tmp_path)
    )
    for (image, link), (_, target) in zip(before, after, strict=True):
        kept = link.startswith(("#", "https:"))
        kind = "raw" if image else "blob"
        assert target == (link if kept else f"https://host/owner/name/{kind}/v1.0/{link}")
    assert "    Source = https://host/owner/name\n" in (tmp_path / "setup.cfg").read_text(encoding="utf-8")


def test_the_workflows_call_targets_of_the_makefile_and_name_the_torch_that_it_names() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    torch = re.search(r"^TORCH \?= (\S+)$", makefile, re.M)
    assert torch
    for path in sorted((ROOT / ".github").rglob("*.yml")):
        parsed = yaml.safe_load(path.read_text(encoding="utf-8"))
        for job in parsed.get("jobs", {}).values() if path.parent.name == "workflows" else ():
            assert {"runs-on", "steps"} <= set(job)
            for step in job["steps"]:
                assert ("run" in step) != ("uses" in step), step
                for target in re.findall(r"^make (\S+)$", step.get("run", ""), re.M):
                    assert re.search(rf"^([\w-]+ )*{target}( [\w-]+)*:", makefile, re.M), target
                named = step.get("env", {}).get("TORCH", torch[1])
                assert named.startswith((torch[1], "--pre torch ")), named
        if path.parent.name == "ISSUE_TEMPLATE" and path.stem != "config":
            assert "drivetrain env" in path.read_text(encoding="utf-8")


def test_the_lowest_versions_are_the_bounds_of_the_package_and_of_each_extra() -> None:
    setup = ConfigParser()
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    for extra, text in {"": "", **setup["options.extras_require"]}.items():
        found = lowest(extra) if extra else lowest()
        rows = [Requirement(row) for row in (setup["options"]["install_requires"] + text).split()]
        bounds = {(row.name, each.version) for row in rows for each in row.specifier if each.operator == ">="}
        assert found == sorted(f"{name}=={version}.*" for name, version in bounds if name != "torch"), extra


def test_the_lowest_versions_of_each_extra_are_tested_or_there_is_a_reason() -> None:
    setup, makefile = ConfigParser(), (ROOT / "Makefile").read_text(encoding="utf-8")
    setup.read(ROOT / "setup.cfg", encoding="utf-8")
    (names,) = re.findall(r"^LOWEST \?= (.*)$", makefile, re.M)
    together = dict(re.findall(r"^LOWEST_EXTRAS_(\w+) := (.*)$", makefile, re.M))
    tested = {extra for name in names.split() for extra in together.get(name, name).split(",")}
    elsewhere = {
        "accelerate": "transformers",
        "lm-eval": "the newest alone",
        "xla": "its one version, in make xla",
    }
    ours = {"bench", "docs", "test", "trackers"}  # of those who work on the project
    assert sorted(setup["options.extras_require"]) == sorted({*tested, *elsewhere, *ours})
    assert {*names.split()} == {*re.findall(r"^LOWEST_TESTS_(\w+) := ", makefile, re.M)}
    rule = "files: ; @echo '$(foreach each,$(LOWEST),$(LOWEST_TESTS_$(each)))'"
    words = subprocess.check_output(["make", "--silent", f"--eval={rule}", "files"], cwd=ROOT, text=True)
    missing = [path for path in re.findall(r"tests/[\w/.]+", words) if not (ROOT / path).exists()]
    assert not missing, "the Makefile's tests of the lowest versions name files that are not there"
