"""Transformers' arguments become options of a Trainer, a task and its data; nothing is ignored in silence."""

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
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import loader, model, rows
from tests.support.refusals import assert_refused
from tests.support.site import site_script

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig
from drivetrain.core.calendar import RunLength
from drivetrain.core.errors import CheckpointError, ConfigError, MissingDependencyError, NonFiniteError
from drivetrain.core.registry import is_installed
from drivetrain.task.optim.build import build_optimizer
from drivetrain.task.task import known_fit

hf = Lazy("drivetrain.integrations.transformers")
table = Lazy("drivetrain.integrations.transformers.arguments_table")
values = Lazy("drivetrain.integrations.transformers.arguments_values")
transformers = Lazy("transformers")

QUIET: dict[str, Any] = {"use_cpu": True, "disable_tqdm": True, "report_to": []}
BERT = "bert, classes"


def from_training_arguments(*given: Any, **options: Any) -> Any:
    return hf.from_training_arguments(*given, **options)


@pytest.fixture(autouse=True)
def level_is_restored() -> Iterator[None]:
    level = logging.getLogger("drivetrain").level
    yield
    logging.getLogger("drivetrain").setLevel(level)


def test_the_installed_release_has_no_option_without_a_row_and_the_page_is_current() -> None:
    kinds = (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments)
    there = {each.name for kind in kinds for each in dataclasses.fields(kind) if each.init}
    assert sorted(there - table.ROWS.keys()) == []
    assert sorted(name for name, row in table.ROWS.items() if row.is_old == (name in there)) == []
    optimizers = {each.value for each in transformers.training_args.OptimizerNames}
    assert sorted(optimizers - table.OPTIMIZERS.keys()) == []
    printer = site_script("print_transformers_arguments")
    text = printer.PAGE.read_text(encoding="utf-8")
    assert printer.table() in text, "run docs/site/print_transformers_arguments.py"


def _seen(mapping: Mapping[str, Any]) -> list[str]:
    mapped = from_training_arguments(mapping)
    options = mapped.trainer_options
    made: dict[str, Any] = {**vars(mapped), "report": None}
    made |= {"callbacks": [(type(each), vars(each)) for each in options["callbacks"]]}
    made |= {"publish": mapped.publish and vars(mapped.publish)}
    made |= {
        "loggers": [
            getattr(each, "_arguments", getattr(each, "directory", each)) for each in options["loggers"]
        ]
    }
    made |= {"level": logging.getLogger("drivetrain").level}
    return sorted(re.sub(r" at 0x\w+", "", f"{name}={value!r}") for name, value in made.items())


def test_mapped_options_have_an_effect_and_refused_ones_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers.GenerationConfig(max_new_tokens=7).save_pretrained("generation")
    level = logging.getLogger("drivetrain").level
    wrong, refused = [], {}
    for name, row in table.ROWS.items():
        if row.needs.get("report_to") == "trackio" and not is_installed("trackio"):
            continue
        if row.status == table.REFUSED:
            value = not row.default if isinstance(row.default, bool) else "some value"
            call = lambda name=name, value=value: from_training_arguments({name: value})  # noqa: E731
            refused[name] = (call, row.text)
        elif row.status == table.MAPPED:
            with monkeypatch.context() as changed:
                for variable, value in row.environment.items():
                    changed.setenv(variable, value)
                base = {"output_dir": "runs/base", **row.needs}
                before = _seen(base)
                logging.getLogger("drivetrain").setLevel(level)
                after = _seen({**base, name: row.example})
                logging.getLogger("drivetrain").setLevel(level)
                mapped = from_training_arguments({**base, name: row.example})
                report = {each.name: each for each in mapped.report}
            logging.getLogger("drivetrain").setLevel(level)
            if before == after or report[name].status != table.MAPPED or "hf_example" in str(report[name]):
                wrong.append(name)
    assert not wrong
    assert_refused(ConfigError, refused)


def test_only_options_without_a_row_that_are_not_at_their_default_are_refused() -> None:
    new = [("new_option", int, 3)]
    kind = dataclasses.make_dataclass("More", new, bases=(transformers.TrainingArguments,))
    kind.__module__ = "transformers.training_args"
    assert from_training_arguments(kind(output_dir="out")).trainer.batch_size == 8
    with pytest.raises(ConfigError, match="no option 'new_option', which is 4"):
        from_training_arguments(kind(output_dir="out", new_option=4))
    # A field of a script's own subclass is left to the script; `seed` has a row.
    fields = [("beta", float, 0.1), ("seed", int, 1)]
    own = dataclasses.make_dataclass("Own", fields, bases=(transformers.TrainingArguments,))
    mapped = from_training_arguments(own(output_dir="out", beta=0.5, seed=7))
    assert mapped.trainer.seed == 7
    assert "beta" not in str(mapped.report)


