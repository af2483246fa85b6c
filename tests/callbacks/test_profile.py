"""Profiles are read back: their updates, their phases, their files; and training goes on as without them."""

from __future__ import annotations

import cProfile
import gzip
import json
import pstats
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.test_engine import calls_in_a_steady_step
from tests.support.messages import heard, warned
from tests.support.outcome import weights
from tests.support.tasks import Duel, Regression, duels, pairs, quiet

from drivetrain import CompileConfig, ConfigError, EarlyStopping, Freeze, LambdaCallback, Profile
from drivetrain.core.registry import is_installed
from drivetrain.testing import run_distributed

ONE = {"wait": 1, "warmup": 1, "active": 1, "repeat": 1}
"""A schedule of the update 2 alone."""


def names(path: Path) -> Counter[str]:
    """The ranges of a trace, by name."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return Counter(each["name"] for each in events if each.get("cat") == "user_annotation")


def updates(path: Path) -> list[str]:
    return sorted(
        name.removeprefix("ProfilerStep#") for name in names(path) if "#" in name and "Step#" in name
    )


def table(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("table-*.json")
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def calls(folder: Path) -> dict[str, int]:
    return {each["name"]: each["calls"] for each in table(folder)["phases"]}


def fitted(profile: Profile | None, updates: int = 8, **options: Any) -> Regression:
    task = Regression(dropout=0.2)
    resume = options.pop("resume", None)
    callbacks = [*options.pop("callbacks", ()), *([profile] if profile else [])]
    quiet(max_steps=updates, callbacks=callbacks, **options).fit(task, pairs(), resume=resume)
    return task


# Traces.


def test_a_trace_has_the_chosen_updates_alone_with_every_phase_by_name(tmp_path: Path) -> None:
    profile = Profile(kinds="trace")
    stopping = EarlyStopping("validation/loss", patience=9)
    options: dict[str, Any] = {"max_epochs": 3, "run_dir": tmp_path, "checkpoint": True, "loggers": "csv"}
    with heard("", level=20) as told:
        quiet(**options, max_grad_norm=1.0, callbacks=[stopping, profile]).fit(
            Regression(), pairs(), pairs(4)
        )
    (trace,) = profile.files
    assert trace == tmp_path / "profile" / "trace-updates-10-12-rank-0.json.gz"
    found = names(trace)
    # Update 14 ends the third epoch; 10 to 12 neither validate nor save.
    assert updates(trace) == ["10", "11", "12"]
    phases = ("step", "forward", "backward", "clip", "optimizer", "CheckpointSaver.on_save")
    assert {name: found[name] for name in phases} == dict.fromkeys(phases, 3)
    assert found["data"] == 1 + 3  # update 10 begins an epoch
    assert not {"validation", "profiling"} & found.keys()
    assert [text for text in told if str(tmp_path / "profile") in text] == [
        f"Profile writes to {tmp_path / 'profile'}"
    ]


def test_a_trace_of_the_end_of_an_epoch_has_validation_saving_and_loggers(tmp_path: Path) -> None:
    profile = Profile({"wait": 3, "warmup": 1, "active": 1, "repeat": 2}, kinds="trace")
    options: dict[str, Any] = {"max_epochs": 2, "run_dir": tmp_path, "checkpoint": True, "loggers": "csv"}
    quiet(**options, log_every="1 epoch", callbacks=[profile]).fit(Regression(), pairs(), pairs(4))
    assert [path.name for path in profile.files] == [
        "trace-updates-4-4-rank-0.json.gz",
        "trace-updates-9-9-rank-0.json.gz",
    ]
    for number, path in zip("49", profile.files, strict=True):
        found = names(path)
        assert updates(path) == [number]
        assert found["validation step"] == 2
        assert found["validation data"] == 1 + 2 + 1  # the begin, the batches, and that there are no more
        assert found["validation"] == 1
        assert found["saving"] >= 1
        assert found["log point"] >= 1
        assert found["CSVLogger"] >= 2  # the log point and the validation


def test_a_schedule_of_torchs_own_and_options_for_shapes(tmp_path: Path) -> None:
    schedule = torch.profiler.schedule(skip_first=1, wait=0, warmup=1, active=2, repeat=1)
    profile = Profile(schedule, "trace", folder=tmp_path, options={"record_shapes": True})
    fitted(profile)
    (trace,) = profile.files
    assert updates(trace) == ["2", "3"]
    with gzip.open(trace, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    assert any("Input Dims" in each.get("args", {}) for each in events)


def test_a_resumed_run_counts_on_from_its_update_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    schedule = {"wait": 4, "warmup": 1, "active": 4, "repeat": 1}
    straight = fitted(None, 12)
    first, second = Profile(schedule), Profile(schedule)
    fitted(first, 7, run_dir=tmp_path, checkpoint=True)
    resumed = fitted(second, 12, run_dir=tmp_path, checkpoint=True, resume="auto")
    assert weights(resumed) == weights(straight)
    assert [path.name for path in first.files if "trace" in path.name] == ["trace-updates-5-6-rank-0.json.gz"]
    (trace,) = (path for path in second.files if "trace" in path.name)
    assert trace.name == "trace-updates-7-8-rank-0.json.gz"
    assert updates(trace) == ["7", "8"]
    assert {path.name for path in tmp_path.glob("profile/table-*.json")} == {
        "table-updates-0-6-rank-0.json",
        "table-updates-7-11-rank-0.json",
    }


# Memory and Python's functions.


def test_memory_of_a_cpu_is_a_list_of_the_operators_that_allocate(tmp_path: Path) -> None:
    profile = Profile(ONE, "memory", folder=tmp_path)
    fitted(profile)
    (path,) = profile.files
    assert path.name == "memory-updates-2-2-rank-0.txt"
    text = path.read_text(encoding="utf-8")
    assert "Self CPU Mem" in text
    assert "aten::addmm" in text


def test_python_has_the_functions_of_the_chosen_updates(tmp_path: Path) -> None:
    profile = Profile({**ONE, "active": 3}, "python", folder=tmp_path)
    fitted(profile)
    stats, text = profile.files
    assert (stats.name, text.name) == ("python-updates-2-4-rank-0.prof", "python-updates-2-4-rank-0.txt")
    found = {key[2]: value[0] for key, value in pstats.Stats(str(stats)).stats.items()}  # type: ignore[attr-defined]
    assert found["mse_loss"] == 3
    assert "mse_loss" in text.read_text(encoding="utf-8") or "train_step" in text.read_text(encoding="utf-8")


# The table.


def test_the_table_counts_every_phase_and_hook(tmp_path: Path) -> None:
    seen = Counter[str]()

    def note(name: str) -> Any:
        return lambda run: seen.update([name])

    hooks = ("on_step_start", "on_micro_batch_end", "on_before_optimizer_step", "on_epoch_end", "on_log")
    watch = LambdaCallback(**{name: note(name) for name in hooks})
    other = LambdaCallback(on_epoch_end=note("other"))
    options: dict[str, Any] = {"max_epochs": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    profile = Profile(kinds="table", folder=tmp_path)
    with heard("profile of updates", level=20) as told:
        quiet(**options, log_every="2 steps", callbacks=[watch, profile, other]).fit(
            Regression(), pairs(), pairs(6)
        )
    found = calls(tmp_path)
    micro_batches, made = 3 * 5, 3 * 3
    assert {name: found[name] for name in found if "." not in name} == {
        "restoring": 1,
        "data": micro_batches,
        "step": made,
        "forward": micro_batches,
        "backward": micro_batches,
        "clip": made,
        "optimizer": made,
        "log point": 5,
        "validation": 3,
        "validation data": 9,
        "validation step": 9,
        "profiling": 1,
    }
    assert {
        name.removeprefix("LambdaCallback."): count for name, count in found.items() if "Callback." in name
    } == {name: seen[name] for name in hooks}
    assert found["LambdaCallback 2.on_epoch_end"] == seen["other"] == 3
    content = table(tmp_path)
    assert (content["updates"], content["rank"], content["device"]) == ([0, 8], 0, "cpu")
    own = sum(each["own_seconds"] for each in content["phases"])
    assert 0 < own <= content["seconds"]
    by_name = {each["name"]: each for each in content["phases"]}
    inside = sum(by_name[name]["seconds"] for name in ("forward", "backward", "clip", "optimizer"))
    assert inside <= by_name["step"]["seconds"]
    assert by_name["step"]["own_seconds"] <= by_name["step"]["seconds"] - inside + 1e-9
    assert by_name["forward"]["own_seconds"] == by_name["forward"]["seconds"]
    (text,) = told
    assert (tmp_path / "table-updates-0-8-rank-0.txt").read_text(encoding="utf-8") == f"{text}\n"
    assert {line.split()[0] for line in text.splitlines()[2:]} >= {"forward", "other", "validation"}


def test_several_optimizers_parts_of_batches_and_transfers_are_counted(tmp_path: Path) -> None:
    quiet(max_epochs=1, callbacks=[Profile(kinds="table", folder=tmp_path / "duel")]).fit(Duel(), duels())
    found = calls(tmp_path / "duel")
    assert found["forward"] == 3 * found["step"] == 33  # to each of two yields, and to the end
    assert found["backward"] == found["optimizer"] == 22
    fitted(Profile(kinds="table", folder=tmp_path / "parts"), 5, micro_batch=1)
    found = calls(tmp_path / "parts")
    assert found["forward"] == found["backward"] == 2 * found["optimizer"] == 10
    fitted(Profile(kinds="table", folder=tmp_path / "cast"), 5, precision="bf16-true")
    assert calls(tmp_path / "cast")["transfer"] == 5  # to bfloat16


def test_updates_after_parameters_are_unfrozen_are_counted(tmp_path: Path) -> None:
    fitted(Profile(kinds="table", folder=tmp_path), 8, callbacks=[Freeze("line.bias", until="4 steps")])
    assert calls(tmp_path)["forward"] == 8


def test_saves_in_the_background_are_counted(tmp_path: Path) -> None:
    fitted(Profile(), 12, run_dir=tmp_path, checkpoint="async")
    found = calls(tmp_path / "profile")
    assert found["CheckpointSaver.on_save"] == 12
    assert found["saving"] >= 2


def test_a_step_that_is_not_recorded_calls_exactly_these_functions_more(tmp_path: Path) -> None:
    plain = Counter(calls_in_a_steady_step(pairs(20)))

    def more(profile: Profile) -> dict[str, int]:
        return dict(Counter(calls_in_a_steady_step(pairs(20), callbacks=[profile])) - plain)

    # The phases are data, step, forward, backward and optimizer.
    in_table = {"begin": 5, "end": 5, "call": 4, "<lambda>": 4, "each": 1, "windows": 1, "before_update": 1}
    assert more(Profile(kinds="table", folder=tmp_path)) == in_table
    later = {"wait": 99, "warmup": 1, "active": 1}
    with warned("chose none of the updates"):
        assert more(Profile(later, "trace", folder=tmp_path)) == {**in_table, "_leave_range": 1, "_action": 1}


# Runs of all kinds.


@pytest.mark.parametrize("kinds", [("table", "trace", "memory"), ("table", "python")])
def test_training_is_the_same_to_the_bit(kinds: tuple[str, ...], tmp_path: Path) -> None:
    plain = fitted(None)
    assert weights(fitted(Profile(ONE, kinds, folder=tmp_path))) == weights(plain)
    assert len(list(tmp_path.iterdir())) == 4


def test_nothing_of_it_stays_behind(tmp_path: Path) -> None:
    strategy = quiet(max_steps=1).select_strategy()
    runs: list[Any] = []
    watch = LambdaCallback(on_fit_start=runs.append)
    fitted(Profile(kinds="table", folder=tmp_path), strategy=strategy, callbacks=[watch])
    fitted(None, strategy=strategy)
    (run,) = runs
    for owner in (run, run.engine, run.train_feed, run.engine.transfer, strategy):
        assert not [name for name, each in vars(owner).items() if hasattr(each, "__wrapped__")]
    assert run.hooks.on_fit_start == (watch.on_fit_start,)
    assert "micro_batches" not in vars(run.train_feed)


def test_an_error_leaves_what_was_recorded(tmp_path: Path) -> None:
    class Fails(Regression):
        def training_step(self, batch: Any) -> Any:
            if self.progress.updates == 3:
                raise ValueError("broken")
            return super().training_step(batch)

    profile = Profile({**ONE, "active": 9})
    with pytest.raises(ValueError, match="broken"):
        quiet(max_steps=8, run_dir=tmp_path, callbacks=[profile]).fit(Fails(), pairs())
    (trace,) = tmp_path.glob("profile/trace-*")
    assert trace.name == "trace-updates-2-3-rank-0.json.gz"
    assert names(trace)["forward"] == 2
    assert calls(tmp_path / "profile")["forward"] == 4
    with torch.profiler.profile() as after:  # ours has ended
        torch.ones(3).sum()
    assert "aten::sum" in {each.key for each in after.key_averages()}


def test_the_note_of_a_hooks_error_names_the_hook(tmp_path: Path) -> None:
    def fail(run: Any) -> None:
        raise ValueError("broken")

    class Fails(LambdaCallback):
        def on_epoch_start(self, run: Any) -> None:
            fail(run)

    with pytest.raises(ValueError, match="broken") as caught:
        fitted(Profile(kinds="table", folder=tmp_path), callbacks=[Fails(on_log=fail)])
    assert any("in on_epoch_start of Fails" in note for note in caught.value.__notes__)


def test_a_loop_that_is_left_and_a_fit_that_ends_early_write_what_there_is(tmp_path: Path) -> None:
    trainer = quiet(max_steps=9, callbacks=[Profile({**ONE, "active": 9}, folder=tmp_path)])
    for step in trainer.steps(Regression(), pairs()):
        if step.update == 4:
            break
    assert updates(tmp_path / "trace-updates-2-4-rank-0.json.gz") == ["2", "3", "4"]
    with warned("chose none of the updates 0 to 4, so none was recorded"):
        fitted(Profile(folder=tmp_path / "late"), 5)


def test_a_profiler_that_is_active_is_an_error_and_goes_on(tmp_path: Path) -> None:
    with (
        torch.profiler.profile() as outer,
        pytest.raises(ConfigError, match="cannot record update 1: another profiler of torch is active"),
    ):
        fitted(Profile(ONE, folder=tmp_path))
    assert "aten::addmm" in {each.key for each in outer.key_averages()}
    of_python = cProfile.Profile()
    of_python.enable()
    try:
        with pytest.raises(ConfigError, match="cannot record the Python functions of update 2: "):
            fitted(Profile(ONE, "python", folder=tmp_path))
    finally:
        of_python.disable()
    assert "mse_loss" in {key[2] for key in pstats.Stats(of_python).stats}  # type: ignore[attr-defined]


def test_an_evaluation_outside_a_fit_is_not_profiled(tmp_path: Path) -> None:
    trainer = quiet(max_steps=1, run_dir=tmp_path, callbacks=[Profile()])
    trainer.validate(Regression(), pairs(4))
    assert not (tmp_path / "profile").exists()


def _on_a_rank(folder: str, strategy: Any, ranks: Any) -> Any:
    profile = Profile(ONE, ranks=ranks)
    task = Regression()
    options: dict[str, Any] = {"max_epochs": 1, "run_dir": folder, "checkpoint": True, "max_grad_norm": 1.0}
    quiet(**options, strategy=strategy, devices=2, callbacks=[profile]).fit(task, pairs(20), pairs(4))
    return sorted(path.name for path in profile.files)


def of_rank(rank: int) -> list[str]:
    table = f"table-updates-0-4-rank-{rank}"
    return [f"{table}.json", f"{table}.txt", f"trace-updates-2-2-rank-{rank}.json.gz"]


def check_two_ranks(folder: Path, strategy: Any) -> None:
    found = run_distributed(_on_a_rank, str(folder), strategy, "all", timeout=180)
    assert found == [sorted(of_rank(0) + of_rank(1))] * 2
    for rank in (0, 1):
        trace = names(folder / "profile" / f"trace-updates-2-2-rank-{rank}.json.gz")
        assert updates(folder / "profile" / f"trace-updates-2-2-rank-{rank}.json.gz") == ["2"]
        assert (trace["forward"], trace["backward"], trace["optimizer"]) == (1, 1, 1)
        content = json.loads((folder / "profile" / f"table-updates-0-4-rank-{rank}.json").read_text())
        counts = {each["name"]: each["calls"] for each in content["phases"]}
        assert (counts["step"], counts["validation"], counts["data"]) == (5, 1, 5)
        assert content["rank"] == rank


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_write_files_of_their_own(strategy: str, tmp_path: Path) -> None:
    check_two_ranks(tmp_path, strategy)


@pytest.mark.full
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3", "accelerate"])
def test_under_every_other_strategy_too(strategy: str, tmp_path: Path) -> None:
    needed = "accelerate" if strategy == "accelerate" else "deepspeed"
    if not is_installed(needed):
        pytest.skip(f"needs {needed}")
    check_two_ranks(tmp_path, strategy)


def test_one_rank_that_is_not_the_first(tmp_path: Path) -> None:
    found = run_distributed(_on_a_rank, str(tmp_path), "ddp", [1], timeout=180)
    assert found == [of_rank(1)] * 2


@pytest.mark.full
def test_a_compiled_task(tmp_path: Path) -> None:
    profile = Profile(ONE, folder=tmp_path)
    quiet(max_steps=5, compile=CompileConfig(backend="eager"), callbacks=[profile]).fit(Regression(), pairs())
    assert names(next(tmp_path.glob("trace-*")))["forward"] == 1
    assert calls(tmp_path)["forward"] == 5


# What cannot be done.


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"kinds": "traces"}, r"unknown kind of profile 'traces'. Did you mean 'trace'"),
        ({"kinds": ()}, "takes some of 'table', 'trace', 'memory', 'python'"),
        ({"ranks": -1}, "ranks, if not 'all', must be a whole number, at least 0, not -1"),
        ({"ranks": []}, "not an empty list"),
        ({"schedule": {"wait": 1, "warmup": 1}}, "has no 'active'"),
        ({"schedule": {**ONE, "actve": 1}}, "has no option 'actve'. Did you mean 'active'"),
        ({"schedule": {**ONE, "active": 0}}, "'active' must be a whole number, at least 1, not 0"),
        ({"schedule": 20}, "takes a mapping such as"),
        ({"schedule": ONE, "kinds": "table"}, "has no effect on 'table'"),
        ({"folder": 3}, r"Profile\(folder=\) must be a path on a local disk"),
        ({"options": 3}, r"Profile\(options=\) must be a mapping of record_shapes, .*, not 3"),
        ({"options": {"record_shape": True}}, "Did you mean 'record_shapes'"),
        ({"options": {"record_shapes": True}, "kinds": "memory"}, "is for 'trace'"),
        ({"options": {"with_stack": True}, "kinds": ("trace", "python")}, "only slot for a profiler"),
    ],
)
def test_bad_arguments_are_told(arguments: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        Profile(**arguments)


def test_what_does_not_fit_the_trainer_is_refused_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no directory to write to.*Profile\(folder="):
        quiet(max_steps=1, callbacks=[Profile()])
    with pytest.raises(ConfigError, match="has rank 1, and this job's ranks are 0 to 0"):
        quiet(max_steps=1, callbacks=[Profile(ranks=[0, 1], folder=tmp_path)])
    with pytest.raises(ConfigError, match="callbacks has 2 Profile, which would need the same profiler"):
        quiet(max_steps=1, callbacks=[Profile(folder=tmp_path), Profile(folder=tmp_path)])
    with pytest.raises(ConfigError, match="returned 3 for update 0"):
        fitted(Profile(lambda number: 3, folder=tmp_path))  # type: ignore[arg-type, return-value]


def test_a_trial_without_a_run_directory_leaves_it_out_by_name(tmp_path: Path) -> None:
    trainer = quiet(max_steps=5, run_dir=tmp_path, try_out="batches", callbacks=[Profile()])
    with heard("Profile", level=20) as told:
        trainer.fit(Regression(), pairs())
    assert "left out" in told[0]
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_made_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot make its folder .*file/profile.*Not a directory"):
        fitted(Profile(folder=tmp_path / "file" / "profile"))


def test_a_file_that_cannot_be_written_is_a_warning_and_training_goes_on(tmp_path: Path) -> None:
    (tmp_path / "trace-updates-2-2-rank-0.json.gz").mkdir()
    profile = Profile(ONE, folder=tmp_path)
    with warned("could not write .*trace-updates-2-2-rank-0.json.gz: .*Is a directory.*not affected"):
        task = fitted(profile)
    assert weights(task) == weights(fitted(None))
    assert [path.name for path in profile.files] == [
        "table-updates-0-7-rank-0.txt",
        "table-updates-0-7-rank-0.json",
    ]
    assert not list(tmp_path.glob(".partial*"))
