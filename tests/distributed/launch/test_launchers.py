"""A program that is started by somebody else's launcher trains in the processes that it finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.failing import JOB
from tests.support.launched import DEEP, FSDP_YAML

from drivetrain.distributed.sockets import release_port, reserve_port

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

PROGRAM = f"""{DEEP}
trainer = Trainer(max_epochs=1, loggers=(), checkpoint=False, progress_bar=False)
strategy = trainer.select_strategy()
result = trainer.fit(Deep(), [{{"x": torch.ones(2, 4)}}] * 8)
config = getattr(strategy, "config", None)
found = {{
    "strategy": strategy.name,
    "wrap": getattr(config, "wrap", None),
    "precision": trainer.precision.name,
    "samples": result.progress.samples,
    "updates": result.progress.updates,
}}
sys.stdout.write(json.dumps(found) + "\\n")
"""

DDP = {"strategy": "ddp", "wrap": None, "precision": "32", "samples": 16, "updates": 4}
FSDP = {**DDP, "strategy": "fsdp", "wrap": ["Block"], "precision": "bf16-mixed"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without what a launcher of the tests themselves has set."""
    for name in JOB:
        monkeypatch.delenv(name, raising=False)


def outcomes(*processes: subprocess.Popen[str]) -> list[dict[str, object]]:
    """What each rank has told at its end."""
    try:
        done = [each.communicate(timeout=240) for each in processes]
    finally:
        for each in processes:
            each.kill()
            each.wait()
    assert all(each.returncode == 0 for each in processes), "\n".join(error for _, error in done)
    return [json.loads(line) for out, _ in done for line in out.splitlines() if line.startswith("{")]


def start(*words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **variables},
    )


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_deepspeeds_launcher() -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    port = reserve_port()
    words = ("-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--master_port", str(port), "train.py")
    assert outcomes(start(*words, DS_ACCELERATOR="cpu")) == [DDP, DDP]
    release_port(port)


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_torchrun() -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    started = start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
    assert outcomes(started) == [DDP, DDP]


@pytest.mark.full
@pytest.mark.usefixtures("alone")
def test_accelerate_launch_s_configuration_chooses_strategy_and_precision() -> None:
    pytest.importorskip("accelerate")
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    Path("fsdp.yaml").write_text(FSDP_YAML, encoding="utf-8")
    launch = ["-m", "accelerate.commands.launch", "--config_file", "fsdp.yaml"]
    assert outcomes(start(*launch, "--main_process_port=0", "train.py")) == [FSDP, FSDP]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("same", "own"),
    [
        (
            {
                "SLURM_JOB_ID": str(os.getpid() % 1000),
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_NUM_NODES": "1",
                "SLURM_STEP_NODELIST": "localhost",
            },
            ("SLURM_PROCID", "SLURM_LOCALID"),
        ),
        (
            {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"},
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ),
        ({"PMI_SIZE": "2", "MPI_LOCALNRANKS": "2"}, ("PMI_RANK", "MPI_LOCALRANKID")),
    ],
    ids=["srun", "Open MPI", "MPICH"],
)
def test_the_variables_of_batch_systems(same: dict[str, str], own: tuple[str, ...]) -> None:
    Path("train.py").write_text(PROGRAM, encoding="utf-8")
    ranks = [start("train.py", **same, **dict.fromkeys(own, str(rank))) for rank in range(2)]
    assert outcomes(*ranks) == [DDP, DDP]


ONE_AND_SEVERAL = """
import sys
import torch
from torch import nn
from drivetrain import OptimizerConfig, TaskModule, Trainer

class Line(TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)

    def forward(self, x):
        return self.line(x)

    def loss(self, outputs, batch):
        return outputs.square().mean()

    def configure_optimizers(self):
        return OptimizerConfig("sgd", lr=0.1)

data = [{"x": torch.full((2, 3), float(index))} for index in range(4)]
quiet = {"max_epochs": 1, "loggers": (), "checkpoint": False, "progress_bar": False}
first = Line()
Trainer(**quiet).fit(first, data)
second = Line()
result = Trainer(strategy="ddp", devices=2, **quiet).fit(second, data)
again = Trainer(strategy="ddp", devices=2, **quiet).validate(second, data)
sys.stdout.write(f"{result.progress.updates} {again['validation/loss']:.5f}\\n")
"""


@pytest.mark.usefixtures("alone")
def test_a_program_that_has_trained_in_one_process_goes_on_in_several() -> None:
    Path("train.py").write_text(ONE_AND_SEVERAL, encoding="utf-8")
    Path("several.py").write_text(ONE_AND_SEVERAL.replace("Trainer(**quiet).fit(first, data)", ""), "utf-8")
    told = []
    for name in ("train.py", "several.py"):
        process = start(name)
        out, error = process.communicate(timeout=240)
        assert process.returncode == 0, error
        told.append(set(out.splitlines()))
    assert told[0] == told[1]
    assert {each.split()[0] for each in told[0]} == {"2"}


EVALUATES = """
import json, sys
import torch
from torch import nn
from drivetrain import StrategyError, TaskModule, Trainer
from drivetrain.strategies import SingleDevice

class Line(TaskModule):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(3, 1)

    def forward(self, x):
        return self.line(x)

    def loss(self, outputs, batch):
        return outputs.square().mean()

data = [{"x": torch.full((2, 3), float(index))} for index in range(5)]
quiet = {"loggers": (), "checkpoint": False, "progress_bar": False}
task = Line()
Trainer(max_epochs=1, strategy="ddp", devices=2, **quiet).fit(task, data)
told = []
for one in ({"strategy": "single"}, {"devices": 1}):
    try:
        Trainer(**one, **quiet)
    except StrategyError as error:
        told.append(str(error))
together = Trainer(**quiet).validate(task, data)["validation/loss"]
alone = Trainer(strategy=SingleDevice("cpu"), **quiet).validate(task, data)["validation/loss"]
sys.stdout.write(json.dumps({"told": told, "values": [round(together, 5), round(alone, 5)]}) + "\\n")
"""


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    "launcher", [(), ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")]
)
def test_a_program_of_several_processes_evaluates_in_all_of_them_or_in_each(
    launcher: tuple[str, ...],
) -> None:
    Path("train.py").write_text(EVALUATES, encoding="utf-8")
    found = outcomes(start(*launcher, "train.py"))
    values: list[Any] = [each["values"] for each in found]
    assert values == [[values[0][0]] * 2] * 2
    for each in found:
        told: Any = each["told"]
        assert len(told) == 2
        assert all(
            "An evaluation does not need a single process: on several each sample" in one for one in told
        )
