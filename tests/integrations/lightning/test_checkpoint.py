"""Lightning's checkpoints are read into unchanged modules, and nothing in them runs."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet
from torch import Tensor, nn

from drivetrain import CheckpointError, ConfigError
from drivetrain.integrations.lightning import as_task, load_checkpoint

callbacks = Lazy("lightning.pytorch.callbacks")
lightning = Lazy("lightning")


class Boom:  # would run if a file were unpickled
    def __reduce__(self) -> Any:
        return exec, ("raise SystemExit('it ran')",)


def made(width: int = 3, **options: Any) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[name-defined,misc]
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

    return Module(width, **options)


def trained(path: Path, module: Any, *more: Any) -> Any:
    saver = callbacks.ModelCheckpoint(path.parent, path.stem, every_n_train_steps=2)
    off = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(max_steps=2, accelerator="cpu", callbacks=[*more, saver], **off)
        trainer.fit(module, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=2))
    return module


@pytest.mark.filterwarnings("ignore:.*torch.jit.script_method:DeprecationWarning")  # of torch.compile
@pytest.mark.parametrize("compiled", [False, True])
def test_a_checkpoint_of_lightning_is_read_into_an_unchanged_module(tmp_path: Path, compiled: bool) -> None:
    path = tmp_path / "last.ckpt"
    module = made(criterion=torch.ones(2), where=[torch.ones(1)])
    if compiled:
        module.net.compile(backend="eager")
        module.net = torch.compile(module.net, backend="eager")
    before = trained(path, module)
    content = torch.load(path, weights_only=True)
    content["teacher"] = [torch.ones(3)]
    torch.save(content, path)
    after = made()
    loaded = load_checkpoint(path, after)
    assert torch.equal(after.net.weight, before.net.weight)
    assert torch.equal(after.net.bias, before.net.bias)
    assert dict(loaded.hparams) == {"width": 3}
    text = str(loaded)
    assert "loaded 2 of 2 tensors: the weights of a checkpoint of Lightning" in text
    assert "hyper-parameter criterion" in text
    left_out = {"hyper-parameter where", "optimizer_states", "loops", "teacher"}
    assert left_out <= set(loaded.left_out)


def test_what_does_not_fit_is_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    path, evil = tmp_path / "last.ckpt", tmp_path / "evil.ckpt"
    trained(path, made())
    other = made(width=2)
    before = other.net.weight.detach().clone()
    content = torch.load(path, weights_only=False)
    content["state_dict"]["danger"] = Boom()
    torch.save(content, evil)
    cases: dict[str, Any] = {
        "another shape": (lambda: load_checkpoint(path, other), "last.ckpt", "2 of another shape"),
        "code": (lambda: load_checkpoint(evil, made()), "it has an object of exec"),
        "a folder": (lambda: load_checkpoint(tmp_path, other), "no checkpoint file of Lightning"),
        "nothing": (lambda: load_checkpoint(tmp_path / "x.ckpt", other), "there is no", "x.ckpt"),
        "no path": (lambda: load_checkpoint(None, other), "the path of a '.ckpt' file, not a NoneType"),  # type: ignore[arg-type]
        "a class": (lambda: load_checkpoint(path, type(other)), "not Module", "Make one first"),
    }
    assert_refused((CheckpointError, ConfigError), cases)
    assert torch.equal(other.net.weight, before)


def test_a_run_takes_weights_of_a_checkpoint_of_lightning_and_does_not_resume_from_it(tmp_path: Path) -> None:
    path, data = str(tmp_path / "last.ckpt"), [torch.ones(2, 4)]
    weight = trained(Path(path), made()).net.weight
    task = as_task(made())
    assert "a checkpoint of Lightning" in str(task.load_weights(path))
    assert torch.equal(task.module.net.weight, weight)
    with pytest.raises(ConfigError, match=r"from weights in a file, call task\.load_weights\(path\)"):
        quiet(max_epochs=1).fit(task, data, resume=path)
