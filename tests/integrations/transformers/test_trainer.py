"""Scripts for transformers' Trainer with one import changed."""

import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import model, padded, rows
from tests.support.messages import warned
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused

from drivetrain import Callback
from drivetrain.core.errors import CheckpointError, ConfigError, DataError
from drivetrain.testing import run_distributed

datasets = Lazy("datasets")
hf = Lazy("drivetrain.integrations.transformers")
peft = Lazy("peft")
scripted = Lazy("tests.integrations.transformers.scripted")
transformers = Lazy("transformers")

CLASSES = "bert, classes"
SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2}
EVERY_2: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 2, **SAVING}
BEST = {"load_best_model_at_end": True, "metric_for_best_model": "score", "save_total_limit": 1}


def even(family: str, count: int) -> Any:  # of one length: transformers' mean of means is then the mean
    return rows(family, 4 * count)[::4]


def arguments(folder: Path | str, kind: Any = None, **options: Any) -> Any:
    given: dict[str, Any] = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 3}
    given |= {
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "max_steps": 4,
    }
    given |= {"train_sampling_strategy": "sequential", "report_to": "none", "disable_tqdm": True}
    return (kind or transformers.TrainingArguments)(str(folder), **{**given, **options})


def trainer(
    folder: Path | str, kind: Any = None, family: str = CLASSES, data: Any = None, **options: Any
) -> Any:  # a Trainer of a class over a tiny model; options of the arguments go there
    own = {"data_collator": padded, "train_dataset": rows(family, 16) if data is None else data}
    names = ("model_init", "callbacks", "optimizers", "optimizer_cls_and_kwargs", "compute_metrics")
    names += ("eval_dataset", "train_dataset", "compute_loss_func", "preprocess_logits_for_metrics")
    own |= {name: options.pop(name) for name in names if name in options}
    if "model_init" not in own:
        own["model"] = model(family)
    return (kind or hf.Trainer)(args=arguments(folder, **options), **own)


def weights(made: Any) -> list[torch.Tensor]:
    return [each.detach().clone() for each in made.model.parameters()]


def equal(one: Any, other: Any, tolerance: float = 0.0) -> None:
    torch.testing.assert_close(weights(one), weights(other), rtol=tolerance, atol=tolerance)


def losses(made: Any, name: str = "loss") -> list[float]:
    return [row[name] for row in made.state.log_history if name in row]


def accuracy(prediction: Any) -> dict[str, float]:
    logits = prediction.predictions
    chosen = logits.argmax(-1) == prediction.label_ids
    return {"accuracy": chosen.mean(), "rows": len(logits)}


def _timeless(values: dict[str, float]) -> dict[str, float]:
    return {name: each for name, each in values.items() if not re.search("runtime|per_second", name)}


def _listed(output: Any) -> list[Any]:
    given = output.predictions
    return [*(given if isinstance(given, tuple) else [given]), output.label_ids]


OTHERS = [pytest.param(each, marks=pytest.mark.nightly) for each in ("bert, tags", "llama", "vit")]


