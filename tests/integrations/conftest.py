"""The libraries of the integrations, imported by the first test that needs them."""

import logging
import os
import warnings

import pytest


@pytest.fixture(scope="session")
def transformers_library() -> None:
    """Import transformers with its Trainer, and what it and accelerate change in the process once."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # which accelerate would warn of on ranks
    os.environ.update(PYTORCH_NVML_BASED_CUDA_CHECK="1", KMP_DUPLICATE_LIB_OK="True")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import datasets  # noqa: F401
        import peft  # noqa: F401
        import torch
        import tqdm
        import transformers
        import transformers.models.bert.modeling_bert

        tqdm.tqdm.monitor_interval = 0  # whose thread would outlive a test
        transformers.utils.logging.disable_progress_bar()
        _ = transformers.Trainer, transformers.Seq2SeqTrainer
        transformers.modeling_utils.unwrap_model(torch.nn.Linear(1, 1))  # sets variables of the environment


@pytest.fixture(scope="session")
def lightning_library() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch  # noqa: F401
        import pytorch_lightning  # noqa: F401
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


@pytest.fixture(scope="session")
def optuna_library() -> None:
    import optuna
    import sklearn.ensemble  # noqa: F401 - sets variables of the environment

    optuna.logging.set_verbosity(optuna.logging.WARNING)


@pytest.fixture(scope="module", autouse=True)
def library(request: pytest.FixtureRequest) -> None:  # before a test's own state is noted
    if (folder := request.path.parent.name) in ("lightning", "optuna", "transformers"):
        request.getfixturevalue(f"{folder}_library")
