"""Profiles are read back: their steps, phases and files; and training goes on as without them."""

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.outcome import weights
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet, variant

from drivetrain import EarlyStopping, LambdaCallback, Profile

ONE = {"wait": 1, "warmup": 1, "active": 1, "repeat": 1}  # a schedule of the step 2 alone


def names(path: Path) -> Counter[str]:  # the ranges of a trace, by name
    with gzip.open(path, "rt", encoding="utf-8") as file:
        events = json.load(file)["traceEvents"]
    return Counter(each["name"] for each in events if each.get("cat") == "user_annotation")


def steps(path: Path) -> list[str]:
    return sorted(name.partition("#")[2] for name in names(path) if name.startswith("ProfilerStep#"))


def table(folder: Path) -> dict[str, Any]:
    (path,) = folder.glob("table-*.json")
    return json.loads(path.read_text(encoding="utf-8"))


def calls(folder: Path) -> dict[str, int]:
    return {each["name"]: each["calls"] for each in table(folder)["phases"]}


def fitted(profile: Profile | None, steps: int = 8, **options: Any) -> Regression:
    task = Regression(dropout=0.2)
    resume = options.pop("resume", None)
    callbacks = [*options.pop("callbacks", ()), *([profile] if profile else [])]
    quiet(max_steps=steps, callbacks=callbacks, **options).fit(task, pairs(), resume=resume)
    return task


def test_trace_has_the_chosen_steps_alone_with_every_phase_by_name(tmp_path: Path) -> None:
    profile = Profile(kinds="trace")
    callbacks = [EarlyStopping("validation/loss", patience=9), profile]
    options: dict[str, Any] = {"max_epochs": 3, "run_dir": tmp_path, "checkpoint": True, "loggers": "csv"}
    quiet(**options, max_grad_norm=1.0, callbacks=callbacks).fit(Regression(), pairs(), pairs(4))
    (trace,) = profile.files
    assert trace == tmp_path / "profile" / "trace-steps-10-12-rank-0.json.gz"
    found = names(trace)
    # Step 14 ends the third epoch; 10 to 12 neither validate nor save.
    assert steps(trace) == ["10", "11", "12"]
    phases = ("step", "forward", "backward", "clip", "optimizer", "CheckpointSaver.on_save")
    assert {name: found[name] for name in phases} == dict.fromkeys(phases, 3)
    assert found["data"] == 1 + 3  # step 10 begins an epoch
    assert not {"validation", "profiling"} & found.keys()


def test_resumed_run_counts_on_from_its_step_and_ends_with_the_same_weights(tmp_path: Path) -> None:
    schedule = {"wait": 4, "warmup": 1, "active": 4, "repeat": 1}
    straight = fitted(None, 12)
    fitted(Profile(schedule), 7, run_dir=tmp_path, checkpoint=True)
    resumed = fitted(Profile(schedule), 12, run_dir=tmp_path, checkpoint=True, resume="auto")
    assert weights(resumed) == weights(straight)
    folder = tmp_path / "profile"
    expected = {"trace-steps-5-6", "trace-steps-7-8", "table-steps-0-6", "table-steps-7-11"}
    assert {path.name.partition("-rank-0")[0] for path in folder.iterdir()} == expected
    assert steps(folder / "trace-steps-7-8-rank-0.json.gz") == ["7", "8"]


def test_a_trace_may_have_python_and_memory(tmp_path: Path) -> None:
    options = {"with_stack": True, "profile_memory": True}
    trace = Profile(ONE, "trace", options=options)
    fitted(trace, run_dir=tmp_path)
    content = gzip.decompress(trace.files[0].read_bytes())
    assert b"functional.py" in content
    assert b"[memory]" in content


