"""Print the table of libraries in docs/explanation/lightning-numbers.md: modules under both Trainers.

PYTHONPATH=package:. python benchmarks/lightning_libraries.py [LIBRARY ...]

Libraries that are not installed are left out. Both Trainers read the data in its order, and torch is seeded
before each step, so that modules that draw random numbers draw the same ones. -v shows which values differ.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import logging
import os
import random
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

import numpy as np
import torch
from tests.integrations.lightning.equality import Recorder, differences
from torch import Tensor
from torch.utils.data import DataLoader, SequentialSampler, TensorDataset

if importlib.util.find_spec("torchvision"):
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # it is built for CUDA, and its operators do not load here
        _OPERATORS = torch.library.Library("torchvision", "FRAGMENT")
        for _name in ("nms", "qnms"):
            _OPERATORS.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")

from drivetrain import Trainer
from drivetrain.integrations.lightning import as_data, as_task
from drivetrain.integrations.lightning.kinds import is_kind

Made = tuple[Any, Any]
"""A module, and its data module or its loaders."""

ENTRIES: dict[str, tuple[str, str, Callable[[], Iterator[tuple[str, Callable[[], Made]]]]]] = {}
"""By the name of a library: its package, what is imported, and a function that yields named modules."""


_STEPS = ("training_step", "validation_step", "fit")
"""The methods that are seeded; anomalib's models that store features choose them in `fit`."""


def library(package: str, imported: str) -> Callable[[Any], Any]:
    """Enter a library's modules into the table."""

    def enter(function: Any) -> Any:
        ENTRIES[package] = (package, imported, function)
        return function

    return enter


def _seeded(step: Any, number: int) -> Any:
    """Return a step that seeds torch by the number of its calls."""
    count = 0

    @functools.wraps(step)
    def seeded(*args: Any, **options: Any) -> Any:
        nonlocal count
        count += 1
        torch.manual_seed(1000 * number + count)
        np.random.seed(count)
        random.seed(count)
        return step(*args, **options)

    return seeded


def _made(make: Callable[[], Made], seeds: bool = True) -> Made:
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    module, data = make()
    for number, name in enumerate(_STEPS if seeds else ()):
        if hasattr(module, name):
            vars(module)[name] = _seeded(getattr(module, name), number)
    return module, data


def _theirs(make: Callable[[], Made], epochs: int) -> tuple[Any, dict[str, list[float]]]:
    module, data = _made(make)
    pl = importlib.import_module(
        next(each.__module__ for each in type(module).__mro__ if each.__name__ == "LightningModule").split(
            ".core"
        )[0]
    )

    class Logger(pl.loggers.logger.Logger):  # type: ignore[name-defined,misc]
        name, version = "recorder", 0

        def __init__(self) -> None:
            super().__init__()
            self.recorder = Recorder()

        def log_metrics(self, metrics: Any, step: int | None = None) -> None:
            self.recorder.log_metrics({k: v for k, v in metrics.items() if k != "epoch"}, step or 0)

        def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

    logger = Logger()
    off = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=logger,
        max_epochs=epochs,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
        **off,
    )
    torch.manual_seed(1)
    trainer.fit(module, **({"datamodule": data} if is_kind(data, "LightningDataModule") else _loaders(data)))
    return module, dict(logger.recorder.values)


def _loaders(data: Any) -> dict[str, Any]:
    return {"train_dataloaders": data[0], "val_dataloaders": data[1]}


def _ours(make: Callable[[], Made], epochs: int, seeds: bool = True) -> tuple[Any, dict[str, list[float]]]:
    module, data = _made(make, seeds)
    recorder = Recorder()
    trainer = Trainer(
        strategy="cpu",
        checkpoint=False,
        log_every=1,
        max_epochs=epochs,
        loggers=(recorder,),
        progress_bar=False,
    )
    given = (as_data(data),) if is_kind(data, "LightningDataModule") else data
    torch.manual_seed(1)
    trainer.fit(as_task(module), *given)
    return module, dict(recorder.values)


