"""What three libraries write to experiment trackers: the table of docs/how-to/trackers.md.

    .venv-trackers/bin/python benchmarks/trackers.py [--only wandb mlflow] [--keep FOLDER]

For each tracker that is installed and each library, benchmarks/tracker_fits.py is run three times: a fit
that is killed after step 8, its resume from the checkpoint of step 6, and a fit of two ranks. They need no
network, and run in a repository of Git whose remote has a password, with another one on the command line and
a third in the environment. Then benchmarks/tracker_stores.py reads what the tracker has stored.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tracker_stores import READERS, Found

PACKAGES = {
    "wandb": "wandb",
    "mlflow": "mlflow",
    "tensorboard": "tensorboard",
    "comet": "comet_ml",
    "aim": "aim",
    "clearml": "clearml",
    "swanlab": "swanlab",
    "neptune": "neptune",
    "trackio": "trackio",
}
LIBRARIES = ("drivetrain", "lightning", "transformers")
LACKING = {
    "lightning": {"clearml", "neptune", "trackio"},
    "transformers": set[str](),
}
"""The trackers for which there is no logger, neither in the library nor in the package of the tracker."""

SECRETS = {"remote": "hidden-remote", "argument": "hidden-argument", "environment": "hidden-environment"}
HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def _environment(folder: Path, tracker: str) -> dict[str, str]:
    """The trackers' own switches for a fit without a network."""
    offline = {
        "WANDB_MODE": "offline",
        "WANDB_TAGS": "baseline",
        "WANDB_LOG_MODEL": "checkpoint",
        "WANDB_X_STATS_SAMPLING_INTERVAL": "0.5",
        "WANDB_SILENT": "true",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/mlflow.db",
        "_MLFLOW_SERVER_ARTIFACT_ROOT": str(folder / "artifacts"),
        "MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "true",
        "MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.5",
        "MLFLOW_TAGS": '{"kind": "baseline"}',
        "MLFLOW_EXPERIMENT_NAME": "lines",
        "HF_MLFLOW_LOG_ARTIFACTS": "1",
        "COMET_START_ONLINE": "false",
        "COMET_LOG_ASSETS": "true",
        "COMET_OFFLINE_DIRECTORY": str(folder),
        "COMET_DISABLE_AUTO_LOGGING": "0" if tracker == "comet" else "1",
        "CLEARML_OFFLINE_MODE": "1",
        "CLEARML_LOG_MODEL": "0",  # what it does with a checkpoint fails offline
        "CLEARML_CACHE_DIR": str(folder / "clearml"),
        "SWANLAB_MODE": "offline",
        "SWANLAB_LOG_DIR": str(folder / "swanlog"),
        "NEPTUNE_MODE": "offline",
        "NEPTUNE_PROJECT": "a/lines",
        "TRACKIO_DIR": str(folder / "trackio"),
        "HF_HUB_OFFLINE": "1",
        "MPLCONFIGDIR": str(
            Path.home() / ".config" / "matplotlib"
        ),  # with its fonts, for which it looks long
    }
    path = os.pathsep.join([str(ROOT / "package"), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {
        "HOME": str(folder),
        "PYTHONPATH": path,
        "MY_API_TOKEN": SECRETS["environment"],
        "OMP_NUM_THREADS": "1",
    }
    return {**os.environ, **offline, **own}


def _fit(library: str, tracker: str, folder: Path, *options: str, ranks: int = 1) -> None:
    words = ["train.py", library, tracker, "--key", f"https://me:{SECRETS['argument']}@example.org", *options]
    if ranks > 1:
        words = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", *words]
    log = folder / "output.txt"
    with log.open("a") as output:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=folder,
            env=_environment(folder, tracker),
            stdout=output,
            stderr=output,
            timeout=600,
        )
    if done.returncode != 0 and "--dies" not in options:
        raise RuntimeError(log.read_text()[-3000:])


def _begin(folder: Path) -> str:
    """Make a repository of Git with the program, and return its commit."""
    (folder / "train.py").write_text((HERE / "tracker_fits.py").read_text())
    (folder / ".gitignore").write_text("*\n!train.py\n")
    author = ("-c", "user.name=me", "-c", "user.email=me@example.org")
    remote = f"https://me:{SECRETS['remote']}@example.org/lines.git"
    for words in (
        ("init", "-q"),
        ("remote", "add", "origin", remote),
        ("add", "train.py"),
        (*author, "commit", "-qm", "x"),
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    done = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def _leaks(folder: Path) -> list[str]:
    """Which secrets a file outside the repository's own folder has."""
    found = set()
    for path in folder.rglob("*"):
        if path.is_file() and ".git" not in path.parts:
            content = path.read_bytes()
            if zipfile.is_zipfile(path):
                with zipfile.ZipFile(path) as archive:
                    content += b"".join(archive.read(each) for each in archive.namelist())
            found |= {name for name, secret in SECRETS.items() if secret.encode() in content}
    return sorted(found)


def compare(library: str, tracker: str, options: argparse.Namespace) -> list[str]:
    """Run a library's fits with a tracker; return the cells of its row."""
    base = Path(tempfile.mkdtemp(prefix=f"{tracker}-{library}-", dir=options.keep)).resolve()
    one, two = base / "one", base / "two"
    one.mkdir()
    two.mkdir()
    commit = _begin(one)
    _fit(library, tracker, one, "--dies", "8")
    _fit(library, tracker, one)
    leaks = _leaks(one)  # before Aim packs its files
    found = READERS[tracker](one)
    if options.verbose:
        print(f"{tracker} {library}: {found}", file=sys.stderr)
    ranks = "not run"
    if not options.no_ranks:
        _begin(two)
        if tracker == "mlflow":  # two processes that make a new database at once get in each other's way
            words = "import mlflow; mlflow.MlflowClient().search_experiments()"
            subprocess.run([sys.executable, "-c", words], env=_environment(two, tracker), check=True)
        _fit(library, tracker, two, ranks=2)
        runs = len(READERS[tracker](two).runs)
        ranks = "one run" if runs == 1 else f"{runs} runs"
    return [*_cells(found, commit), ranks, ", ".join(leaks) or "none"]


def _cells(found: Found, commit: str) -> list[str]:
    losses = [
        steps
        for name, steps in found.values.items()
        if "loss" in name and "eval" not in name and "val" not in name
    ]
    steps = Counter(max(losses, key=len, default=[]))
    twice = sum(number - 1 for number in steps.values())
    resume = "the same run" if len(found.runs) == 1 else f"{len(found.runs)} runs"
    if twice:
        resume += f", {twice} step{'s' * (twice > 1)} twice"
    if (lost := 10 - len(steps)) > 0:
        resume += f", {lost} steps lost"
    has_commit = commit in found.commit or found.commit == commit[:7]
    return [
        str(len(found.values)),
        str(len(found.config)),
        "yes" if found.media else "no",
        str(len(found.system)) if found.system else "no",
        "yes" if has_commit else "setting" if "commit" in str(found.config) else "no",
        "yes" if "baseline" in str(found.tags) else "no",
        str(len(found.files)) if found.files else "no",
        resume,
    ]


COLUMNS = (
    *("tracker", "values", "settings", "pictures", "machine", "commit", "tags", "files", "after a kill"),
    *("two ranks", "secrets"),
)


def _row(tracker: str, options: argparse.Namespace) -> list[str]:
    """Each cell has what the libraries write, in their order; one text where all write the same."""

    def cells_of(library: str) -> list[str]:
        cells = ["-"] * (len(COLUMNS) - 1)
        if tracker not in LACKING.get(library, ()):
            try:
                cells = compare(library, tracker, options)
            except Exception as error:
                print(f"{tracker} with {library}: {error}", file=sys.stderr)
                cells = ["fails"] * len(cells)
        print(" | ".join([tracker, library, *cells]), file=sys.stderr, flush=True)
        return cells

    with ThreadPoolExecutor() as pool:
        columns = zip(*pool.map(cells_of, options.libraries), strict=True)
    return [tracker, *(each[0] if len({*each}) == 1 else " / ".join(each) for each in columns)]


def main() -> None:
    """Compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=[*PACKAGES], default=[*PACKAGES])
    parser.add_argument("--libraries", nargs="+", choices=LIBRARIES, default=LIBRARIES)
    parser.add_argument("--keep", type=Path, help="a folder for the stores, which is not deleted")
    parser.add_argument("--no-ranks", action="store_true", help="leave out the fit of two ranks")
    parser.add_argument("--verbose", action="store_true", help="print all that is found")
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}", flush=True)
    for tracker in options.only:
        if importlib.util.find_spec(PACKAGES[tracker]) is None:
            print(f"{PACKAGES[tracker]} is not installed", file=sys.stderr)
            continue
        print(f"| {' | '.join(_row(tracker, options))} |", flush=True)


if __name__ == "__main__":
    main()
