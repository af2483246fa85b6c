"""The projects of docs/how-to/lightning-projects.md, before and after; `make libraries` runs them."""

import importlib.util
import os
import re
from pathlib import Path

import pytest
from tests.support.forked import run_forked, undisturbed

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "how-to" / "lightning-projects.md"

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(
        not (importlib.util.find_spec("hydra") and importlib.util.find_spec("typeshed_client")),
        reason="hydra-core and jsonargparse's signatures are not installed; `make libraries` installs them",
    ),
]


@pytest.fixture(autouse=True)
def project(tmp_path, monkeypatch):  # the files of the page, in the working directory
    monkeypatch.chdir(tmp_path)
    for match in re.finditer(r"^```\w+\n# file: (\S+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S):
        path = tmp_path / match[1]
        path.parent.mkdir(exist_ok=True)
        path.write_text(match[2])


def run(*words):
    paths = [str(Path.cwd()), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**undisturbed(), "PYTHONPATH": os.pathsep.join(paths)}
    done = run_forked(words, Path.cwd(), environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return re.findall(r"^val/loss [\d.]+$", done.stdout, re.M)


def test_a_project_with_hydra_has_the_same_loss_afterwards_and_resumes():
    changed = ["trainer.max_epochs=3", "model.hidden=16"]
    (loss,) = run("hydra_before.py", *changed)
    assert run("hydra_after.py", *changed, "hydra.run.dir=ours") == [loss]
    (checkpoint,) = [path.parent for path in Path("ours").rglob("manifest.json")][-1:]
    four = ["trainer.max_epochs=4", "model.hidden=16"]
    assert run("hydra_after.py", *four, f"ckpt_path={checkpoint.absolute()}") == run("hydra_before.py", *four)
    both = run("hydra_after.py", "--multirun", "trainer.max_epochs=1,2")
    assert both == run("hydra_before.py", "--multirun", "trainer.max_epochs=1,2")


def test_a_project_with_lightnings_cli_has_the_same_loss_afterwards():
    changed = ["--config", "config.yaml", "--trainer.max_epochs", "3", "--model.hidden", "16"]
    assert run("cli_after.py", *changed) == run("cli_before.py", "fit", *changed) != []
