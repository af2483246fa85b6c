"""The strategies that the pages show, each in a file of examples/, under the conformance suite."""

import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo  # here and not in each of the processes, which are copies of this one
import torchmetrics  # noqa: F401  for the same reason
from tests.strategies.resuming import check_resume

from drivetrain import ConfigError, Trainer
from drivetrain.core.registry import Registry
from drivetrain.strategies import STRATEGIES, SingleDevice
from drivetrain.strategies.ddp import DDP
from drivetrain.testing import check_strategy

pytestmark = pytest.mark.skipif(not torch.distributed.is_gloo_available(), reason="needs gloo")

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], Any]]:
    """Put an example on the path with the metadata that pip would write; return its module."""
    made: list[str] = []

    def install(name: str) -> Any:
        project = EXAMPLES / name / "pyproject.toml"
        rows = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["entry-points"]
        metadata = tmp_path / f"{name}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        listed = {group: "\n".join(f"{k} = {v}" for k, v in each.items()) for group, each in rows.items()}
        text = "\n".join(f"[{group}]\n{each}" for group, each in listed.items())
        (metadata / "entry_points.txt").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.syspath_prepend(EXAMPLES / name)
        fresh: Registry[Any] = Registry("strategy", dict(STRATEGIES._rows))
        monkeypatch.setattr(STRATEGIES, "_rows", fresh._rows)
        monkeypatch.setattr(STRATEGIES, "_discovered", False)
        made.append(name)
        return import_module(name)

    yield install
    for name in made:
        sys.modules.pop(name, None)


Install = Callable[[str], Any]


def test_the_pages_show_the_whole_files() -> None:
    pages = {"write-a-strategy": ("all_reduce", 150), "write-an-inexact-strategy": ("local_sgd", 200)}
    for page, (name, lines) in pages.items():
        text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text(encoding="utf-8")
        source = (EXAMPLES / name / f"{name}.py").read_text(encoding="utf-8")
        assert f"```python\n# file: {name}.py\n{source}```" in text
        assert len(source.splitlines()) < lines


def test_all_reduce_is_found_by_its_entry_point(installed: Install) -> None:
    module = installed("all_reduce")
    for spec in ("all_reduce", module.AllReduceConfig(timeout=60)):
        strategy = Trainer(max_epochs=1, strategy=spec, devices=2).select_strategy()
        assert isinstance(strategy, module.AllReduce)
        assert strategy.world_size == 2
    with pytest.raises(ConfigError, match=r"AllReduceConfig\(timeout=...\) must be a finite number above 0"):
        module.AllReduceConfig(timeout=-1)


@pytest.mark.heavy("a strategy of another package under the conformance suite")
def test_all_reduce_computes_the_big_batch(installed: Install) -> None:
    module = installed("all_reduce")
    own = lambda world_size: module.AllReduce(world_size=world_size)  # noqa: E731
    check_strategy(own, checks=["same_as_the_big_batch"])


@pytest.mark.nightly
@pytest.mark.parametrize(("precision", "tolerance"), [("32", 1e-6), ("bf16-mixed", 0.005)])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_reduce_conforms(installed: Install, world_size: int, precision: str, tolerance: float) -> None:
    module = installed("all_reduce")
    own = lambda world_size: module.AllReduce(world_size=world_size)  # noqa: E731
    check_strategy(own, world_size, precision=precision, tolerance=tolerance)


@pytest.mark.nightly
def test_all_reduce_resumes_what_others_saved_and_they_what_it_saved(installed: Install) -> None:
    module = installed("all_reduce")
    makers = {
        "single": lambda world_size: SingleDevice("cpu"),
        "ddp": lambda world_size: DDP(world_size=world_size),
        "all_reduce": lambda world_size: module.AllReduce(world_size=world_size),
    }
    assert check_resume(makers, world_sizes=(1, 2)) == 25


@pytest.mark.nightly
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_local_sgd_conforms_but_for_what_it_declares(installed: Any, world_size: int, capsys: Any) -> None:
    module = installed("local_sgd")
    config = module.LocalSGDConfig(period=4)
    check_strategy(lambda world_size: module.LocalSGD(config, world_size=world_size), world_size)
    if world_size > 1:
        assert "'local_sgd' is not compared with one process: each process" in capsys.readouterr().out
