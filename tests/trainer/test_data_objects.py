"""Data objects: what is called before their data is asked for and after the run, and their state."""

from pathlib import Path
from typing import Any

import pytest
from tests.support.ranks import on_two_ranks
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback
from drivetrain.distributed.processes import local_rank, once_per_machine, world_size


class Data:
    """Writes down its calls."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.epochs = 0

    def begin(self, verb: str, task: Any) -> None:
        self.calls.append(("begin", verb, type(task).__name__, world_size()))

    def end(self, verb: str) -> None:
        self.calls.append(("end", verb))

    def train_data(self) -> Any:
        self.calls.append("train")
        return pairs(10)

    def validation_data(self) -> Any:
        self.calls.append("validation")
        return pairs(4)

    def state_dict(self) -> dict[str, Any]:
        return {"epochs": self.epochs}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calls.append(("load", state))


def test_each_verb_begins_and_ends_its_data() -> None:
    for verb in ("fit", "validate", "plan"):
        data = Data()
        getattr(quiet(max_epochs=1), verb)(Regression(), data)
        name = "fit" if verb == "plan" else verb
        first, *asked, last = data.calls
        assert (first, last) == (("begin", name, "Regression", 1), ("end", name))
        assert set(asked) == ({"validation"} if verb == "validate" else {"validation", "train"})


def test_data_is_ended_after_an_error_and_after_the_last_callback() -> None:
    data = Data()
    finish = LambdaCallback(on_fit_end=lambda run: data.calls.append("finished"))
    quiet(max_epochs=1, callbacks=[finish]).fit(Regression(), data)
    assert data.calls[-2:] == ["finished", ("end", "fit")]

    class Fails(Data):
        def train_data(self) -> Any:
            raise ValueError("no such file")

    failing = Fails()
    with pytest.raises(ValueError, match="no such file"):
        quiet(max_epochs=1).fit(Regression(), failing)
    assert failing.calls[-1] == ("end", "fit")


def test_the_state_of_the_data_is_in_a_checkpoint(tmp_path: Path) -> None:
    options = {"run_dir": tmp_path, "checkpoint": CheckpointConfig(every="1 epoch")}
    data = Data()
    count = LambdaCallback(on_epoch_end=lambda run: setattr(data, "epochs", data.epochs + 1))
    quiet(max_epochs=2, callbacks=[count], **options).fit(Regression(), data)
    again = Data()
    quiet(max_epochs=3, **options).fit(Regression(), again, resume="auto")
    assert ("load", {"epochs": 2}) in again.calls


def prepared(path: Path) -> tuple[int, bool]:
    """The size of the job when the data begins, and whether the file was there for this rank."""
    seen: list[Any] = []

    def prepare() -> None:
        with path.open("a", encoding="utf-8") as file:
            file.write(f"{local_rank()}\n")

    class Prepared(Data):
        def begin(self, verb: str, task: Any) -> None:
            once_per_machine(prepare)
            seen.append((world_size(), path.exists()))

    quiet(max_epochs=1, strategy="ddp", devices=2).fit(Regression(), Prepared())
    return tuple(seen[0])


def test_data_begins_when_the_ranks_are_connected_and_is_prepared_once(tmp_path: Path) -> None:
    assert on_two_ranks(prepared, tmp_path / "prepared") == [(2, True), (2, True)]
    assert (tmp_path / "prepared").read_text(encoding="utf-8") == "0\n"
