"""Models of Hugging Face, which compute their own loss, as tasks: predictions, metrics and weights."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import OptimizerConfig, TaskModule

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()  # whose thread would stay
torchmetrics = pytest.importorskip("torchmetrics.classification")

BERT = dict.fromkeys(("hidden_size", "intermediate_size"), 16) | {"vocab_size": 99, "num_labels": 3}
BERT |= {"num_hidden_layers": 1, "num_attention_heads": 2}


class Wrapped(TaskModule):  # the shortest task for a model that computes its own loss
    def __init__(self, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = transformers.BertForSequenceClassification(transformers.BertConfig(**BERT))
        self.options = options

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch, **self.options)

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.1)


class Scored(Wrapped):
    def metrics(self) -> Mapping[str, Any]:
        return {"accuracy": torchmetrics.MulticlassAccuracy(3, average="micro")}


class Written(Scored):  # as `Scored`, with a loss and inputs of the metric by hand
    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])

    def metric_inputs(self, outputs: Any, batch: Any) -> Any:
        return outputs.logits, batch["labels"]


def batches(count: int = 8, size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(5)
    draw = lambda high, *shape: torch.randint(high, shape, generator=generator)  # noqa: E731
    samples: Any = [{"input_ids": draw(99, 6), "labels": draw(3)} for _ in range(count)]
    return DataLoader(samples, batch_size=size)


def test_a_task_needs_no_loss_and_no_metric_inputs_of_its_own() -> None:
    fit = lambda task: quiet(max_steps=4, log_every=1).fit(task, batches(), batches(6)).metrics  # noqa: E731
    written, *others = map(fit, (Written(), Scored(), Scored(return_dict=False)))
    for metrics in others:
        assert metrics.keys() == written.keys() >= {"train/accuracy", "validation/accuracy"}
        for name, value in metrics.items():
            assert value == pytest.approx(written[name], rel=1e-5), name
