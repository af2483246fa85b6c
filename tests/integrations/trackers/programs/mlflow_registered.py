"""Without arguments a fit whose task is registered with MLflow; else another process that loads it."""

import sys

import mlflow
import numpy as np
import torch

mlflow.set_tracking_uri("sqlite:///here.db")
if len(sys.argv) == 1:
    from tests.support.tasks import Regression, pairs

    from drivetrain import Trainer
    from drivetrain.integrations.trackers import MLflowLogger

    tracker = MLflowLogger(tracking_uri="sqlite:///here.db", register="lines")
    task = Regression()
    Trainer(max_steps=4, loggers=tracker, run_dir="run", strategy="cpu", progress_bar=False).fit(
        task, pairs()
    )
    torch.save(task(torch.ones(2, 4)).detach(), "expected.pt")
else:
    model = mlflow.pytorch.load_model("models:/lines/1")
    print(
        torch.equal(model(torch.ones(2, 4)), torch.load("expected.pt")), "tests.support.tasks" in sys.modules
    )
    signature = mlflow.models.get_model_info("models:/lines/1").signature
    print(signature.inputs.inputs[0].shape, signature.outputs.inputs[0].shape, type(model).__name__)
    print(mlflow.pyfunc.load_model("models:/lines/1").predict(np.ones((3, 4), np.float32)).shape)
