"""Transformers' arguments become options of a Trainer, a task and its data; nothing is ignored in silence."""

from __future__ import annotations

import copy
import dataclasses
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from drivetrain import (
    CheckpointConfig,
    CheckpointError,
    ConfigError,
    LambdaCallback,
    NonFiniteError,
    OptimizerConfig,
    Totals,
    Trainer,
)
from drivetrain.task.optim.build import build_optimizer
from drivetrain.task.task import known_fit
from drivetrain.testing import run_distributed

pytestmark = pytest.mark.full
transformers = pytest.importorskip("transformers")

from tests.integrations.transformers.families import loader, model  # noqa: E402

from drivetrain.integrations.transformers import (  # noqa: E402
    CallbackAdapter,
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
from drivetrain.integrations.transformers.last_update import LastUpdate  # noqa: E402

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
    kind.__module__ = "transformers.training_args"
    assert from_training_arguments(kind(output_dir="out")).trainer.batch_size == 8
    with pytest.raises(ConfigError, match="no option 'new_option', which is 4"):
        from_training_arguments(kind(output_dir="out", new_option=4))
    with pytest.raises(ConfigError, match="'learning_rate'"):
        from_training_arguments({"learnin_rate": 1e-3})


def test_a_field_of_a_scripts_own_subclass_is_left_to_the_script() -> None:
    @dataclasses.dataclass
    class Own(transformers.TrainingArguments):  # type: ignore[name-defined,misc]
        beta: float = 0.1
        seed: int = 1  # has a row

    mapped = from_training_arguments(Own(output_dir="out", beta=0.5, seed=7))
    assert mapped.trainer.seed == 7
    assert "beta" not in str(mapped.report)


@pytest.mark.parametrize(
    ("option", "near"),
    [
        ({"eval_strategy": "step"}, "Did you mean 'steps'"),
        ({"evaluation_strategy": "epochs"}, "Did you mean 'epoch'"),
        ({"save_strategy": "step"}, "Did you mean 'steps'"),
        ({"logging_strategy": "never"}, "Allowed: 'epoch', 'no', 'steps'"),
        ({"hub_strategy": "every_saves"}, "Did you mean 'every_save'"),
        ({"lr_scheduler_type": "cosin"}, "Did you mean 'cosine'"),
        ({"optim": "adamw_toch"}, "Did you mean 'adamw_torch'"),
    ],
)
def test_a_misspelt_value_is_refused_with_the_nearest_one(option: dict[str, str], near: str) -> None:
    ((name, value),) = option.items()
    with pytest.raises(ConfigError, match=f"{name}='{value}' is .*{near}"):
        from_training_arguments(option)


def test_a_directory_of_logs_without_tensorboard_is_reported_as_not_used() -> None:
    options: dict[str, Any] = {"logging_dir": "logs", "report_to": "tensorboard"}
    assert "not used" not in str(from_training_arguments(options).report)
    for mapped in (
        from_training_arguments({**options, "report_to": []}),
        from_training_arguments(options, loggers=()),
    ):
        (line,) = [each for each in mapped.report if each.name == "logging_dir"]
        assert "not used" in line.text


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


_OLD_DICTIONARY: dict[str, Any] = {
    "output_dir": "out",
    "overwrite_output_dir": False,
    "per_gpu_train_batch_size": None,
    "learning_rate": 3e-4,
    "lr_scheduler_type": "linear",
    "warmup_ratio": 0.0,
    "warmup_steps": 0,
    "log_level": "passive",
    "logging_dir": "out/runs/Jan01_00-00-00_host",
    "no_cuda": False,
    "use_mps_device": False,
    "jit_mode_eval": False,
    "fp16_opt_level": "O1",
    "half_precision_backend": "auto",
    "local_rank": 0,
    "tpu_num_cores": None,
    "tpu_metrics_debug": False,
    "debug": [],
    "past_index": -1,
    "fsdp": [],
    "fsdp_min_num_params": 0,
    "fsdp_transformer_layer_cls_to_wrap": None,
    "deepspeed": None,
    "optim_args": None,
    "adafactor": False,
    "group_by_length": False,
    "length_column_name": "length",
    "report_to": [],
    "use_legacy_prediction_loop": False,
    "push_to_hub": True,
    "hub_model_id": "me/example",
    "hub_strategy": "every_save",
    "hub_token": "<HUB_TOKEN>",
    "gradient_checkpointing": False,
    "include_inputs_for_metrics": False,
    "fp16_backend": "auto",
    "push_to_hub_model_id": None,
    "push_to_hub_organization": None,
    "push_to_hub_token": "<PUSH_TO_HUB_TOKEN>",
    "mp_parameters": "",
    "full_determinism": False,
    "torchdynamo": None,
    "ray_scope": "last",
    "ddp_timeout": 1800,
}
_STORED = {
    "4.28": _OLD_DICTIONARY
    | {
        "evaluation_strategy": "epoch",
        "optim": "adamw_hf",
        "sharded_ddp": [],
        "xpu_backend": None,
        "save_safetensors": False,
        "use_ipex": False,
        "fsdp_config": {"fsdp_min_num_params": 0, "xla": False, "xla_fsdp_grad_ckpt": False},
        "hub_private_repo": False,
    },
    "4.57": _OLD_DICTIONARY
    | {
        "eval_strategy": "epoch",
        "optim": "adamw_torch_fused",
        "lr_scheduler_kwargs": {},
        "save_safetensors": True,
        "fsdp_config": {"min_num_params": 0, "xla": False, "xla_fsdp_v2": False, "xla_fsdp_grad_ckpt": False},
        "accelerator_config": {
            "split_batches": False,
            "dispatch_batches": None,
            "even_batches": True,
            "use_seedable_sampler": True,
            "non_blocking": False,
            "gradient_accumulation_kwargs": None,
        },
        "hub_private_repo": None,
        "include_num_input_tokens_seen": False,
        "liger_kernel_config": None,
        "project": "huggingface",
        "trackio_space_id": "trackio",
    },
}


@pytest.mark.parametrize("version", [*_STORED, "installed"])
def test_a_dictionary_of_stored_arguments_is_mapped_without_its_hidden_tokens(version: str) -> None:
    options = {"learning_rate": 3e-4, "push_to_hub": True, "hub_model_id": "me/example", "report_to": []}
    args = transformers.TrainingArguments(output_dir="out", eval_strategy="epoch", **options)
    mapped = from_training_arguments(_STORED.get(version) or args.to_dict())
    direct = from_training_arguments(args)
    assert vars(mapped.publish)["_token"] is None
    assert mapped.task_options["optimizer"].learning_rate == 3e-4
    assert mapped.trainer.validate_every == direct.trainer.validate_every
    assert mapped.trainer_options["strategy"] == direct.trainer_options["strategy"]
    assert "token" not in str(mapped.report)


def test_an_empty_value_of_an_older_option_is_none() -> None:
    empty = {"sharded_ddp": [], "no_cuda": None, "warmup_ratio": None, "fsdp_min_num_params": None}
    assert from_training_arguments(empty).task_options == from_training_arguments({}).task_options
    with pytest.raises(ConfigError, match="sharded_ddp='simple'"):
        from_training_arguments({"sharded_ddp": "simple"})
    assert "greater_is_better=False" in str(from_training_arguments({"greater_is_better": False}).report)


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


def _histories(folder: Path, options: dict[str, Any], **ours: Any) -> Iterator[tuple[list[Any], Any]]:
    """The log of their Trainer and of ours, each with the update of the best checkpoint."""
    options = {
        "per_device_train_batch_size": 4,
        "train_sampling_strategy": "sequential",
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        **options,
    }
    torch.manual_seed(0)
    there, scores = bert(), [1.0, 2.0, 1.0, 0.0]
    here = copy.deepcopy(there)
    metrics: dict[str, Any] = {"compute_metrics": lambda _: {"score": left.pop(0)}}
    args = transformers.TrainingArguments(output_dir=str(folder / "theirs"), **options)
    left = list(scores)
    trainer = transformers.Trainer(there, args, train_dataset=Samples(), eval_dataset=Samples(), **metrics)
    trainer.train()
    yield trainer.state.log_history, trainer.state.best_global_step
    left = list(scores)
    adapter = CallbackAdapter([])
    mapped = from_training_arguments(
        {**options, "output_dir": str(folder / "ours")}, callbacks=[adapter], **ours
    )
    task = TransformersTask(here, **metrics, **mapped.task_options)
    mapped.trainer.fit(task, mapped.train_data(Samples(), task.collate_function()), Samples())
    yield adapter.state.log_history, adapter.state.best_global_step


def _updates(history: list[dict[str, Any]], name: str) -> list[int]:
    return [row["step"] for row in history if name in row]


@pytest.mark.parametrize(
    ("options", "evaluated"),
    [
        ({"eval_strategy": "steps", "eval_steps": 5, "save_steps": 5, "max_steps": 7}, [5, 7]),
        ({"eval_strategy": "steps", "eval_steps": 3, "save_steps": 3, "max_steps": 6}, [3, 6]),
        ({"eval_strategy": "steps", "eval_steps": 5, "max_steps": 7, "eval_delay": 6}, [7]),
        ({"eval_strategy": "epoch", "logging_strategy": "epoch", "max_steps": 4}, [3, 4]),
        ({"eval_strategy": "epoch", "max_steps": 4, "eval_delay": 1.2}, [4]),
    ],
)
def test_the_last_update_is_evaluated_as_theirs(
    options: dict[str, Any], evaluated: list[int], tmp_path: Path
) -> None:
    options = {**options, "metric_for_best_model": "score"}
    if "save_steps" in options:
        options["load_best_model_at_end"] = True
    (theirs, their_best), (ours, our_best) = _histories(tmp_path, options)
    assert _updates(ours, "eval_score") == _updates(theirs, "eval_score") == evaluated
    assert _updates(ours, "loss") == _updates(theirs, "loss")
    assert our_best == their_best
    if "save_steps" in options:
        assert our_best == evaluated[1]


def test_intervals_that_replace_those_of_the_arguments_are_the_only_ones() -> None:
    options = {"eval_strategy": "steps", "logging_strategy": "epoch"}
    (last,) = from_training_arguments(options).trainer_options["callbacks"]
    assert last == LastUpdate(logs=True, validates=True)
    replaced = from_training_arguments(options, validate_every="1 epoch", log_every=10)
    assert replaced.trainer_options["callbacks"] == []


def test_shares_of_a_run_are_their_updates(tmp_path: Path) -> None:
    options = {
        "num_train_epochs": 7,
        "logging_steps": 0.1,
        "eval_strategy": "steps",
        "eval_steps": 0.5,
        "save_steps": 0.5,
        "warmup_steps": 0.1,
    }
    (theirs, _), (ours, _) = _histories(tmp_path, options, total_updates=21)
    assert _updates(ours, "loss") == _updates(theirs, "loss") == [3, 6, 9, 12, 15, 18, 21]
    assert _updates(ours, "eval_loss") == _updates(theirs, "eval_loss") == [11, 21]
    rates = [[row["learning_rate"] for row in each if "loss" in row] for each in (theirs, ours)]
    assert rates[0] == pytest.approx(rates[1])


def test_a_share_needs_the_number_of_updates() -> None:
    share = {"logging_steps": 0.5}
    with pytest.raises(ConfigError, match=r"logging_steps=0\.5 is a share .* max_steps, or .*total_updates="):
        from_training_arguments(share)
    for mapped in (
        from_training_arguments(share, total_updates=21),
        from_training_arguments({**share, "max_steps": 21}, total_updates=5),
        from_training_arguments(share, max_steps=21),
    ):
        assert str(mapped.trainer.log_every) == "11 steps"


# Options whose effect shows in a run.


def _fit(
    folder: Path, options: dict[str, Any], weight: float | None = None
) -> tuple[list[Any], set[torch.dtype]]:
    """Train for five updates of families' BERT; the log, and the dtypes of its head in evaluations."""
    adapter = CallbackAdapter([])
    mapped = from_training_arguments(
        {
            "output_dir": str(folder),
            "max_steps": 5,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 1,
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        },
        callbacks=[adapter],
    )
    made, seen = model("bert, classes"), set()
    if weight is not None:
        torch.nn.init.constant_(made.classifier.weight, weight)
    made.classifier.register_forward_hook(
        lambda module, _, output: seen.add(output.dtype) if not module.training else None
    )
    task = TransformersTask(made, **mapped.task_options)
    data = loader("bert, classes", 16, size=8)
    mapped.trainer.fit(task, data, data, resume=mapped.resume)
    return adapter.state.log_history, seen


@pytest.mark.parametrize(
    ("options", "logged", "evaluated", "dtype"),
    [
        ({}, [2, 4], [1, 2, 3, 4, 5], torch.float32),
        ({"eval_delay": 3}, [2, 4], [3, 4, 5], torch.float32),
        ({"logging_first_step": True}, [1, 2, 4], [1, 2, 3, 4, 5], torch.float32),
        ({"bf16_full_eval": True}, [2, 4], [1, 2, 3, 4, 5], torch.bfloat16),
    ],
)
def test_an_option_is_seen_in_a_run(
    options: dict[str, Any], logged: list[int], evaluated: list[int], dtype: torch.dtype, tmp_path: Path
) -> None:
    history, seen = _fit(tmp_path, options)
    assert _updates(history, "loss") == logged
    assert _updates(history, "eval_loss") == evaluated
    assert seen == {dtype}


def test_a_weight_that_overflows_is_found_where_it_is_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"debug": "underflow_overflow", "logging_nan_inf_filter": False}
    with pytest.raises(NonFiniteError):
        _fit(tmp_path, options, weight=math.inf)
    assert "abs min" in caplog.text  # the calls before it
    assert "classifier" in caplog.text


def test_checkpoints_without_the_state_of_the_run_are_not_resumed(tmp_path: Path) -> None:
    options = {"save_only_model": True, "save_steps": 3}
    _fit(tmp_path, options)
    with pytest.raises(CheckpointError, match="resumable=False"):
        _fit(tmp_path, {**options, "resume_from_checkpoint": True})


def test_a_device_without_a_cache_has_none_to_empty(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="EmptyCache on 'cpu'"):
        _fit(tmp_path, {"torch_empty_cache_steps": 2})


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
