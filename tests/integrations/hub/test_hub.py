"""Publishing to the Hub, and resuming from it, with the Hub's own client."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
import yaml
from tests.support.held import in_files
from tests.support.messages import warned
from tests.support.outcome import weights
from tests.support.tasks import pairs
from torch import Tensor, nn
from torch.nn import functional as F

from drivetrain import (
    CheckpointConfig,
    ConfigError,
    LambdaCallback,
    OptimizerConfig,
    Preempted,
    TaskModule,
    Trainer,
)
from drivetrain.checkpoint import verify
from drivetrain.cli.main import main
from drivetrain.core.errors import CheckpointError
from drivetrain.integrations.hub import CardData, Publish, push
from drivetrain.integrations.hub.client import HubError, client
from drivetrain.testing.distributed import run_distributed

if TYPE_CHECKING:
    from conftest import Hub

pytestmark = [
    pytest.mark.full,
    # The Hub's own client calls its HTTP library so.
    pytest.mark.filterwarnings("ignore:Use 'content=<...>':DeprecationWarning"),
]

REPOSITORY = "org/line"


class Wide(TaskModule):
    """A task whose weights do not fit into one packet."""

    def __init__(self, width: int = 1024) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1), nn.Linear(width, 1))

    def forward(self, features: Tensor) -> Tensor:
        return self.net(features)

    def loss(self, outputs: Tensor, batch: Any) -> Tensor:
        return F.mse_loss(outputs, batch[1])

    def configure_optimizers(self) -> OptimizerConfig:
        return OptimizerConfig("adamw", lr=0.01)


def wide() -> Wide:
    torch.manual_seed(3)
    return Wide()


def trainer(run_dir: Path, *callbacks: Any, epochs: int = 2, **options: Any) -> Trainer:
    return Trainer(
        max_epochs=epochs,
        strategy="cpu",
        callbacks=callbacks,
        run_dir=run_dir,
        progress_bar=False,
        **options,
    )


def files(revision: str | None = None) -> set[str]:
    return set(client(None).list_repo_files(REPOSITORY, revision=revision))


def downloaded(folder: Path) -> Path:
    api = client(None)
    return Path(api.snapshot_download(REPOSITORY, local_dir=folder, cache_dir=folder / ".cache"))


def commits(hub: Hub) -> list[str]:
    """The messages of the commits, oldest first."""
    content = json.loads((hub.folder / "repositories" / "org--line.json").read_text())
    return list(content["messages"])


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A finished run of two epochs of five updates."""
    made = tmp_path / "run"
    trainer(made).fit(wide(), pairs(), pairs())
    return made


