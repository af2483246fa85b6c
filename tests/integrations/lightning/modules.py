"""LightningModules as users write them, for comparisons of two trainers."""

import functools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassPrecision


def loader(samples: int = 22, seed: int = 0, batch_size: int = 4) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator)
    y = (x.sum(1) > 0).long()
    return DataLoader(TensorDataset(x, y), batch_size)


def body(hidden: int = 8) -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, hidden), nn.ReLU(), nn.Linear(hidden, 2))


class Classifier(LightningModule):  # the module of the first page of most tutorials
    def __init__(self, hidden: int = 8, lr: float = 0.1):
        super().__init__()
        self.save_hyperparameters()
        self.net = body(hidden)
        self.train_accuracy = MulticlassAccuracy(2)
        self.accuracy = MulticlassAccuracy(2)

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.train_accuracy(logits, y)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("train_acc", self.train_accuracy, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        self.log_dict({"val_loss": F.cross_entropy(logits, y), "val_acc": self.accuracy}, prog_bar=True)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", F.cross_entropy(self(x), y), sync_dist=True)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return self(batch[0]).argmax(1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class Template(LightningModule):  # the hydra template: a plateau, the best value
    def __init__(self, net: nn.Module | None = None):
        super().__init__()
        self.net = net or body()
        self.optimizer = functools.partial(torch.optim.Adam, lr=0.05, weight_decay=0.01)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
        self.scheduler = functools.partial(plateau, factor=0.1, patience=0, threshold=10.0)
        self.train_loss, self.val_loss = MeanMetric(), MeanMetric()
        self.val_acc, self.val_acc_best = MulticlassAccuracy(2), MaxMetric()
        self.several = MetricCollection([MulticlassAccuracy(2), MulticlassPrecision(2)], prefix="train/")

    def on_train_start(self):
        self.val_loss.reset()
        self.val_acc_best.reset()

    def model_step(self, batch):
        x, y = batch
        logits = self.net(x)
        return F.cross_entropy(logits, y), logits.argmax(1), y

    def training_step(self, batch, batch_idx):
        loss, found, y = self.model_step(batch)
        self.train_loss(loss)
        self.several.update(found, y)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def on_train_epoch_end(self):
        self.log_dict(self.several.compute())
        self.several.reset()

    def validation_step(self, batch, batch_idx):
        loss, found, y = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(found, y)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True)
        self.log("val/acc", self.val_acc, on_epoch=True, metric_attribute="val_acc")

    def on_validation_epoch_end(self):
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def configure_optimizers(self):
        optimizer = self.optimizer(params=self.trainer.lightning_module.parameters())
        scheduler = self.scheduler(optimizer=optimizer)
        options = {"monitor": "val/loss", "interval": "epoch", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, **options}}


class OneCycle(LightningModule):  # by step over the planned length; outputs collected
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 2))
        self.outputs: list[Tensor] = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("lr", self.trainer.optimizers[0].param_groups[0]["lr"])
        self.log("loss", loss)
        return {"loss": loss, "logits": y}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.log("batch_loss", outputs["loss"])

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.outputs.append(F.cross_entropy(self.net(x), y, reduction="none"))

    def on_validation_epoch_end(self):
        every = torch.cat(self.outputs)
        self.log_dict({"val_mean": every.mean(), "val_max": every.max(), "count": float(len(every))})
        self.outputs.clear()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class WarmUp(LightningModule):  # a warm-up by hand in `optimizer_step`, clipping by hand, norms of gradients
    def __init__(self):
        super().__init__()
        self.net = body()

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss)
        return loss

    def on_after_backward(self):
        if self.current_epoch < 1:  # the last layer rests in the first epoch
            for each in self.net[2].parameters():
                each.grad = None

    def on_before_optimizer_step(self, optimizer):
        norm = torch.stack([p.grad.norm() for p in self.net.parameters() if p.grad is not None]).norm()
        self.log("grad_norm", norm)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
        largest = 0.05 * (1 + self.current_epoch)
        self.clip_gradients(optimizer, gradient_clip_val=largest, gradient_clip_algorithm="norm")

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        if self.trainer.global_step < 6:
            for group in optimizer.param_groups:
                group["lr"] = 0.1 * (self.trainer.global_step + 1) / 6
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler, metric):
        if self.current_epoch < 4:
            scheduler.step()

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1 / (1 + epoch))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "frequency": 2}}


