"""A fit of ten steps by one library with one tracker, for benchmarks/trackers.py.

    python benchmarks/tracker_fits.py drivetrain|lightning|transformers TRACKER [--dies 8]

The tracker writes to the working directory and needs no network. Where a library can store checkpoints there,
it does; the tag "baseline" and a picture are given where the library has a way to give them.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

STEPS, CHECKPOINT_EVERY = 10, 3
PAUSE = float(os.environ.get("PAUSE", "0.3"))
"""Seconds between two steps, so that measurements of the machine have something to measure."""


class Pairs(Dataset[dict[str, Tensor]]):
    """Ten vectors with their sums."""

    def __init__(self) -> None:
        self.x = torch.randn(10, 4, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.x[index].sum().reshape(1)}


def _end_step(step: int, dies: int | None) -> None:
    time.sleep(PAUSE)
    if step == dies:
        os.kill(os.getpid(), signal.SIGKILL)


def drivetrain(tracker: str, dies: int | None) -> None:
    """Train with this library."""
    from drivetrain import Callback, CheckpointConfig, OptimizerConfig, TaskModule, Trainer
    from drivetrain.loggers import LOGGERS, Image

    class Line(TaskModule):
        def __init__(self, rate: float = 0.05) -> None:
            super().__init__()
            self.line = nn.Linear(4, 1)
            self.rate = rate

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x)

        def loss(self, outputs: Tensor, batch: Any) -> Tensor:
            return F.mse_loss(outputs, batch["labels"])

        def configure_optimizers(self) -> OptimizerConfig:
            return OptimizerConfig("sgd", lr=self.rate)

    class End(Callback):
        def on_step_end(self, run: Any) -> None:
            _end_step(run.progress.steps, dies)

        def on_evaluation_end(self, run: Any) -> None:
            run.log("picture", Image(torch.rand(3, 8, 8)))

    options: dict[str, Any] = {
        "wandb": {"project": "lines", "tags": ["baseline"]},
        "mlflow": {"experiment": "lines", "tags": {"kind": "baseline"}},
        "comet": {"project": "lines", "tags": ["baseline"]},
        "aim": {"repo": ".", "experiment": "lines", "tags": ["baseline"]},
        "clearml": {"project": "lines", "tags": ["baseline"]},
        "swanlab": {"project": "lines", "tags": ["baseline"]},
        "neptune": {"project": "a/lines", "tags": ["baseline"]},
        "trackio": {"project": "lines"},
    }.get(tracker, {})
    if tracker != "tensorboard":
        options["artifacts"] = "all"
    kind: Any = LOGGERS[tracker]
    Trainer(
        max_epochs=2,
        log_every=1,
        checkpoint=CheckpointConfig(every=f"{CHECKPOINT_EVERY} steps", keep_last=None),
        callbacks=[End()],
        loggers=kind("run") if tracker == "tensorboard" else kind(**options),
        run_dir="run",
        progress_bar=False,
    ).fit(Line(), DataLoader(Pairs(), 2), DataLoader(Pairs(), 5), resume="auto")


def lightning(tracker: str, dies: int | None) -> None:
    """Train with Lightning and its logger; where it has none, with the one of the tracker's package."""
    from lightning import pytorch as pl
    from lightning.pytorch import loggers
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Line(pl.LightningModule):
        def __init__(self, rate: float = 0.05) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.line = nn.Linear(4, 1)

        def training_step(self, batch: Any) -> Tensor:
            loss = F.mse_loss(self.line(batch["x"]), batch["labels"])
            self.log("train/loss", loss)
            return loss

        def validation_step(self, batch: Any) -> None:
            self.log("validation/loss", F.mse_loss(self.line(batch["x"]), batch["labels"]))

        def on_validation_end(self) -> None:
            log_image = getattr(self.logger, "log_image", None)
            if log_image is not None and not self.trainer.sanity_checking and self.trainer.is_global_zero:
                log_image("picture", [torch.rand(8, 8, 3).numpy()])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), self.hparams["rate"])

    class End(pl.Callback):
        def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
            _end_step(trainer.global_step, dies)

    def theirs(place: str, name: str) -> Any:
        return getattr(importlib.import_module(place), name)

    makers: dict[str, Any] = {
        "wandb": lambda: loggers.WandbLogger(project="lines", log_model="all", tags=["baseline"]),
        "mlflow": lambda: loggers.MLFlowLogger(
            "lines",
            tracking_uri=os.environ["MLFLOW_TRACKING_URI"],
            log_model="all",
            tags={"kind": "baseline"},
        ),
        "tensorboard": lambda: loggers.TensorBoardLogger("run", name="lines"),
        "comet": lambda: loggers.CometLogger(project="lines", tags=["baseline"]),  # online=False disables it
        "swanlab": lambda: theirs("swanlab.integration.pytorch_lightning", "SwanLabLogger")(
            project="lines", tags=["baseline"]
        ),
        "aim": lambda: theirs("aim.pytorch_lightning", "AimLogger")(repo=".", experiment="lines"),
    }
    saver = ModelCheckpoint("checkpoints", every_n_train_steps=CHECKPOINT_EVERY, save_top_k=-1)
    saved = sorted(Path("checkpoints").glob("*.ckpt"), key=lambda each: each.stat().st_mtime)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    logger = makers[tracker]()
    pl.Trainer(
        max_epochs=2,
        log_every_n_steps=1,
        callbacks=[saver, End()],
        logger=logger,
        accelerator="cpu",
        devices=ranks,
        strategy="ddp" if ranks > 1 else "auto",
        enable_progress_bar=False,
        enable_model_summary=False,
    ).fit(
        Line(),
        DataLoader(Pairs(), 2),
        DataLoader(Pairs(), 5),
        ckpt_path=str(saved[-1]) if saved else None,
        weights_only=False,
    )
    if tracker == "comet":  # only then is there an archive, and Lightning leaves it to the program
        logger.experiment.end()


