"""Lightning's checkpoints are read into unchanged modules, and nothing in them runs."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import warned
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import CheckpointError, ConfigError, TaskModule

pytest.importorskip("lightning")

import lightning
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint

from drivetrain.integrations.lightning import load_checkpoint


class Boom:
    """Would run if a file were unpickled."""

    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


class Module(lightning.LightningModule):
    def __init__(self, width: int = 3, criterion: Any = None, where: Any = None) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a hyper-parameter that is a module
            self.save_hyperparameters()
        self.net = nn.Linear(4, width)

    def training_step(self, batch: Tensor) -> Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def on_load_checkpoint(self, checkpoint: Any) -> None:
        raise AssertionError("it is not called")


def trained(path: Path, module: Any, *callbacks: Any) -> Any:
    """A checkpoint that their Trainer writes after two updates."""
    saver = ModelCheckpoint(path.parent, path.stem, every_n_train_steps=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            max_steps=2,
            accelerator="cpu",
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[*callbacks, saver],
        )
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
    return module


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_of_lightning_is_read_into_an_unchanged_module(tmp_path: Path, compiled: bool) -> None:
    path = tmp_path / "last.ckpt"
    module = Module(criterion=nn.MSELoss(), where=Path("/data"))
    if compiled:
        module.net.compile()
        module.net = torch.compile(module.net, backend="eager")
    before = trained(path, module)
    content = torch.load(path, weights_only=False)
    content["teacher"] = Boom()
    content["hyper_parameters"]["danger"] = {"inside": [Boom()]}
    torch.save(content, path)
    after = Module()
    loaded = load_checkpoint(path, after)
    assert all(
        torch.equal(getattr(after.net, name), getattr(before.net, name)) for name in ("weight", "bias")
    )
    assert dict(loaded.hparams) == {"width": 3}
    text = str(loaded)
    assert "loaded 2 of 2 tensors: the weights of a checkpoint of Lightning" in text
    assert "hyper-parameter criterion" in text
    assert "torch.nn.modules.loss.MSELoss" in text
    for name in ("hyper-parameter where", "hyper-parameter danger", "optimizer_states", "loops", "teacher"):
        assert name in loaded.left_out


def test_of_averaged_weights_it_is_said_which_were_taken(tmp_path: Path) -> None:
    path = tmp_path / "ema.ckpt"
    trained(path, Module(), EMAWeightAveraging(decay=0.5))
    content = torch.load(path, weights_only=False)
    after = Module()
    with warned("the averages are read"):
        loaded = load_checkpoint(path, after)
    assert loaded.averaged
    assert "the averages (state_dict)" in str(loaded)
    assert torch.equal(after.net.weight, content["state_dict"]["net.weight"])
    assert not torch.equal(after.net.weight, content["current_model_state"]["net.weight"])


def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    path = tmp_path / "last.ckpt"
    trained(path, Module())
    other = Module(width=2)
    before = other.net.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"last\.ckpt' do not fit Module: 2 of another shape"):
        load_checkpoint(path, other)
    assert torch.equal(other.net.weight, before)
    content = torch.load(path, weights_only=False)
    content["state_dict"]["danger"] = Boom()
    torch.save(content, path)
    with pytest.raises(CheckpointError, match="as 'danger' among its weights"):
        load_checkpoint(path, Module())
    with pytest.raises(CheckpointError, match="is no checkpoint file of Lightning"):
        load_checkpoint(tmp_path, other)
    with pytest.raises(ConfigError, match=r"fills a module, not Module\. Make one first"):
        load_checkpoint(path, Module)  # type: ignore[arg-type]


def test_every_place_that_takes_a_checkpoint_recognises_one_of_lightning(tmp_path: Path) -> None:
    class Task(TaskModule):
        def __init__(self, width: int = 3) -> None:
            super().__init__()
            self.net = nn.Linear(4, width)

        def training_step(self, batch: Tensor) -> Tensor:
            return self.net(batch).square().mean()

        validation_step = training_step

    path = str(tmp_path / "last.ckpt")
    weight = trained(Path(path), Module()).net.weight
    task, data = Task(), [torch.ones(2, 4)]
    assert "a checkpoint of Lightning" in str(task.load_weights(path))
    with warned("hyper-parameters that Task does not take"):
        assert torch.equal(Task.from_checkpoint(path).net.weight, weight)
    assert quiet().validate(Task(), data, checkpoint=path) == quiet().validate(task, data)
    with pytest.raises(ConfigError, match=r"Only its weights can be read.*task\.load_weights\(path\)"):
        quiet(max_epochs=1).fit(Task(), data, resume=path)
