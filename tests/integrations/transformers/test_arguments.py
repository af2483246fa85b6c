"""Transformers' arguments become options of a Trainer, a task and its data; nothing is ignored in silence."""

from __future__ import annotations

import dataclasses
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import CheckpointConfig, ConfigError, LambdaCallback, OptimizerConfig, Totals, Trainer
from drivetrain.task.optim.build import build_optimizer
from drivetrain.task.task import known_fit
from drivetrain.testing import run_distributed

pytestmark = pytest.mark.full
transformers = pytest.importorskip("transformers")

from drivetrain.integrations.transformers import (  # noqa: E402
    TransformersOptimizer,
    TransformersTask,
    from_training_arguments,
)
from drivetrain.integrations.transformers.arguments_table import (  # noqa: E402
    MAPPED,
    OPTIMIZERS,
    REFUSED,
    ROWS,
)

ROOT = Path(__file__).parents[3]
CLASSES = (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments)


@pytest.fixture(scope="module", autouse=True)
def theirs() -> Any:
    """Their Trainer, whose import sets variables of the environment, without a thread of tqdm's."""
    from tqdm.auto import tqdm

    tqdm.monitor_interval = 0
    pytest.importorskip("deepspeed")
    return transformers.Trainer


@pytest.fixture(autouse=True)
def level_is_restored() -> Iterator[None]:
    level = logging.getLogger("drivetrain").level
    yield
    logging.getLogger("drivetrain").setLevel(level)


def bert() -> Any:
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.BertForSequenceClassification(
        transformers.BertConfig(
            vocab_size=50, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **sizes
        )
    )


class Samples(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> dict[str, Any]:
        made = torch.Generator().manual_seed(index)
        length = 4 + index % 3
        return {
            "input_ids": torch.cat(
                [torch.randint(1, 50, (length,), generator=made), torch.zeros(6 - length, dtype=torch.long)]
            ),
            "attention_mask": torch.tensor([1] * length + [0] * (6 - length)),
            "label": index % 2,
        }


# The table.


def test_the_installed_release_has_no_option_without_a_row() -> None:
    there = {each.name for kind in CLASSES for each in dataclasses.fields(kind) if each.init}
    assert sorted(there - ROWS.keys()) == []
    assert sorted(name for name, row in ROWS.items() if not row.is_old and name not in there) == []
    assert sorted(name for name, row in ROWS.items() if row.is_old and name in there) == []


def _seen(mapping: Mapping[str, Any]) -> list[str]:
    """All that a conversion makes, as text, and the level of the messages."""
    mapped = from_training_arguments(mapping)
    made = {
        **vars(mapped),
        "report": None,
        "callbacks": [(type(each), vars(each)) for each in mapped.trainer_options["callbacks"]],
        "publish": mapped.publish and vars(mapped.publish),
        "loggers": [getattr(each, "directory", each) for each in mapped.trainer_options["loggers"]],
        "level": logging.getLogger("drivetrain").level,
    }
    return sorted(re.sub(r" at 0x\w+", "", f"{name}={value!r}") for name, value in made.items())


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.status == MAPPED])
def test_a_mapped_option_has_an_effect(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    row = ROWS[name]
    monkeypatch.chdir(tmp_path)
    transformers.GenerationConfig(max_new_tokens=7).save_pretrained("generation")
    for variable, value in row.environment.items():
        monkeypatch.setenv(variable, value)
    level = logging.getLogger("drivetrain").level
    base = {"output_dir": "runs/base", **row.needs}
    before = _seen(base)
    logging.getLogger("drivetrain").setLevel(level)
    after = _seen({**base, name: row.example})
    assert before != after
    report = {each.name: each for each in from_training_arguments({**base, name: row.example}).report}
    assert report[name].status == MAPPED
    assert "hf_example" not in str(report[name])


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.status == REFUSED])
def test_a_refused_option_says_what_to_use(name: str) -> None:
    value = not ROWS[name].default if isinstance(ROWS[name].default, bool) else "some value"
    with pytest.raises(ConfigError, match=re.escape(ROWS[name].text)):
        from_training_arguments({name: value})


def test_an_option_without_a_row_is_an_error_unless_it_is_at_its_default() -> None:
    kind = dataclasses.make_dataclass(
        "More", [("new_option", int, 3)], bases=(transformers.TrainingArguments,)
    )
    assert from_training_arguments(kind(output_dir="out")).trainer.batch_size == 8
    with pytest.raises(ConfigError, match="no option 'new_option', which is 4"):
        from_training_arguments(kind(output_dir="out", new_option=4))
    with pytest.raises(ConfigError, match="'learning_rate'"):
        from_training_arguments({"learnin_rate": 1e-3})


