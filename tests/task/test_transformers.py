"""Models of Hugging Face, which compute their own loss, as tasks: predictions, metrics and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.ranks import on_two_ranks
from tests.support.tasks import quiet
from torch import Tensor
from torch.utils.data import DataLoader

from drivetrain import LambdaCallback, OptimizerConfig, TaskModule
from drivetrain.checkpoint.prediction_files import read_predictions

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()  # whose thread would stay
torchmetrics = pytest.importorskip("torchmetrics.classification")

BERT = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_labels": 3,
}
GPT2 = {"vocab_size": 99, "n_embd": 16, "n_layer": 1, "n_head": 2}


def words(generator: torch.Generator) -> Tensor:
    return torch.randint(1, 99, (6,), generator=generator)


def classified(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": words(generator), "labels": torch.randint(3, (), generator=generator)}


def continued(generator: torch.Generator) -> dict[str, Tensor]:
    given = words(generator)
    return {"input_ids": given, "labels": given.clone()}


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[torch.Generator], dict[str, Tensor]]]] = {
    "bert": (lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**BERT)), classified),
    "gpt2": (lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)), continued),
}


class Wrapped(TaskModule):
    """The shortest task for a model that computes its own loss; forward gets `options` too."""

    def __init__(self, family: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model, self.options = FAMILIES[family][0](), options

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch, **self.options)

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.1)


class Scored(Wrapped):
    """As `Wrapped`, with a metric."""

    def metrics(self) -> Mapping[str, Any]:
        return {"accuracy": torchmetrics.MulticlassAccuracy(3, average="micro")}


class Written(Scored):
    """As `Scored`, with a loss and inputs of the metric by hand."""

    def loss(self, outputs: Any, batch: Any) -> Tensor:
        return torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])

    def metric_inputs(self, outputs: Any, batch: Any) -> Any:
        return outputs.logits, batch["labels"]


def batches(family: str, count: int = 8, size: int = 4) -> DataLoader[Any]:
    """A loader of samples for a family."""
    generator = torch.Generator().manual_seed(5)
    samples: Any = [FAMILIES[family][1](generator) for _ in range(count)]
    return DataLoader(samples, batch_size=size)


@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_are_the_models_own_outputs(family: str, tmp_path: Path) -> None:
    task = Wrapped(family).eval()
    with torch.no_grad():
        right = [task(**batch) for batch in batches(family)]
    found = [quiet().predict(task, batches(family))]
    if family != "gpt2":  # whose cache of keys and values is no tensor, and cannot be stored
        files = quiet().predict(task, batches(family), save_to=tmp_path)
        found.append([read_predictions(file) for file in files])
    for outputs in found:
        for one, other in zip(outputs, right, strict=True):
            assert type(one) is type(other)
            assert list(one) == list(other)
            assert torch.equal(one.logits, other.logits)
            assert torch.equal(one.loss, other.loss)


def test_predictions_on_ranks_and_in_parts_are_the_models_own_outputs() -> None:
    def predicted() -> bool:
        kept = quiet().predict(Wrapped("bert"), batches("bert"))
        both = quiet(strategy="ddp", devices=2).predict(Wrapped("bert"), batches("bert"))
        return all(
            type(one) is type(two) and one.logits.equal(two.logits)
            for one, two in zip(kept, both, strict=True)
        )

    assert on_two_ranks(predicted) == [True, True]
    task = Wrapped("bert", output_hidden_states=True)
    data = [{"input_ids": each["input_ids"]} for each in batches("bert", 15, 5)]
    parts = quiet(micro_batch=2).predict(task, data)
    for whole, joined in zip(quiet().predict(task, data), parts, strict=True):
        assert type(joined) is type(whole)
        torch.testing.assert_close(joined.logits, whole.logits)
        torch.testing.assert_close(joined.hidden_states, whole.hidden_states)


def test_a_task_needs_no_loss_and_no_metric_inputs_of_its_own() -> None:
    written, *others = (
        quiet(max_steps=4, log_every=1).fit(task, batches("bert"), batches("bert", 6)).metrics
        for task in (Written("bert"), Scored("bert"), Scored("bert", return_dict=False))
    )
    for metrics in others:
        assert metrics.keys() == written.keys() >= {"train/accuracy", "validation/accuracy"}
        for name, value in metrics.items():
            assert value == pytest.approx(written[name], rel=1e-5), name


def saved(strategy: Any, family: str, directory: Path) -> dict[str, float]:
    """Train with metrics, and write the model as its library does in the middle; what the training logged."""
    values: dict[str, float] = {}

    def save(run: Any) -> None:
        if run.progress.updates == 2:
            state = run.full_state_dict(run.task.model)
            assert bool(state) == (run.engine.ranks.rank == 0)
            if state:
                run.task.model.save_pretrained(directory, state_dict=state)

    note = LambdaCallback(on_log=lambda run: values.update(run.logged), on_step_end=save)
    task = Scored(family) if family == "bert" else Wrapped(family)
    options = {"strategy": strategy, "devices": 2, "max_steps": 4, "log_every": 1}
    quiet(callbacks=[note], **options).fit(task, batches(family, size=2))
    return {name: value for name, value in values.items() if not name.startswith("time")}


@pytest.mark.parametrize("family", ["bert", pytest.param("gpt2", marks=pytest.mark.nightly)])
def test_a_callback_saves_a_sharded_model_as_its_library_does(family: str, tmp_path: Path) -> None:
    for strategy in ("ddp", "fsdp"):
        first, second = on_two_ranks(saved, strategy, family, tmp_path / strategy)
        assert first == second
    kind: Any = type(FAMILIES[family][0]())
    ddp, fsdp = (kind.from_pretrained(tmp_path / strategy) for strategy in ("ddp", "fsdp"))
    torch.testing.assert_close(ddp.state_dict(), fsdp.state_dict(), rtol=1e-4, atol=1e-5)
    assert ddp.config.architectures == fsdp.config.architectures == [kind.__name__]