def _compared(name: str, make: Callable[[], Made], epochs: int = 2) -> list[str]:
    """Return a row of the table without the library's name."""
    try:
        theirs, logged = _theirs(make, epochs)
    except Exception as error:
        _trace()
        return [name, f"Lightning's Trainer: {_short(error)}", "", ""]
    try:
        _ours(make, epochs, seeds=False)
    except Exception as error:
        _trace()
        return [name, f"no: {_short(error)}", "", ""]
    ours, found = _ours(make, epochs)
    pairs = [*zip(theirs.state_dict().values(), ours.state_dict().values(), strict=True)]
    tensors = [each for each in pairs if isinstance(each[0], Tensor) and each[0].numel()]
    numbers = [(one.double() - other.double()).abs().max() for one, other in tensors]
    largest = max(map(float, numbers), default=0.0)
    unequal = differences(logged, found)
    if "-v" in sys.argv:
        for each, values in unequal.items():
            print("   ", each, *([f"{v:.6f}" for v in part][:8] for part in values))
    return [name, "yes", f"{largest:.1e}", ", ".join(sorted(unequal)) or "none"]


def _trace() -> None:
    if "-v" in sys.argv:
        traceback.print_exc()


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:200]


class _Batches:
    """Ready batches; Lightning takes a list of mappings for several loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


# The libraries.


def _series() -> Any:
    import pandas as pd

    times = pd.date_range("2020-01-01", periods=60, freq="D")
    noise = np.random.default_rng(0).random((4, 60))
    frames = [
        pd.DataFrame(
            {"unique_id": f"s{g}", "ds": times, "y": np.sin(np.arange(60) / 3 + g) + 3 + 0.1 * noise[g]}
        )
        for g in range(4)
    ]
    return pd.concat(frames, ignore_index=True)


@library("pytorch-forecasting", "pytorch_forecasting")
def forecasting() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of pytorch-forecasting."""
    from pytorch_forecasting import DeepAR, NBeats, TemporalFusionTransformer, TimeSeriesDataSet

    def make(kind: Any, data: dict[str, Any], **options: Any) -> Made:
        frame = _series().rename(columns={"unique_id": "g"})
        frame["t"] = frame.groupby("g").cumcount()
        dataset = TimeSeriesDataSet(
            frame,
            time_idx="t",
            target="y",
            group_ids=["g"],
            max_encoder_length=10,
            min_encoder_length=10,
            max_prediction_length=4,
            **data,
        )
        loaders = [dataset.to_dataloader(train=False, batch_size=32, num_workers=0) for _ in range(2)]
        return kind.from_dataset(dataset, learning_rate=0.01, log_interval=-1, **options), loaders

    known = {"time_varying_unknown_reals": ["y"]}
    yield "TemporalFusionTransformer", lambda: make(TemporalFusionTransformer, known, hidden_size=8)
    yield "NBeats", lambda: make(NBeats, known, widths=[8, 8], optimizer="adam")
    yield "DeepAR", lambda: make(DeepAR, known, hidden_size=8)


