"""What is uploaded of a model of transformers is what `from_pretrained` loads."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from tests.support.tasks import quiet

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
datasets = pytest.importorskip("datasets")

from tests.integrations.hub.test_hub import REPOSITORY, downloaded  # noqa: E402
from tests.integrations.transformers.families import model, padded, rows  # noqa: E402

from drivetrain.integrations.hub import CardData, Publish, push  # noqa: E402
from drivetrain.integrations.transformers import TransformersTask  # noqa: E402

if TYPE_CHECKING:
    from conftest import Hub

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft's
]


def reviews() -> Any:
    """A set as `load_dataset("org/reviews")` returns it."""
    listed = [{"input_ids": each["input_ids"].tolist(), "label": 1} for each in rows("bert, classes", 1) * 4]
    found = datasets.Dataset.from_list(listed).with_format("torch")
    found.info.download_checksums = {"hf://datasets/org/reviews@0a1b/data/train.parquet": {}}
    return found


def test_a_published_model_is_loaded_by_from_pretrained(hub: Hub, tmp_path: Path) -> None:
    task = TransformersTask(model("bert, classes"))
    publish = Publish(REPOSITORY, card=CardData(pipeline_tag="text-classification"))
    run = {"max_steps": 1, "run_dir": tmp_path / "run", "checkpoint": True, "batch_size": 2}
    quiet(callbacks=[publish], **run).fit(task, reviews(), reviews())
    folder = downloaded(tmp_path / "downloaded")
    kind = transformers.BertForSequenceClassification
    found, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report.values())
    given = padded(rows("bert, classes", 2))
    with torch.no_grad():
        assert torch.equal(found.eval()(**given).logits, task.model.eval()(**given).logits)
    card = (folder / "README.md").read_text()
    assert 'BertForSequenceClassification.from_pretrained("org/line")' in card
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["library_name"], head["datasets"]) == ("transformers", ["org/reviews"])
    (result,) = head["model-index"][0]["results"]
    assert result["task"]["type"] == "text-classification"
    assert [each["type"] for each in result["metrics"]] == ["loss"]


def test_an_adapter_is_pushed_as_pefts_own_files(hub: Hub, tmp_path: Path) -> None:
    base = model("bert, classes")
    base.config._name_or_path = base.name_or_path = "org/base"
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    task = TransformersTask(peft.get_peft_model(base, config))
    quiet(max_steps=1, run_dir=tmp_path / "run", checkpoint=True, batch_size=2).fit(task, reviews())
    push(tmp_path / "run", REPOSITORY)
    folder = downloaded(tmp_path / "downloaded")
    loaded = peft.PeftModel.from_pretrained(model("bert, classes"), folder)
    for name, each in loaded.state_dict().items():
        assert torch.equal(each, task.model.state_dict()[name])
    assert not (folder / "model.safetensors").exists()
    head = yaml.safe_load((folder / "README.md").read_text().split("---\n")[1])
    assert (head["library_name"], head["base_model"]) == ("peft", "org/base")