@pytest.mark.parametrize("family", [CLASSES, "t5", *OTHERS])
def test_losses_rates_metrics_and_predictions_are_transformers(family: str, tmp_path: Path) -> None:
    data, held_out = even(family, 8), even(family, 7)
    found = []
    options: dict[str, Any] = {"max_steps": 8, "logging_steps": 2, "warmup_steps": 2, "max_grad_norm": 0.5}
    options |= {"eval_strategy": "epoch", "eval_dataset": held_out, "per_device_eval_batch_size": 7}
    options |= {"include_num_input_tokens_seen": "all", "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    for kind in (transformers.Trainer, hf.Trainer):
        made = trainer(tmp_path / kind.__module__, kind, family, data, **options)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            output = made.train()
        predicted = made.predict(held_out)
        found.append((made, output, made.evaluate(), predicted))
    (theirs, output, evaluated, predicted), (ours, our_output, our_evaluated, our_predicted) = found
    for expected, row in zip(theirs.state.log_history, ours.state.log_history, strict=True):
        assert _timeless(row).keys() == _timeless(expected).keys()
        assert _timeless(row) == pytest.approx(_timeless(expected), rel=1e-5)
    assert our_output.global_step == output.global_step
    assert our_output.training_loss == pytest.approx(output.training_loss, rel=1e-5)
    assert our_output.metrics.keys() >= output.metrics.keys()
    assert our_evaluated.keys() == evaluated.keys()
    assert _timeless(our_evaluated) == pytest.approx(_timeless(evaluated), rel=1e-5)
    assert our_predicted.metrics.keys() == predicted.metrics.keys()
    for one, other in zip(_listed(our_predicted), _listed(predicted), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    equal(ours, theirs, 1e-5)


def test_every_overridden_step_gives_the_same_steps(tmp_path: Path) -> None:
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "eval_dataset": rows(CLASSES, 5)}
    plain = trainer(tmp_path, **options)
    expected, evaluated = plain.train(), plain.evaluate()
    predicted = plain.predict(rows(CLASSES, 5)).predictions
    for kind in scripted.STEPS:
        other = trainer(tmp_path, kind, **options)
        output = other.train()
        equal(plain, other)
        more = 1 if kind is scripted.ByAccelerator else 0
        assert output.training_loss == pytest.approx(expected.training_loss + more, rel=1e-6), kind
        assert other.evaluate()["eval_loss"] == pytest.approx(evaluated["eval_loss"], rel=1e-6), kind
        np.testing.assert_allclose(other.predict(rows(CLASSES, 5)).predictions, predicted, rtol=1e-5)


def test_a_step_sees_its_gradients_and_may_change_them(tmp_path: Path) -> None:
    kinds, data = (hf.Trainer, transformers.Trainer), even(CLASSES, 16)
    made = [trainer(tmp_path / each.__module__, scripted.editing(each), data=data) for each in kinds]
    before = made[0].model.get_input_embeddings().weight.detach().clone()
    for each in made:
        each.train()
    after = made[0].model.get_input_embeddings().weight.detach()
    torch.testing.assert_close(after, before, rtol=0.0, atol=1e-6)  # the way there and back rounds
    assert losses(made[0]) == pytest.approx(losses(made[1]), rel=1e-5)
    equal(*made, tolerance=1e-5)


def test_a_hook_of_a_gradient_runs_once_with_an_overridden_step(tmp_path: Path) -> None:
    calls: list[Any] = []
    made = [trainer(tmp_path, kind, max_steps=3) for kind in (hf.Trainer, scripted.Wrapping)]
    for each in made:
        each.model.classifier.weight.register_hook(lambda gradient: calls.append(gradient) or gradient / 2)
        each.train()
    assert len(calls) == 6
    equal(*made)


def test_predictions_metrics_and_outputs_of_an_overridden_prediction_step(tmp_path: Path) -> None:
    data = rows(CLASSES, 7)
    plain = trainer(tmp_path, eval_dataset=data, compute_metrics=accuracy)
    by_class = {"compute_metrics": lambda given: {"same": (given.predictions == given.label_ids).mean()}}
    other = trainer(tmp_path, scripted.OwnPrediction, eval_dataset=data, **by_class)
    found, expected = other.predict(data), plain.predict(data)
    assert np.array_equal(found.predictions, expected.predictions.argmax(-1))
    assert np.array_equal(found.label_ids, [int(each["labels"]) for each in data])
    assert found.metrics["test_same"] == expected.metrics["test_accuracy"]
    assert other.evaluate()["eval_same"] == plain.evaluate()["eval_accuracy"]
    seq2seq, data = trainer(tmp_path, family="t5"), rows("t5", 2)
    alone = seq2seq.predict(data, ignore_keys=["encoder_last_hidden_state", "past_key_values"]).predictions
    assert np.array_equal(alone, seq2seq.predict(data).predictions[0])


def test_given_and_overridden_optimizers_data_and_logs_are_used(tmp_path: Path) -> None:
    class Created(hf.Trainer):  # type: ignore[name-defined,misc]
        def create_optimizer(self, model: Any = None) -> Any:
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            return self.optimizer

    class Scripted(Created):
        calls: tuple[Any, ...] = ()

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            self.calls += (num_training_steps,)
            self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
            return self.lr_scheduler

        def get_train_dataloader(self) -> Any:
            return torch.utils.data.DataLoader(self.train_dataset, batch_size=8, collate_fn=padded)

        def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
            logs["mine"] = 1.0
            super().log(logs, start_time)

    made = trainer(tmp_path, Scripted)
    made.train()
    assert made.calls == (4,)
    history = [each for each in made.state.log_history if "loss" in each]
    assert [each["learning_rate"] for each in history] == [0.1, 0.05, 0.1 / 3, 0.025]
    assert [each["epoch"] for each in history] == [0.5, 1.0, 1.5, 2.0]  # 16 samples, batches of 8
    assert all(each["mine"] == 1.0 for each in history)
    assert type(made.optimizer) is torch.optim.SGD
    constant, bert = {"lr_scheduler_type": "constant", "learning_rate": 0.1}, model(CLASSES)
    sgd = torch.optim.SGD(bert.parameters(), lr=0.1)
    given = (sgd, torch.optim.lr_scheduler.ConstantLR(sgd, factor=1.0))
    of_class = trainer(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}), **constant)
    others = hf.Trainer(bert, arguments(tmp_path), padded, rows(CLASSES, 16), optimizers=given)
    for each in (of_class, others, trainer(tmp_path, Created, **constant)):
        each.train()
        equal(each, of_class)
    assert of_class.get_learning_rates() == [0.1, 0.1]


