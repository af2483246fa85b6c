"""The finished model in MLflow's own form, in its registry."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from drivetrain.core.messages import logger
from drivetrain.core.version import __version__
from drivetrain.data import to_host
from drivetrain.task.task import TaskModule

if TYPE_CHECKING:
    from drivetrain.run.run import Run

_LOG = logger(__name__)

_SAMPLES = 2
"""The samples that the signature is read from."""


def register_model(client: Any, run_id: str, name: str, run: Run, weights: str | None) -> None:
    """Store the trained task as a model of MLflow, and add it to the registry as a version of a name.

    `mlflow.pytorch.load_model` loads it. The task's module goes into the pickle, unless it is installed.

    Args:
        client: The `MlflowClient`.
        run_id: The run's id.
        name: The name in the registry; made if there is none.
        run: The run, whose training is over.
        weights: The file of the finished weights; None for those of the task.
    """
    import mlflow.pytorch
    from mlflow.exceptions import MlflowException

    task = copy.deepcopy(run.task).cpu().eval()
    if weights is not None:
        task.load_weights(weights)
    needed = [f"torch=={torch.__version__}", f"drivetrain=={__version__}"]
    with TemporaryDirectory() as folder, _pickled_by_value(type(task).__module__):
        path = Path(folder) / "model"
        options = {"signature": _signature(task, run), "pip_requirements": needed}
        if "serialization_format" in inspect.signature(mlflow.pytorch.save_model).parameters:
            options["serialization_format"] = "pickle"  # only that gives the task back
        mlflow.pytorch.save_model(task, path, **options)
        client.log_artifacts(run_id, str(path), "model")
    try:
        client.get_registered_model(name)
    except MlflowException:
        client.create_registered_model(name)
    source = f"{client.get_run(run_id).info.artifact_uri}/model"
    version = client.create_model_version(name, source, run_id)
    _LOG.info(f"MLflow: the model is version {version.version} of {name!r}")


def _signature(task: TaskModule, run: Run) -> Any:
    """Return the names, types and shapes of inputs and outputs, from the last batch of training."""
    from mlflow.models import infer_signature

    if run.window is None:  # a fit that was over when it was resumed
        _LOG.warning("MLflow: the model has no signature, because this fit has made no step")
        return None
    batch = to_host(run.window.micro_batches[0].batch)
    inputs = _first(task.inputs(batch))
    with torch.no_grad():
        if isinstance(inputs, Mapping):
            outputs = task(**inputs)
        else:
            outputs = task(*inputs) if isinstance(inputs, tuple) else task(inputs)
    return infer_signature(_arrays(inputs), _arrays(outputs))


def _first(inputs: Any) -> Any:
    """Return the first samples of the tensors."""
    if isinstance(inputs, Tensor):
        return inputs[:_SAMPLES]
    if isinstance(inputs, Mapping):
        return {name: _first(each) for name, each in inputs.items()}
    return tuple(_first(each) for each in inputs) if isinstance(inputs, tuple) else inputs


def _arrays(values: Any) -> Any:
    """Return tensors as MLflow takes them: one as an array, several as a mapping of arrays."""
    if isinstance(values, Tensor):
        values = values.detach()
        return (values.float() if values.dtype is torch.bfloat16 else values).numpy()
    if isinstance(values, (tuple, list)):
        if len(values) == 1:
            return _arrays(values[0])
        values = {str(index): each for index, each in enumerate(values)}
    return {name: _arrays(each) for name, each in values.items() if isinstance(each, Tensor)}


@contextmanager
def _pickled_by_value(name: str) -> Iterator[None]:
    """Run the block so that cloudpickle stores a module that is not installed, as one beside a script."""
    import cloudpickle

    module = sys.modules[name]
    file = getattr(module, "__file__", None)
    if name == "__main__" or file is None or "site-packages" in file:
        yield  # cloudpickle stores the program's main module anyway
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)
