"""Models of transformers as tasks: trained, evaluated, predicted, resumed and rebuilt."""

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import FAMILIES, loader, model, padded, rows
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig
from drivetrain.core.errors import CheckpointError, ConfigError, DataError

datasets = Lazy("datasets")
hf = Lazy("drivetrain.integrations.transformers")
loss_items = Lazy("drivetrain.integrations.transformers.loss_items")
peft = Lazy("peft")
transformers = Lazy("transformers")

BERT = "bert, classes"
FEW = (BERT, "gpt2", "t5", "vit", "wav2vec2")
"""One of each kind of loss and input; nightly has all families."""
OTHERS = [pytest.param(each, marks=pytest.mark.nightly) for each in FAMILIES if each not in FEW]


def task(family: str, **options: Any) -> Any:  # a step shows the gradient
    return hf.TransformersTask(model(family), **{"optimizer": OptimizerConfig("sgd", lr=0.5), **options})


def weights(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: each.detach().clone() for name, each in module.state_dict().items()}


def equal(one: Any, other: Any, rtol: float = 0, atol: float = 0) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=rtol, atol=atol)


def split_batches_have_the_gradient_of_the_large_one(family: str, **options: Any) -> None:
    whole, split = task(family, **options), task(family, **options)
    before = weights(whole)
    quiet(max_steps=1).fit(whole, loader(family, 4, 4))
    quiet(max_steps=1, gradient_accumulation_steps=2).fit(split, loader(family, 4, 2))
    assert any(not torch.equal(each, before[name]) for name, each in whole.state_dict().items())
    equal(split, whole, rtol=1e-5, atol=1e-6)


def losses_weigh_the_items_that_they_are_a_mean_over(family: str) -> None:
    items = loss_items.items_of(model(family))
    assert not items.problem
    for batch in loader(family, 6, 3):
        assert float(items.count(batch)) == FAMILIES[family].weight(batch)


def predictions_are_the_models_own(family: str) -> None:
    made = task(family).eval()
    with torch.no_grad():
        right = [made(**made.inputs(batch)) for batch in loader(family, 3)]
    for one, other in zip(quiet().predict(made, loader(family, 3)), right, strict=True):
        assert type(one) is type(other)
        assert "past_key_values" not in one
        tensors = {name: value for name, value in one.items() if isinstance(value, Tensor)}
        assert all(torch.equal(value, other[name]) for name, value in tensors.items())


def resume_is_bitwise(family: str, folder: Path) -> None:
    options = {"optimizer": OptimizerConfig("adamw", lr=1e-3), "neftune_alpha": None}
    data, more = loader(family), loader(family, 5)
    straight, first, third = (task(family, **options) for _ in range(3))
    trainer = {"max_steps": 4, "validate_every": 2}
    whole = quiet(**trainer).fit(straight, data, more)
    trainer |= {"run_dir": folder, "checkpoint": True}
    halt = LambdaCallback(on_step_end=lambda run: run.progress.steps == 2 and run.stop("enough"))
    quiet(callbacks=[halt], **trainer).fit(first, data, more)
    equal(hf.TransformersTask.from_checkpoint(folder), first)
    result = quiet(**trainer).fit(third, data, more, resume="auto")
    equal(third, straight)
    assert result.metrics["validation/loss"] == whole.metrics["validation/loss"]


@pytest.mark.parametrize("family", [*FEW, *OTHERS])
def test_a_model_is_accumulated_weighed_predicted_and_resumed(family: str, tmp_path: Path) -> None:
    split_batches_have_the_gradient_of_the_large_one(family)
    losses_weigh_the_items_that_they_are_a_mean_over(family)
    predictions_are_the_models_own(family)
    resume_is_bitwise(family, tmp_path)


def test_a_model_is_trained_in_training_mode_as_by_transformers() -> None:
    one = model(BERT).eval()  # as from_pretrained gives it
    task = hf.TransformersTask(one)
    assert all(each.training for each in task.modules())