def test_a_plateau_given_as_an_object_watches_what_transformers_watches(tmp_path: Path) -> None:
    options = {**EVERY_2, "save_strategy": "no", "metric_for_best_model": "loss", "max_steps": 8}
    found = []
    for kind in (transformers.Trainer, hf.Trainer):
        bert = model(CLASSES)
        sgd = torch.optim.SGD(bert.parameters(), lr=0.1)
        falls = {"patience": 0, "factor": 0.5, "threshold": 10.0, "threshold_mode": "abs"}
        given = (sgd, torch.optim.lr_scheduler.ReduceLROnPlateau(sgd, **falls))
        args = arguments(tmp_path, **options)
        made = kind(bert, args, padded, even(CLASSES, 16), even(CLASSES, 3), optimizers=given)
        made.train()
        found.append(losses(made, "learning_rate"))
    assert found[0] == found[1] == [0.1] * 4 + [0.05] * 2 + [0.025] * 2


@pytest.mark.landing
def test_overrides_memory_and_recomputation_take_the_forms_of_transformers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def scripted_by(base: Any) -> Any:
        class Scripted(base):
            def training_step(self, model: Any, inputs: Any, items: Any = None) -> Any:
                assert items == 2
                return super().training_step(model, inputs, items)

            def get_eval_dataloader(self, eval_dataset: Any) -> Any:
                return torch.utils.data.DataLoader(eval_dataset, batch_size=3, collate_fn=padded)

            def create_scheduler(self, num_training_steps: int) -> Any:
                return super().create_scheduler(num_training_steps)

        return Scripted

    class Recomputing(torch.nn.Linear):
        given: Any = None

        def gradient_checkpointing_enable(
            self, gradient_checkpointing_kwargs: Any, every_n_layers: int = 1, offload: bool = False
        ) -> None:
            self.given = gradient_checkpointing_kwargs

        def forward(self, x: Any, labels: Any = None) -> Any:
            assert self.given or not self.training
            return {"loss": torch.nn.functional.cross_entropy(super().forward(x), labels)}

    found, folder = [], tmp_path / "saved"
    options = {"eval_strategy": "epoch", "eval_dataset": even(CLASSES, 3), "max_steps": 2}
    options |= {"skip_memory_metrics": False}
    recomputes = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
    points = [{"x": torch.ones(4), "labels": 1}] * 8
    for kind in (transformers.Trainer, hf.Trainer):
        made = trainer(tmp_path, scripted_by(kind), data=even(CLASSES, 16), **options)
        names = sorted(made.train().metrics)
        made.save_model(folder, _internal_call=True)
        with warnings.catch_warnings():  # transformers calls the method's former name, and says so
            warnings.simplefilter("ignore")
            own = kind(Recomputing(4, 2), arguments(tmp_path, **recomputes), train_dataset=points)
            own.train()
        found.append((names, losses(made, "eval_loss"), own.model.given))
    assert found[0][0] == found[1][0]
    assert "train_mem_cpu_peaked_delta" in found[1][0]
    assert "Recomputing: it is no model of transformers" in caplog.text
    assert found[1][1] == pytest.approx(found[0][1], rel=1e-5)
    assert found[0][2] == found[1][2] == {"use_reentrant": False}


def test_an_overridden_evaluate_is_what_a_fit_calls_and_ranks_by(tmp_path: Path) -> None:
    options = {**EVERY_2, "metric_for_best_model": "f1", "load_best_model_at_end": True}
    made = trainer(tmp_path, scripted.Answering, eval_dataset=rows(CLASSES, 5), **options)
    made.train()
    assert losses(made, "eval_f1") == [3.0, 5.0]
    assert (made.state.best_metric, made.state.best_global_step) == (5.0, 4)