@library("mlcolvar", "mlcolvar")
def colvar() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of mlcolvar."""
    from mlcolvar.cvs import AutoEncoderCV, DeepLDA, DeepTDA, RegressionCV, VariationalAutoEncoderCV
    from mlcolvar.data import DictDataset, DictModule

    x = torch.randn(60, 4, generator=torch.Generator().manual_seed(0))
    labels = (torch.arange(60) % 2).float()

    def data(**more: Any) -> Any:
        return DictModule(
            DictDataset({"data": x, **more}), lengths=[0.8, 0.2], random_split=False, shuffle=False
        )

    yield "AutoEncoderCV", lambda: (AutoEncoderCV([4, 6, 2]), data())
    yield "RegressionCV", lambda: (RegressionCV([4, 6, 1]), data(target=x.sum(1, keepdim=True)))
    yield "DeepLDA", lambda: (DeepLDA([4, 6, 2], n_states=2), data(labels=labels))
    targets = {"target_centers": [-1.0, 1.0], "target_sigmas": [0.2, 0.2]}
    yield "DeepTDA", lambda: (DeepTDA(2, 1, layers=[4, 6, 1], **targets), data(labels=labels))
    yield "VariationalAutoEncoderCV", lambda: (VariationalAutoEncoderCV(1, encoder_layers=[4, 6]), data())


@library("scvi-tools", "scvi")
def scvi_tools() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield training plans of scvi-tools."""
    import scvi
    from scvi.dataloaders import DataSplitter, SemiSupervisedDataSplitter
    from scvi.train import AdversarialTrainingPlan, SemiSupervisedTrainingPlan, TrainingPlan

    scvi.settings.seed = 0
    cells = scvi.data.synthetic_iid(batch_size=40, n_genes=20)

    def make(kind: Any, plan: Any, splitter: Any, setup: dict[str, Any], *args: Any, **options: Any) -> Made:
        kind.setup_anndata(cells, batch_key="batch", **setup)
        model = kind(cells, *args)
        data = splitter(model.adata_manager, train_size=0.8, batch_size=32)
        return plan(model.module, **options), data

    of_labels = {"labels_key": "labels", "unlabeled_category": "label_0"}
    yield "SCVI, TrainingPlan", lambda: make(scvi.model.SCVI, TrainingPlan, DataSplitter, {})
    yield (
        "SCVI, AdversarialTrainingPlan",
        lambda: make(scvi.model.SCVI, AdversarialTrainingPlan, DataSplitter, {}, adversarial_classifier=True),
    )
    yield (
        "SCANVI, SemiSupervisedTrainingPlan",
        lambda: make(
            scvi.model.SCANVI,
            SemiSupervisedTrainingPlan,
            SemiSupervisedDataSplitter,
            of_labels,
            n_classes=2,
        ),
    )


@library("chemprop", "chemprop")
def chemprop() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of chemprop."""
    from chemprop import data, models, nn

    smiles = ["C", "CC", "CCO", "CCN", "c1ccccc1", "CC(=O)O", "CCCl", "OCCO", "CCCC", "CNC", "C=C", "C#N"]

    def make() -> Made:
        points = [data.MoleculeDatapoint.from_smi(each, np.array([float(len(each))])) for each in smiles]
        train = data.MoleculeDataset(points[:8])
        scaler = train.normalize_targets()
        valid = data.MoleculeDataset(points[8:])
        valid.normalize_targets(scaler)
        transform = nn.UnscaleTransform.from_standard_scaler(scaler)
        model = models.MPNN(
            nn.BondMessagePassing(d_h=16),
            nn.MeanAggregation(),
            nn.RegressionFFN(input_dim=16, hidden_dim=16, output_transform=transform),
            batch_norm=True,
            metrics=[nn.metrics.RMSE(), nn.metrics.MAE()],
        )
        loaders = [
            data.build_dataloader(train, batch_size=3, num_workers=0),
            data.build_dataloader(valid, batch_size=3, num_workers=0, shuffle=False),
        ]
        return model, loaders

    yield "MPNN", make


@library("gluonts", "gluonts")
def gluonts() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of gluonts."""
    from gluonts.dataset.pandas import PandasDataset
    from gluonts.torch import DeepAREstimator, PatchTSTEstimator, SimpleFeedForwardEstimator

    def make(kind: Any, **options: Any) -> Made:
        data = PandasDataset.from_long_dataframe(
            _series().astype({"y": np.float32}), item_id="unique_id", timestamp="ds", target="y", freq="D"
        )
        estimator = kind(
            prediction_length=4, context_length=8, batch_size=8, num_batches_per_epoch=4, **options
        )
        transformed = [*estimator.create_transformation().apply(data, is_train=True)]
        module = estimator.create_lightning_module()
        train = _Batches([*estimator.create_training_data_loader(transformed, module)])
        return module, [train, _Batches([*estimator.create_validation_data_loader(transformed, module)])]

    yield "SimpleFeedForward", lambda: make(SimpleFeedForwardEstimator)
    yield "DeepAR", lambda: make(DeepAREstimator, freq="D", hidden_size=8)
    yield "PatchTST", lambda: make(PatchTSTEstimator, patch_len=4, d_model=8, nhead=2, dim_feedforward=8)