def test_the_printed_table_is_current() -> None:
    page = ROOT / "docs" / "how-to" / "transformers-arguments.md"
    from tests.support.arguments_page import table

    assert table() in page.read_text(encoding="utf-8"), "run python -m tests.support.arguments_page"


# Their classes.


def test_the_arguments_of_a_script_are_parsed_and_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (
        "train.py --output_dir out --learning_rate 3e-4 --warmup_steps 0.25 --eval_strategy steps"
        " --eval_steps 4 --save_strategy steps --save_steps 8 --load_best_model_at_end"
        " --predict_with_generate --generation_num_beams 2 --metric_for_best_model f1 --max_steps 16"
        " --lr_scheduler_type cosine --report_to tensorboard --logging_steps 0.1 --use_cpu --bf16"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    (args,) = transformers.HfArgumentParser(
        transformers.Seq2SeqTrainingArguments
    ).parse_args_into_dataclasses()
    mapped = from_training_arguments(args)
    trainer = mapped.trainer
    assert (trainer.max_steps, trainer.max_epochs, trainer.strategy) == (16, None, "cpu")
    assert (str(trainer.validate_every), str(trainer.log_every)) == ("4 steps", "2 steps")
    assert trainer.precision.name == "bf16-mixed"  # type: ignore[union-attr]
    assert trainer.loggers == ("tensorboard",)
    policy = trainer.checkpoint
    assert isinstance(policy, CheckpointConfig)
    assert (str(policy.every), policy.keep_last, policy.best) == ("8 steps", None, 1)
    assert (policy.by, policy.mode) == ("validation/f1", "max")
    assert mapped.load_best
    assert mapped.task_options["generate"] == {"num_beams": 2}
    optimizer = mapped.task_options["optimizer"]
    assert (optimizer.learning_rate, optimizer.warmup_steps, optimizer.schedule) == (3e-4, 0.25, "cosine")


def test_the_defaults_are_theirs_and_their_object_equals_a_mapping() -> None:
    there = from_training_arguments(transformers.TrainingArguments(output_dir="out"))
    here = from_training_arguments({"output_dir": "out"})
    assert there.trainer == here.trainer
    assert there.task_options == here.task_options
    assert {each.name for each in there.report} == {"output_dir", "logging_nan_inf_filter"}
    trainer = there.trainer
    assert (trainer.max_epochs, trainer.seed, trainer.max_grad_norm, trainer.batch_size) == (3, 42, 1.0, 8)
    assert (trainer.on_nonfinite, trainer.validate_every) == ("skip", None)
    assert 'on_nonfinite="skip"' in str(there.report)


@pytest.mark.parametrize(
    ("name", "value", "wanted"), [("learning_rate", "5e-5", "a number"), ("bf16", "false", "True or False")]
)
def test_a_text_in_the_place_of_a_number_is_refused(name: str, value: str, wanted: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}='{value}' is a text: give {wanted}"):
        from_training_arguments({name: value})


def test_older_names_and_conflicts() -> None:
    mapped = from_training_arguments(
        {
            "evaluation_strategy": "epoch",
            "fsdp": "full_shard auto_wrap offload",
            "fsdp_config": {"fsdp_transformer_layer_cls_to_wrap": ["BertLayer"]},
            "fp16_backend": "auto",
        }
    )
    strategy = mapped.trainer_options["strategy"]
    assert (strategy.sharding, strategy.cpu_offload, strategy.wrap) == ("full_shard", True, ("BertLayer",))
    for wrong, message in [
        ({"evaluation_strategy": "epoch", "eval_strategy": "steps"}, "former name of eval_strategy"),
        ({"half_precision_backend": "apex"}, "apex has ended"),
        ({"report_to": ["wandb"]}, "no logger here"),
        ({"lr_scheduler_type": "greedy"}, "reduce_lr_on_plateau"),
        ({"lr_scheduler_kwargs": {"cycles": 1}, "lr_scheduler_type": "cosine"}, "cycles"),
        ({"optim": "galore_adamw"}, "galore_torch.GaLoreAdamW"),
        ({"optim_args": "momentum=0.9"}, "does not take"),
        ({"load_best_model_at_end": True}, "validations"),
        ({"logging_steps": 2.5}, "not a whole number"),
        ({"deepspeed": {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}}, "lr=1.0"),
        ({"fsdp": True, "deepspeed": {}, "fsdp_config": {"wrapp": 1}}, "wrapp"),
    ]:
        with pytest.raises(ConfigError, match=re.escape(message)):
            from_training_arguments(wrong)


# Schedules and optimizers.

_OPTIONS: dict[str, dict[str, Any]] = {
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_warmup_with_min_lr": {"min_lr_rate": 0.1},
    "warmup_stable_decay": {"num_decay_steps": 5},
    "polynomial": {"power": 2.0},
}


@pytest.mark.parametrize("name", [each.value for each in transformers.trainer_utils.SchedulerType])
@pytest.mark.parametrize("warmup", [3, 0.07])
def test_rates_are_transformers_own(name: str, warmup: float) -> None:
    if name in ("reduce_lr_on_plateau", "greedy"):
        pytest.skip("they watch a metric")
    args = transformers.TrainingArguments(
        output_dir="out",
        max_steps=100,
        learning_rate=1e-3,
        warmup_steps=warmup,
        lr_scheduler_type=name,
        lr_scheduler_kwargs=_OPTIONS.get(name),
    )
    theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
    schedule = transformers.get_scheduler(
        name, theirs, args.get_warmup_steps(100), 100, args.lr_scheduler_kwargs
    )
    ours = from_training_arguments(args).task_options["optimizer"]._configured(None, 100)
    for update in range(100):
        assert ours.lr * ours.schedule(update) == schedule.get_last_lr()[0]
        theirs.step()
        schedule.step()


@pytest.mark.parametrize(
    "name", [name for name, row in OPTIMIZERS.items() if row.here and "8bit" not in name]
)
def test_the_optimizer_is_the_one_that_their_trainer_makes(name: str, tmp_path: Path) -> None:
    if "4bit" in name or name in ("adamw_hf", "adamw_torch_xla"):
        pytest.skip("it needs another package, or is a former name")
    model = bert()
    model.scale = torch.nn.Parameter(torch.ones(3))  # has decay there, and would have none by our rule
    options = {"output_dir": str(tmp_path), "optim": name, "weight_decay": 0.1, "learning_rate": 1e-2}
    args = transformers.TrainingArguments(**options)
    theirs = transformers.Trainer(model, args).create_optimizer()
    task = TransformersTask(model, **from_training_arguments(args).task_options)
    with known_fit(task, Totals(updates=100)):
        config = task.configure_optimizers()
    assert isinstance(config, OptimizerConfig)
    ours = build_optimizer(config, task)
    assert type(ours) is type(theirs)
    for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
        assert [id(each) for each in mine["params"]] == [id(each) for each in other["params"]]
        keys = {"lr", "weight_decay", "betas", "eps", "momentum", "alpha", "scale_parameter", "relative_step"}
        for key in keys & other.keys():
            assert mine[key] == other[key], key


def test_the_releases_optimizers_all_have_a_row() -> None:
    there = {each.value for each in transformers.training_args.OptimizerNames}
    assert sorted(there - OPTIMIZERS.keys()) == []


# Training.


def test_a_run_equals_their_trainers_and_its_task_is_stored(tmp_path: Path) -> None:
    options = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "max_grad_norm": 0.5,
        "num_train_epochs": 2.5,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "disable_tqdm": True,
        "save_strategy": "epoch",
        "include_num_input_tokens_seen": "non_padding",
    }
    torch.manual_seed(0)
    theirs, ours = bert(), bert()
    ours.load_state_dict(theirs.state_dict())
    args = transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), **options)
    trainer = transformers.Trainer(theirs, args, train_dataset=Samples())
    trainer.train()
    mapped = from_training_arguments({**options, "output_dir": str(tmp_path / "ours")})
    task = TransformersTask(ours, **mapped.task_options)
    result = mapped.trainer.fit(task, mapped.train_data(Samples(), task.collate_function()))
    assert result.progress.updates == trainer.state.global_step == 8
    assert result.progress.tokens == trainer.state.num_input_tokens_seen
    for name, each in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], each, atol=1e-6, rtol=1e-5)
    again = TransformersTask.from_checkpoint(tmp_path / "ours")
    assert again.optimizer == mapped.task_options["optimizer"]