def test_refusals(tmp_path: Path) -> None:
    def overriding(name: str, method: Any = lambda self: None, **options: Any) -> Any:
        return lambda: trainer(tmp_path, type("Scripted", (hf.Trainer,), {name: method}), **options)

    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows(CLASSES, 4))

    def forgetful(self: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        return self.compute_loss(model, inputs)

    def loads(self: Any) -> Any:
        return torch.utils.data.DataLoader(Stream(), batch_size=2, collate_fn=padded)

    made = trainer(tmp_path)
    other = torch.optim.SGD(model(CLASSES).parameters(), lr=0.1)
    share = {"max_steps": -1, "num_train_epochs": 1, "logging_steps": 0.5}
    seq2seq = trainer(tmp_path, hf.Seq2SeqTrainer, "t5", eval_dataset=rows("t5", 2))
    theirs = tmp_path / "theirs"
    trainer(theirs, transformers.Trainer, save_strategy="steps", save_steps=2, max_steps=2).train()
    forgets = overriding("training_step", forgetful)
    streams = overriding("get_train_dataloader", loads, **share)
    never = {"_inner_training_loop": "drivetrain.Trainer", "_prepare_inputs": "Override compute_loss"}
    cases: dict[str, Any] = {n: (overriding(n), f"Scripted.{n} would never", v) for n, v in never.items()}
    cases |= {
        "a search": (lambda: made.hyperparameter_search(backend="sigopt"), "has ended", "backend='optuna'"),
        "a trial": (lambda: made.train(trial={}), "trial"),
        "no data": (lambda: trainer(tmp_path, eval_strategy="epoch"), "without an eval_dataset"),
        "generation": (lambda: generator(tmp_path, hf.Trainer), "Seq2SeqTrainer"),
        "beams": (lambda: seq2seq.evaluate(num_beams=2), "predict_with_generate=True"),
        "a step without backward": (lambda: forgets().train(), "ran no backward"),
        "a share of a stream": (lambda: streams().train(), "logging_steps=0.5 is a share", "Give max_steps"),
        "a stream": (lambda: trainer(tmp_path, data=Stream(), max_steps=-1), "without a length", "max_steps"),
        "no samples": (lambda: trainer(tmp_path / "empty", data=[]).train(), "train_dataset is empty"),
        "another's": (
            lambda: trainer(tmp_path, optimizers=(other, None)).train(),
            "are neither in self.model",
        ),
    }
    resume = lambda: trainer(theirs).train(resume_from_checkpoint=True)  # noqa: E731
    cases["their checkpoint"] = (resume, "checkpoints of transformers' own Trainer")
    assert_refused((ConfigError, CheckpointError, DataError, AttributeError), cases)


def test_a_resumed_training_is_bitwise_the_uninterrupted_one(tmp_path: Path) -> None:
    options = {**SAVING, "max_steps": 8, "train_sampling_strategy": "random"}
    options |= {"gradient_accumulation_steps": 2}
    whole = trainer(tmp_path / "whole", **options)
    expected = whole.train()
    with pytest.raises(KeyboardInterrupt):
        trainer(tmp_path / "cut", callbacks=[scripted.Interrupted(5)], **options).train()
    resumed = trainer(tmp_path / "cut", **options)
    output = resumed.train(resume_from_checkpoint=True)
    equal(resumed, whole)
    assert output.global_step == expected.global_step == 8
    timeless = [_timeless(each) for each in resumed.state.log_history if "loss" in each]
    assert timeless == [_timeless(each) for each in whole.state.log_history if "loss" in each]
    with pytest.raises(CheckpointError):
        trainer(tmp_path / "empty", **options).train(resume_from_checkpoint=True)


def test_the_last_checkpoint_of_a_folder_is_resumed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert hf.get_last_checkpoint(tmp_path / "none") is None
    assert hf.get_last_checkpoint(tmp_path) is None
    first = trainer(tmp_path, **SAVING)
    first.train()
    last = hf.get_last_checkpoint(str(tmp_path))
    assert last == str(tmp_path / "checkpoint-4")
    longer = trainer(tmp_path, **SAVING, max_steps=6, learning_rate=0.5)  # the checkpoint's stays, as there
    assert longer.train(resume_from_checkpoint=last).global_step == 6
    assert "lr was 0.01 and is now 0.5" in caplog.text
    assert [each["step"] for each in longer.state.log_history if "loss" in each] == [1, 2, 3, 4, 5, 6]
    theirs = tmp_path / "theirs"
    trainer(theirs, transformers.Trainer, **SAVING).train()
    assert hf.get_last_checkpoint(theirs) == str(theirs / "checkpoint-4")


def test_the_best_model_is_loaded_and_kept_and_a_stop_comes_early(tmp_path: Path) -> None:
    values = iter(range(0, -99, -1))
    options: dict[str, Any] = {**EVERY_2, **BEST}
    options |= {"callbacks": [transformers.EarlyStoppingCallback(2)], "eval_dataset": rows(CLASSES, 4)}
    made = trainer(tmp_path, compute_metrics=lambda _: {"score": next(values)}, max_steps=20, **options)
    assert made.train().global_step == 6
    best = Path(made.state.best_model_checkpoint)
    assert (made.state.best_metric, best.name) == (0, "checkpoint-2")
    kept = hf.TransformersTask.from_checkpoint(best).model
    for one, other in zip(made.model.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")  # peft's
def test_the_best_adapter_is_loaded(tmp_path: Path) -> None:
    seen: list[tuple[float, Any]] = []

    class Keeps(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
            seen.append((metrics["eval_loss"], weights(made)))

    options: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps"}
    options |= {"save_steps": 1, "load_best_model_at_end": True, "learning_rate": 3.0, "max_grad_norm": 0.0}
    adapter = peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
    data, args = even("llama", 8), arguments(tmp_path, **options)
    given = peft.get_peft_model(model("llama"), adapter)
    made = hf.Trainer(given, args, padded, data, data, callbacks=[Keeps])
    made.train()
    best = min(seen, key=lambda each: each[0])
    assert best[0] < seen[-1][0]  # it is not the last one
    torch.testing.assert_close(weights(made), best[1], rtol=0.0, atol=0.0)


def test_what_a_script_sets_after_the_construction_counts(tmp_path: Path) -> None:
    data = rows(CLASSES, 16)
    late = trainer(tmp_path / "late", learning_rate=0.5, max_steps=9, eval_dataset=data)
    late.args.learning_rate, late.args.max_steps, late.args.per_device_eval_batch_size = 1e-2, 4, 2
    right = trainer(tmp_path / "right", eval_dataset=data)
    for each in (right, late):
        each.train()
    assert losses(late) == losses(right)
    late.model = right.model
    expected = right.evaluate()["eval_loss"]
    assert late.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-6)
    late.args.label_smoothing_factor = 0.9
    assert late.evaluate()["eval_loss"] > 1.001 * expected
    by_hand = trainer(tmp_path / "hand", lr_scheduler_type="constant")
    by_hand.optimizer = given = torch.optim.SGD(by_hand.model.parameters(), lr=0.0)
    before = weights(by_hand)
    by_hand.train()
    assert by_hand.optimizer is given
    torch.testing.assert_close(weights(by_hand), before, rtol=0.0, atol=0.0)


def test_evaluation_sets_have_names_and_one_ranks(tmp_path: Path) -> None:
    sets = {"news": rows(CLASSES, 4), "mail": rows(CLASSES, 3)}
    options = {"eval_strategy": "epoch", "save_strategy": "epoch", "metric_for_best_model": "news_accuracy"}
    made = trainer(tmp_path, eval_dataset=sets, compute_metrics=accuracy, max_steps=8, **options)
    made.train()
    found = [each for each in made.state.log_history if "eval_news_loss" in each or "eval_mail_loss" in each]
    assert [each.get("eval_news_rows", each.get("eval_mail_rows")) for each in found] == [4, 3]
    metrics = made.evaluate()
    assert {"eval_news_loss", "eval_mail_accuracy", "eval_mail_runtime"} <= metrics.keys()
    assert made.state.best_metric == metrics["eval_news_accuracy"]
    assert made.evaluate(sets["mail"], metric_key_prefix="mail").keys() >= {"mail_loss", "mail_runtime"}


def test_model_init_begins_anew_and_the_seed_decides(tmp_path: Path) -> None:
    def init() -> Any:
        config = model(CLASSES).config
        torch.manual_seed(torch.initial_seed())
        config.hidden_dropout_prob = 0.1
        return transformers.BertForSequenceClassification(config)

    made = trainer(tmp_path, model_init=init, train_sampling_strategy="random")
    first, second = made.train(), made.train()
    assert first.training_loss == second.training_loss
    other = trainer(tmp_path, model_init=init, train_sampling_strategy="random", seed=7)
    assert other.train().training_loss != first.training_loss


def test_num_train_epochs_max_steps_and_streams_give_the_length_of_a_training(tmp_path: Path) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(rows(CLASSES, 7))

    for options, steps in (({"max_steps": -1}, 12), ({"max_steps": 3}, 3)):
        assert trainer(tmp_path, num_train_epochs=1.5, **options).train().global_step == steps
    options = {"per_device_train_batch_size": 3, "train_sampling_strategy": "group_by_length"}
    made = trainer(tmp_path, dataloader_drop_last=True, **options)
    loader = made.get_train_dataloader()
    assert (len(loader), type(loader.sampler).__name__) == (5, "LengthGroupedSampler")
    assert made.accelerator.prepare(loader) is loader
    assert loader.total_batch_size == 3
    found = []
    for data in (Stream(), rows(CLASSES, 7)):
        made = trainer(tmp_path, data=data, eval_dataset=data, max_steps=6, compute_metrics=accuracy)
        assert made.train().global_step == 6
        found.append(made.evaluate())
        assert found[-1]["eval_rows"] == 7
    assert found[0]["eval_loss"] == pytest.approx(found[1]["eval_loss"], rel=1e-6)


def test_dataloader_drop_last_drops_the_last_batch_of_evaluations_and_predictions(tmp_path: Path) -> None:
    data, found = rows(CLASSES, 7), []
    for kind in (transformers.Trainer, hf.Trainer):
        made = trainer(tmp_path, kind, eval_dataset=data, dataloader_drop_last=True)
        assert len(made.predict(data).predictions) == 6
        found.append(made.evaluate()["eval_loss"])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


def test_a_dataset_of_columns_is_collated_and_smoothed_as_in_transformers(tmp_path: Path) -> None:
    columns = {"input_ids": [[number % 9 + 3, 5] for number in range(8)], "label": [0, 1, 2, 1] * 2}
    data = datasets.Dataset.from_dict({**columns, "text": ["left out"] * 8})
    found = []
    for kind in (transformers.Trainer, hf.Trainer):
        args = arguments(tmp_path, label_smoothing_factor=0.1, eval_on_start=True, eval_strategy="epoch")
        made = kind(model(CLASSES), args, train_dataset=data, eval_dataset=data)
        made.train()
        found.append([_timeless(each) for each in made.state.log_history])
    assert len(found[0]) == len(found[1])
    for theirs, ours in zip(*found, strict=True):
        assert {**ours, "total_flos": 0} == pytest.approx({**theirs, "total_flos": 0}, rel=1e-5)


def test_results_states_and_models_are_written(tmp_path: Path) -> None:
    made = trainer(tmp_path, eval_dataset=rows(CLASSES, 3))
    output = made.train()
    made.save_model()
    made.log_metrics("train", output.metrics)
    made.save_metrics("train", output.metrics)
    made.save_metrics("eval", made.evaluate())
    made.save_state()
    made.create_model_card(license="mit")
    written = json.loads((tmp_path / "all_results.json").read_text())
    assert written["train_loss"] == output.training_loss
    assert "eval_loss" in written
    assert json.loads((tmp_path / "trainer_state.json").read_text())["global_step"] == 4
    assert "license: mit" in (tmp_path / "README.md").read_text()
    again = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    for one, other in zip(again.parameters(), made.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert made.get_num_trainable_parameters() == sum(each.numel() for each in again.parameters())
    assert made.is_world_process_zero()
    assert made.is_local_process_zero()


def test_callbacks_of_both_kinds_work_and_can_be_removed(tmp_path: Path) -> None:
    seen: list[str] = []

    class Theirs(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
            seen.append(f"theirs {type(model).__name__}")

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_save = state.global_step == 1
            control.should_training_stop = state.global_step == 3

    class Ours(Callback):
        def on_checkpoint_saved(self, run: Any) -> None:
            seen.append(f"ours {run.progress.steps}")

    options = {"save_strategy": "steps", "save_steps": 100, "callbacks": [Theirs, Ours()]}
    made = trainer(tmp_path / "both", **options)
    assert made.train().global_step == 3
    assert seen == ["theirs BertForSequenceClassification", "ours 1", "ours 3"]
    assert type(made.pop_callback(Theirs)) is Theirs
    made = trainer(tmp_path / "removed", **options)
    made.remove_callback(Theirs)
    assert made.train().global_step == 4


STEPS: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": 5, "max_steps": 7}
EPOCHS: dict[str, Any] = {"eval_strategy": "epoch", "max_steps": 11}
SHARES: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 5.25, "gradient_accumulation_steps": 3}
SHARES |= {"logging_steps": 0.1, "warmup_steps": 0.1, "eval_strategy": "steps", "eval_steps": 0.4}
WATCHED: dict[str, Any] = {"lr_scheduler_type": "reduce_lr_on_plateau"}
WATCHED |= {"lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "mode": "max", "min_lr": 2e-3}}
OPTIONS = {
    "shares": {**SHARES, "save_strategy": "steps", "save_steps": 0.4},
    "an evaluation at the last step": {**STEPS, "save_strategy": "steps", "save_steps": 5, **BEST},
    "a delay": {**STEPS, "eval_delay": 6, "logging_steps": 3, "logging_first_step": True},
    "a short epoch": {**EPOCHS, "logging_strategy": "epoch"},
    "a rate that watches": {**EPOCHS, **BEST, "save_strategy": "epoch", "max_steps": 32, **WATCHED},
}


@pytest.mark.filterwarnings("ignore::Warning:torch.optim")  # of transformers' own loop
@pytest.mark.parametrize("name", OPTIONS)
def test_steps_rates_and_bests_of_the_log_are_transformers(name: str, tmp_path: Path) -> None:
    class Ends(transformers.TrainerCallback):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_epoch_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self.seen.append(("epoch", state.global_step, state.epoch))

        def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
            self.seen.append(("train", state.global_step, state.epoch))

    found, made = [], []
    for kind in (transformers.Trainer, hf.Trainer):
        scores, ends = iter([1.0, 3.0, 2.0, 2.0] * 3), Ends()
        more = {"compute_metrics": lambda _, scores=scores: {"score": next(scores)}, "callbacks": [ends]}
        more |= {"eval_dataset": rows(CLASSES, 4), **OPTIONS[name]}
        each = trainer(tmp_path / kind.__module__, kind, **more)
        for _ in range(2 if name == "a short epoch" else 1):
            each.train()
        keys = ("step", "learning_rate", "eval_score")
        history = [[*(row.get(key) for key in keys), "loss" in row] for row in each.state.log_history]
        found.append([history, ends.seen, each.state.best_global_step])
        made.append(each)
    assert found[0] == found[1]
    if "load_best_model_at_end" in OPTIONS[name]:
        # Attention does not depend on the bias of its keys: the gradients of that bias are rounding errors,
        # which Adam makes into whole steps.
        equal(*made, tolerance=1e-4 if name == "a rate that watches" else 1e-5)
    if name == "shares":
        saved = (tmp_path / hf.Trainer.__module__ / "checkpoints").glob("step-*")
        assert sorted(path.name for path in saved) == [f"step-000000{each}" for each in ("07", "14", "16")]


def generator(folder: Path, kind: Any, **options: Any) -> Any:
    given: dict[str, Any] = {"predict_with_generate": True, "generation_max_length": 6}
    given |= {"eval_strategy": "epoch", "max_steps": 2}
    # transformers counts the samples of a last, smaller batch wrongly.
    args = arguments(folder, transformers.Seq2SeqTrainingArguments, per_device_eval_batch_size=2, **given)
    made = model("t5")
    made.generation_config.pad_token_id = made.config.pad_token_id = 1
    return kind(made, args, padded, even("t5", 4), even("t5", 4), **options)


def test_generated_sequences_are_predicted_and_measured(tmp_path: Path) -> None:
    lengths: list[int] = []

    def longest(prediction: Any) -> dict[str, float]:
        lengths.append(prediction.predictions.shape[1])
        return {"longest": prediction.predictions.shape[1]}

    class Scripted(hf.Seq2SeqTrainer):
        def prediction_step(self, *given: Any, **options: Any) -> Any:
            return super().prediction_step(*given, **options)

    made = generator(tmp_path / "ours", hf.Seq2SeqTrainer, compute_metrics=longest)
    made.train()
    scripted = generator(tmp_path / "scripted", Scripted, compute_metrics=longest)
    scripted.train()
    theirs = generator(tmp_path / "theirs", transformers.Seq2SeqTrainer, compute_metrics=longest)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs.train()
    data = even("t5", 4)
    one, other = made.predict(data), theirs.predict(data)
    width = one.predictions.shape[1]
    assert np.array_equal(one.predictions, other.predictions[:, :width])
    assert np.array_equal(one.predictions, scripted.predict(data).predictions)
    assert one.metrics["test_loss"] == pytest.approx(other.metrics["test_loss"], rel=1e-5)
    assert made.evaluate(max_length=4)["eval_longest"] <= 4
    assert made.predict(data, max_new_tokens=2, num_beams=2).predictions.shape[1] <= 3
    made.model.generation_config.max_new_tokens = 9  # which max_length replaces
    assert made.predict(data).predictions.shape[1] <= 6
    assert made.predict(data, max_length=3).predictions.shape[1] <= 3


def test_a_callback_saves_the_model_in_the_middle_of_a_fit(tmp_path: Path) -> None:
    saves = scripted.SavesAt2(tmp_path / "middle")
    saves.script = trainer(tmp_path / "four", callbacks=[saves], lr_scheduler_type="constant")
    saves.script.train()
    two = trainer(tmp_path / "two", max_steps=2, lr_scheduler_type="constant")
    two.train()
    found = type(two.model).from_pretrained(tmp_path / "middle")
    for one, other in zip(found.parameters(), two.model.parameters(), strict=True):
        assert torch.equal(one, other)


def test_an_optimizer_goes_on_in_a_second_train(tmp_path: Path) -> None:
    constant = {"max_steps": 2, "lr_scheduler_type": "constant"}
    scheduled = trainer(tmp_path, optimizer_cls_and_kwargs=(torch.optim.SGD, {"lr": 0.1}), max_steps=2)
    for _ in range(2):
        scheduled.train()
        assert losses(scheduled, "learning_rate") == [0.1, 0.05]
    found = []
    for kind in (hf.Trainer, transformers.Trainer):
        bert = model(CLASSES)
        given = (torch.optim.AdamW(bert.parameters(), lr=1e-2), None)
        args = arguments(tmp_path / kind.__module__, **constant)
        made = kind(bert, args, padded, even(CLASSES, 16), optimizers=given)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # transformers' own
            found.append([made.train().training_loss, made.train().training_loss])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_a_second_train_that_saves_keeps_the_checkpoints_of_the_first(tmp_path: Path) -> None:
    for kind in (transformers.Trainer, hf.Trainer):
        folder = tmp_path / kind.__module__
        made = [trainer(folder, kind, max_steps=2, **SAVING) for _ in range(2)]
        assert made[0].train().global_step == 2
        for each in made:  # the same object, and a new one
            with warned("earlier-") if kind is hf.Trainer else warnings.catch_warnings():
                assert each.train().global_step == 2
    for place in (folder, folder / "earlier-1", folder / "earlier-2"):
        assert hf.get_last_checkpoint(place) == str(place / "checkpoint-2")
        assert (place / "checkpoints" / "step-00000002").is_dir()


def test_an_optimizer_of_a_part_of_the_model_trains_that(tmp_path: Path) -> None:
    bert = model(CLASSES)
    before = {name: each.clone() for name, each in bert.state_dict().items()}
    head = torch.optim.SGD(bert.classifier.parameters(), lr=0.1)
    hf.Trainer(bert, arguments(tmp_path), padded, rows(CLASSES, 16), optimizers=(head, None)).train()
    moved = {name for name, each in bert.state_dict().items() if not torch.equal(each, before[name])}
    assert moved == {"classifier.weight", "classifier.bias"}


def _script(folder: str, size: int) -> dict[str, Any]:
    data = rows(CLASSES, 9)
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"eval_dataset": data, "compute_metrics": accuracy, "max_steps": -1}
    options |= {"num_train_epochs": 1, "eval_strategy": "steps", "eval_steps": 0.5}
    for name, kind in (("plain", hf.Trainer), ("own", scripted.OwnBackward)):
        made = trainer(f"{folder}/{name}", kind, per_device_train_batch_size=size, **options)
        made.train()
        assert [each["step"] for each in made.state.log_history if "eval_loss" in each] == [2, 4]
        found[name] = losses(made)
        made.save_model()
    output = made.predict(data)
    found |= {"predicted": output.predictions, "labels": output.label_ids}
    return {**found, **_timeless(made.evaluate())}


@pytest.mark.landing
def test_two_ranks_train_evaluate_and_predict_as_one(tmp_path: Path) -> None:
    expected = _script(str(tmp_path / "one"), 4)
    for found in on_two_ranks(_script, str(tmp_path / "two"), 2):
        np.testing.assert_allclose(found.pop("predicted"), expected["predicted"], rtol=1e-4, atol=1e-5)
        assert np.array_equal(found.pop("labels"), expected["labels"])
        assert {name: pytest.approx(expected[name], rel=1e-5) for name in found} == found
    assert (tmp_path / "two" / "plain" / "config.json").exists()


def _static(folder: str, name: str) -> list[Any]:
    kind = hf.Trainer if name == "Trainer" else getattr(scripted, name)
    made = trainer(f"{folder}/{name}", kind, ddp_static_graph=True)
    made.train()
    return [each.sum().item() for each in weights(made)]


def _copied(folder: str) -> list[float]:
    with pytest.raises(ConfigError, match=r"CopiedLoss\.compute_loss multiplies the loss by the number"):
        trainer(folder, scripted.CopiedLoss)
    found = []
    for kind in (scripted.CopiedLoss, scripted.CopiedStep):
        made = trainer(f"{folder}/{kind.__name__}", kind, average_tokens_across_devices=False)
        found.append(made.train().training_loss)
        assert made.accelerator.distributed_type == "MULTI_CPU"
        with pytest.raises(ConfigError, match="each sample once"):
            made.accelerator.gather_for_metrics(torch.ones(2))
        made.accelerator.wait_for_everyone()
    return found


OWN = r"OwnBackward\.training_step calls loss\.backward\(\) itself"


@pytest.mark.landing
def test_overridden_steps_on_two_ranks_train_as_one_or_are_refused(tmp_path: Path) -> None:
    plain = on_two_ranks(_static, str(tmp_path), "Trainer")
    assert on_two_ranks(_static, str(tmp_path), "Wrapping") == plain
    assert plain[0] == plain[1]
    expected = trainer(tmp_path / "one", per_device_train_batch_size=4).train().training_loss
    for found in on_two_ranks(_copied, str(tmp_path / "two")):
        assert found == pytest.approx([expected] * 2, rel=1e-5)
    with pytest.raises(RuntimeError, match=OWN):
        run_distributed(_static, str(tmp_path), "OwnBackward")


def _sharded(folder: str, name: str) -> Any:
    made = trainer(f"{folder}/{name}", getattr(scripted, name), fsdp=True, max_steps=2)
    made.train()
    assert made.is_fsdp_enabled
    assert made.accelerator.distributed_type == "FSDP"
    return made.predict(rows(CLASSES, 5)).predictions.shape


@pytest.mark.landing
def test_with_sharded_parameters_a_step_leaves_backward_to_the_engine(tmp_path: Path) -> None:
    for shape in on_two_ranks(_sharded, str(tmp_path), "Wrapping"):
        assert shape == (5, 3)
    with pytest.raises(RuntimeError, match=OWN):
        run_distributed(_sharded, str(tmp_path), "OwnBackward")