def transformers(tracker: str, dies: int | None) -> None:
    """Train with transformers' Trainer and `report_to`; Aim's package has the callback itself."""
    from transformers import PretrainedConfig, PreTrainedModel, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    class LineConfig(PretrainedConfig):
        model_type = "line"

    class Line(PreTrainedModel):
        config_class = LineConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.line = nn.Linear(4, 1)
            self.post_init()

        def forward(self, x: Tensor, labels: Tensor) -> Any:
            outputs = self.line(x)
            return {"loss": F.mse_loss(outputs, labels), "logits": outputs}

    class End(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            _end_step(state.global_step, dies)

    options: dict[str, Any] = {"project": "lines"} if tracker == "trackio" else {}
    callbacks: list[Any] = [End()]
    if tracker == "aim":
        callbacks.append(
            importlib.import_module("aim.hugging_face").AimCallback(repo=".", experiment="lines")
        )
    elif tracker == "neptune":
        from neptune.handler import Handler
        from transformers.integrations import NeptuneCallback

        Handler.fetch = lambda *_: "offline"  # the callback asks for the run's id, which only a server knows
        callbacks.append(NeptuneCallback(log_checkpoints="all", tags=["baseline"]))
    elif tracker == "swanlab" and os.environ.get("RANK", "0") == "0":
        importlib.import_module("swanlab").init(project="lines")  # the callback itself cannot open a run
    trainer = Trainer(
        Line(LineConfig()),
        TrainingArguments(
            "run",
            run_name="small",
            num_train_epochs=2,
            per_device_train_batch_size=2,
            learning_rate=0.05,
            logging_steps=1,
            save_steps=CHECKPOINT_EVERY,
            eval_strategy="epoch",
            report_to={"aim": "none", "neptune": "none", "comet": "comet_ml"}.get(tracker, tracker),
            use_cpu=True,
            disable_tqdm=True,
            **options,
        ),
        train_dataset=Pairs(),
        eval_dataset=Pairs(),
        callbacks=callbacks,
    )
    trainer.train(resume_from_checkpoint=get_last_checkpoint("run") if Path("run").exists() else None)


def main() -> None:
    """Read the command line, and train."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("library", choices=("drivetrain", "lightning", "transformers"))
    parser.add_argument("tracker")
    parser.add_argument("--dies", type=int, help="the step after which the process is killed")
    parser.add_argument("--key", help="a secret address, which no store should have")
    options = parser.parse_args()
    globals()[options.library](options.tracker, options.dies)


if __name__ == "__main__":
    main()