def test_refusals(tmp_path: Path) -> None:
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1.0}}}
    rows: list[tuple[Any, ...]] = [
        ({"learnin_rate": 1e-3}, "'learning_rate'"),
        ({"eval_strategy": "step"}, "Did you mean 'steps'"),
        ({"learning_rate": "5e-5"}, "give a number"),
        ({"evaluation_strategy": "epoch", "eval_strategy": "steps"}, "former name of eval_strategy"),
        ({"report_to": ["flyte"]}, "no such logger here"),
        ({"report_to": "codecarbon"}, "CODECARBON_COUNTRY_ISO_CODE=DEU", "callbacks=[CodeCarbon("),
        ({"load_best_model_at_end": True}, "validations"),
        ({"lr_scheduler_type": "greedy"}, "between min_lr=0.001 and max_lr=1", "learning_rate=5e-05"),
        ({"lr_scheduler_type": "greedy", "lr_scheduler_kwargs": {"pace": 1}}, "'pace': 1} with 'greedy'"),
        (
            {
                "gradient_accumulation_steps": 2,
                "accelerator_config": {"gradient_accumulation_kwargs": {"num_steps": 10}},
            },
            "`num_steps` is set but is 10",
            "gradient_accumulation_steps=2",
        ),
        ({"logging_steps": 0.5}, "logging_steps=0.5 is a share", "max_steps", "total_steps="),
        ({"deepspeed": adamw}, "lr=1.0"),
        ({"fsdp": True, "deepspeed": {}, "fsdp_config": {"wrapp": 1}}, "wrapp"),
        ({"tp_size": 2, "deepspeed": {"zero_optimization": {"stage": 1}}}, "deepspeed and tp_size exclude"),
        ({"tp_size": 2, "parallelism_config": {"tp_size": 4}}, "tp_size=2, and", "has tp_size=4"),
        ({"parallelism_config": {"cp_size": 2}}, "cp_size=2", "Give tp_size"),
    ]
    cases = {str(each): (lambda each=each: from_training_arguments(each), *words) for each, *words in rows}
    cases["no cache"] = (
        lambda: _fit(tmp_path, {"torch_empty_cache_steps": 2}),
        "torch_empty_cache_steps on 'cpu'",
    )
    assert_refused(ConfigError, cases)


def test_a_release_without_the_newest_options_has_their_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = values.default_values()
    assert values.NEWER.items() <= installed.items()
    for name in values.NEWER:
        for kind in (transformers.TrainingArguments, transformers.Seq2SeqTrainingArguments):
            monkeypatch.delitem(kind.__dataclass_fields__, name, raising=False)
    made = from_training_arguments({"gradient_checkpointing": True, "report_to": []})
    assert made.trainer_options["memory"]["activation_checkpointing"]
    assert values.default_values() == installed


def test_codecarbon_measures_for_the_country_of_its_own_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CODECARBON_COUNTRY_ISO_CODE", "DEU")
    if not is_installed("codecarbon"):
        with pytest.raises(MissingDependencyError, match=r"drivetrain\[codecarbon"):
            from_training_arguments({"report_to": "codecarbon"})
        return
    made = from_training_arguments({"report_to": ["codecarbon", "tensorboard"]}).trainer
    assert [each.country for each in made.callbacks if hasattr(each, "country")] == ["DEU"]


