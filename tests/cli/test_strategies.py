"""The list of strategies, and a strategy with its options on the command line and in a file."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import pytest
import yaml

from drivetrain.cli.settings import Settings
from drivetrain.cli.strategies import Listed, list_strategies
from drivetrain.core.errors import MissingDependencyError
from drivetrain.strategies import STRATEGIES, Hardware, Support
from drivetrain.strategies.ddp import DDPConfig
from drivetrain.strategies.fsdp.config import FSDPConfig


def listed(hardware: Hardware) -> dict[str, Listed]:
    return {each.name: each for each in list_strategies(hardware)}


@pytest.mark.parametrize(
    ("hardware", "cannot"),
    [
        (Hardware(), {"cuda": "no CUDA GPUs", "mps": "no Metal"}),
        (Hardware(mps=True), {"cuda": "no CUDA GPUs"}),
        (Hardware(cuda=8), {"mps": "8 CUDA GPUs and no Metal"}),
        (
            Hardware(tpu=4),
            {
                "auto": "torch_xla",
                "single": "'xla'",
                "ddp": "'xla'",
                "cuda": "4 TPU chips",
                "mps": "4 TPU chips",
            },
        ),
    ],
)
def test_what_a_machine_cannot_run_is_listed_with_the_reason(
    hardware: Hardware, cannot: dict[str, str]
) -> None:
    found = listed(hardware)
    assert set(found) == set(STRATEGIES)
    for name in ("auto", "single", "cpu", "cuda", "mps", "ddp"):
        assert found[name].needs
        assert found[name].available is (name not in cannot)
        assert cannot.get(name, "") in found[name].reason
        if name in cannot and name in ("cuda", "mps"):
            assert found[name].reason == f"this machine has {hardware}"


def test_the_options_of_a_strategy_are_listed_with_their_defaults() -> None:
    options = listed(Hardware())["ddp"].options
    assert (options["bucket_mb"], options["timeout"], options["static_graph"]) == ("25.0", "None", "False")
    assert listed(Hardware())["cpu"].options == {}


@dataclass(frozen=True)
class OddConfig:
    hops: int
    names: tuple[str, ...] = ()


class Odd:
    name, config_type, needs = "odd", OddConfig, "luck"

    @classmethod
    def available(cls, hardware: Hardware) -> Support:
        if hardware.cuda:
            raise RuntimeError("the driver is on strike")
        return Support(False, "no luck")


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of other packages, of every sort."""
    rows: dict[str, Any] = {**STRATEGIES._rows, "odd": Odd, "broken": "nowhere.at_all:Thing", "number": 3}
    monkeypatch.setattr(STRATEGIES, "_rows", rows)


@pytest.mark.usefixtures("others")
def test_rows_of_other_packages_are_listed_also_when_they_are_broken() -> None:
    found = listed(Hardware())
    assert found["odd"] == Listed("odd", "luck", False, "no luck", {"hops": "required", "names": "()"})
    assert "'nowhere.at_all:Thing', which cannot be loaded" in found["broken"].reason
    assert "which has no name, config_type" in found["number"].reason
    assert found["ddp"].available
    assert listed(Hardware(cuda=1))["odd"].reason == "the driver is on strike"


@pytest.mark.usefixtures("others")
def test_the_command_prints_them_all(drive: Any) -> None:
    code, out, err = drive("strategies", quiet=False)
    assert (code, err) == (0, "")
    here, _, rest = out.partition("cannot run here")
    assert "  ddp " in here
    assert "no luck; needs luck" in rest
    assert "bucket_mb=25.0" in rest
    code, out, _ = drive("strategies", "--json", quiet=False)
    found = json.loads(out)
    assert code == 0
    assert found["hardware"].keys() == {"cuda", "mps", "tpu", "xpu"}
    assert [each["name"] for each in found["strategies"]] == list(STRATEGIES)
    code, _, err = drive("strategies", "--trainer.seed 3", quiet=False)
    assert (code, err) == (
        2,
        "drivetrain: drivetrain strategies: unknown argument --trainer.seed. Allowed: '--debug', '--json'.\n",
    )


def settings(line: str) -> Settings:
    return Settings("fit", "train", line.split())


def file_with(tmp_path: Any, strategy: Any) -> str:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"trainer": {"strategy": strategy}}), encoding="utf-8")
    return f"--config {path}"


def printed(line: str) -> Any:
    return yaml.safe_load(settings(line).as_file())["trainer"]["strategy"]


