"""A program that is started by somebody else's launcher trains in the processes that it finds."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.distributed.running import FSDP_YAML, LIMIT, PROGRAMS, run
from tests.support.forked import Forked, undisturbed
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from drivetrain.core.registry import is_installed
from drivetrain.distributed.failure.heartbeat import DIED
from drivetrain.distributed.failure.last_words import record
from drivetrain.distributed.launch import torchrun
from drivetrain.distributed.sockets import reserved_port

pytestmark = [
    pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo"),
    pytest.mark.real("other programs start the ranks"),
]
PROGRAM = str(PROGRAMS / "launched.py")
DDP = {"strategy": "ddp", "block": "Block", "precision": "32", "samples": 16, "steps": 4, "same": True}
FSDP = {**DDP, "strategy": "fsdp", "block": "FSDPBlock", "precision": "bf16-mixed"}


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as found:
        yield found


def outcomes(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def launch(*words: str, **variables: str) -> list[dict[str, Any]]:
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    command, environment = [sys.executable, "-m", *words, PROGRAM], {**undisturbed(), **variables}
    done = subprocess.run(command, env=environment, **options)
    assert done.returncode == 0, done.stderr
    found = outcomes(done.stdout)
    assert len({each.pop("value") for each in found}) == 1
    assert all(each.pop("told") == [True, True] for each in found)
    return found


@pytest.mark.landing
def test_torchrun() -> None:
    assert launch("torch.distributed.run", "--standalone", "--nproc-per-node=2") == [DDP, DDP]


@pytest.mark.landing
def test_under_torchrun_the_last_word_is_the_rank_that_was_killed_and_not_its_signal() -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": LIMIT, "check": False}
    done = subprocess.run([*command, PROGRAM, '{"kill": true}'], env=undisturbed(), **options)
    assert done.returncode == 1
    assert "rank 1 failed first, last heard of " in done.stderr, done.stderr
    assert "exit code 75" not in done.stderr
    assert re.search(r"Root Cause[^=]* rank +: 1 ", done.stderr), done.stderr


def test_the_error_of_a_rank_that_ends_because_of_another_is_no_root_cause_of_torchrun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def recorded(name: str, is_first: bool) -> tuple[int, str]:
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / name))
        record(ValueError(name), is_first)
        extra = json.loads((tmp_path / name).read_text(encoding="utf-8"))["message"]["extraInfo"]
        return int(extra["timestamp"]), extra["py_callstack"]

    (later, consequence), (time, first) = recorded("later", False), recorded("first", True)
    assert later > time
    assert "ValueError: later" in consequence
    assert "ValueError: first" in first


def test_the_launcher_says_how_a_rank_ended_that_was_only_gone_for_the_others(tmp_path: Path) -> None:
    told = {"message": {"message": f"RankFailure: rank 1 failed first: {DIED}"}}
    (tmp_path / "error.json").write_text(json.dumps(told), encoding="utf-8")
    error = ChildFailedError("program", {1: ProcessFailure(1, 7, -11, "")})
    assert torchrun._failure(error, tmp_path, "")["text"] == "rank 1 failed first: it was killed by SIGSEGV"


@pytest.mark.nightly
@pytest.mark.skipif(not is_installed("deepspeed"), reason="needs deepspeed")
def test_deepspeeds_launcher(port: int) -> None:
    words = ("deepspeed.launcher.runner", "--no_local_rank", "--num_gpus=2", f"--master_port={port}")
    assert launch(*words, DS_ACCELERATOR="cpu") == [DDP, DDP]


@pytest.mark.nightly
@pytest.mark.skipif(not is_installed("accelerate"), reason="needs accelerate")
def test_accelerate_launch_s_configuration_chooses_strategy_and_precision() -> None:
    words = ("accelerate.commands.launch", "--config_file", str(FSDP_YAML), "--main_process_port=0")
    assert launch(*words) == [FSDP, FSDP]


SLURM = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_NUM_NODES": "1"}


def test_the_variables_of_slurm(port: int) -> None:
    job = {**undisturbed(), **SLURM, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    job["SLURM_STEP_NODELIST"] = "localhost"
    own = ("SLURM_PROCID", "SLURM_LOCALID")
    ranks = [Forked([PROGRAM], Path.cwd(), {**job, **dict.fromkeys(own, str(rank))}) for rank in range(2)]
    ended = [each.communicate(LIMIT) for each in ranks]
    assert [each.returncode for each in ranks] == [0, 0], ended
    for each in [outcomes(out)[0] for out, _ in ended]:
        assert {name: each[name] for name in DDP} == DDP
        assert each["told"] == [True, True]


def test_a_program_that_has_trained_in_one_process_goes_on_in_several() -> None:
    """With what it would have had without, where the program is run again for each rank."""
    options: dict[str, Any] = {"strategy": "ddp", "devices": 2}
    forked = run("launched.py", "forked", **options, **{"alone first": True})
    started = run("launched.py", "started", **options)
    assert (forked.code, started.code) == (0, 0), (forked.errors, started.errors)
    (one,), both = outcomes(forked.out), outcomes(started.out)
    assert both == [{**DDP, "told": [True, True], "value": one["value"]}] * 2
    assert {name: one[name] for name in DDP} == DDP