def test_table_counts_every_phase_and_hook(tmp_path: Path) -> None:
    seen = Counter[str]()

    def note(name: str) -> Any:
        return lambda run: seen.update([name])

    hooks = ("on_step_start", "on_micro_batch_end", "on_before_optimizer_step", "on_epoch_end", "on_log")
    watch = LambdaCallback(**{name: note(name) for name in hooks})
    other = LambdaCallback(on_epoch_end=note("other"))
    options: dict[str, Any] = {"max_epochs": 3, "gradient_accumulation_steps": 2, "max_grad_norm": 1.0}
    callbacks = [watch, Profile(kinds="table"), other]
    with heard("profile of steps", level=20) as told:
        trainer = quiet(**options, log_every="2 steps", run_dir=tmp_path, callbacks=callbacks)
        trainer.fit(Regression(), pairs(), pairs(6))
    folder = tmp_path / "profile"
    found = calls(folder)
    of_micro_batch = dict.fromkeys(("data", "forward", "backward"), 3 * 5)
    of_step = dict.fromkeys(("step", "clip", "optimizer"), 3 * 3)
    evaluation = {"validation": 3, "validation data": 9, "validation step": 9}
    rest = {"log point": 6, "profiling": 1}  # the last two: before the save, and at the end
    expected = {**of_micro_batch, **of_step, **evaluation, **rest}
    assert {name: found[name] for name in found if "." not in name} == expected
    assert {name: found[f"LambdaCallback.{name}"] for name in hooks} == {name: seen[name] for name in hooks}
    assert found["LambdaCallback 2.on_epoch_end"] == seen["other"] == 3
    content = table(folder)
    assert (content["steps"], content["rank"], content["device"]) == ([0, 8], 0, "cpu")
    assert 0 < sum(each["own_seconds"] for each in content["phases"]) <= content["seconds"]
    by_name = {each["name"]: each for each in content["phases"]}
    inside = sum(by_name[name]["seconds"] for name in ("forward", "backward", "clip", "optimizer"))
    assert by_name["step"]["own_seconds"] <= by_name["step"]["seconds"] - inside + 1e-9
    (text,) = told
    assert (folder / "table-steps-0-8-rank-0.txt").read_text(encoding="utf-8") == f"{text}\n"


def test_profiling_changes_no_weights_and_leaves_nothing_behind(tmp_path: Path) -> None:
    plain = fitted(None)
    everything = Profile(ONE, ("table", "trace"))
    assert weights(fitted(everything, run_dir=tmp_path)) == weights(plain)
    assert len(list((tmp_path / "profile").iterdir())) == 3
    strategy, runs = quiet(max_steps=1).select_strategy(), []
    watch = LambdaCallback(on_fit_start=runs.append)
    fitted(Profile(kinds="table"), strategy=strategy, callbacks=[watch], run_dir=tmp_path)
    (run,) = runs
    for owner in (run, run.engine, run.train_feed, run.engine.transfer, strategy):
        assert not [name for name, each in vars(owner).items() if hasattr(each, "__wrapped__")]
    assert run.hooks.on_fit_start == (watch.on_fit_start,)
    assert "micro_batches" not in vars(run.train_feed)


def test_an_error_leaves_what_was_recorded(tmp_path: Path) -> None:
    def fail(self: Any, batch: Any) -> Any:
        if self.progress.steps == 3:
            raise ValueError("broken")
        return Regression.training_step(self, batch)

    profile = Profile({**ONE, "active": 9})
    with pytest.raises(ValueError, match="broken"):
        quiet(max_steps=8, run_dir=tmp_path, callbacks=[profile]).fit(variant(training_step=fail)(), pairs())
    (trace,) = tmp_path.glob("profile/trace-*")
    assert trace.name == "trace-steps-2-3-rank-0.json.gz"
    assert names(trace)["forward"] == 2
    assert calls(tmp_path / "profile")["forward"] == 4
    with torch.profiler.profile() as after:  # ours has ended
        torch.ones(3).sum()
    assert "aten::sum" in {each.key for each in after.key_averages()}


def on_a_rank(folder: Path, all_ranks: bool, strategy: str) -> list[str]:
    profile = Profile(ONE, all_ranks=all_ranks)
    trainer = quiet(max_epochs=1, run_dir=folder, strategy=strategy, devices=2, callbacks=[profile])
    trainer.fit(Regression(), pairs(20), pairs(4))
    return sorted(path.name for path in profile.files)


def of_rank(rank: int) -> list[str]:
    table = f"table-steps-0-4-rank-{rank}"
    return [f"{table}.json", f"{table}.txt", f"trace-steps-2-2-rank-{rank}.json.gz"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_ranks_write_files_of_their_own(strategy: str, tmp_path: Path) -> None:
    assert on_two_ranks(on_a_rank, tmp_path, True, strategy) == [sorted(of_rank(0) + of_rank(1))] * 2
    for rank in (0, 1):
        trace = names(tmp_path / "profile" / f"trace-steps-2-2-rank-{rank}.json.gz")
        assert (trace["forward"], trace["backward"], trace["optimizer"]) == (1, 1, 1)
        content = json.loads((tmp_path / "profile" / f"table-steps-0-4-rank-{rank}.json").read_text())
        assert content["rank"] == rank
    if strategy == "ddp":
        assert on_two_ranks(on_a_rank, tmp_path / "second", False, strategy) == [of_rank(0)] * 2
