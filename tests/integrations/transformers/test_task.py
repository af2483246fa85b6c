"""Models of transformers as tasks: trained, evaluated, predicted, resumed and rebuilt."""

from __future__ import annotations

import json
import logging
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.messages import heard, warned
from tests.support.tasks import quiet
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig
from drivetrain.core.errors import CheckpointError, ConfigError, DataError
from drivetrain.testing import run_distributed

transformers = pytest.importorskip("transformers")

from tests.integrations.transformers.families import (  # noqa: E402
    FAMILIES,
    loader,
    model,
    padded,
    rows,
)

from drivetrain.integrations.transformers import TransformersTask  # noqa: E402
from drivetrain.integrations.transformers.loss_items import UNSHIFTED, items_of  # noqa: E402

INEXACT = "CLIPModel: transformers lists it under no kind of loss"


def task(family: str, **options: Any) -> TransformersTask:
    """A task of a family with plain gradient descent, whose update shows the gradient."""
    return TransformersTask(model(family), **{"optimizer": OptimizerConfig("sgd", lr=0.5), **options})


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of a module's weights."""
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


@pytest.fixture
def expected(family: str) -> Any:
    """Expects the warning about a loss that cannot be split."""
    with heard(INEXACT) if family == "clip" else nullcontext():
        yield