def test_a_pushed_model_has_weights_a_card_and_curves(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    card = CardData(license="apache-2.0", tags=["lines"], base_model="org/base", datasets=["org/points"])
    assert push(run_dir, REPOSITORY, card=card).startswith(f"{hub.address}/{REPOSITORY}/commit/")
    folder = downloaded(tmp_path / "downloaded")
    task = wide()
    task.load_weights(folder)
    assert weights(task) == weights(Wide.from_checkpoint(run_dir))
    assert [each for each in files() if each.startswith("runs/run/events.out.tfevents.")]
    text = (folder / "README.md").read_text()
    head = yaml.safe_load(text.split("---\n")[1])
    assert head["license"] == "apache-2.0"
    assert head["tags"] == ["drivetrain", "lines"]
    assert head["base_model"] == "org/base"
    assert head["datasets"] == ["org/points"]
    assert head["metrics"] == ["loss"]
    for part in (
        "| `validation/loss` | ",
        "| `task.width` | `1024` |",
        "| `optimizer.lr` | `0.01` |",
        "| `trainer.precision` | `32` |",
        f"| torch | `{torch.__version__}` |",
        "| updates | 10 |",
    ):
        assert part in text


def test_the_assets_of_a_checkpoint_are_beside_the_weights(hub: Hub, tmp_path: Path) -> None:
    words, adapter = tmp_path / "words.txt", tmp_path / "adapter_config.json"
    words.write_text("one two")
    adapter.write_text('{"base_model_name_or_path": "org/base"}')
    trainer(tmp_path / "run", assets=[words, adapter]).fit(wide(), pairs())
    push(tmp_path / "run", REPOSITORY)
    assert {"adapter_config.json", "words.txt", "model.safetensors"} <= files()
    card = (downloaded(tmp_path / "downloaded") / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert (head["base_model"], head["library_name"]) == ("org/base", "peft")


def test_a_card_that_someone_has_edited_is_kept(hub: Hub, run_dir: Path, tmp_path: Path) -> None:
    push(run_dir, REPOSITORY)
    api = client(None)
    api.upload_file(
        path_or_fileobj=b"---\nlicense: mit\n---\nMine", path_in_repo="README.md", repo_id=REPOSITORY
    )
    push(run_dir, REPOSITORY, checkpoint=True)
    folder = downloaded(tmp_path / "downloaded")
    assert (folder / "README.md").read_text().endswith("Mine")
    verify(str(folder / "last-checkpoint"))


def test_weights_of_an_earlier_upload_in_several_files_are_removed(hub: Hub, run_dir: Path) -> None:
    push(run_dir, REPOSITORY)
    for name in ("model-00001-of-00002.safetensors", "model.safetensors.index.json", "model-notes.txt"):
        client(None).upload_file(path_or_fileobj=b"{}", path_in_repo=name, repo_id=REPOSITORY)
    push(run_dir, REPOSITORY)
    assert {each for each in files() if each.startswith("model")} == {"model.safetensors", "model-notes.txt"}


@pytest.mark.parametrize(
    ("every", "folders"),
    [
        ("end", set()),
        ("save", set()),
        ("checkpoint", {"last-checkpoint"}),
        ("all", {"checkpoints/update-00000005", "checkpoints/update-00000010"}),
    ],
)
def test_a_run_uploads_as_often_as_is_asked(hub: Hub, tmp_path: Path, every: str, folders: set[str]) -> None:
    publish = Publish(REPOSITORY, every, private=True, revision="trained")
    policy = CheckpointConfig(keep_last=1, best=0)
    trainer(tmp_path / "run", publish, checkpoint=policy).fit(wide(), pairs(), pairs())
    there = files("trained")
    assert {"README.md", "model.safetensors"} <= there
    assert {each.rpartition("/")[0] for each in there if each.endswith("/manifest.json")} == folders
    assert files() == set()
    content = json.loads((hub.folder / "repositories" / "org--line.json").read_text())
    assert content["private"]
    assert content["messages"][-1] == "Upload update-00000010"
    assert len(content["messages"]) == 1 if every == "end" else len(content["messages"]) <= 2
    assert not (tmp_path / "run" / ".hub").exists()
    for name in folders:
        api, folder = client(None), tmp_path / "downloaded"
        api.snapshot_download(REPOSITORY, revision="trained", local_dir=folder, cache_dir=folder / ".cache")
        verify(str(folder / name))


@pytest.mark.parametrize("every", ["checkpoint", "all"])
def test_a_run_on_another_machine_resumes_from_the_hub(hub: Hub, tmp_path: Path, every: str) -> None:
    undisturbed = wide()
    trainer(tmp_path / "whole").fit(undisturbed, pairs(), pairs())
    trainer(tmp_path / "first", Publish(REPOSITORY, every), epochs=1).fit(wide(), pairs(), pairs())
    resumed = Wide()
    result = trainer(tmp_path / "second", Publish(REPOSITORY, every)).fit(
        resumed, pairs(), pairs(), resume="hub"
    )
    assert result.progress.updates == 10
    assert (tmp_path / "second" / "checkpoints" / "update-00000005").is_dir()
    assert weights(resumed) == weights(undisturbed)
    # Its own newer checkpoint comes before that of the Hub.
    (tmp_path / "hub" / "repositories" / "org--line.json").rename(tmp_path / "gone.json")
    again = trainer(tmp_path / "second", Publish(REPOSITORY), epochs=3).fit(
        Wide(), pairs(), pairs(), resume="hub"
    )
    assert again.progress.updates == 15


def test_a_checkpoint_whose_objects_are_files_is_fetched_too(hub: Hub, tmp_path: Path) -> None:
    saved = trainer(tmp_path / "first", epochs=1).fit(wide(), pairs()).last_checkpoint
    in_files(Path(str(saved)))
    push(tmp_path / "first", REPOSITORY, checkpoint=True)
    result = trainer(tmp_path / "second", Publish(REPOSITORY)).fit(Wide(), pairs(), resume="hub")
    assert (result.progress.updates, result.progress.epoch) == (10, 2)
    assert (tmp_path / "second" / "checkpoints" / "update-00000005" / "checkpoint.json").is_file()


def test_a_run_without_a_repository_begins_anew_and_one_without_access_does_not(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = trainer(tmp_path / "run", Publish(REPOSITORY)).fit(wide(), pairs(), resume="hub")
    assert result.progress.updates == 10
    monkeypatch.setenv("HF_TOKEN", "hf_anotherTokenThatIsWrong")
    with pytest.raises(HubError, match=r"no checkpoint was read from org/line: .*401") as failure:
        trainer(tmp_path / "new", Publish(REPOSITORY)).fit(wide(), pairs(), resume="hub")
    assert "hf_another" not in str(failure.value)
    monkeypatch.setenv("HF_TOKEN", "hf_markerTokenThatMustNeverBeSeen")


def test_a_damaged_checkpoint_on_the_hub_is_refused(hub: Hub, tmp_path: Path) -> None:
    trainer(tmp_path / "first", Publish(REPOSITORY, "checkpoint"), epochs=1).fit(wide(), pairs())
    api = client(None)
    api.upload_file(
        path_or_fileobj=b"{}", path_in_repo="last-checkpoint/model.safetensors", repo_id=REPOSITORY
    )
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        trainer(tmp_path / "second", Publish(REPOSITORY)).fit(wide(), pairs(), resume="hub")
    assert not list((tmp_path / "second").rglob("update-*"))


def test_training_goes_on_when_the_server_dies_within_an_upload(
    hub: Hub, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The next save completes; neither the failure nor anything that is written shows the token."""
    (hub.folder / "stall").touch()
    publish = Publish(REPOSITORY, "checkpoint")
    run = trainer(tmp_path / "run", publish, epochs=3, log_every="1 step")
    with warned() as told:
        for number, _ in enumerate(run.steps(wide(), pairs(), pairs()), 1):
            if number == 6:  # the first epoch's upload is in progress
                wait_for(lambda: (hub.folder / "stalled").exists())
                hub.kill()
            if number == 8:  # two updates were made meanwhile
                wait_for(lambda: publish._current is None or publish._current._process.poll() is not None)
                (hub.folder / "stall").unlink()
                hub.start()
    assert len(told) == 1
    assert told[0].startswith("the upload of update-00000005 to org/line failed: ")
    assert told[0].endswith("The next save tries again")
    assert commits(hub)[-1] == "Upload update-00000015"
    folder = downloaded(tmp_path / "downloaded")
    verify(str(folder / "last-checkpoint"))
    shown = [*told, *capfd.readouterr()]
    assert "hf_marker" not in " ".join(shown)
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"hf_marker" not in path.read_bytes(), path


def test_a_preempted_run_waits_for_the_upload_of_its_last_checkpoint(hub: Hub, tmp_path: Path) -> None:
    def stop(run: Any) -> None:
        if run.progress.updates == 3:
            signal.raise_signal(signal.SIGTERM)

    callbacks = Publish(REPOSITORY, "checkpoint"), LambdaCallback(on_step_end=stop)
    with pytest.raises(Preempted):
        trainer(tmp_path / "run", *callbacks).fit(wide(), pairs())
    assert commits(hub) == ["Upload update-00000003"]
    verify(str(downloaded(tmp_path / "downloaded") / "last-checkpoint"))


def wait_for(condition: Any, seconds: float = 90.0) -> None:
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends
        time.sleep(0.05)


def test_the_end_waits_for_a_stuck_upload_no_longer_than_its_timeout(hub: Hub, tmp_path: Path) -> None:
    (hub.folder / "stall").touch()
    publish = Publish(REPOSITORY, "save", timeout=20)
    began = time.monotonic()
    with warned(r"by hand: drivetrain checkpoint push .*update-00000010 org/line$"):
        result = trainer(tmp_path / "run", publish).fit(wide(), pairs())
    assert result.progress.updates == 10
    assert time.monotonic() - began < 60
    assert (hub.folder / "stalled").exists()
    assert not (tmp_path / "run" / ".hub").exists()


def test_a_broken_token_is_in_no_message(hub: Hub, run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The HTTP library's own error quotes the header that it cannot send."""
    with pytest.raises(HubError, match="org/line was not uploaded") as failure:
        push(run_dir, REPOSITORY, token="hf_markerToken\nThatBreaksTheHeader")
    assert "<hidden>" in str(failure.value)
    assert "marker" not in str(failure.value)
    assert "Breaks" not in str(failure.value)
    assert failure.value.__suppress_context__
    with pytest.raises(HubError) as failure:
        push(run_dir, REPOSITORY, token="secret-of-no-known-form")  # the server's answer quotes it
    assert "401" in str(failure.value)
    assert "secret-of" not in str(failure.value)


def test_a_token_among_the_arguments_of_a_task_is_not_uploaded(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Greedy(Wide):
        def __init__(self, token: str) -> None:
            super().__init__()

    trainer(tmp_path / "run").fit(Greedy("hf_markerTokenThatMustNeverBeSeen"), pairs())
    with pytest.raises(HubError, match=r"last-checkpoint/manifest\.json holds the Hub's token"):
        push(tmp_path / "run", REPOSITORY, checkpoint=True)
    push(tmp_path / "run", REPOSITORY)
    card = (downloaded(tmp_path / "downloaded") / "README.md").read_text()
    assert "| `task.token` | `<hidden>` |" in card


def train_on_two(folder: str) -> None:
    torch.manual_seed(3)
    Trainer(
        max_epochs=2,
        strategy="ddp",
        callbacks=[Publish(REPOSITORY, "checkpoint")],
        run_dir=folder,
        progress_bar=False,
    ).fit(Wide(), pairs())


def test_of_several_ranks_only_the_first_uploads(hub: Hub, tmp_path: Path) -> None:
    run_distributed(train_on_two, str(tmp_path / "run"), world_size=2)
    made = [each for each in hub.requests() if each[1].startswith(f"/api/models/{REPOSITORY}/commit/")]
    assert len(made) == len(commits(hub))
    assert commits(hub)[-1] == "Upload update-00000006"
    verify(str(downloaded(tmp_path / "downloaded") / "last-checkpoint"))


def test_the_command_pushes_a_run(hub: Hub, run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["checkpoint", "push", str(run_dir), REPOSITORY, "--license", "mit", "--checkpoint", "--json"]
    assert main(words) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["commit"].startswith(hub.address)
    assert {"README.md", "last-checkpoint/manifest.json"} <= files()
    assert main(["checkpoint", "push", str(run_dir), "not a name"]) == 2
    assert "'organisation/name'" in capsys.readouterr().err


def test_without_a_token_or_a_checkpoint_a_fit_does_not_begin(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="checkpoint=False saves none"):
        trainer(tmp_path / "run", Publish(REPOSITORY), checkpoint=False)
    with monkeypatch.context() as changed:
        changed.delenv("HF_TOKEN")
        changed.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(tmp_path / "none"))
        with pytest.raises(ConfigError, match="no token to upload to org/line with"):
            trainer(tmp_path / "run", Publish(REPOSITORY)).fit(wide(), pairs())
