"""Weights are read from Lightning's and Composer's files and from state dicts; nothing in them runs."""

import argparse
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.checkpoint.weights.models import Planted
from tests.support.messages import warned
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import CheckpointError, ConfigError, TaskModule
from drivetrain.checkpoint import DamagedCheckpointError, load_weights
from drivetrain.integrations.weight_files.import_command import import_weights

# Saved by Lightning 2.6.6 with its EMAWeightAveraging and the hyper-parameters {"lr": 0.1, "args": None}.
LIGHTNING = Path(__file__).with_name("lightning_2_6_6.ckpt")
AVERAGES = {"net.weight": 0.3788, "net.bias": -1.2925}


class Net(TaskModule):
    def __init__(self, lr: float = 1.0, args: Any = "default") -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.lr, self.args = lr, args

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return outputs.square().mean()


PLAIN = {"lr": 0.5, "args": {"sizes": [1, (2, 3)], "name": "x"}}


def saved(path: Path, hparams: dict[str, Any] | None, **changes: Any) -> str:  # without the averaging
    content = torch.load(LIGHTNING, weights_only=True)
    for key in ("current_model_state", "averaging_state", "hyper_parameters", "hparams_name"):
        del content[key]
    if hparams is not None:
        content.update(hyper_parameters=hparams, hparams_name="kwargs")
    torch.save({**content, **changes}, path)
    return str(path)


def values(tensors: Any) -> dict[str, float]:
    return {name: round(float(tensor), 4) for name, tensor in tensors.items()}


def test_of_averaged_weights_the_averages_are_taken_with_a_warning() -> None:
    task = Net()
    with warned(r"the averages are read.*'current_model_state'|averaged weights"):
        assert "the averages (state_dict) of" in str(task.load_weights(LIGHTNING))
    assert values(task.state_dict()) == AVERAGES


STATE = {"net.weight": torch.full((1, 1), 3.0), "net.bias": torch.full((1,), 4.0)}
EXPECTED = {"net.weight": 3.0, "net.bias": 4.0}
# composer/core/state.py, State.state_dict; composer/utils/checkpoint.py, get_checkpoint
OPTIMIZERS = {"DecoupledAdamW": {"state": {"net.weight": {"exp_avg": torch.ones(1)}}}}
COMPOSER = {"model": STATE, "optimizers": OPTIMIZERS, "schedulers": [("LambdaLR", {"last_epoch": 2})]}
COMPOSER |= {"timestamp": {"Timestamp": {"epoch": 1}}, "metadata": {"composer_env_info": {}}, "run_name": "a"}
COMPOSER = {"state": COMPOSER, "rng": [{"python": (3, (1, 2), None), "torch": torch.ones(2)}]}
FOUND = [
    (STATE, "a state dict"),
    ({f"_orig_mod.{name}": each for name, each in STATE.items()}, "a state dict"),
    ({"model": STATE, "epoch": 3, "opt": {}}, "under 'model'; not read: epoch, opt"),
    ({"model_state_dict": STATE, "optimizer_state_dict": {}}, "not read: optimizer_state_dict"),
    (COMPOSER, "a checkpoint of Composer; not read: optimizers, schedulers, timestamp"),
]
REFUSED = [
    (Net(), r"refuses .*: it has an object of .*Net\. Where you trust the file and have its code, save"),
    ({"model": STATE, "args": argparse.Namespace(lr=1)}, r"it has an object of argparse\.Namespace\."),
    ({"model": STATE, "planted": Planted(Path("it ran"))}, "it has an object of "),
    ({"state_dict": {"a": torch.ones(1), "b": 3}}, "a int as 'b' among its weights"),
    ([torch.ones(1)], "holds a list, not weights by name"),
    ({}, "It has nothing"),
]


def test_a_state_dict_is_found_where_programs_put_it(tmp_path: Path) -> None:
    for number, (content, told) in enumerate(FOUND):
        path = tmp_path / f"{number}{('.pt', '.bin')[number % 2]}"
        torch.save(content, path)
        task = Net()
        assert told in str(task.load_weights(path))
        assert values(task.state_dict()) == EXPECTED
    for content, told in REFUSED:
        torch.save(content, tmp_path / "file.pt")
        with pytest.raises(CheckpointError, match=told):
            load_weights(tmp_path / "file.pt")
    assert not Path("it ran").exists()


def test_a_changed_byte_half_a_file_and_another_file_are_told(tmp_path: Path) -> None:
    path = tmp_path / "file.pt"
    torch.save({"x": torch.full((1000,), 0.25)}, path)
    data = path.read_bytes()
    changed = bytearray(data)
    changed[data.find(torch.full((1000,), 0.25).numpy().tobytes()) + 1999] ^= 1
    for content in (changed, data[:-1], data[:10], b"", pickle.dumps(Planted(tmp_path / "it ran"))):
        path.write_bytes(content)
        with pytest.raises(DamagedCheckpointError, match=r"is not what torch\.save writes, or not all of it"):
            load_weights(path)
    torch.save({"x": torch.ones(1)}, path, pickle_protocol=4)
    with pytest.raises(CheckpointError, match=r"refuses .*Unsupported operand"):
        load_weights(path)


def test_loaded_weights_outlive_their_file(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "file.pt")
    read = load_weights(tmp_path / "file.pt")
    (tmp_path / "file.pt").write_bytes(b"")
    assert values(read) == EXPECTED


def test_weights_that_share_storages_take_the_space_of_the_storages(tmp_path: Path) -> None:
    """Also where their names alternate."""
    wholes = [torch.arange(100.0), torch.arange(100.0) + 100]
    state = {f"{index}.{number}": each[index:] for index in range(20) for number, each in enumerate(wholes)}
    torch.save(state, tmp_path / "views.pt")
    read = load_weights(str(tmp_path / "views.pt"))
    assert list(read) == list(state)
    assert all(torch.equal(read[name], each) for name, each in state.items())
    assert len({each.untyped_storage().data_ptr() for each in read.values()}) == 2


def test_another_programs_file_is_imported_but_no_run_resumed_from_it(tmp_path: Path) -> None:
    import_weights(saved(tmp_path / "plain.ckpt", PLAIN), tmp_path / "plain")
    task = Net.from_checkpoint(tmp_path / "plain")
    assert (task.lr, task.args, values(task.state_dict())) == (0.5, PLAIN["args"], AVERAGES)
    path = saved(tmp_path / "last.ckpt", {"lr": 0.5, "args": torch.ones(2)})
    import_weights(path, tmp_path / "ours")
    with pytest.raises(ConfigError, match=r"that a file cannot hold.*Net\.from_checkpoint\(path, "):
        Net.from_checkpoint(tmp_path / "ours")
    assert Net.from_checkpoint(tmp_path / "ours", args=1).lr == 0.5
    with pytest.raises(CheckpointError, match=r"a file of weights, .*`drivetrain checkpoint import`"):
        Net.from_checkpoint(path)
    with pytest.raises(CheckpointError, match="nothing is ever overwritten"):
        import_weights(path, tmp_path / "ours")
    with pytest.raises(ConfigError, match=r"is a file.*task\.load_weights\(path\) before"):
        quiet(max_steps=1).fit(Net(), [torch.ones(2, 1)], resume=path)