def test_a_classifier_is_trained_evaluated_predicted_and_rebuilt(tmp_path: Path) -> None:
    made = task("bert, classes", compute_metrics=lambda given: {"rows": len(given.predictions)})
    result = quiet(max_steps=2, run_dir=tmp_path, checkpoint=True).fit(
        made, loader("bert, classes"), loader("bert, classes", 7)
    )
    assert result.metrics["validation/rows"] == 7
    again = TransformersTask.from_checkpoint(tmp_path)
    batch = padded(rows("bert, classes", 4))
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch).logits, made.eval()(**batch).logits)
    assert [each.logits.shape for each in quiet().predict(made, loader("bert, classes", 3))] == [
        (2, 3),
        (1, 3),
    ]


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.weight])
def test_the_gradient_of_a_split_batch_is_that_of_the_large_one(family: str) -> None:
    whole, split = task(family), task(family)
    before = weights(whole)
    quiet(max_steps=1).fit(whole, loader(family, 4, 4))
    quiet(max_steps=1, gradient_accumulation_steps=2).fit(split, loader(family, 4, 2))
    assert any(not torch.equal(each, before[name]) for name, each in whole.state_dict().items())
    torch.testing.assert_close(weights(split), weights(whole), rtol=1e-5, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("family", [name for name, each in FAMILIES.items() if each.weight])
def test_a_loss_weighs_as_many_items_as_it_is_a_mean_over(family: str) -> None:
    by_hand = FAMILIES[family].weight
    assert by_hand is not None
    items = items_of(model(family))
    assert not items.problem
    for batch in loader(family, 6, 3):
        assert float(items.count(batch)) == by_hand(batch)


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("expected")
def test_a_resumed_fit_is_bitwise_the_uninterrupted_one(family: str, tmp_path: Path) -> None:
    options = {"optimizer": OptimizerConfig("adamw", lr=1e-3), "neftune_alpha": None}
    data, more = loader(family), loader(family, 5)
    straight = task(family, **options)
    full = quiet(max_steps=6, validate_every=3).fit(straight, data, more)
    first = task(family, **options)
    trainer = {"run_dir": tmp_path, "checkpoint": True, "validate_every": 3}
    halt = LambdaCallback(on_step_end=lambda run: run.progress.updates == 3 and run.stop("enough"))
    quiet(max_steps=6, callbacks=[halt], **trainer).fit(first, data, more)
    second = TransformersTask.from_checkpoint(tmp_path)
    torch.testing.assert_close(weights(second), weights(first), rtol=0, atol=0)
    third = task(family, **options)
    result = quiet(max_steps=6, **trainer).fit(third, data, more, resume="auto")
    torch.testing.assert_close(weights(third), weights(straight), rtol=0, atol=0)
    assert result.metrics["validation/loss"] == full.metrics["validation/loss"]


@pytest.mark.full
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.usefixtures("expected")
def test_predictions_are_the_models_own_outputs_without_caches(family: str) -> None:
    made = task(family).eval()
    with torch.no_grad():
        right = [made(**made.inputs(batch)) for batch in loader(family, 3)]
    for one, other in zip(quiet().predict(made, loader(family, 3)), right, strict=True):
        assert type(one) is type(other)
        assert "past_key_values" not in one
        for name, value in one.items():
            if isinstance(value, Tensor):
                assert torch.equal(value, other[name])


@pytest.mark.full
@pytest.mark.parametrize("family", ["bert, classes", "gpt2", "t5"])
def test_a_model_that_returns_tuples_is_trained_alike(family: str) -> None:
    class Tuples(TransformersTask):
        def forward(self, **columns: Any) -> Any:
            outputs = self.model(**columns, return_dict=False)
            assert isinstance(outputs, tuple)
            return outputs

    plain, tuples = task(family), Tuples(model(family), optimizer=OptimizerConfig("sgd", lr=0.5))
    metrics = [
        quiet(max_steps=2, log_every=1).fit(each, loader(family), loader(family, 3)).metrics
        for each in (plain, tuples)
    ]
    assert metrics[0] == metrics[1]


@pytest.mark.full
def test_a_loss_that_cannot_be_split_is_named() -> None:
    with warned(INEXACT):
        quiet(max_steps=1).fit(task("clip"), loader("clip", 4))
    summed = model("wav2vec2")
    summed.config.ctc_loss_reduction = "sum"
    with warned("Wav2Vec2ForCTC: it sums its loss over the samples"):
        quiet(max_steps=1).fit(TransformersTask(summed), loader("wav2vec2", 4))
    wrong = task("gpt2")
    object.__setattr__(wrong, "items", items_of(model("t5")))
    with warned("GPT2LMHeadModel: its loss is a mean over"):
        quiet(max_steps=1).fit(wrong, loader("gpt2", 4, 1))


@pytest.mark.full
def test_the_causal_models_that_do_not_shift_their_labels_are_listed() -> None:
    """Found in the source of transformers: a loss of their own that takes the labels as they are."""
    import inspect

    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    found = set()
    for names in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
        for name in [names] if isinstance(names, str) else names:
            source = inspect.getsource(getattr(transformers, name))
            if "labels" in source and "loss_function(" not in source and "1:]" not in source:
                found.add(name)
    assert found == UNSHIFTED


@pytest.mark.full
def test_columns_that_the_model_does_not_take_are_left_out_and_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    samples: Any = [{**each, "text": "a word", "number": 3} for each in rows("vit", 6)]

    class Samples(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return len(samples)

        def __getitem__(self, index: int) -> Any:
            return samples[index]

    with caplog.at_level(logging.INFO):
        quiet(max_steps=3, batch_size=2).fit(task("vit"), Samples())
    told = [each.message for each in caplog.records if "does not take" in each.message]
    assert len(told) == 1
    assert "ViTForImageClassification.forward does not take the columns number, text" in told[0]


@pytest.mark.full
def test_datasets_are_padded_by_their_tokenizer(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = word_tokenizer(tmp_path)
    texts = ["a b", "a", "a b c d", "b c", "c", "d a b"]
    data = datasets.Dataset.from_dict({**tokenizer(texts), "text": texts, "label": [0, 1, 2, 0, 1, 2]})
    seen: list[Any] = []

    class Kept(TransformersTask):
        def training_step(self, batch: Any) -> Any:
            seen.append(batch)
            return super().training_step(batch)

    made = Kept(model("bert, classes"), processing_class=tokenizer)
    quiet(max_steps=3, batch_size=2).fit(made, data)
    assert {tuple(each) for each in map(sorted, seen)} == {
        ("attention_mask", "input_ids", "labels", "token_type_ids")
    }
    lengths = {each["input_ids"].shape[1] for each in seen}
    assert len(lengths) > 1


@pytest.mark.full
def test_datasets_are_padded_to_a_multiple(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    tokenizer = word_tokenizer(tmp_path)
    data = datasets.Dataset.from_dict({**tokenizer(["a b", "a", "a b c d"]), "label": [0, 1, 2]})
    made = TransformersTask(model("bert, classes"), processing_class=tokenizer, pad_to_multiple_of=8)
    assert made.collate_function()([*data])["input_ids"].shape == (3, 8)
    quiet(batch_size=3, max_steps=1).fit(made, data)
    again = TransformersTask(model("bert, classes"), pad_to_multiple_of=8)
    with pytest.raises(ConfigError, match="pad_to_multiple_of=8 needs a tokenizer that has a pad_token"):
        quiet(batch_size=3, max_steps=1).fit(again, data)


def word_tokenizer(directory: Path) -> Any:
    """A tokenizer of six words."""
    (directory / "vocab.txt").write_text(
        "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcd"]), encoding="utf-8"
    )
    return transformers.BertTokenizer(str(directory / "vocab.txt"))


def streamed(rows: int, seen: list[list[Any]], **options: Any) -> tuple[Any, Any]:
    """A task that notes its batches' first tokens, and a stream of samples."""
    datasets = pytest.importorskip("datasets")

    class Kept(TransformersTask):
        def training_step(self, batch: Any) -> Any:
            seen.append(batch["input_ids"][:, 0].tolist())
            return super().training_step(batch)

    def samples() -> Any:
        for number in range(rows):
            yield {"input_ids": [3 + number, *[5] * (number % 3)], "labels": number % 3, "text": "a"}

    stream = datasets.IterableDataset.from_generator(samples)
    return Kept(model("bert, classes"), **options), stream


@pytest.mark.full
def test_a_stream_is_padded_and_resumes_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KMP_DUPLICATE_LIB_OK", "True")  # which faiss sets, and datasets imports
    tokenizer = word_tokenizer(tmp_path)
    options = {"processing_class": tokenizer, "optimizer": OptimizerConfig("sgd", lr=0.1)}
    whole: list[list[Any]] = []
    made, data = streamed(9, whole, **options)
    quiet(max_epochs=2, batch_size=2).fit(made, data)
    assert whole[:5] == [[3, 4], [5, 6], [7, 8], [9, 10], [11]]
    parts: list[list[Any]] = []
    trainer = {"batch_size": 2, "run_dir": tmp_path / "run", "checkpoint": True, "max_epochs": 2}
    first, data = streamed(9, parts, **options)
    halt = LambdaCallback(on_step_end=lambda run: run.progress.updates == 3 and run.stop("enough"))
    quiet(**trainer, callbacks=[halt]).fit(first, data)
    second, data = streamed(9, parts, **options)
    quiet(**trainer).fit(second, data, resume="auto")
    assert parts == whole
    torch.testing.assert_close(weights(second), weights(made), rtol=0, atol=0)


@pytest.mark.full
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"preprocess_logits_for_metrics": max}, "preprocess_logits_for_metrics has no effect without"),
        ({"batch_eval_metrics": True}, "batch_eval_metrics has no effect without compute_metrics"),
        ({"include_for_metrics": ["loss"]}, "include_for_metrics has no effect without compute_metrics"),
        ({"include_for_metrics": "loss"}, r"a sequence of names, not a text: give \['loss'\]"),
        ({"label_names": "labels"}, r"a sequence of names, not a text: give \['labels'\]"),
        ({"label_names": ["lables"]}, "label_names has 'lables', .* Did you mean 'labels'"),
        ({"compute_loss_func": max, "label_smoothing": 0.1}, "label_smoothing has no effect"),
        ({"compute_loss_func": 3}, "compute_loss_func must be a function, not 3"),
        ({"processing_class": "bert"}, r"not a text: give AutoTokenizer.from_pretrained\('bert'\)"),
    ],
)
def test_an_argument_without_effect_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task("bert, classes", **options)
    with pytest.raises(ConfigError, match="give it as processing_class"):
        task("gpt2", generate={"stop_strings": ["."]})
    with pytest.raises(ConfigError, match="input embeddings, which a Wav2Vec2ForCTC does not have"):
        task("wav2vec2", neftune_alpha=5)


