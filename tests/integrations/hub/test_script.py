"""A script for transformers' Trainer pushes its model."""

from __future__ import annotations

import json
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
    with pytest.raises(ConfigError, match=r"push_to_hub\(dataset_tag=.*Did you mean 'dataset_tags'"):
        made.push_to_hub(dataset_tag="glue")
    assert made.push_to_hub(license="mit").startswith(hub.address)
    uploaded = huggingface_hub.HfApi(endpoint=hub.address).list_repo_files("me/script")
    assert {"model.safetensors", "README.md", "config.json"} <= set(uploaded)


def test_the_card_and_the_message_of_transformers_examples(
    hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    args = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=1,
        eval_strategy="epoch",
        hub_model_id="me/examples",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = rows("bert, classes", 8)
    made = Trainer(model("bert, classes"), args, padded, data, data)
    made.train()
    made.push_to_hub(
        commit_message="Training complete",
        blocking=False,
        model_name="a reader",
        language="en",
        finetuned_from="org/base",
        tasks=["text-classification", "fill-mask"],
        tags="short",
        dataset_tags="glue",
        dataset_args="mrpc",
        dataset="GLUE MRPC",
    )
    api = huggingface_hub.HfApi(endpoint=hub.address)
    path = api.hf_hub_download("me/examples", "README.md", local_dir=tmp_path / "got")
    card = huggingface_hub.ModelCard(Path(path).read_text())
    assert "# a reader" in card.text
    assert "It started from `org/base`. It was trained on `GLUE MRPC`." in card.text
    found = card.data
    assert (found.language, found.base_model, found.datasets) == ("en", "org/base", ["glue"])
    assert found.pipeline_tag == "text-classification"
    assert {"short", "fill-mask"} <= set(found.tags)
    result = found.eval_results[0]
    assert found.model_name == "a reader"
    assert (result.dataset_type, result.dataset_name, result.dataset_args) == ("glue", "GLUE MRPC", "mrpc")
    repository = json.loads((hub.folder / "repositories" / "me--examples.json").read_text())
    assert repository["messages"] == ["Training complete"]