QUIET = "--trainer.loggers= --trainer.progress_bar false"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--trainer.strategy cpu", "cpu"),
        ("--trainer.strategy ddp", "ddp"),
        ("--trainer.strategy=ddp --trainer.strategy.bucket_mb=50", DDPConfig(bucket_mb=50.0)),
        ("--trainer.strategy.static-graph yes --trainer.strategy ddp", DDPConfig(static_graph=True)),
        ("--trainer.strategy ddp --trainer.strategy.communication fp16", DDPConfig(communication="fp16")),
        ("--trainer.strategy ddp --trainer.strategy.timeout none", DDPConfig()),
        (
            "--trainer.strategy fsdp --trainer.strategy.tensor_parallel 2 --trainer.devices 2",
            FSDPConfig(tensor_parallel=2),
        ),
        (
            (
                "--trainer.strategy fsdp --trainer.strategy.ignored head,norm.*"
                " --trainer.strategy.activation_checkpointing selective"
            ),
            FSDPConfig(ignored=("head", "norm.*"), activation_checkpointing="selective"),
        ),
    ],
)
def test_options_of_a_strategy_make_its_configuration(line: str, expected: Any) -> None:
    assert settings(f"{line} {QUIET}").trainer().strategy == expected


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("--trainer.strategy ddp --trainer.strategy.bucket_md 50", "Did you mean 'bucket_mb'?"),
        (
            "--trainer.strategy ddp --trainer.strategy.bucket_mb big",
            "strategy.bucket_mb must be a number, not",
        ),
        ("--trainer.strategy ddp --trainer.strategy.bucket_mb 0", "bucket_mb=...) must be a positive number"),
        ("--trainer.strategy ddp --trainer.strategy.communication fp61", "Did you mean 'fp16'?"),
        ("--trainer.strategy.bucket_mb 50", "give --trainer.strategy NAME too"),
        ("--trainer.strategy cpu --trainer.strategy.bucket_mb 50", "strategy 'cpu' has no options"),
        ("--trainer.strategy dpd --trainer.strategy.bucket_mb 50", "Did you mean 'ddp'?"),
    ],
)
def test_a_wrong_option_is_one_message(drive: Any, line: str, message: str) -> None:
    code, out, err = drive("plan", f"--task shapes.Shapes --data shapes.data {line}", quiet=False)
    assert (code, out) == (2, "")
    assert message in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("strategy", "line", "expected"),
    [
        ("ddp", "", "ddp"),
        ({"name": "ddp", "bucket_mb": 3}, "", DDPConfig(bucket_mb=3)),
        ("ddp", "--trainer.strategy.bucket_mb 4", DDPConfig(bucket_mb=4.0)),
        (
            {"name": "ddp", "bucket_mb": 3},
            "--trainer.strategy.static_graph true",
            DDPConfig(bucket_mb=3, static_graph=True),
        ),
        ({"name": "ddp", "bucket_mb": 3}, "--trainer.strategy ddp", DDPConfig(bucket_mb=3)),
        ({"bucket_mb": 3}, "--trainer.strategy ddp", DDPConfig(bucket_mb=3)),
        # Options of another strategy go with it.
        ({"name": "ddp", "bucket_mb": 3}, "--trainer.strategy cpu", "cpu"),
    ],
)
def test_the_command_line_is_laid_over_the_file(
    tmp_path: Any, strategy: Any, line: str, expected: Any
) -> None:
    found = settings(f"{file_with(tmp_path, strategy)} {line} {QUIET}")
    assert found.trainer().strategy == expected


def test_lists_of_a_file_are_tuples_of_a_configuration(tmp_path: Any) -> None:
    given = {"name": "fsdp", "ignored": ["head", "norm.*"]}
    found = settings(f"{file_with(tmp_path, given)} --trainer.devices 2 {QUIET}")
    assert found.trainer().strategy == FSDPConfig(ignored=("head", "norm.*"))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--trainer.strategy cpu", "cpu"),
        ("--trainer.strategy ddp --trainer.strategy.bucket_mb 5", {"name": "ddp", "bucket_mb": 5.0}),
    ],
)
def test_the_printed_configuration_reads_back_as_the_same(tmp_path: Any, line: str, expected: Any) -> None:
    found = printed(line)
    assert found == expected
    assert printed(file_with(tmp_path, found)) == found


def test_a_strategy_whose_package_is_missing_is_listed_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Needy(Odd):
        @classmethod
        def available(cls, hardware: Hardware) -> Support:
            raise MissingDependencyError("rings", "ring", "strategy 'needy'")

    monkeypatch.setattr(STRATEGIES, "_rows", {**STRATEGIES._rows, "needy": Needy})
    assert "pip install 'drivetrain[ring]'" in listed(Hardware())["needy"].reason
