"""Tasks as estimators of scikit-learn."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch.utils.data import DataLoader

from drivetrain.core.errors import ConfigError
from drivetrain.task.task import TaskModule
from drivetrain.trainer.trainer import Trainer

_DEFAULTS = {"batch_size": 32, "checkpoint": False, "loggers": (), "progress_bar": False}
_GROUPS = ("hparams", "trainer")


class _TaskEstimator(BaseEstimator):  # type: ignore[misc]
    """The parameters, the fit and the outputs of both estimators."""

    def __init__(
        self,
        task: Callable[..., TaskModule],
        *,
        hparams: Mapping[str, Any] | None = None,
        trainer: Mapping[str, Any] | None = None,
        seed: int = 0,
    ) -> None:
        self.task = task
        self.hparams = hparams
        self.trainer = trainer
        self.seed = seed

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the arguments; if `deep`, also entries of both mappings, such as `trainer__max_epochs`."""
        found: dict[str, Any] = super().get_params(deep=False)
        groups = {group: found[group] for group in _GROUPS if deep and isinstance(found[group], Mapping)}
        return found | {f"{group}__{name}": each for group in groups for name, each in groups[group].items()}

    def set_params(self, **params: Any) -> Self:
        """Set arguments, and entries of `hparams` and `trainer` by names such as `hparams__hidden`."""
        entries = {name: each for name, each in params.items() if name.startswith(("hparams__", "trainer__"))}
        super().set_params(**{name: each for name, each in params.items() if name not in entries})
        for name, value in entries.items():
            group, _, entry = name.partition("__")
            setattr(self, group, {**(getattr(self, group) or {}), entry: value})
        return self

    def _fit(self, x: Any, y: np.ndarray[Any, Any], **known: int) -> Self:
        """Make the task, whose constructor gets of `known` what it names, and fit it."""
        if not callable(self.task) or isinstance(self.task, TaskModule):
            kind = type(self.task).__name__
            raise ConfigError(f"task must be a class or a function that makes a task, not a {kind}")
        for group in _GROUPS:
            value = getattr(self, group)
            if not isinstance(value, Mapping | None):
                what = "the Trainer" if group == "trainer" else "the task"
                raise ConfigError(
                    f"{group} must be a mapping of arguments of {what}, not a {type(value).__name__}"
                )
        named = inspect.signature(self.task).parameters
        hparams = {name: value for name, value in known.items() if name in named} | dict(self.hparams or {})
        trainer = Trainer(**{**_DEFAULTS, "seed": self.seed, **(self.trainer or {})})
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(self.seed)
            self.task_ = self.task(**hparams)
        trainer.fit(self.task_, (torch.tensor(x), torch.tensor(y)))  # copies: it may be read-only
        return self

    def _outputs(self, x: Any) -> torch.Tensor:
        """Return the outputs of the fitted task, of shape (samples, ...)."""
        check_is_fitted(self)
        x = validate_data(self, x, dtype=np.float32, allow_nd=True, reset=False)
        settings = {**_DEFAULTS, **(self.trainer or {})}
        trainer = Trainer(**{name: each for name, each in settings.items() if not name.startswith("max_")})
        rows: Any = torch.tensor(x)  # a tensor is a sequence of its rows
        data: DataLoader[Any] = DataLoader(rows, batch_size=settings["batch_size"])
        outputs = trainer.predict(self.task_, data, joined=True)
        if not isinstance(outputs, torch.Tensor):
            raise ConfigError(
                f"{type(self.task_).__name__}: an estimator needs a tensor with a row for each sample, but"
                f" predict_step returned a {type(outputs).__name__}"
            )
        return outputs.float()


class TaskClassifier(ClassifierMixin, _TaskEstimator):  # type: ignore[misc]
    """A task as a classifier of scikit-learn, for `GridSearchCV`, `cross_val_score`, pipelines and so on.

    `fit(X, y)` makes the task anew and trains it on batches `(X, y)`: X in float32, y as numbers of classes
    from 0. The task's outputs are scores of shape (samples, classes), as for `nn.CrossEntropyLoss`.

    Args:
        task: The class of the task, or a function that returns one. If its parameters include `features` or
            `classes`, it gets the number of columns of X or that of classes.
        hparams: Further arguments of the task. A search names them `hparams__hidden`.
        trainer: Arguments of the Trainer. By default `batch_size` is 32, and nothing is written or shown. A
            search names them `trainer__max_epochs`.
        seed: Seeds the weights and the fit.

    Attributes:
        task_: The fitted task.
        classes_: The classes, in the order of the scores.

    Raises:
        ConfigError: An argument is of the wrong kind, or the outputs have no score for each class.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train a new task on X, of shape (samples, ...), and the classes y; return self."""
        X, y = validate_data(self, X, y, dtype=np.float32, allow_nd=True)  # noqa: N806
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        return self._fit(X, numbers.astype(np.int64), features=X.shape[-1], classes=len(self.classes_))

    def predict_proba(self, X: Any) -> np.ndarray[Any, Any]:  # noqa: N803
        """Return the probabilities of the classes, of shape (samples, classes)."""
        scores = self._outputs(X)
        scores = scores[:, None] if scores.ndim == 1 else scores  # of one class
        if scores.shape[1:] != (len(self.classes_),):
            raise ConfigError(
                f"{type(self.task_).__name__} returned outputs of shape {tuple(scores.shape)} for"
                f" {len(self.classes_)} classes; a classifier returns a score for each class"
            )
        return scores.softmax(dim=1).numpy()

    def predict(self, X: Any) -> np.ndarray[Any, Any]:  # noqa: N803
        """Return the class with the highest score for each sample."""
        chosen = self.predict_proba(X).argmax(axis=1)
        return self.classes_[chosen]  # type: ignore[no-any-return]


class TaskRegressor(RegressorMixin, _TaskEstimator):  # type: ignore[misc]
    """A task as a regressor of scikit-learn.

    `fit(X, y)` makes the task anew and trains it on batches `(X, y)`, both in float32. The task's outputs
    have the shape (samples,) or (samples, 1).

    Args:
        task: The class of the task, or a function that returns one. Where its parameters include `features`,
            it gets the number of columns of X.
        hparams: Further arguments of the task. A search names them `hparams__hidden`.
        trainer: Arguments of the Trainer. By default `batch_size` is 32, and nothing is written or shown. A
            search names them `trainer__max_epochs`.
        seed: Seeds the weights and the fit.

    Attributes:
        task_: The fitted task.

    Raises:
        ConfigError: An argument is of the wrong kind, or the outputs are not one for each sample.
    """

    def fit(self, X: Any, y: Any) -> Self:  # noqa: N803
        """Train a new task on X, of shape (samples, ...), and y, of shape (samples,); return self."""
        X, y = validate_data(self, X, y, dtype=np.float32, allow_nd=True, y_numeric=True)  # noqa: N806
        return self._fit(X, y.astype(np.float32), features=X.shape[-1])

    def predict(self, X: Any) -> np.ndarray[Any, Any]:  # noqa: N803
        """Return the outputs for each sample."""
        outputs = self._outputs(X)
        if outputs.shape not in (outputs.shape[:1], (*outputs.shape[:1], 1)):
            raise ConfigError(
                f"{type(self.task_).__name__} returned outputs of shape {tuple(outputs.shape)}; a regressor"
                " returns one number for each sample"
            )
        return outputs.flatten().numpy()