@library("neuralforecast", "neuralforecast")
def neuralforecast() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of neuralforecast."""
    from neuralforecast import models
    from neuralforecast.tsdataset import TimeSeriesDataModule, TimeSeriesDataset

    def make(kind: Any, **options: Any) -> Made:
        dataset, *_ = TimeSeriesDataset.from_df(_series())
        module = kind(h=4, input_size=8, max_steps=6, val_check_steps=2, batch_size=2, **options)
        module.val_size = 4
        module.test_size = 0
        return module, TimeSeriesDataModule(dataset, batch_size=2, shuffle_train=True)

    yield "NHITS", lambda: make(models.NHITS, mlp_units=[[8, 8]] * 3)
    yield "TFT", lambda: make(models.TFT, hidden_size=8, n_head=2)
    yield "LSTM", lambda: make(models.LSTM, encoder_hidden_size=8, decoder_hidden_size=8)


@library("darts", "darts")
def darts() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of darts."""
    from darts import TimeSeries
    from darts.models import NBEATSModel, TCNModel, TFTModel

    def make(kind: Any, **options: Any) -> Made:
        series = [
            TimeSeries.from_values(group["y"].to_numpy(dtype=np.float32))
            for _, group in _series().groupby("unique_id")
        ]
        quiet = {"accelerator": "cpu", "enable_progress_bar": False, "logger": False}
        model = kind(input_chunk_length=8, batch_size=16, random_state=0, pl_trainer_kwargs=quiet, **options)
        prepared = model._setup_for_fit_from_dataset(series=series, val_series=series)
        given = model._setup_for_train(**prepared[1])
        return given["model"], given["datamodule"]

    yield "NBEATS", lambda: make(NBEATSModel, output_chunk_length=4, num_stacks=2, layer_widths=8)
    yield "TCN", lambda: make(TCNModel, output_chunk_length=4, num_filters=4)
    yield (
        "TFT",
        lambda: make(TFTModel, output_chunk_length=4, hidden_size=8, add_relative_index=True),
    )


@library("lightly", "lightly")
def lightly() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of lightly."""
    from lightly.utils.benchmarking import LinearClassifier

    backbone = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 8), torch.nn.BatchNorm1d(8))

    def make() -> Made:
        images = TensorDataset(torch.randn(24, 3, 4, 4), torch.arange(24) % 5, torch.arange(24))
        module = LinearClassifier(
            backbone, batch_size_per_device=8, feature_dim=8, num_classes=5, topk=(1, 2)
        )
        return module, [DataLoader(images, 8, shuffle=True, drop_last=True), DataLoader(images, 8)]

    yield "LinearClassifier", make


@library("torchgeo", "torchgeo")
def torchgeo() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of torchgeo."""
    from torchgeo import datamodules, trainers

    class Images(torch.utils.data.Dataset[Any]):
        def __init__(self, split: str = "train", kind: str = "label") -> None:
            self.kind = kind

        def __len__(self) -> int:
            return 12

        def __getitem__(self, index: int) -> dict[str, Any]:
            generator = torch.Generator().manual_seed(index)
            image = torch.rand(3, 32, 32, generator=generator)
            mask = (image.sum(0) > 1.5).long()
            label = torch.tensor(index % 4)
            return {"image": image, **({"mask": mask} if self.kind == "mask" else {"label": label})}

    class Data(datamodules.NonGeoDataModule):  # type: ignore[name-defined,misc]
        mean, std = torch.tensor(0.0), torch.tensor(1.0)

    def data(kind: str) -> Any:
        return Data(Images, batch_size=4, num_workers=0, kind=kind)

    yield (
        "ClassificationTask",
        lambda: (trainers.ClassificationTask(model="resnet18", in_channels=3, num_classes=4), data("label")),
    )
    yield (
        "SemanticSegmentationTask",
        lambda: (
            trainers.SemanticSegmentationTask(
                model="unet", backbone="resnet18", in_channels=3, num_classes=2, task="multiclass"
            ),
            data("mask"),
        ),
    )