@pytest.mark.full
def test_a_multiple_that_another_collation_does_not_pad_to_is_refused(tmp_path: Path) -> None:
    made = task("bert, classes", processing_class=word_tokenizer(tmp_path), pad_to_multiple_of=16)
    with pytest.raises(ConfigError, match=r"first micro-batch has length .* Give that collation"):
        quiet(max_steps=1).fit(made, loader("bert, classes"))


@pytest.mark.full
def test_a_model_without_a_loss_is_explained() -> None:
    with pytest.raises(ConfigError, match="not the class BertModel"):
        TransformersTask(transformers.BertModel)
    body = TransformersTask(model("bert, classes").bert)
    with (
        warned("BertModel: transformers lists it under no kind of loss"),
        pytest.raises(ConfigError, match="BertModel returned no loss, and its forward takes no labels"),
    ):
        quiet(max_steps=1).fit(body, loader("bert, classes"))


@pytest.mark.full
def test_labels_that_are_no_classes_cannot_be_smoothed() -> None:
    made = task("bert, classes", label_smoothing=0.1)
    batch = {**padded(rows("bert, classes", 2)), "labels": torch.rand(2, 3)}
    with pytest.raises(ConfigError, match=r"labels are \(2, 3\) float32 and logits \(2, 3\)"):
        made.loss(made(input_ids=batch["input_ids"]), batch)


