"""A script for transformers' Trainer pushes its model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from drivetrain.core.errors import ConfigError

huggingface_hub = pytest.importorskip("huggingface_hub")
transformers = pytest.importorskip("transformers")

from tests.integrations.transformers.families import model, padded, rows  # noqa: E402

from drivetrain.integrations.transformers import Trainer  # noqa: E402

pytestmark = [
    pytest.mark.full,
    # The Hub's own client calls its HTTP library so.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]


def test_a_script_pushes_its_model(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which accelerate sets
    args = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=1,
        hub_model_id="me/script",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    made = Trainer(model("bert, classes"), args, padded, rows("bert, classes", 8))
    made.train()
    with pytest.raises(ConfigError, match=r"push_to_hub\(commit_message\)"):
        made.push_to_hub(commit_message="mine")
    assert made.push_to_hub(license="mit").startswith(hub.address)
    uploaded = huggingface_hub.HfApi(endpoint=hub.address).list_repo_files("me/script")
    assert {"model.safetensors", "README.md", "config.json"} <= set(uploaded)