@library("anomalib", "anomalib")
def anomalib() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of anomalib, with a folder of made-up images."""
    from anomalib import models
    from anomalib.data import Folder
    from PIL import Image

    root = tempfile.mkdtemp()
    for kind, shift in (("good", 0), ("bad", 90)):
        os.makedirs(f"{root}/{kind}")
        for index in range(6):
            pixels = torch.randint(0, 120, (3, 64, 64), generator=torch.Generator().manual_seed(index))
            array = (pixels + shift).to(torch.uint8).permute(1, 2, 0).numpy()
            Image.fromarray(array).save(f"{root}/{kind}/{index}.png")

    def make(kind: Any, **options: Any) -> Made:
        data = Folder(
            "made-up",
            root=root,
            normal_dir="good",
            abnormal_dir="bad",
            train_batch_size=2,
            eval_batch_size=2,
            num_workers=0,
            val_split_mode="same_as_test",
        )
        pre = kind.configure_pre_processor((64, 64))
        return kind(pre_processor=pre, visualizer=False, **options), data

    small = {"backbone": "resnet18", "pre_trained": False, "layers": ["layer1"]}
    yield "Padim", lambda: make(models.Padim, n_features=8, **small)
    yield "Patchcore", lambda: make(models.Patchcore, coreset_sampling_ratio=0.1, **small)
    yield "ReverseDistillation", lambda: make(models.ReverseDistillation, pre_trained=False)
    yield (
        "Fastflow",
        lambda: make(models.Fastflow, backbone="resnet18", pre_trained=False, flow_steps=2, evaluator=False),
    )
    yield "Ganomaly", lambda: make(models.Ganomaly, batch_size=2, n_features=8, latent_vec_size=8)


@library("pyannote.audio", "pyannote.audio")
def pyannote() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield a module of pyannote.audio, with a task on a made-up recording."""
    from pyannote.audio.models.segmentation.debug import SimpleSegmentationModel
    from pyannote.audio.tasks import SpeakerDiarization, VoiceActivityDetection
    from pyannote.core import Annotation, Segment, Timeline
    from pyannote.database.protocol import SpeakerDiarizationProtocol

    path = f"{tempfile.mkdtemp()}/made-up.wav"
    open(path, "w").close()

    class Protocol(SpeakerDiarizationProtocol):  # type: ignore[misc]
        name = "Debug.SpeakerDiarization.Debug"

        def _file(self) -> Iterator[dict[str, Any]]:
            annotation = Annotation(uri="a")
            for start in range(0, 20, 4):
                annotation[Segment(start, start + 2)] = f"speaker{start // 4 % 2}"
            yield {
                "uri": "a",
                "database": "Debug",
                "scope": "file",
                "audio": path,
                "annotation": annotation,
                "annotated": Timeline([Segment(0, 20)]),
            }

        train_iter = development_iter = _file

    def make(kind: Any, **options: Any) -> Made:
        task = kind(Protocol(), duration=2.0, batch_size=4, num_workers=0, **options)
        module = SimpleSegmentationModel(task=task)
        samples = torch.randn(1, 32000, generator=torch.Generator().manual_seed(0))
        module.audio.crop = lambda *_, **__: (samples, 16000)  # files need torchcodec
        module.prepare_data()
        module.setup()
        train = _Batches([*itertools.islice(module.train_dataloader(), 4)])
        return module, [train, _Batches([*module.val_dataloader()])]

    yield "VoiceActivityDetection", lambda: make(VoiceActivityDetection)
    yield "SpeakerDiarization", lambda: make(SpeakerDiarization, max_speakers_per_chunk=2)