def test_the_arguments_of_a_script_are_parsed_and_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    command = (
        "train.py --output_dir out --learning_rate 3e-4 --warmup_steps 0.25 --eval_strategy steps"
        " --eval_steps 4 --save_strategy steps --save_steps 8 --load_best_model_at_end"
        " --predict_with_generate --generation_num_beams 2 --metric_for_best_model f1 --max_steps 16"
        " --lr_scheduler_type cosine --report_to tensorboard --logging_steps 0.1 --use_cpu --bf16"
    )
    monkeypatch.setattr(sys, "argv", command.split())
    parser = transformers.HfArgumentParser(transformers.Seq2SeqTrainingArguments)
    (args,) = parser.parse_args_into_dataclasses()
    mapped = from_training_arguments(args)
    trainer, policy = mapped.trainer, mapped.trainer.checkpoint
    assert (trainer.max_steps, trainer.max_epochs, trainer.strategy) == (16, None, "cpu")
    assert (str(trainer.validate_every), str(trainer.log_every)) == ("4 steps", "2 steps")
    assert trainer.precision.name == "bf16-mixed"  # type: ignore[union-attr]
    assert trainer.loggers == ("tensorboard",)
    assert isinstance(policy, CheckpointConfig)
    assert (str(policy.every), policy.keep_last, policy.best) == ("8 steps", None, 1)
    assert (policy.by, policy.mode) == ("validation/f1", "max")
    assert mapped.trainer.checkpoint.restore_best
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


# From what 4.28 has stored.
OLD: dict[str, Any] = {"output_dir": "out", "overwrite_output_dir": False, "per_gpu_train_batch_size": None}
OLD |= {"learning_rate": 3e-4, "evaluation_strategy": "epoch", "optim": "adamw_hf", "log_level": "passive"}
OLD |= {"no_cuda": False, "warmup_ratio": 0.0, "warmup_steps": 0, "fsdp": [], "fsdp_min_num_params": 0}
OLD |= {"sharded_ddp": [], "debug": [], "past_index": -1, "push_to_hub": True, "hub_model_id": "me/example"}
OLD |= {"hub_token": "<HUB_TOKEN>", "push_to_hub_token": "<PUSH_TO_HUB_TOKEN>", "mp_parameters": ""}
OLD |= {"fsdp_config": {"fsdp_min_num_params": 0, "xla": False}, "report_to": [], "local_rank": 0}


def test_stored_arguments_of_older_releases_are_mapped_without_hidden_tokens() -> None:
    options = {"learning_rate": 3e-4, "push_to_hub": True, "hub_model_id": "me/example", "report_to": []}
    args = transformers.TrainingArguments(output_dir="out", eval_strategy="epoch", **options)
    direct = from_training_arguments(args)
    for given in (args.to_dict(), OLD):
        mapped = from_training_arguments(given)
        assert vars(mapped.publish)["_token"] is None
        assert mapped.task_options["optimizer"].learning_rate == 3e-4
        assert mapped.trainer.validate_every == direct.trainer.validate_every
        assert mapped.trainer_options["strategy"] == direct.trainer_options["strategy"]
        assert "token" not in str(mapped.report)


def test_trainer_options_replace_those_of_the_arguments() -> None:
    mine = LambdaCallback(on_fit_end=print)
    named = from_training_arguments({"report_to": ["comet_ml", "azure_ml", "clearml", "dagshub"]})
    assert named.trainer.loggers == ("comet", "azureml", "clearml", "mlflow")
    options = {"report_to": "wandb", "seed": 1, "eval_strategy": "steps", "logging_strategy": "epoch"}
    mapped = from_training_arguments(options, loggers=["csv"], seed=2, validate_every="1 epoch", log_every=10)
    assert (mapped.trainer.loggers, mapped.trainer.seed) == (["csv"], 2)
    assert mapped.trainer_options["callbacks"] == []  # nothing at the last step
    mapped = from_training_arguments({**options, "report_to": []}, callbacks=[mine])
    last, other = mapped.trainer_options["callbacks"]
    kind = Lazy("drivetrain.integrations.transformers.last_step").LastStep
    assert {type(last), type(other)} == {kind, LambdaCallback}
    share = {"logging_steps": 0.5}
    for mapped in (
        from_training_arguments(share, total_steps=21),
        from_training_arguments({**share, "max_steps": 21}, total_steps=5),
        from_training_arguments(share, max_steps=21),
    ):
        assert str(mapped.trainer.log_every) == "11 steps"


def test_data_options_make_a_loader(tmp_path: Path) -> None:
    data = rows(BERT, 48)[::4]  # of one length
    assert from_training_arguments({"output_dir": str(tmp_path)}).train_data(data) is data
    options = {"dataloader_drop_last": True, "per_device_train_batch_size": 5, "group_by_length": True}
    mapped = from_training_arguments({**options, **QUIET, "max_steps": 3, "save_strategy": "no"})
    task = hf.TransformersTask(model(BERT), **mapped.task_options)
    made = mapped.train_data(data, task.collate_function())
    assert (made.batch_size, made.drop_last, len(made)) == (5, True, 2)
    assert mapped.trainer.fit(task, made).progress.epoch == 1