def test_a_loss_that_cannot_be_split_is_named() -> None:
    summed = model("wav2vec2")
    summed.config.ctc_loss_reduction = "sum"
    with warned("Wav2Vec2ForCTC: it sums its loss over the samples"):
        quiet(max_steps=1).fit(hf.TransformersTask(summed), loader("wav2vec2", 4))
    wrong = task("gpt2")
    object.__setattr__(wrong, "items", loss_items.items_of(model("t5")))
    with warned("GPT2LMHeadModel: its loss is a mean over"):
        quiet(max_steps=1).fit(wrong, loader("gpt2", 4, 1))


def test_labels_that_are_left_out_are_not_counted() -> None:
    segformer = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig())
    for made, labels, count in ((model(BERT), [1, -100, 2], 2), (segformer, [[0, 255, 1]], 2)):
        assert float(loss_items.items_of(made).count({"labels": torch.tensor(labels)})) == count
    answers = {"start_positions": torch.tensor([0, 5, 4]), "end_positions": torch.tensor([1, 5, 5])}
    assert float(loss_items.spans({"input_ids": torch.zeros(3, 5), **answers})) == 1.5


@pytest.mark.landing
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
    assert found == loss_items.UNSHIFTED


@pytest.mark.parametrize("family", ["bert, tags", "gpt2"])
def test_label_smoothing_is_that_of_transformers_in_any_split(family: str) -> None:
    from transformers.trainer_pt_utils import LabelSmoother

    made, batch = task(family, label_smoothing=0.2), padded(rows(family, 4))
    outputs = made.model(**batch)
    right = LabelSmoother(0.2)(outputs, batch["labels"], shift_labels=family == "gpt2")
    torch.testing.assert_close(made.loss(outputs, batch), right)
    split_batches_have_the_gradient_of_the_large_one(family, label_smoothing=0.2)


def test_compute_loss_func_gets_labels_of_any_name_and_the_number_of_items() -> None:
    def summed(outputs: Any, labels: Tensor, num_items_in_batch: Any) -> Tensor:
        logits = outputs.logits.flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="sum")
        return loss / num_items_in_batch

    own, given = task("bert, tags"), task("bert, tags", compute_loss_func=summed)
    for each in (own, given):
        quiet(max_steps=1, gradient_accumulation_steps=2).fit(each, loader("bert, tags", 4, 2))
    equal(given, own, rtol=1e-5, atol=1e-6)
    made, samples = renamed()
    values = quiet().validate(made, [padded(samples)])
    plain = quiet().validate(task(BERT), [padded(rows(BERT, 4))])
    assert values["validation/loss"] == pytest.approx(plain["validation/loss"])
    assert values["validation/labels"] == sum(int(each["kind"]) for each in samples)


def renamed(**options: Any) -> tuple[Any, Any]:  # labels that only the user's loss reads
    def loss(outputs: Any, labels: Any, num_items_in_batch: Any) -> Any:
        return torch.nn.functional.cross_entropy(outputs.logits, labels)

    def metrics(given: Any, compute_result: bool = True) -> dict[str, float]:
        return {"labels": float(given.label_ids.sum())}

    samples = [{"input_ids": each["input_ids"], "kind": each["labels"]} for each in rows(BERT, 4)]
    given = {"label_names": ["kind"], "compute_loss_func": loss, "compute_metrics": metrics}
    return task(BERT, **given, **options), samples


def test_noise_is_added_to_embeddings_in_training_alone() -> None:
    plain, noisy = task("gpt2"), task("gpt2", neftune_alpha=5.0)
    trainer = quiet(max_steps=1, log_every=1)
    results = [trainer.fit(each, loader("gpt2"), loader("gpt2", 3)).metrics for each in (plain, noisy)]
    assert results[0]["train/loss"] != results[1]["train/loss"]
    assert not noisy.model.get_input_embeddings()._forward_hooks
    words, embedded, fresh = padded(rows("gpt2", 2))["input_ids"], [], task("gpt2", neftune_alpha=5.0)
    body = fresh.model.transformer
    body.h[0].register_forward_pre_hook(lambda module, given: embedded.append(given[0]))
    fresh.training_step(padded(rows("gpt2", 2)))
    clean = body.wte(words) + body.wpe(torch.arange(words.shape[1]))
    most = 5.0 / (words.shape[1] * 16) ** 0.5
    assert 0.5 * most < (embedded[0] - clean).abs().max() <= most * 1.001


