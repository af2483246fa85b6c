"""Models of Hugging Face, which compute their own loss, as tasks: predictions, metrics and weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.tasks import quiet
from torch import Tensor, nn
from torch.utils.data import DataLoader

from drivetrain import Callback, LambdaCallback, OptimizerConfig, TaskModule
from drivetrain.checkpoint.prediction_files import read_predictions
from drivetrain.testing import run_distributed

transformers = pytest.importorskip("transformers")
transformers.utils.logging.disable_progress_bar()  # whose thread would stay
torchmetrics = pytest.importorskip("torchmetrics.classification")

SMALL = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 16,
    "num_labels": 3,
}
AUDIO = {
    **SMALL,
    "conv_dim": (8, 8),
    "conv_kernel": (3, 3),
    "conv_stride": (2, 2),
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "feat_extract_norm": "layer",
}
IMAGES = {**SMALL, "image_size": 8, "patch_size": 4}
T5 = {
    "vocab_size": 99,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 16,
    "num_layers": 1,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}


def words(generator: torch.Generator, length: int = 6) -> Tensor:
    return torch.randint(1, 99, (length,), generator=generator)


def classified(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_ids": words(generator), "labels": torch.randint(3, (), generator=generator)}


def tagged(generator: torch.Generator) -> dict[str, Tensor]:
    labels = torch.randint(3, (6,), generator=generator)
    labels[4:] = -100
    return {"input_ids": words(generator), "labels": labels}


def continued(generator: torch.Generator) -> dict[str, Tensor]:
    given = words(generator)
    return {"input_ids": given, "labels": given.clone()}


def pictured(generator: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(3, 8, 8, generator=generator),
        "labels": torch.randint(3, (), generator=generator),
    }


def spoken(generator: torch.Generator) -> dict[str, Tensor]:
    return {"input_values": torch.randn(80, generator=generator), "labels": words(generator, 4)}


def adapted() -> Any:
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(FAMILIES["bert"][0](), peft.LoraConfig(r=2, target_modules=["query", "value"]))


FAMILIES: dict[str, tuple[Callable[[], Any], Callable[[torch.Generator], dict[str, Tensor]]]] = {
    "bert": (
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**SMALL)),
        classified,
    ),
    "bert, tokens": (
        lambda: transformers.BertForTokenClassification(transformers.BertConfig(**SMALL)),
        tagged,
    ),
    "gpt2": (
        lambda: transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2)
        ),
        continued,
    ),
    "t5": (lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)), continued),
    "vit": (lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**IMAGES)), pictured),
    "wav2vec2": (lambda: transformers.Wav2Vec2ForCTC(transformers.Wav2Vec2Config(**AUDIO)), spoken),
    "lora": (adapted, classified),
}


class Wrapped(TaskModule):
    """The shortest task for a model that computes its own loss.

    Args:
        family: Its name in `FAMILIES`.
        options: What forward is given in addition.
    """

    def __init__(self, family: str, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = FAMILIES[family][0]()
        self.options = options

    def forward(self, **batch: Any) -> Any:
        return self.model(**batch, **self.options)

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("sgd", lr=0.1)


class Scored(Wrapped):
    """As `Wrapped`, with a metric."""

    def metrics(self) -> Mapping[str, Any]:
        return {"accuracy": torchmetrics.MulticlassAccuracy(3, average="micro")}


def batches(family: str, count: int = 8, size: int = 4) -> DataLoader[Any]:
    """A loader of samples for a family."""
    generator = torch.Generator().manual_seed(5)
    samples: Any = [FAMILIES[family][1](generator) for _ in range(count)]
    return DataLoader(samples, batch_size=size)


def weights(task: nn.Module) -> dict[str, Tensor]:
    """Copies of a task's weights."""
    return {name: each.detach().clone() for name, each in task.state_dict().items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_are_the_models_own_outputs(family: str, tmp_path: Path) -> None:
    task = Wrapped(family).eval()
    with torch.no_grad():
        right = [task(**batch) for batch in batches(family)]
    kept = quiet().predict(task, batches(family))
    files = []
    if family not in ("gpt2", "t5"):  # a cache of keys and values is no tensor, and cannot be stored
        files = quiet().predict(task, batches(family), save_to=tmp_path)
    for outputs in (kept, [read_predictions(file) for file in files] or kept):
        assert [type(each) for each in outputs] == [type(each) for each in right]
        for one, other in zip(outputs, right, strict=True):
            assert list(one) == list(other)
            assert torch.equal(one.logits, other.logits)
            assert torch.equal(one.loss, other.loss)


def predicted() -> bool:
    """Whether the predictions on one of two ranks are those of one process."""
    kept = quiet().predict(Wrapped("bert"), batches("bert"))
    both = quiet(strategy="ddp", devices=2).predict(Wrapped("bert"), batches("bert"))
    same = [
        type(one) is type(two) and one.logits.equal(two.logits) for one, two in zip(kept, both, strict=True)
    ]
    return all(same)


def test_all_ranks_get_the_models_own_outputs() -> None:
    assert run_distributed(predicted) == [True, True]


def test_outputs_of_parts_are_joined() -> None:
    task = Wrapped("bert", output_hidden_states=True)
    data = [{"input_ids": each["input_ids"]} for each in batches("bert", 15, 5)]
    for whole, joined in zip(
        quiet().predict(task, data), quiet(micro_batch=2).predict(task, data), strict=True
    ):
        assert type(joined) is type(whole)
        torch.testing.assert_close(joined.logits, whole.logits)
        torch.testing.assert_close(joined.hidden_states, whole.hidden_states)


@pytest.mark.parametrize("options", [{}, {"return_dict": False}], ids=["outputs", "tuple"])
def test_a_task_needs_no_loss_and_no_metric_inputs_of_its_own(options: dict[str, Any]) -> None:
    class Written(Scored):
        def loss(self, outputs: Any, batch: Any) -> Tensor:
            return self.by_hand(outputs, batch)

        def by_hand(self, outputs: Any, batch: Any) -> Tensor:
            return torch.nn.functional.cross_entropy(outputs.logits, batch["labels"])

        def metric_inputs(self, outputs: Any, batch: Any) -> Any:
            return outputs.logits, batch["labels"]

    plain, written = Scored("bert", **options), Written("bert")
    results = [
        quiet(max_steps=4, log_every=1).fit(task, batches("bert"), batches("bert", 6)).metrics
        for task in (plain, written)
    ]
    assert results[0].keys() == results[1].keys() >= {"train/accuracy", "validation/accuracy"}
    for name, value in results[0].items():
        assert value == pytest.approx(results[1][name], rel=1e-5), name


class Saves(Callback):
    """Writes the model as its library does, in the middle of a fit.

    Args:
        directory: Where to.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    def on_step_end(self, run: Any) -> None:
        if run.progress.updates == 2:
            state = run.full_state_dict(run.task.model)
            assert bool(state) == (run.engine.ranks.rank == 0)
            if state:
                run.task.model.save_pretrained(self.directory, state_dict=state)


def saved(strategy: Any, family: str, directory: Path) -> dict[str, float]:
    """Train with metrics and save in the middle; what the training logged."""
    values: dict[str, float] = {}
    note = LambdaCallback(on_log=lambda run: values.update(run.logged))
    options = {"max_steps": 4, "log_every": 1, "callbacks": [Saves(directory), note]}
    kind = Scored if family == "bert" else Wrapped
    kind_of_data = batches(family, size=2)
    quiet(strategy=strategy, devices=2, **options).fit(kind(family), kind_of_data)
    return {name: value for name, value in values.items() if not name.startswith("time")}


@pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")
@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_callback_saves_a_sharded_model_as_its_library_does(family: str, tmp_path: Path) -> None:
    found = {}
    for strategy in ("ddp", "fsdp"):
        found[strategy] = run_distributed(saved, strategy, family, tmp_path / strategy)
        assert found[strategy][0] == found[strategy][1]
    kind: Any = type(FAMILIES[family][0]())
    loaded = [kind.from_pretrained(tmp_path / strategy) for strategy in ("ddp", "fsdp")]
    torch.testing.assert_close(*(weights(each) for each in loaded), rtol=1e-4, atol=1e-5)
    assert loaded[0].config.architectures == loaded[1].config.architectures == [kind.__name__]
