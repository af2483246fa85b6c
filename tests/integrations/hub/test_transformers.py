"""Models of transformers on the Hub: their folders, adapters, and scripts that push."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.hub.test_hub import REPOSITORY, downloaded, head_of
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model, padded, rows
from tests.support.tasks import quiet

from drivetrain.core.errors import ConfigError
from drivetrain.integrations.hub import CardData, Publish, push

hf = Lazy("drivetrain.integrations.transformers")
peft = Lazy("peft")
transformers = Lazy("transformers")

pytestmark = [
    pytest.mark.usefixtures("transformers_library"),
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft's
]


def reviews() -> Any:  # a set as `load_dataset("org/reviews")` returns it
    import datasets

    listed = [{"input_ids": each["input_ids"].tolist(), "label": 1} for each in rows("bert, classes", 1) * 4]
    found = datasets.Dataset.from_list(listed).with_format("torch")
    found.info.download_checksums = {"hf://datasets/org/reviews@0a1b/data/train.parquet": {}}
    return found


@pytest.mark.landing
def test_from_pretrained_loads_a_published_model(hub: Any, tmp_path: Path) -> None:
    task = hf.TransformersTask(model("bert, classes"))
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
    head = head_of(card)
    assert (head["library_name"], head["datasets"]) == ("transformers", ["org/reviews"])
    (result,) = head["model-index"][0]["results"]
    assert result["task"]["type"] == "text-classification"
    assert [each["type"] for each in result["metrics"]] == ["loss"]


def test_push_uploads_an_adapter_as_pefts_own_files(hub: Any, tmp_path: Path) -> None:
    base = model("bert, classes")
    base.config._name_or_path = base.name_or_path = "org/base"
    config = peft.LoraConfig(r=2, target_modules=["query"], task_type="SEQ_CLS")
    task = hf.TransformersTask(peft.get_peft_model(base, config))
    quiet(max_steps=1, run_dir=tmp_path / "run", checkpoint=True, batch_size=2).fit(task, reviews())
    push(tmp_path / "run", REPOSITORY)
    folder = downloaded(tmp_path / "downloaded")
    loaded = peft.PeftModel.from_pretrained(model("bert, classes"), folder)
    for name, each in loaded.state_dict().items():
        assert torch.equal(each, task.model.state_dict()[name])
    assert not (folder / "model.safetensors").exists()
    head = head_of((folder / "README.md").read_text())
    assert (head["library_name"], head["base_model"]) == ("peft", "org/base")


def test_push_to_hub_of_a_script_has_the_card_and_message_of_transformers(hub: Any, tmp_path: Path) -> None:
    import huggingface_hub

    options: dict[str, Any] = {"max_steps": 2, "hub_model_id": "me/examples", "use_cpu": True}
    options |= {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "score", "report_to": "none"}
    args = transformers.TrainingArguments(str(tmp_path / "run"), disable_tqdm=True, **options)
    data = rows("bert, classes", 8)
    scores = iter((2, 1))
    score = {"compute_metrics": lambda _: {"score": next(scores)}}
    made = hf.Trainer(model("bert, classes"), args, padded, data, data, **score)
    made.train()
    with pytest.raises(ConfigError, match=r"push_to_hub\(dataset_tag=.*Did you mean 'dataset_tags'"):
        made.push_to_hub(dataset_tag="glue")
    given = {"model_name": "a reader", "language": "en", "finetuned_from": "org/base", "tags": "short"}
    given |= {"dataset_tags": "glue", "dataset_args": "mrpc", "dataset": "GLUE MRPC"}
    tasks = ["text-classification", "fill-mask"]
    pushed = made.push_to_hub(commit_message="Training complete", blocking=False, tasks=tasks, **given)
    assert pushed.startswith(hub.address)
    api = huggingface_hub.HfApi(endpoint=hub.address)
    assert {"model.safetensors", "README.md", "config.json"} <= set(api.list_repo_files("me/examples"))
    path = api.hf_hub_download("me/examples", "README.md", local_dir=tmp_path / "got")
    card = huggingface_hub.ModelCard(Path(path).read_text())
    assert "# a reader" in card.text
    assert "It started from `org/base`. It was trained on `GLUE MRPC`." in card.text
    found = card.data
    assert (found.language, found.base_model, found.datasets) == ("en", "org/base", ["glue"])
    assert {"short", "fill-mask"} <= set(found.tags)
    made.push_to_hub()  # the best one, and not the newest
    assert hub.commits("me--examples") == ["Training complete", "Upload step-00000001"]