def word_tokenizer(directory: Path) -> Any:
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *"abcd"]
    (directory / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    return transformers.BertTokenizer(str(directory / "vocab.txt"))


def keeping(seen: list[Any], **options: Any) -> Any:  # a task that notes its batches
    class Kept(hf.TransformersTask):  # type: ignore[name-defined,misc]
        def training_step(self, batch: Any) -> Any:
            seen.append(batch)
            return super().training_step(batch)

    return Kept(model(BERT), **options)


def test_datasets_are_padded_by_their_tokenizer_and_to_a_multiple(tmp_path: Path) -> None:
    tokenizer, seen = word_tokenizer(tmp_path), list[Any]()
    texts = ["a b", "a", "a b c d", "b c", "c", "d a b"]
    data = datasets.Dataset.from_dict({**tokenizer(texts), "text": texts, "label": [0, 1, 2, 0, 1, 2]})
    quiet(max_steps=3, batch_size=2).fit(keeping(seen, processing_class=tokenizer), data)
    columns = ("attention_mask", "input_ids", "labels", "token_type_ids")
    assert {tuple(sorted(each)) for each in seen} == {columns}
    assert len({each["input_ids"].shape[1] for each in seen}) > 1
    made = task(BERT, processing_class=tokenizer, pad_to_multiple_of=8)
    assert made.collate_function()([*data])["input_ids"].shape == (6, 8)
    quiet(batch_size=3, max_steps=1).fit(made, data)
    fresh = task(BERT, processing_class=tokenizer, pad_to_multiple_of=8)
    cases: dict[str, Any] = {
        "no tokenizer": (lambda: task(BERT, pad_to_multiple_of=8), "pad_token"),
        "another collation": (lambda: quiet(max_steps=1).fit(fresh, loader(BERT)), "Give that collation"),
    }
    assert_refused(ConfigError, cases)


def test_a_stream_is_padded_and_resumes_where_it_was(tmp_path: Path) -> None:
    def streamed(seen: list[Any]) -> tuple[Any, Any]:
        def samples() -> Any:
            for number in range(9):
                yield {"input_ids": [3 + number, *[5] * (number % 3)], "labels": number % 3, "text": "a"}

        optimizer = OptimizerConfig("sgd", lr=0.1)
        made = keeping(seen, processing_class=word_tokenizer(tmp_path), optimizer=optimizer)
        return made, datasets.IterableDataset.from_generator(samples)

    whole, parts = list[Any](), list[Any]()
    made, data = streamed(whole)
    quiet(max_epochs=2, batch_size=2).fit(made, data)
    trainer = {"batch_size": 2, "run_dir": tmp_path / "run", "checkpoint": True, "max_epochs": 2}
    halt = LambdaCallback(on_step_end=lambda run: run.progress.steps == 3 and run.stop("enough"))
    first, data = streamed(parts)
    quiet(**trainer, callbacks=[halt]).fit(first, data)
    second, data = streamed(parts)
    quiet(**trainer).fit(second, data, resume="auto")
    firsts = [[each["input_ids"][:, 0].tolist() for each in seen] for seen in (whole, parts)]
    assert firsts[0][:5] == [[3, 4], [5, 6], [7, 8], [9, 10], [11]]
    assert firsts[0] == firsts[1]
    equal(second, made)


def test_a_rebuilt_task_has_transformers_own_class_its_configuration_and_its_options(tmp_path: Path) -> None:
    given = model("gpt2")
    given.generation_config.update(do_sample=True, top_k=7)
    made = hf.TransformersTask(given, label_smoothing=0.1, generate={"max_new_tokens": 3})
    quiet(max_steps=1, run_dir=tmp_path, checkpoint=True).fit(made, loader("gpt2"))
    before = torch.get_rng_state()
    again = hf.TransformersTask.from_checkpoint(tmp_path)
    assert torch.equal(torch.get_rng_state(), before)
    assert type(again.model) is transformers.GPT2LMHeadModel
    assert again.model.config.to_dict() == made.model.config.to_dict()
    assert again.model.generation_config.top_k == 7
    assert (again.label_smoothing, again.generation.max_new_tokens) == (0.1, 3)
    # Without the functions that its arguments belong to.
    own, samples = renamed(batch_eval_metrics=True, include_for_metrics=["loss"])
    quiet(max_steps=1, run_dir=tmp_path / "own", checkpoint=True).fit(own, [padded(samples)])
    rebuilt = hf.TransformersTask.from_checkpoint(tmp_path / "own")
    assert rebuilt.batch_eval_metrics
    assert rebuilt.columns.labels == ("kind",)


def test_nothing_that_a_checkpoint_names_is_imported(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('imported')", encoding="utf-8")
    described = task(BERT).hparams["model"]
    config = described["config"]

    def rebuild(**changed: Any) -> Any:
        return lambda: hf.TransformersTask({**described, **changed})

    names = (("evil.Model", "bert"), ("BertTokenizer", "bert"), ("BertForMaskedLM", "evil"))
    kernels: list[dict[str, Any]] = [{"attention": "evil/kernel"}, {"attention": {"": "evil/kernel"}}]
    kernels += [{"config": {**config, "parts": {"attn_implementation": "evil/kernel:run"}}}]
    broken: list[dict[str, Any]] = [{"config": {**config, "hidden_size": "wide"}}]
    cases: dict[str, Any] = {str(each): (rebuild(**each), "cannot make a BertForSequence") for each in broken}
    for name, kind in names:
        given = {"class": name, "config": {**config, "model_type": kind}}
        cases[f"{name} {kind}"] = (rebuild(**given), "has no model of the class")
    cases |= {str(each): (rebuild(**each), "from the repository", "evil/kernel") for each in kernels}
    assert_refused(CheckpointError, cases)
    remote = hf.TransformersTask({**described, "config": {**config, "auto_map": {"AutoModel": "evil.Model"}}})
    assert type(remote.model) is type(model(BERT))
    assert "auto_map" not in json.dumps(remote.hparams["model"])


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_a_class_of_the_users_own_is_given_again_and_adapters_are_rebuilt(tmp_path: Path) -> None:
    class Own(transformers.BertForSequenceClassification):  # type: ignore[name-defined,misc]
        pass

    made = hf.TransformersTask(Own(model(BERT).config))
    quiet(max_steps=1, run_dir=tmp_path / "own", checkpoint=True).fit(made, loader(BERT))
    with pytest.raises(ConfigError, match=r"cannot hold \(model\)"):
        hf.TransformersTask.from_checkpoint(tmp_path / "own")
    again = hf.TransformersTask.from_checkpoint(tmp_path / "own", model=Own(model(BERT).config))
    assert torch.equal(again.model.classifier.weight, made.model.classifier.weight)
    config = peft.LoraConfig(r=2, target_modules=["query", "value"], modules_to_save=["classifier"])
    made = hf.TransformersTask(peft.get_peft_model(model(BERT), config))
    policy = CheckpointConfig(parameters="all")
    quiet(max_steps=1, run_dir=tmp_path / "lora", checkpoint=policy).fit(made, loader(BERT))
    again = hf.TransformersTask.from_checkpoint(tmp_path / "lora")
    assert type(again.model) is type(made.model)
    equal(again, made)
    trained = [{n for n, p in each.named_parameters() if p.requires_grad} for each in (again, made)]
    assert trained[0] == trained[1]


def test_refusals() -> None:
    bare = [{"input_ids": torch.ones(2, 3, dtype=torch.long), "attention_mask": torch.ones(2, 3)}]
    options: list[tuple[Any, ...]] = [
        ({"preprocess_logits_for_metrics": max}, "preprocess_logits_for_metrics has no effect without"),
        ({"label_names": ["lables"]}, "Did you mean 'labels'"),
        ({"compute_loss_func": max, "label_smoothing": 0.1}, "label_smoothing has no effect"),
    ]
    cases = {str(given): (lambda given=given: task(BERT, **given), *words) for given, *words in options}
    cases |= {
        "stop strings": (lambda: task("gpt2", generate={"stop_strings": ["."]}), "as processing_class"),
        "no embeddings": (lambda: task("wav2vec2", neftune_alpha=5), "input embeddings", "Wav2Vec2ForCTC"),
        "an option": (lambda: task("gpt2", generate={"num_beam": 2}), "Did you mean 'num_beams'"),
        "no generation": (lambda: task("vit", generate=True), "a ViTForImageClassification cannot generate"),
        "a class": (lambda: hf.TransformersTask(transformers.BertModel), "not the class BertModel"),
        "no model": (lambda: hf.TransformersTask(torch.nn.Linear(2, 2)), "PreTrainedModel", "not a Linear"),
        "no loss": (lambda: quiet(max_steps=1).fit(task(BERT), bare), "returned no loss", "attention_mask"),
    }
    assert_refused((ConfigError, DataError), cases)
    with warned("BertModel: transformers lists it under no kind of loss"):
        body = hf.TransformersTask(model(BERT).bert)
        fit = lambda: quiet(max_steps=1).fit(body, loader(BERT))  # noqa: E731
        assert_refused(ConfigError, {"no head": (fit, "BertModel returned no loss", "takes no labels")})


def trained(strategy: str, directory: Path) -> dict[str, tuple[Any, ...]]:
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")  # T5's blocks return views
    devices, size = ("auto", 4) if strategy == "cpu" else (2, 2)
    found = {}
    for family in (BERT, "gpt2", "t5"):
        kinds: set[str] = set()

        def look(run: Any, kinds: set[str] = kinds) -> None:
            kinds.update(type(each).__name__ for each in run.task.modules())

        options = {"strategy": strategy, "devices": devices, "log_every": 1}
        parts = {"run_dir": directory / family, "checkpoint": True, **options}
        smoothing = {"label_smoothing": 0.1 if family == "t5" else 0.0}
        quiet(max_steps=1, **parts).fit(task(family, **smoothing), loader(family, 8, size))
        made, more = task(family, **smoothing), loader(family, 5, 2)
        trainer = quiet(max_steps=2, callbacks=[LambdaCallback(on_fit_start=look)], **parts)
        values = trainer.fit(made, loader(family, 8, size), more, resume="auto").metrics
        values = {name: each for name, each in values.items() if not name.startswith("time")}
        values["predicted"] = len(quiet(**options).predict(made, more))
        tensors = {name: each.numpy() for name, each in weights(made).items()}
        found[family] = values, tensors, {each for each in kinds if each.startswith("FSDP")}
    return found


@pytest.mark.landing
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_train_as_one_and_fsdp_shards_the_blocks(strategy: str, tmp_path: Path) -> None:
    alone = trained("cpu", tmp_path / "one")
    first, second = on_two_ranks(trained, strategy, tmp_path / "two")
    for family, (values, tensors, sharded) in first.items():
        right, right_tensors, _ = alone[family]
        assert values == second[family][0], family
        assert values == pytest.approx(right, rel=1e-5), family
        assert tensors.keys() == right_tensors.keys()
        for name, value in right_tensors.items():
            np.testing.assert_allclose(tensors[name], value, rtol=1e-4, atol=1e-5, err_msg=family + name)
        blocks = {f"FSDP{each}" for each in model(family)._no_split_modules or ()}
        assert sharded <= {*blocks, "FSDPTransformersTask"}
        assert bool(sharded & blocks) == (strategy == "fsdp")
