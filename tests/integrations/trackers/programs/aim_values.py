"""Prints the values, name, experiment, configuration and commit of the only run of a repository of Aim."""

import json

from aim import Repo, Run

(run_hash,) = Repo("run").list_all_runs()
run = Run(run_hash, repo="run")
rows = []
for metric in run.metrics():
    if not metric.name.startswith("__"):
        table = metric.dataframe()
        name = f"{metric.context.to_dict().get('subset', '')}/{metric.name}".lstrip("/")
        rows += [(step, name, value) for step, value in zip(table["step"], table["value"], strict=True)]
print(json.dumps([rows, run.name, run.experiment, run["config"], run["__system_params", "git_info"]]))
run.close()
