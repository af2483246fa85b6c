"""What the local stores of experiment trackers have, for benchmarks/trackers.py."""

from __future__ import annotations

import json
import sqlite3
import zipfile
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from drivetrain.integrations.trackers.base import read_lines
from drivetrain.integrations.trackers.wandb_file import read_history, read_records
from drivetrain.loggers.files import flat


@dataclass
class Found:
    """What a tracker has of a fit.

    Attributes:
        runs: The ids of its runs.
        values: The steps of each value that was logged.
        config: The names of the settings.
        media: The names of pictures.
        system: The names of measurements of the machine.
        commit: The commit, where the tracker has a place for it.
        tags: All tags.
        files: The files stored.
    """

    runs: set[str] = field(default_factory=set)
    values: dict[str, list[int]] = field(default_factory=dict)
    config: set[str] = field(default_factory=set)
    media: set[str] = field(default_factory=set)
    system: set[str] = field(default_factory=set)
    commit: str = ""
    tags: set[str] = field(default_factory=set)
    files: set[str] = field(default_factory=set)

    def add(self, name: str, step: Any) -> None:
        """Add a value of a step."""
        self.values.setdefault(name, []).append(int(step or 0))


def _rows(path: Path, query: str) -> list[Any]:
    with closing(sqlite3.connect(path)) as database:
        return database.execute(query).fetchall()


def _names(tree: Any) -> set[str]:
    return {name for name, _ in flat(tree)}


def wandb(folder: Path) -> Found:
    """Read the files of offline runs."""
    from wandb.proto import wandb_internal_pb2

    found = Found()
    for path in sorted(folder.rglob("*.wandb")):
        found.runs.add(path.stem)
        for row in read_history(path):
            step = row.get("step", row.get("trainer/global_step", row.get("train/global_step", 0)))
            for name in row:
                base = name.split("._type")[0].split(".")[0]
                if name.endswith("._type") or isinstance(row[name], dict):
                    found.media.add(base)
                elif not name.startswith("_") and base == name:
                    found.add(name, step)
        for each in read_records(path):
            record = wandb_internal_pb2.Record.FromString(each)
            for item in record.config.update:
                name = item.key or ".".join(item.nested_key)
                if not name.startswith("_wandb"):
                    found.config |= _names({name: json.loads(item.value_json)})
            found.system |= {item.key for item in record.stats.item}
            found.tags |= {*record.run.tags}
            found.commit = found.commit or record.environment.git.commit or record.run.git.commit
            for artifact in (record.artifact, record.request.log_artifact.artifact):
                if artifact.type == "model":
                    found.files |= {f"{artifact.name}/{item.path}" for item in artifact.manifest.contents}
            found.files |= {item.path for item in record.files.files if "/media/" not in f"/{item.path}"}
    return found


def mlflow(folder: Path) -> Found:
    """Read the database and the folder of artifacts."""
    found, base = Found(), folder / "mlflow.db"
    found.runs = {each for (each,) in _rows(base, "select run_uuid from runs")}
    for name, step in _rows(base, "select key, step from metrics"):
        if name.startswith("system/"):
            found.system.add(name)
        else:
            found.add(name, step)
    found.config = {each for (each,) in _rows(base, "select key from params")}
    tags = dict(_rows(base, "select key, value from tags"))
    found.commit = tags.get("mlflow.source.git.commit", "")
    found.tags = {*tags, *tags.values()}
    for path in (folder / "artifacts").rglob("*"):
        if path.suffix == ".png":
            found.media.add(path.parent.name)
        elif path.is_file():
            found.files.add(path.relative_to(folder / "artifacts").as_posix())
    return found


