"""A fit whose server is killed after step 4 and started again after step 7, and one in a job of Azure."""

import os
import signal
import subprocess
import sys
import urllib.request

from tests.support.tasks import Regression, pairs

from drivetrain import ConfigError, LambdaCallback, Trainer
from drivetrain.integrations.trackers import MLflowLogger

PORT = sys.argv[1]
ADDRESS = f"http://127.0.0.1:{PORT}"


def start():
    words = ["--backend-store-uri", "sqlite:///served.db", "--artifacts-destination", "stored"]
    command = [sys.executable, "-m", "mlflow", "server", *words, "--port", PORT, "--workers", "1"]
    with open("server.log", "a") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    while server.poll() is None:
        try:
            return urllib.request.urlopen(f"{ADDRESS}/health").close() or server
        except OSError:
            pass
    raise RuntimeError("the server did not start")


def kill():
    os.killpg(server.pid, signal.SIGKILL)
    server.wait()


def change(run):
    global server
    if run.progress.steps == 4:
        kill()
    if run.progress.steps == 7:
        server = start()


def fit(loggers, **options):
    quiet = {"log_every": 1, "strategy": "cpu", "progress_bar": False}
    Trainer(**quiet, loggers=loggers, **options).fit(Task(), pairs(), pairs(4))


class Task(Regression):
    def __init__(self, text="x" * 7000):
        super().__init__()


server = start()
try:
    change = [LambdaCallback(on_step_end=change)]
    tracker = MLflowLogger(
        tracking_uri=ADDRESS, experiment="digits", tags={"kind": "small"}, artifacts="best"
    )
    fit((tracker, "csv"), max_epochs=2, run_dir="run", callbacks=change)
    job = tracker.experiment.create_run("0", run_name="job").info.run_id
    os.environ |= {"MLFLOW_TRACKING_URI": ADDRESS, "MLFLOW_RUN_ID": job}
    fit("azureml", max_steps=2, run_dir="job")
finally:
    kill()
try:
    fit("mlflow", max_steps=2, run_dir="without", checkpoint=False)
except ConfigError as error:
    print(error)