ADAM = {"type": "AdamW", "params": dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")}


def _distributed(strategy: dict[str, Any], folder: str) -> dict[str, float]:
    mapped = from_training_arguments(
        {
            **strategy,
            "output_dir": folder,
            "max_steps": 2,
            "learning_rate": 0.1,
            "weight_decay": 0.1,
            "disable_tqdm": True,
        }
    )
    torch.manual_seed(0)
    task = TransformersTask(bert(), **mapped.task_options)
    mapped.trainer.fit(task, Samples())
    return {name: float(each.detach().double().norm()) for name, each in task.named_parameters()}


def test_strategies_of_the_arguments_train_on_two_processes(tmp_path: Path) -> None:
    found = [
        run_distributed(_distributed, spec, str(tmp_path / name))
        for name, spec in {
            "ddp": {"ddp_bucket_cap_mb": 1},
            "fsdp": {"fsdp": "full_shard"},
            "zero2": {"deepspeed": {"zero_optimization": {"stage": 2}, "optimizer": ADAM}},
        }.items()
    ]
    for each in found:
        assert each == [pytest.approx(found[0][0], rel=1e-5)] * 2


def test_the_best_of_a_run_and_a_rate_that_watches_it_are_theirs(tmp_path: Path) -> None:
    options = {
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "num_train_epochs": 4,
        "eval_strategy": "epoch",
        "save_strategy": "epoch",
        "save_total_limit": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "ones",
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "factor": 0.5, "mode": "max", "min_lr": 2e-3},
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "disable_tqdm": True,
    }
    scores = {"theirs": [1.0, 3.0, 2.0, 2.0], "ours": [1.0, 3.0, 2.0, 2.0]}
    torch.manual_seed(0)
    theirs, ours = bert(), bert()
    ours.load_state_dict(theirs.state_dict())
    trainer = transformers.Trainer(
        theirs,
        transformers.TrainingArguments(output_dir=str(tmp_path / "theirs"), **options),
        train_dataset=Samples(),
        eval_dataset=Samples(),
        compute_metrics=lambda _: {"ones": scores["theirs"].pop(0)},
    )
    trainer.train()
    mapped = from_training_arguments({**options, "output_dir": str(tmp_path / "ours")})
    task = TransformersTask(
        ours, compute_metrics=lambda _: {"ones": scores["ours"].pop(0)}, **mapped.task_options
    )
    rates: list[float] = []
    watch = LambdaCallback(on_epoch_end=lambda run: rates.append(run.learning_rates()["lr"]))
    fit = dataclasses.replace(mapped.trainer, callbacks=[watch])
    result = fit.fit(task, mapped.train_data(Samples(), task.collate_function()), Samples())
    assert rates[-1] == pytest.approx(trainer.optimizer.param_groups[0]["lr"]) == 2.5e-3
    best = TransformersTask.from_checkpoint(str(result.best_checkpoint))
    for name, each in theirs.state_dict().items():  # they have loaded the best
        torch.testing.assert_close(best.model.state_dict()[name], each, atol=1e-6, rtol=1e-5)
    assert mapped.load_best