class GAN(LightningModule):  # manual, with schedules; one optimizer steps every second batch
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 4))
        self.discriminator = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(), nn.Linear(8, 1))
        self.register_buffer("batches", torch.zeros(()))

    def training_step(self, batch):
        real, _ = batch
        g_opt, d_opt = self.optimizers()
        noise = torch.sin(torch.arange(3 * len(real)).float() + self.global_step).view(-1, 3)
        ones, zeros = torch.ones(len(real), 1), torch.zeros(len(real), 1)
        self.toggle_optimizer(d_opt)
        fake = self.generator(noise).detach()
        d_loss = F.binary_cross_entropy_with_logits(self.discriminator(real), ones)
        d_loss = d_loss + F.binary_cross_entropy_with_logits(self.discriminator(fake), zeros)
        self.manual_backward(d_loss)
        self.untoggle_optimizer(d_opt)
        with g_opt.toggle_model():  # which leaves out the gradients that the discriminator adds up
            g_loss = F.binary_cross_entropy_with_logits(self.discriminator(self.generator(noise)), ones)
            g_opt.zero_grad()
            self.manual_backward(g_loss)
            self.clip_gradients(g_opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            g_opt.step()
        self.batches += 1
        if self.batches % 2 == 0:
            self.clip_gradients(d_opt, gradient_clip_val=0.01, gradient_clip_algorithm="value")
            d_opt.step()
            d_opt.zero_grad()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        for each in self.lr_schedulers():
            each.step()

    def configure_optimizers(self):
        first = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.999))
        second = torch.optim.Adam(self.discriminator.parameters(), lr=0.01, betas=(0.5, 0.999))
        schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (first, second)]
        return [first, second], schedules


class Skipping(LightningModule):  # returns None for some batches; several sets to validate on
    def __init__(self):
        super().__init__()
        self.net = body()

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (1 + dataloader_idx) * batch[0], batch[1]

    def training_step(self, batch, batch_idx):
        x, y = batch
        if batch_idx % 3 == 1:
            return None
        loss = F.cross_entropy(self.net(x), y)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("val_loss", loss)
        self.log(f"val_{dataloader_idx}", loss, add_dataloader_idx=False, batch_size=1)
        self.log("hidden", loss, logger=False)

    def configure_optimizers(self):
        return [torch.optim.Adagrad(self.parameters(), lr=0.1)]


