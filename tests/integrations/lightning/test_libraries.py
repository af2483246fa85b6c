"""Modules of libraries built on Lightning, under Lightning's Trainer and ours; `make libraries` runs them."""

import importlib.util
import os
from pathlib import Path

import pytest
from tests.support.forked import run_forked, undisturbed

ROOT = Path(__file__).parents[3]
OTHERWISE = {  # what docs/explanation/lightning-numbers.md says of values that Lightning logs otherwise
    "MPNN": "val/mae, val/rmse, val_loss",
    "ReverseDistillation": "train_loss_epoch",
    "Fastflow": "train_loss_epoch",
    "Ganomaly": "discriminator_loss_epoch, generator_loss_epoch",
}
LIBRARIES = {  # how each is imported, and the number of its modules
    "anomalib": ("anomalib", 5),
    "chemprop": ("chemprop", 1),
    "darts": ("darts", 3),
    "gluonts": ("gluonts", 3),
    "lightly": ("lightly", 1),
    "mlcolvar": ("mlcolvar", 5),
    "nequip": ("nequip", 2),
    "neuralforecast": ("neuralforecast", 3),
    "pyannote.audio": ("pyannote", 2),
    "pytorch-forecasting": ("pytorch_forecasting", 3),
    "pytorch-tabular": ("pytorch_tabular", 3),
    "scvi-tools": ("scvi", 3),
    "torchgeo": ("torchgeo", 2),
}


@pytest.mark.nightly
@pytest.mark.parametrize("library", LIBRARIES)
def test_each_module_of_a_library_trains_unchanged_to_the_weights_of_lightning(library, tmp_path):
    imported, count = LIBRARIES[library]
    if importlib.util.find_spec(imported) is None:
        pytest.skip(f"{library} is not installed; `make libraries` installs it")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**undisturbed(), "PYTHONPATH": os.pathsep.join(paths)}
    words = [str(ROOT / "benchmarks" / "lightning_libraries.py"), library]
    done = run_forked(words, tmp_path, environment, timeout=1800)
    rows = [
        line.strip("| ").split(" | ") for line in done.stdout.splitlines() if line.startswith(f"| {library} ")
    ]
    assert len(rows) == count, done.stdout + done.stderr[-4000:]
    for _, module, unchanged, weights, otherwise in rows:
        assert (unchanged, weights, otherwise) == ("yes", "0.0e+00", OTHERWISE.get(module, "none")), rows
