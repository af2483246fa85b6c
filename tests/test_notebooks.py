"""The tutorials print what they store; `python -m tests.test_notebooks` runs them and stores it."""

import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.forked import undisturbed
from tests.test_docs import masked

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "docs" / "tutorials").glob("*.ipynb"))

EXECUTE = """
import sys
import nbformat
from nbclient import NotebookClient

notebook = nbformat.reads(sys.stdin.read(), as_version=4)
NotebookClient(notebook, timeout=3600, kernel_name="python3", record_timing=False).execute()
sys.stdout.write(nbformat.writes(notebook))
"""


def executed(path: Path, directory: Path) -> dict[str, Any]:  # in a kernel of its own
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    here = {name: str(directory / name) for name in ("IPYTHONDIR", "JUPYTER_DATA_DIR", "JUPYTER_CONFIG_DIR")}
    done = subprocess.run(
        [sys.executable, "-c", EXECUTE],
        input=path.read_text(encoding="utf-8"),
        cwd=directory,
        env={**undisturbed(), **here, "PATH": programs, "OMP_NUM_THREADS": "1", "TERM": "dumb"},
        capture_output=True,
        text=True,
        timeout=7200,
        check=False,
    )
    assert done.returncode == 0, f"{path.name}: {done.stderr[-4000:]}"
    notebook: dict[str, Any] = json.loads(done.stdout)
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["execution_count"] = None
            cell["outputs"] = as_seen(cell["outputs"], directory)
    return notebook


def as_seen(outputs: list[dict[str, Any]], directory: Path) -> list[dict[str, Any]]:
    """Join what was written to both streams, as a terminal shows it, without this run's directory."""
    kept: list[dict[str, Any]] = []
    for output in outputs:
        if output["output_type"] != "stream":
            kept.append({**output, "execution_count": None})
        elif kept and kept[-1]["output_type"] == "stream":
            kept[-1]["text"] += "".join(output["text"])
        else:
            kept.append({**output, "name": "stdout", "text": "".join(output["text"])})
    for output in kept:
        if output["output_type"] == "stream":
            text = shown(output["text"]).replace(f"{directory}/", "")
            output["text"] = text.splitlines(keepends=True)
    return [each for each in kept if each.get("text") != []]


def shown(text: str) -> str:  # of a line that was written again, the last
    # A kernel sends stderr, which has this line, before or after the end of stdout's line.
    text = re.sub("drivetrain: curves: .*\n", "", text.replace("\r\n", "\n"))
    lines = [[part for part in line.split("\r") if part.strip()] for line in text.split("\n")]
    last = [parts[-1].strip() if len(parts) > 1 else "".join(parts).rstrip() for parts in lines]
    # transformers, which torchmetrics loads where it is installed, has tqdm warn that ipywidgets is not.
    text = "\n".join(line for line in last if "ipywidgets" not in line and "notebook_tqdm" not in line)
    return text if text.strip() else ""


def printed(cell: dict[str, Any]) -> str:
    parts = [each.get("text") or each["data"]["text/plain"] for each in cell["outputs"]]
    return "\n".join("".join(each) for each in parts)


def in_meaning(text: str) -> list[str]:  # without numbers and units of time
    return [re.sub(r"# (s|ms|min)\b", "# s", line) for line in masked(text)]


@pytest.mark.nightly
@pytest.mark.skipif(
    not torch.distributed.is_gloo_available() or sys.platform != "linux", reason="needs gloo and a safe fork"
)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_stores(path: Path, tmp_path: Path) -> None:
    stored = json.loads(path.read_text(encoding="utf-8"))
    found = executed(path, tmp_path)
    for before, after in zip(stored["cells"], found["cells"], strict=True):
        if before["cell_type"] == "code":
            assert in_meaning(printed(after)) == in_meaning(printed(before)), "".join(before["source"])


def test_the_map_names_each_notebook_which_has_outputs_and_no_place_of_a_machine() -> None:
    text = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    assert len(NOTEBOOKS) == 4
    wrong = [path.name for path in NOTEBOOKS if f"tutorials/{path.name}" not in text]
    for path in NOTEBOOKS:
        source = path.read_text(encoding="utf-8")
        cells = json.loads(source)["cells"]
        outputs = [each["output_type"] for cell in cells for each in cell.get("outputs", ())]
        wrong += [] if outputs and "error" not in outputs else [f"{path.name}: outputs"]
        for cell in cells:
            prose = "".join(cell["source"]) if cell["cell_type"] == "markdown" else ""
            links = re.findall(r"\]\((?![a-z]+:)([^)\s#]+)", prose)
            wrong += [each for each in links if not (path.parent / each).exists()]
        wrong += re.findall(r"(?:/home|/Users|/root|/work|/tmp|/mnt)/[\w./-]*", source)
    assert not wrong


if __name__ == "__main__":
    wanted = sys.argv[1:] or [path.stem for path in NOTEBOOKS]
    for each in NOTEBOOKS:
        if each.stem in wanted:
            with tempfile.TemporaryDirectory() as temporary:
                text = json.dumps(executed(each, Path(temporary)), indent=1, ensure_ascii=False)
            each.write_text(text + "\n", encoding="utf-8")