class Finetuning(LightningModule):  # a frozen backbone joins in later
    def __init__(self):
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU()).requires_grad_(False)
        self.head, self.best = None, math.inf

    def configure_model(self):
        if self.head is None:
            torch.manual_seed(2)
            self.head = nn.Linear(8, 2)

    def train(self, mode=True):
        super().train(mode)
        self.backbone.eval()
        return self

    def on_train_epoch_start(self):
        is_joined = self.current_epoch > 0
        self.backbone.requires_grad_(is_joined)
        self.optimizers().param_groups[-1]["lr"] = rate = 0.02 * is_joined
        self.log("backbone_rate", rate)

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.backbone(x)), y, label_smoothing=0.1)
        self.log("train/loss", loss, on_step=False, on_epoch=True)
        trained = sum(each.numel() for each in self.parameters() if each.requires_grad)
        self.log("trained", float(trained), on_step=False, on_epoch=True, reduce_fx="max")
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        loss = F.cross_entropy(self.head(self.backbone(x)), y)
        self.log("val/loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_validation_epoch_end(self):
        self.best = min(self.best, float(self.trainer.callback_metrics.get("val/loss", math.inf)))

    def on_save_checkpoint(self, checkpoint):
        checkpoint["best"] = self.best

    def on_load_checkpoint(self, checkpoint):
        self.best = checkpoint["best"]

    def configure_optimizers(self):
        groups = [{"params": self.head.parameters()}, {"params": self.backbone.parameters(), "lr": 0.0}]
        return torch.optim.SGD(groups, lr=0.1)


class Noted(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = body()
        self.calls = Counter()

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def validation_step(self, batch, batch_idx): ...

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


class Ranks(Noted):
    def training_step(self, batch, batch_idx):
        gathered = self.all_gather(torch.tensor(float(self.global_rank)))
        assert gathered.tolist() == ([0.0, 1.0] if self.trainer.world_size == 2 else 0.0)
        if batch_idx == 1 and self.global_rank == self.trainer.world_size - 1:
            return None
        return super().training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Numbers(Noted):
    def training_step(self, batch, batch_idx):
        self.log_dict({"numpy": np.float32(batch_idx), "whole": batch_idx, "tensor": torch.tensor(batch_idx)})
        self.log("first", self.global_rank + 1.0, rank_zero_only=True)
        self.log("first_epoch", self.global_rank + 1.0, rank_zero_only=True, on_step=False, on_epoch=True)
        self.log("mean", self.global_rank + 1.0, sync_dist=True)
        for fx in ("min", "max"):
            self.log(fx, self.global_rank + 1.0, on_step=False, on_epoch=True, reduce_fx=fx)
        if self.trainer.is_global_zero:
            self.log("only", 5.0, rank_zero_only=True, logger=False)
        return super().training_step(batch, batch_idx)


class Counting(Classifier):
    def __init__(self):
        super().__init__()
        self.counted = SumMetric()

    def validation_step(self, batch, batch_idx):
        self(batch[0])
        self.counted.update(len(batch[0]))
        self.log("counted", self.counted)
        self.log("summed", float(len(batch[0])), reduce_fx="sum", on_epoch=True)


class Divided(LightningDataModule):  # as the hydra template, by the processes
    def setup(self, stage):
        self.stages = [*getattr(self, "stages", []), stage]
        self.size = 8 // self.trainer.world_size

    def train_dataloader(self):
        return loader(24, 0, self.size)

    def val_dataloader(self):
        return loader(9, 1)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        assert self.trainer.lightning_module is not None
        x, y = batch
        return -x, y


class Noting(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = body()
        self.calls: list[str] = []

    def note(self, name: str) -> None:
        self.calls.append(f"{name} {self.current_epoch} {self.global_step}" if self._trainer else name)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.note(f"validation_step {batch_idx}")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.note(f"test_step {batch_idx}")

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(f"predict_step {batch_idx}")
        return batch[1]


def _noting(name: str) -> Callable[..., None]:
    def hook(self: Any, *arguments: Any, **options: Any) -> None:
        indices = [each for each in arguments if type(each) is int]
        given = [getattr(each, "value", each) for each in options.values()]
        self.note(" ".join(map(str, [name, *indices, *given])))

    return hook


_NOTED = ["on_fit_start", "on_fit_end", "on_before_zero_grad", "on_before_backward", "on_after_backward"]
_NOTED += ["on_before_optimizer_step", "prepare_data", "setup", "teardown", "configure_model"]
for _stage in ("train", "validation", "test", "predict"):
    for _part in ("", "_epoch", "_batch"):
        _NOTED += [f"on_{_stage}{_part}_start", f"on_{_stage}{_part}_end"]
for _name in _NOTED:
    setattr(Noting, _name, _noting(_name))


class Recording(Noting):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.note(f"training_step {batch_idx}")
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        self.calls.append("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
        optimizer.step(closure=optimizer_closure)
        self.note(f"optimizer_step {epoch} {batch_idx}")

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()
        self.note("lr_scheduler_step")

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.note("configure_gradient_clipping")
