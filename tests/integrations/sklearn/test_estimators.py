"""Tasks as estimators: grid searches, scikit-learn's own checks, and what is refused."""

import importlib
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.tasks import quiet
from torch import nn

from drivetrain import OptimizerConfig, TaskModule
from drivetrain.core.errors import ConfigError


@pytest.fixture(scope="module", autouse=True)
def library() -> Any:  # whose first import sets variables of the environment
    importlib.import_module("sklearn.model_selection")
    return importlib.import_module("drivetrain.integrations.sklearn")


class Scores(TaskModule):
    def __init__(self, features: int, classes: int = 1, hidden: int = 16) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(features, hidden), nn.ReLU(), nn.Linear(hidden, classes))
        self.loss = nn.CrossEntropyLoss() if classes > 1 else nn.MSELoss()

    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x).squeeze(1)

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=1e-2)


class Odd(Scores):  # its outputs are no scores of classes, and no numbers
    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x)

    def training_step(self, batch: Any) -> Any:
        return self.net(batch[0]).square().mean()


class Pairs(Odd):
    def forward(self, x: torch.Tensor) -> Any:
        return self.net(x), x


def data(rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(0).normal(size=(rows, 3))
    return x, np.array(["low", "high"])[(x.sum(axis=1) > 0).astype(int)]


def test_a_grid_search_tries_arguments_of_the_task_and_of_the_trainer(library: Any) -> None:
    from sklearn.model_selection import GridSearchCV

    x, y = data()
    before = torch.get_rng_state()
    estimator = library.TaskClassifier(Scores, trainer={"max_epochs": 1, "batch_size": 10})
    grid = {"hparams__hidden": [2, 16], "trainer__max_epochs": [0.2, 20]}
    search = GridSearchCV(estimator, grid, cv=2).fit(x, y)
    assert search.best_params_ == {"hparams__hidden": 16, "trainer__max_epochs": 20}
    assert search.best_score_ > 0.8
    assert estimator.trainer == {"max_epochs": 1, "batch_size": 10}
    best = search.best_estimator_
    assert best.task_.hparams["features"] == 3
    assert set(best.predict(x)) == {"low", "high"}
    np.testing.assert_allclose(best.predict_proba(x).sum(axis=1), 1.0, rtol=1e-5)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_estimator_has_the_outputs_of_the_fit_that_it_stands_for(library: Any) -> None:
    x, y = data()
    target = (y == "high").astype(np.float32)
    options = {"max_epochs": 2, "batch_size": 8}
    found = library.TaskRegressor(Scores, trainer=options, seed=3).fit(x, target).predict(x)
    torch.manual_seed(3)
    task = Scores(features=3)
    rows = torch.from_numpy(x.astype(np.float32))
    quiet(**options, seed=3).fit(task, (rows, torch.from_numpy(target)))
    np.testing.assert_array_equal(found, task.eval()(rows).detach().numpy())


def test_arguments_and_outputs_that_no_estimator_can_have_are_refused(library: Any) -> None:
    x, y = data(8)
    for kind, task, target, words in (
        (library.TaskClassifier, Pairs, y, "an estimator needs a tensor with a row for each sample"),
        (library.TaskClassifier, lambda features: Odd(features, 3), y, "a score for each class"),
        (library.TaskRegressor, lambda features: Odd(features, 2), x[:, 0], "one number for each sample"),
    ):
        fitted = kind(task, trainer={"max_steps": 1}).fit(x, target)
        with pytest.raises(ConfigError, match=words):
            fitted.predict(x)
    for wrong, words in (
        ({"task": Scores(3)}, "task must be a class or a function that makes a task, not a Scores"),
        ({"hparams": 3}, "hparams must be a mapping of arguments of the task, not a int"),
        (
            {"trainer": quiet(max_steps=1)},
            "trainer must be a mapping of arguments of the Trainer, not a Trainer",
        ),
    ):
        with pytest.raises(ConfigError, match=words):
            library.TaskRegressor(**{"task": Scores, **wrong}).fit(x, x[:, 0])


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["TaskClassifier", "TaskRegressor"])
def test_the_checks_of_scikit_learn_pass(name: str, library: Any) -> None:
    from sklearn.utils.estimator_checks import check_estimator

    estimator = getattr(library, name)(Scores, trainer={"max_epochs": 30, "batch_size": 8})
    check_estimator(estimator, on_skip=None)