def test_data_options_make_a_loader(tmp_path: Path) -> None:
    plain = from_training_arguments({"output_dir": str(tmp_path)})
    data = Samples()
    assert plain.train_data(data) is data
    mapped = from_training_arguments(
        {
            "dataloader_drop_last": True,
            "per_device_train_batch_size": 5,
            "group_by_length": True,
            "use_cpu": True,
            "max_steps": 3,
            "save_strategy": "no",
            "disable_tqdm": True,
        }
    )
    task = TransformersTask(bert(), **mapped.task_options)
    loader = mapped.train_data(data, task.collate_function())
    assert (loader.batch_size, loader.drop_last, len(loader)) == (5, True, 2)
    assert mapped.trainer.fit(task, loader).progress.epoch == 1


def test_trainer_options_replace_those_of_the_arguments() -> None:
    class Mine:
        def log_metrics(self, metrics: Mapping[str, float], step: int) -> None: ...
        def log_config(self, config: Mapping[str, Any]) -> None: ...
        def close(self) -> None: ...

    mine = Mine()
    mapped = from_training_arguments({"report_to": "wandb", "seed": 1}, loggers=[mine], seed=2)
    assert mapped.trainer.loggers == [mine]
    assert mapped.trainer.seed == 2
    assert isinstance(mapped.trainer, Trainer)
    assert isinstance(mapped.task_options["optimizer"], TransformersOptimizer)