def tensorboard(folder: Path) -> Found:
    """Read event files as TensorBoard does, without what a later one hides."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = Found()
    for place in sorted({each.parent for each in folder.rglob("events.out.tfevents*")}):
        found.runs.add(place.relative_to(folder).as_posix())
        events = EventAccumulator(str(place), {"scalars": 0, "images": 0, "tensors": 0}).Reload()
        tags: Any = events.Tags()
        for name in tags["scalars"]:
            for each in events.Scalars(name):
                found.add(name, each.step)
        found.media |= {*tags["images"]}
        for name in tags["tensors"]:
            texts = [b"".join(each.tensor_proto.string_val) for each in events.Tensors(name)]
            for text in texts:
                found.config.add(name)
                with suppress(ValueError):
                    found.config |= _names(json.loads(text))
        for each in events.summary_metadata.values():
            if each.plugin_data.plugin_name == "hparams":
                from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

                start = HParamsPluginData.FromString(each.plugin_data.content).session_start_info
                found.config |= {*start.hparams}
    return found


def comet(folder: Path) -> Found:
    """Read the archives of offline experiments; a killed one leaves an empty archive."""
    found = Found()
    for path in sorted(folder.rglob("*.zip")):
        try:
            archive = zipfile.ZipFile(path)
            messages = list(read_lines(archive.read("messages.json").decode()))
            about = json.loads(archive.read("experiment.json"))
        except (KeyError, zipfile.BadZipFile):
            continue
        found.runs.add(about["offline_id"])
        found.tags |= {*(about.get("tags") or ())}
        for each in messages:
            kind, content = each["type"], each["payload"]
            if kind == "metric_msg":
                name = content["metric"]["metricName"]
                if name.startswith(("sys.", "process")):
                    found.system.add(name)
                else:
                    found.add(name, content["metric"]["step"])
            elif kind == "parameter_msg":
                parameter = content.get("param") or content["params"]  # a list of values has the second name
                found.config.add(parameter["paramName"])
            elif kind == "git_metadata":
                found.commit = str(content)
            elif "upload" in kind:
                name = content.get("additional_params", {}).get("fileName") or str(content.get("file_path"))
                (found.media if str(content.get("upload_type")) == "visualization" else found.files).add(name)
            elif kind == "log_other_msg" and "tag" in content:
                found.tags.add(str(content))
    return found


def clearml(folder: Path) -> Found:
    """Read the sessions of offline tasks."""
    found = Found()
    for path in sorted(folder.rglob("task.json")):
        task = json.loads(path.read_text())
        found.runs.add(task.get("id") or path.parent.name)
        found.tags |= {*task.get("tags", ())}
        for section, values in (task.get("hyperparams") or {}).items():
            found.config |= {f"{section}/{name}" for name in values}
        found.commit = (task.get("script") or {}).get("version_num") or found.commit
        found.files |= {each["key"] for each in (task.get("execution") or {}).get("artifacts") or ()}
        found.files |= {str(each) for each in (task.get("models") or {}).get("output") or ()}
        events = path.with_name("metrics.jsonl")
        for line in read_lines(events.read_text()) if events.exists() else ():
            for each in line:
                if "value" not in each:
                    found.media.add(each["metric"])
                elif each["metric"].startswith(":"):
                    found.system.add(f"{each['metric']}/{each['variant']}")
                else:
                    found.add(f"{each['metric']}/{each['variant']}", each["iter"])
    return found


def swanlab(folder: Path) -> Found:
    """Read the files of offline runs."""
    from google.protobuf.json_format import MessageToDict
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    found = Found()
    for path in sorted(folder.rglob("*.swanlab")):
        found.runs.add(path.stem)
        for each in read_records(path):
            record = Record.FromString(each)
            content = MessageToDict(record, preserving_proto_field_name=True)
            if record.HasField("scalar"):
                if record.scalar.key.startswith("__swanlab__"):
                    found.system.add(record.scalar.key)
                else:
                    found.add(record.scalar.key, record.scalar.step)
            elif record.HasField("media"):
                found.media.add(record.media.key)
            elif "start" in content:
                found.tags |= {*content["start"].get("tags", ())}
            if (saved := content.get("save", {})).get("name") not in (
                "config",
                "metadata",
                "requirements",
                None,
            ):
                found.files.add(saved["name"])
        for about in path.parent.rglob("*metadata.json"):
            found.commit = found.commit or _value(json.loads(about.read_text()), "commit")
        for about in path.parent.rglob("config.yaml"):
            import yaml

            settings = yaml.safe_load(about.read_text()) or {}
            found.config |= _names({name: each["value"] for name, each in settings.items()})
    return found


def _value(tree: Any, name: str) -> str:
    if isinstance(tree, Mapping):
        for key, each in tree.items():
            if name in str(key).lower() and isinstance(each, (str, list)):
                return str(each)
            if inner := _value(each, name):
                return inner
    return ""


def neptune(folder: Path) -> Found:
    """Read the operations of offline runs."""
    found = Found()
    for path in sorted(folder.rglob("data-*.log")):
        found.runs.add(path.parts[-2])
        for line in read_lines(path.read_text()):
            each = line["obj"]
            name = "/".join(each["path"])
            if each["type"] == "LogFloats":
                if name.startswith("monitoring/"):
                    found.system.add(name)
                else:
                    for value in each["values"]:
                        found.add(name, value.get("step"))
            elif each["type"] == "LogImages":
                found.media.add(name)
            elif name == "sys/tags":
                found.tags |= {*each["values"]}
            elif "commit" in str(each) and name.startswith("source_code/git"):
                found.commit = str(each.get("value"))
            elif "Upload" in each["type"]:
                found.files.add(name)
            elif each["type"].startswith("Assign") and not name.startswith(("sys/", "source_code/")):
                found.config.add(name)
    return found


def trackio(folder: Path) -> Found:
    """Read the database of the project."""
    found = Found()
    for base in folder.rglob("*.db"):
        tables = {each for (each,) in _rows(base, "select name from sqlite_master where type = 'table'")}
        if "metrics" not in tables:
            continue
        for run, step, text in _rows(base, "select run_name, step, metrics from metrics"):
            found.runs.add(run)
            for name, value in json.loads(text).items():
                (found.media.add(name) if isinstance(value, dict) else found.add(name, step))
        if "configs" in tables:
            for (text,) in _rows(base, "select config from configs"):
                found.config |= _names(json.loads(text))
        if "system_metrics" in tables:
            for (text,) in _rows(base, "select metrics from system_metrics"):
                found.system |= json.loads(text).keys()
    found.files = {each.name for each in folder.rglob("*") if each.is_file() and "artifacts" in each.parts}
    return found


def aim(folder: Path) -> Found:
    """Read the repository through Aim."""
    import aim as package

    found = Found()
    repo = package.Repo(str(folder))
    for run in (
        package.Run(each, repo=repo) for each in repo.list_all_runs()
    ):  # read_only=True needs the index
        found.runs.add(run.hash)
        found.tags |= {*map(str, run.props.tags)}
        for metric in run.metrics():
            if metric.name.startswith("__"):
                found.system.add(metric.name)
            else:
                context = metric.context.to_dict().get("subset", "")
                for step in metric.data.indices_list():
                    found.add(f"{context}/{metric.name}".lstrip("/"), step)
        for name in ("config", "args", "hparams", "model", "__system_params"):
            value = run.get(name, {})
            if name == "__system_params":
                found.commit = found.commit or _value(value, "hash")
            else:
                found.config |= _names({name: _plain(value)})
        found.media |= {each for each in ("picture",) if _pictures(run, each)}
    found.files = {
        each.relative_to(folder).as_posix() for each in folder.rglob("aim-artifacts/**/*") if each.is_file()
    }
    return found


def _pictures(run: Any, name: str) -> bool:
    from aim.storage.context import Context

    return run.get_image_sequence(name, Context({})) is not None


def _plain(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {str(key): _plain(each) for key, each in tree.items()}
    return tree if isinstance(tree, (bool, int, float, str, type(None))) else str(tree)


READERS = {
    each.__name__: each
    for each in (wandb, mlflow, tensorboard, comet, aim, clearml, swanlab, neptune, trackio)
}