@pytest.mark.full
def test_single_samples_in_the_place_of_batches_are_explained() -> None:
    samples = [{**each, "labels": int(each["labels"])} for each in rows("bert, classes", 4)]
    with pytest.raises(DataError, match=r"'labels' of a batch is .*, not a tensor .*gives single samples"):
        quiet(max_steps=1).fit(task("bert, classes"), samples)


@pytest.mark.full
def test_a_label_that_only_the_users_loss_reads_reaches_it_and_the_metrics() -> None:
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels)

    samples = [{"input_ids": each["input_ids"], "kind": each["labels"]} for each in rows("bert, classes", 4)]
    own = task(
        "bert, classes",
        label_names=["kind"],
        compute_loss_func=loss,
        compute_metrics=lambda given: {"labels": float(given.label_ids.sum())},
    )
    values = quiet().validate(own, [padded(samples)])
    plain = quiet().validate(task("bert, classes"), [padded(rows("bert, classes", 4))])
    assert values["validation/loss"] == pytest.approx(plain["validation/loss"])
    assert values["validation/labels"] == sum(int(each["kind"]) for each in samples)


@pytest.mark.full
def test_a_rebuilt_model_has_transformers_own_class_and_all_of_its_configuration(tmp_path: Path) -> None:
    made = TransformersTask(model("gpt2"), label_smoothing=0.1, generate={"max_new_tokens": 3})
    made.model.generation_config.update(do_sample=True, top_k=7)
    made = TransformersTask(made.model, label_smoothing=0.1, generate={"max_new_tokens": 3})
    quiet(max_steps=1, run_dir=tmp_path, checkpoint=True).fit(made, loader("gpt2"))
    before = torch.get_rng_state()
    again = TransformersTask.from_checkpoint(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(again.model) is transformers.GPT2LMHeadModel
    assert again.model.config.to_dict() == made.model.config.to_dict()
    assert again.model.generation_config.top_k == 7
    assert again.label_smoothing == 0.1
    assert again.generation.max_new_tokens == 3


@pytest.mark.full
def test_a_task_is_rebuilt_without_the_functions_that_its_arguments_belong_to(tmp_path: Path) -> None:
    def metrics(given: Any, compute_result: bool) -> dict[str, float]:
        return {}

    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels)

    made = task(
        "bert, classes",
        compute_metrics=metrics,
        batch_eval_metrics=True,
        include_for_metrics=["loss"],
        compute_loss_func=loss,
        label_names=["kind"],
    )
    samples = [{"input_ids": each["input_ids"], "kind": each["labels"]} for each in rows("bert, classes", 4)]
    quiet(max_steps=1, run_dir=tmp_path, checkpoint=True).fit(made, [padded(samples)])
    again = TransformersTask.from_checkpoint(tmp_path)
    assert again.batch_eval_metrics
    assert again.columns.labels == ("kind",)
    with pytest.raises(ConfigError, match="label_names has 'kind'"):
        task("bert, classes", label_names=["kind"])