_OPTIONS: dict[str, dict[str, Any]] = {"cosine_with_min_lr": {"min_lr": 1e-5}}
_OPTIONS |= {"cosine_warmup_with_min_lr": {"min_lr_rate": 0.1}, "warmup_stable_decay": {"num_decay_steps": 5}}
_OPTIONS |= {"polynomial": {"power": 2.0}}


def test_learning_rates_of_every_schedule_are_transformers_own() -> None:
    names = {each.value for each in transformers.trainer_utils.SchedulerType}
    for name in names - {"reduce_lr_on_plateau", "greedy"}:  # which watch a metric
        for warmup in (3, 0.07):
            options: dict[str, Any] = {"max_steps": 60, "learning_rate": 1e-3, "warmup_steps": warmup}
            options |= {"lr_scheduler_type": name}
            args = transformers.TrainingArguments("out", **options, lr_scheduler_kwargs=_OPTIONS.get(name))
            theirs = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
            given = (args.get_warmup_steps(60), 60, args.lr_scheduler_kwargs)
            schedule = transformers.get_scheduler(name, theirs, *given)
            ours = from_training_arguments(args).task_options["optimizer"]._configured(None, 60)
            for step in range(60):
                assert ours.lr * ours.schedule(step) == schedule.get_last_lr()[0], (name, step)
                theirs.step()
                schedule.step()


def test_every_optimizer_is_the_one_that_their_trainer_makes(tmp_path: Path) -> None:
    keys = {"lr", "weight_decay", "betas", "eps", "momentum", "alpha", "scale_parameter", "relative_step"}
    other_packages = {"adamw_hf", "adamw_torch_xla"}  # or a former name
    bert = model(BERT)
    bert.scale = torch.nn.Parameter(torch.ones(3))  # has decay there, and would have none by our rule
    for name, row in table.OPTIMIZERS.items():
        if not row.here or "8bit" in name or "4bit" in name or name in other_packages:
            continue
        options = {**QUIET, "optim": name, "weight_decay": 0.1, "learning_rate": 1e-2}
        args = transformers.TrainingArguments(str(tmp_path), **options)
        theirs = transformers.Trainer(bert, args).create_optimizer()
        task = hf.TransformersTask(bert, **from_training_arguments(args).task_options)
        with known_fit(task, RunLength(steps=100)):
            config = task.configure_optimizers()
        assert isinstance(config, OptimizerConfig)
        ours = build_optimizer(config, task)
        assert type(ours) is type(theirs)
        for mine, other in zip(ours.param_groups, theirs.param_groups, strict=True):
            assert [id(each) for each in mine["params"]] == [id(each) for each in other["params"]], name
            assert [mine[key] for key in keys & other.keys()] == [other[key] for key in keys & other.keys()]


def _fit(folder: Path, options: dict[str, Any], weight: float | None = None) -> set[Any]:
    given = {"max_steps": 5, "eval_strategy": "steps", "eval_steps": 1, **QUIET, **options}
    mapped = from_training_arguments({"output_dir": str(folder), **given})
    made, seen = model(BERT), set()
    if weight is not None:
        torch.nn.init.constant_(made.classifier.weight, weight)
    made.classifier.register_forward_hook(
        lambda module, _, output: seen.add(output.dtype) if not module.training else None
    )
    data, task = loader(BERT, 16, size=8), hf.TransformersTask(made, **mapped.task_options)
    mapped.trainer.fit(task, data, data, resume=mapped.resume)
    assert hf.TransformersTask.from_checkpoint(folder).optimizer == mapped.task_options["optimizer"]
    return seen


def test_options_are_seen_in_a_run(tmp_path: Path) -> None:
    options: dict[str, Any] = {"debug": "underflow_overflow", "logging_nan_inf_filter": False}
    with pytest.raises(NonFiniteError, match=r"first in the forward of .*classifier"):
        _fit(tmp_path / "overflow", options, weight=math.inf)
    options = {"save_only_model": True, "save_steps": 3}
    assert _fit(tmp_path / "weights", options) == {torch.float32}
    with pytest.raises(CheckpointError, match="resumable=False"):
        _fit(tmp_path / "weights", {**options, "resume_from_checkpoint": True})