@library("pytorch-tabular", "pytorch_tabular")
def tabular() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield modules of pytorch_tabular."""
    import pandas as pd
    from pytorch_tabular import TabularModel, config, models

    def make(kind: Any, **options: Any) -> Made:
        draws = np.random.default_rng(0).random((40, 3))
        frame = pd.DataFrame(draws, columns=["a", "b", "c"])
        frame["kind"] = ["x", "y"] * 20
        frame["y"] = (frame["a"] > frame["b"]).astype(int)
        model = TabularModel(
            data_config=config.DataConfig(
                target=["y"], continuous_cols=["a", "b", "c"], categorical_cols=["kind"]
            ),
            model_config=kind(task="classification", **options),
            optimizer_config=config.OptimizerConfig(),
            trainer_config=config.TrainerConfig(batch_size=8, progress_bar="none", load_best=False),
            verbose=False,
        )
        data = model.prepare_dataloader(train=frame[:32], validation=frame[32:], seed=0)
        return model.prepare_model(data), [data.train_dataloader(), data.val_dataloader()]

    yield "CategoryEmbeddingModel", lambda: make(models.CategoryEmbeddingModelConfig, layers="8-8")
    yield "GANDALF", lambda: make(models.GANDALFConfig, gflu_stages=2)
    yield "FTTransformer", lambda: make(models.FTTransformerConfig, num_heads=2, num_attn_blocks=1)


@library("nequip", "nequip")
def nequip() -> Iterator[tuple[str, Callable[[], Made]]]:
    """Yield NequIP's training module, with frames of made-up atoms in a file."""
    import ase
    from ase.calculators.singlepoint import SinglePointCalculator
    from ase.io import write
    from nequip.data.datamodule import ASEDataModule
    from nequip.train import EMALightningModule, NequIPLightningModule
    from nequip.utils.global_state import set_global_state

    set_global_state()

    folder = tempfile.mkdtemp()
    random_ = np.random.default_rng(0)
    frames = []
    for _ in range(8):
        atoms = ase.Atoms("OH2", positions=[[0, 0, 0], [1, 0, 0], [0, 1, 0]] + 0.1 * random_.random((3, 3)))
        atoms.calc = SinglePointCalculator(
            atoms, energy=float(random_.random()), forces=random_.random((3, 3))
        )
        frames.append(atoms)
    write(f"{folder}/frames.xyz", frames, format="extxyz")
    kinds = ["O", "H"]

    def make(kind: Any, **options: Any) -> Made:
        data = ASEDataModule(
            seed=0,
            train_file_path=f"{folder}/frames.xyz",
            val_file_path=f"{folder}/frames.xyz",
            transforms=[
                {
                    "_target_": "nequip.data.transforms.ChemicalSpeciesToAtomTypeMapper",
                    "model_type_names": kinds,
                },
                {"_target_": "nequip.data.transforms.NeighborListTransform", "r_max": 3.0},
            ],
            train_dataloader={"_target_": "torch.utils.data.DataLoader", "batch_size": 2},
            val_dataloader={"_target_": "torch.utils.data.DataLoader", "batch_size": 2},
        )
        model = {
            "_target_": "nequip.model.NequIPGNNModel",
            "seed": 0,
            "model_dtype": "float32",
            "type_names": kinds,
            "r_max": 3.0,
            "num_layers": 1,
            "l_max": 1,
            "num_features": 4,
            "avg_num_neighbors": 2.0,
            "radial_mlp_width": 8,
        }
        loss = {
            "_target_": "nequip.train.EnergyForceLoss",
            "per_atom_energy": True,
            "coeffs": {"total_energy": 1.0, "forces": 1.0},
        }
        metrics = {"_target_": "nequip.train.EnergyForceMetrics", "coeffs": {"total_energy_mae": 1.0}}
        module = kind(
            model=model,
            loss=loss,
            val_metrics=metrics,
            train_metrics=metrics,
            optimizer={"_target_": "torch.optim.Adam", "lr": 0.01},
            num_datasets={"train": 1, "val": 1, "test": 0, "predict": 0},
            **options,
        )
        return module, data

    yield "NequIPLightningModule", lambda: make(NequIPLightningModule)
    yield "EMALightningModule", lambda: make(EMALightningModule, ema_decay=0.9)


class _InOrder(SequentialSampler):
    """The data in its order, where a library asks for a random one."""

    def __init__(self, data_source: Any, *_: Any, **__: Any) -> None:
        super().__init__(data_source)


def main() -> None:
    """Print a row for each module of the libraries that are installed."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    torch.utils.data.RandomSampler = _InOrder  # type: ignore[misc]
    torch.utils.data.dataloader.RandomSampler = _InOrder  # type: ignore[misc]
    chosen = [each for each in sys.argv[1:] if not each.startswith("-")]
    print("| library | module | unchanged | difference of weights | logged otherwise |\n|" + " --- |" * 5)
    for name, (package, imported, modules) in ENTRIES.items():
        if (chosen and name not in chosen) or importlib.util.find_spec(imported.split(".")[0]) is None:
            continue
        try:
            made = [*modules()]
        except Exception as error:
            _trace()
            print(f"| {package} {version(package)} | {_short(error)} |")
            continue
        for each, make in made:
            print(f"| {package} {version(package)} | {' | '.join(_compared(each, make))} |", flush=True)


if __name__ == "__main__":
    main()