@pytest.mark.full
def test_nothing_that_a_file_names_is_imported(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    described = task("bert, classes").hparams["model"]
    for name, kind in (("evil.Model", "bert"), ("BertTokenizer", "bert"), ("BertForMaskedLM", "evil")):
        wrong = {**described, "class": name, "config": {**described["config"], "model_type": kind}}
        with pytest.raises(CheckpointError, match=r"transformers .* has no model of the class"):
            TransformersTask(wrong)
    evil: list[dict[str, Any]] = [{"attention": "evil/kernel"}, {"attention": {"": "evil/kernel"}}]
    evil += [{"config": {**described["config"], "_attn_implementation": "evil/kernel@main"}}]
    evil += [{"config": {**described["config"], "parts": {"attn_implementation": "evil/kernel:run"}}}]
    for wrong in evil:
        with pytest.raises(CheckpointError, match=r"attention from the repository .*evil/kernel"):
            TransformersTask({**described, **wrong})
    remote = {**described["config"], "auto_map": {"AutoModel": "evil.Model"}}
    assert type(TransformersTask({**described, "config": remote}).model) is type(model("bert, classes"))
    assert "auto_map" not in json.dumps(TransformersTask({**described, "config": remote}).hparams["model"])


@pytest.mark.full
def test_a_configuration_that_makes_no_model_is_named() -> None:
    described = task("bert, classes").hparams["model"]
    wrong = {"config": {**described["config"], "hidden_size": "wide"}}, {"adapters": {"one": {"r": 2}}}
    for each in wrong:
        with pytest.raises(
            CheckpointError, match="cannot make a BertForSequenceClassification of the stored"
        ):
            TransformersTask({**described, **each})


@pytest.mark.full
def test_a_class_of_the_users_own_is_given_again(tmp_path: Path) -> None:
    class Own(transformers.BertForSequenceClassification):  # type: ignore[name-defined,misc]
        pass

    made = TransformersTask(Own(model("bert, classes").config))
    quiet(max_steps=1, run_dir=tmp_path, checkpoint=True).fit(made, loader("bert, classes"))
    with pytest.raises(ConfigError, match=r"cannot hold \(model\)"):
        TransformersTask.from_checkpoint(tmp_path)
    again = TransformersTask.from_checkpoint(tmp_path, model=Own(model("bert, classes").config))
    assert torch.equal(again.model.classifier.weight, made.model.classifier.weight)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_adapters_are_rebuilt_with_their_base(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    made = TransformersTask(peft.get_peft_model(model("bert, classes"), config))
    policy = CheckpointConfig(parameters="all")
    quiet(max_steps=1, run_dir=tmp_path, checkpoint=policy).fit(made, loader("bert, classes"))
    again = TransformersTask.from_checkpoint(tmp_path)
    assert type(again.model) is type(made.model)
    torch.testing.assert_close(weights(again), weights(made), rtol=0, atol=0)
    assert {n for n, p in again.named_parameters() if p.requires_grad} == {
        n for n, p in made.named_parameters() if p.requires_grad
    }


@pytest.mark.full
@pytest.mark.parametrize("family", ["bert, classes", "bert, tags", "gpt2", "t5"])
def test_label_smoothing_is_that_of_transformers_in_any_split(family: str) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    made = task(family, label_smoothing=0.2)
    batch = padded(rows(family, 4))
    outputs = made.model(**batch)
    right = LabelSmoother(0.2)(outputs, batch["labels"], shift_labels=family == "gpt2")
    torch.testing.assert_close(made.loss(outputs, batch), right)
    split = task(family, label_smoothing=0.2)
    quiet(max_steps=1).fit(made, loader(family, 4, 4))
    quiet(max_steps=1, gradient_accumulation_steps=2).fit(split, loader(family, 4, 2))
    torch.testing.assert_close(weights(split), weights(made), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_a_loss_function_gets_labels_and_the_number_of_items() -> None:
    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        logits = outputs.logits.flatten(0, 1)
        return (
            torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum") / num_items_in_batch
        )

    family = "bert, tags"
    own, given = task(family), task(family, compute_loss_func=summed)
    options = {"max_steps": 1, "gradient_accumulation_steps": 2}
    quiet(**options).fit(own, loader(family, 4, 2))
    quiet(**options).fit(given, loader(family, 4, 2))
    torch.testing.assert_close(weights(given), weights(own), rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_noise_is_added_to_embeddings_in_training_alone() -> None:
    plain, noisy = task("gpt2"), task("gpt2", neftune_alpha=5.0)
    results = [
        quiet(max_steps=1, log_every=1).fit(each, loader("gpt2"), loader("gpt2", 3)).metrics
        for each in (plain, noisy)
    ]
    assert results[0]["train/loss"] != results[1]["train/loss"]
    assert not noisy.model.get_input_embeddings()._forward_hooks
    batch = padded(rows("gpt2", 2))
    embedded: list[Tensor] = []
    fresh = task("gpt2", neftune_alpha=5.0)
    embedding = fresh.model.get_input_embeddings()
    block = fresh.model.transformer.h[0]
    block.register_forward_pre_hook(lambda module, given: embedded.append(given[0]))
    fresh.training_step(batch)
    clean = embedding(batch["input_ids"]) + fresh.model.transformer.wpe(
        torch.arange(batch["input_ids"].shape[1])
    )
    most = 5.0 / (batch["input_ids"].shape[1] * 16) ** 0.5
    noise = (embedded[0] - clean).abs()
    assert 0.5 * most < noise.max() <= most * 1.001


@pytest.mark.full
def test_what_cannot_work_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a PreTrainedModel or a PeftModel, not a Linear"):
        TransformersTask(torch.nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="a ViTForImageClassification cannot generate"):
        task("vit", generate=True)
    with pytest.raises(ConfigError, match=r"has no option 'num_beam'\. Did you mean 'num_beams'"):
        task("gpt2", generate={"num_beam": 2})
    with pytest.raises(ConfigError, match="label_smoothing"):
        task("gpt2", label_smoothing=1.0)
    bare = [{"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3)}]
    with pytest.raises(ConfigError, match="returned no loss: the batch has the columns attention_mask"):
        quiet(max_steps=1).fit(task("bert, classes"), bare)


def trained(strategy: str, family: str, directory: Path) -> tuple[dict[str, float], dict[str, Any]]:
    """Train, evaluate and predict; the values and the weights."""
    warnings.filterwarnings("ignore", message=INEXACT)
    warnings.filterwarnings(
        "ignore", message="FSDP2-wrapped module"
    )  # T5's blocks return views, and change none
    devices = "auto" if strategy == "cpu" else 2
    size = 4 if strategy == "cpu" else 2
    options = {"strategy": strategy, "devices": devices, "log_every": 1}
    parts = {"run_dir": directory / f"{strategy}", "checkpoint": True, **options}
    smoothing = {"label_smoothing": 0.1 if family == "t5" else 0.0}
    made = task(family, **smoothing)
    quiet(max_steps=1, **parts).fit(made, loader(family, 8, size))
    made = task(family, **smoothing)
    found = quiet(max_steps=2, **parts).fit(
        made, loader(family, 8, size), loader(family, 5, 2), resume="auto"
    )
    predicted = quiet(**options).predict(made, loader(family, 5, 2))
    values = {**found.metrics, "predicted": float(len(predicted))}
    return {name: each for name, each in values.items() if not name.startswith("time")}, {
        name: each.numpy() for name, each in weights(made).items()
    }


def trained_in_turn(strategy: str, directory: Path) -> dict[str, Any]:
    """Train every family in one process group; the one that ZeRO 3 refuses would end the ranks."""
    found: dict[str, Any] = {}
    for number, family in enumerate(FAMILIES):
        if (strategy, family) != ("zero3", "clip"):
            found[family] = trained(strategy, family, directory / str(number))
    noisy = task("gpt2", neftune_alpha=5.0, label_smoothing=0.1)
    devices = "auto" if strategy == "cpu" else 2
    values = quiet(max_steps=1, strategy=strategy, devices=devices, log_every=1).fit(noisy, loader("gpt2"))
    assert not noisy.model.get_input_embeddings()._forward_hooks
    found["noise"] = values.metrics["train/loss"]
    return found


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What one process trains."""
    directory = tmp_path_factory.mktemp("alone")
    found: dict[str, Any] = run_distributed(trained_in_turn, "cpu", directory, world_size=1, timeout=240)[0]
    return found


def sharded_blocks(family: str) -> set[str]:
    """The classes of the modules that a fit under FSDP shards, without the step that it wraps."""
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    found: set[str] = set()

    def look(run: Any) -> None:
        sharded = (each for each in run.task.modules() if isinstance(each, FSDPModule))
        found.update(type(each).__name__.removeprefix("FSDP") for each in sharded)

    options = {"strategy": "fsdp", "devices": 2, "callbacks": [LambdaCallback(on_fit_start=look)]}
    quiet(max_steps=1, **options).fit(task(family), loader(family, 4))
    return found


@pytest.mark.full
def test_fsdp_shards_the_blocks_that_transformers_names() -> None:
    for family, block in (("bert, classes", "BertLayer"), ("t5", "T5Block")):
        assert block in (model(family)._no_split_modules or ())
        for found in run_distributed(sharded_blocks, family, timeout=200):
            assert block in found
            assert found <= {*model(family)._no_split_modules, "TransformersTask"}


@pytest.mark.full
def test_a_scalar_parameter_is_refused_under_zero3(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"'model\.logit_scale' is a scalar, which cannot be sharded"):
        run_distributed(trained, "zero3", "clip", tmp_path, timeout=240)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero3"])
def test_two_processes_train_as_one(strategy: str, alone: dict[str, Any], tmp_path: Path) -> None:
    """Evaluated, predicted and resumed too; a contrastive loss of two samples is another one than of four."""
    first, second = run_distributed(trained_in_turn, strategy, tmp_path, timeout=480)
    # The ranks' noise differs from that of one process.
    assert first.pop("noise") == second.pop("noise") == pytest.approx(alone["noise"], rel=0.1)
    for family, (values, weights) in first.items():
        assert values == second[family][0], family
        right, right_weights = alone[family]
        assert values.keys() == right.keys()
        assert weights.keys() == right_weights.keys()
        if family != "clip":
            assert values == pytest.approx(right, rel=1e-5), family
            for name, value in right_weights.items():
                np.testing.assert_allclose(weights[name], value, rtol=1e-4, atol=1e-5, err_msg=family + name)
