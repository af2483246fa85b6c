"""Publishing to the Hub, and resuming from it, with the Hub's own client."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import pairs
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule, Trainer
from drivetrain.checkpoint import verify
from drivetrain.cli.main import main
from drivetrain.core.errors import CheckpointError, ConfigError, Preempted
from drivetrain.integrations.hub import CardData, Publish, push
from drivetrain.integrations.hub import publish as publishing
from drivetrain.integrations.hub.client import HubError, client
from drivetrain.testing import run_distributed

# The Hub's own client calls its HTTP library so.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning")

REPOSITORY = "org/line"


class Wide(TaskModule):  # a task whose weights do not fit into one packet
    def __init__(self, width: int = 1024, token: str = "", note: str = "") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01)


def trainer(run_dir: Path, *callbacks: Any, epochs: int = 2, **options: Any) -> Trainer:
    given = {"strategy": "cpu", "max_epochs": epochs, "progress_bar": False, **options}
    return Trainer(callbacks=callbacks, run_dir=run_dir, **given)


def files(revision: str | None = None) -> set[str]:
    return set(client(None).list_repo_files(REPOSITORY, revision=revision))


def downloaded(folder: Path, revision: str | None = None) -> Path:
    options = {"revision": revision, "local_dir": folder, "cache_dir": folder / ".cache"}
    return Path(client(None).snapshot_download(REPOSITORY, **options))


def upload(name: str, content: bytes) -> None:
    client(None).upload_file(path_or_fileobj=content, path_in_repo=name, repo_id=REPOSITORY)


def head_of(card: str) -> dict[str, Any]:
    return dict(yaml.safe_load(card.split("---\n")[1]))


def test_push_uploads_weights_assets_card_and_curves(hub: Any, tmp_path: Path) -> None:
    words, adapter = tmp_path / "words.txt", tmp_path / "adapter_config.json"
    words.write_text("one two")
    adapter.write_text('{"base_model_name_or_path": "org/base"}')
    run_dir = tmp_path / "run"
    trainer(run_dir, assets=[words, adapter]).fit(Wide(), pairs(), pairs())
    card = CardData(license="apache-2.0", tags=["lines"], datasets=["org/points"])
    assert push(run_dir, REPOSITORY, card=card).startswith(f"{hub.address}/{REPOSITORY}/commit/")
    folder = downloaded(tmp_path / "downloaded")
    task = Wide()
    task.load_weights(folder)
    assert weights(task) == weights(Wide.from_checkpoint(run_dir))
    assert {"adapter_config.json", "words.txt", "model.safetensors"} <= files()
    assert [each for each in files() if each.startswith("runs/run/events.out.tfevents.")]
    text = (folder / "README.md").read_text()
    head = {"license": "apache-2.0", "tags": ["drivetrain", "lines"], "base_model": "org/base"}
    head |= {"library_name": "peft", "datasets": ["org/points"], "metrics": ["loss"]}
    assert head_of(text).items() >= head.items()
    parts = ["| `validation/loss` | ", "| `task.width` | `1024` |", "| `optimizer.lr` | `0.01` |"]
    parts += ["| `trainer.precision` | `32` |", f"| torch | `{torch.__version__}` |", "| steps | 10 |"]
    assert [each for each in parts if each not in text] == []


def test_push_again_keeps_an_edited_card_and_removes_stale_weights(hub: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    trainer(run_dir).fit(Wide(), pairs())
    push(run_dir, REPOSITORY)
    upload("README.md", b"---\nlicense: mit\n---\nMine")
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "model-notes.txt"):
        upload(name, b"{}")
    push(run_dir, REPOSITORY, checkpoint=True)
    assert {each for each in files() if each.startswith("model")} == {"model.safetensors", "model-notes.txt"}
    folder = downloaded(tmp_path / "downloaded")
    assert (folder / "README.md").read_text().endswith("Mine")
    verify(str(folder / "last-checkpoint"))


def test_checkpoint_push_command(hub: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_dir = tmp_path / "run"
    trainer(run_dir, epochs=1).fit(Wide(), pairs())
    words = ["checkpoint", "push", str(run_dir), REPOSITORY, "--license", "mit", "--checkpoint", "--json"]
    assert main([*words, "--revision", "side", "--tag", "short"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["commit"].startswith(hub.address)
    assert {"README.md", "last-checkpoint/manifest.json"} <= files("side")
    head = head_of((downloaded(tmp_path / "downloaded", "side") / "README.md").read_text())
    assert (head["license"], head["tags"]) == ("mit", ["drivetrain", "short"])
    assert main(["checkpoint", "push", str(run_dir), "not a name"]) == 2
    assert "'organisation/name'" in capsys.readouterr().err


def test_no_error_and_no_upload_shows_a_token(hub: Any, tmp_path: Path) -> None:
    secret, plain = "hf_markerTokenThatMustNeverBeSeen", "secret-of-no-known-form"
    trainer(tmp_path / "run", epochs=1).fit(Wide(token=secret, note=plain), pairs())
    # The HTTP library's own error quotes the header that it cannot send, and the server's answer the token.
    said_of = {"hf_markerToken\nThatBreaksTheHeader": "<hidden>", plain: "401"}
    for token, said in said_of.items():
        with pytest.raises(HubError, match="org/line was not uploaded") as failure:
            push(tmp_path / "run", REPOSITORY, token=token)
        assert said in str(failure.value)
        assert not [part for part in ("marker", "Breaks", "secret-of") if part in str(failure.value)]
        assert (failure.value.__suppress_context__, failure.value.__cause__) == (True, None)
    with pytest.raises(HubError, match=r"json holds the Hub's token"):
        push(tmp_path / "run", REPOSITORY, token=plain, checkpoint=True)
    push(tmp_path / "run", REPOSITORY, checkpoint=True)
    for path in (*(tmp_path / "run").rglob("*"), *downloaded(tmp_path / "all").rglob("*")):
        assert path.is_dir() or secret.encode() not in path.read_bytes(), path
    push(tmp_path / "run", REPOSITORY)
    card = (downloaded(tmp_path / "downloaded") / "README.md").read_text()
    assert secret not in card


def test_refusals(hub: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_dir = tmp_path / "run"

    def resumed(token: str | None = None) -> None:
        trainer(tmp_path / "new", Publish(REPOSITORY, token=token)).fit(Wide(), pairs(), resume="hub")

    with monkeypatch.context() as changed:
        changed.delenv("HF_TOKEN")
        changed.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="no token to upload to org/line"):
            trainer(run_dir, Publish(REPOSITORY)).fit(Wide(), pairs())
    with pytest.raises(ConfigError, match="checkpoint=False saves none"):
        trainer(run_dir, Publish(REPOSITORY), checkpoint=False)
    trainer(run_dir, epochs=1).fit(Wide(), pairs())
    push(run_dir, REPOSITORY, checkpoint=True)
    with pytest.raises(
        HubError, match=r"no checkpoint was read from org/line: RepositoryNotFoundError: 401"
    ) as failure:
        resumed(token="hf_anotherTokenThatIsWrong")
    assert "hf_another" not in str(failure.value)
    upload("last-checkpoint/model.safetensors", b"{}")
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        resumed()
    assert not list((tmp_path / "new").rglob("step-*"))


@pytest.mark.landing
def test_resume_from_the_hub_on_another_machine(hub: Any, tmp_path: Path) -> None:
    undisturbed = Wide()
    trainer(tmp_path / "whole").fit(undisturbed, pairs(), pairs())
    # Without a repository a run begins anew.
    first = Publish(REPOSITORY, "checkpoint")
    trainer(tmp_path / "first", first, epochs=1).fit(Wide(), pairs(), pairs(), resume="hub")
    resumed, begun = Wide(), list[int]()
    notes = LambdaCallback(on_fit_start=lambda run: begun.append(run.progress.steps))
    again = trainer(tmp_path / "second", Publish(REPOSITORY, "checkpoint"), notes)
    result = again.fit(resumed, pairs(), pairs(), resume="hub")
    assert (result.progress.steps, result.progress.epoch) == (10, 2)
    assert (tmp_path / "second" / "checkpoints" / "step-00000005").is_dir()
    assert weights(resumed) == weights(undisturbed)
    # Its own newer checkpoint comes before that of the Hub.
    push(tmp_path / "first", REPOSITORY, checkpoint=True)
    more = trainer(tmp_path / "second", Publish(REPOSITORY), notes, epochs=3)
    assert more.fit(Wide(), pairs(), pairs(), resume="hub").progress.steps == 15
    assert begun == [5, 10]


FOLDERS = {"checkpoint": {"last-checkpoint"}}
FOLDERS["all"] = {"checkpoints/step-00000005", "checkpoints/step-00000010"}


@pytest.mark.nightly
@pytest.mark.parametrize("every", ["end", "save", "checkpoint", "all"])
def test_publish_uploads_as_often_as_asked(hub: Any, tmp_path: Path, every: str) -> None:
    publish = Publish(REPOSITORY, every, private=True, revision="trained")
    policy = CheckpointConfig(keep_last=1, best=0)
    trainer(tmp_path / "run", publish, checkpoint=policy).fit(Wide(), pairs(), pairs())
    there = files("trained")
    assert {"README.md", "model.safetensors"} <= there
    assert {each.rpartition("/")[0] for each in there if each.endswith("/manifest.json")} == FOLDERS.get(
        every, set()
    )
    assert files() == set()
    assert json.loads((hub.folder / "repositories" / "org--line.json").read_text())["private"]
    assert hub.commits()[-1] == "Upload step-00000010"
    assert len(hub.commits()) == 1 if every == "end" else len(hub.commits()) <= 2
    assert not (tmp_path / "run" / ".hub").exists()
    for name in FOLDERS.get(every, ()):
        verify(str(downloaded(tmp_path / "downloaded", "trained") / name))
    if every == "all":
        resuming, begun = Publish(REPOSITORY, "all", revision="trained"), list[int]()
        notes = LambdaCallback(on_fit_start=lambda run: begun.append(run.progress.steps))
        trainer(tmp_path / "other", resuming, notes, epochs=3).fit(Wide(), pairs(), resume="hub")
        assert begun == [10]


def train_on_two(folder: str) -> None:
    publish = Publish(REPOSITORY, "checkpoint")
    trainer(Path(folder), publish, strategy="ddp").fit(Wide(), pairs())
    assert (publish._newest is None) == (os.environ["RANK"] == "1")


@pytest.mark.landing
def test_of_two_ranks_only_the_first_uploads(hub: Any, tmp_path: Path) -> None:
    run_distributed(train_on_two, str(tmp_path / "run"))
    made = [each for each in hub.paths() if each.startswith(f"/api/models/{REPOSITORY}/commit/")]
    assert len(made) == len(hub.commits())
    assert hub.commits()[-1] == "Upload step-00000006"
    verify(str(downloaded(tmp_path / "downloaded") / "last-checkpoint"))


def wait_for(condition: Any) -> None:
    ends = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


@pytest.mark.landing
@pytest.mark.real("kills a server within an upload")
def test_training_goes_on_when_the_server_dies_in_an_upload(hub: Any, tmp_path: Path, capfd: Any) -> None:
    (hub.folder / "stall").touch()
    publish = Publish(REPOSITORY, "checkpoint")
    run = trainer(tmp_path / "run", publish, epochs=3, log_every="1 step")
    with warned() as told:
        for number, _ in enumerate(run.steps(Wide(), pairs(), pairs()), 1):
            if number == 6:  # the first epoch's upload is in progress
                wait_for(lambda: (hub.folder / "stalled").exists())
                hub.kill()
            if number == 8:  # two steps were made meanwhile
                wait_for(lambda: publish._current is None or publish._current._process.poll() is not None)
                (hub.folder / "stall").unlink()
                hub.start()
    assert len(told) == 1
    assert told[0].startswith("the upload of step-00000005 to org/line failed: ")
    assert told[0].endswith("The next save tries again")
    assert hub.commits()[-1] == "Upload step-00000015"
    verify(str(downloaded(tmp_path / "downloaded") / "last-checkpoint"))
    assert "hf_marker" not in " ".join([*told, *capfd.readouterr()])
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hf_marker" not in path.read_bytes(), path


def preempted(folder: str) -> None:
    def stop(run: Any) -> None:
        if run.progress.steps == 3:
            signal.raise_signal(signal.SIGTERM)

    publishing._GRACE = 0.0  # of a fit that fails
    callbacks = Publish(REPOSITORY, "checkpoint"), LambdaCallback(on_step_end=stop)
    with pytest.raises(Preempted):
        trainer(Path(folder), *callbacks).fit(Wide(), pairs())


@pytest.mark.landing
@pytest.mark.real("sends a process SIGTERM")
def test_a_preempted_run_waits_for_the_upload_of_its_last_checkpoint(hub: Any, tmp_path: Path) -> None:
    run_distributed(preempted, str(tmp_path / "run"), world_size=1)
    assert hub.commits() == ["Upload step-00000003"]
    verify(str(downloaded(tmp_path / "downloaded") / "last-checkpoint"))


@pytest.mark.landing
@pytest.mark.real("ends an upload that is stuck")
def test_a_fit_waits_for_a_stuck_upload_until_a_timeout_a_resume_uploads_it(hub: Any, tmp_path: Path) -> None:
    (hub.folder / "stall").touch()
    with warned(r"by hand: drivetrain checkpoint push .*step-00000010 org/line$"):
        trainer(tmp_path / "run", Publish(REPOSITORY, "save", timeout=1)).fit(Wide(), pairs())
    assert not (tmp_path / "run" / ".hub").exists()
    (hub.folder / "stall").unlink()
    trainer(tmp_path / "run", Publish(REPOSITORY)).fit(Wide(), pairs(), resume="auto")
    assert hub.commits() == ["Upload step-00000010"]
