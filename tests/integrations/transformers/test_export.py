"""Folders that `from_pretrained` loads: from tasks, checkpoints and finished fits."""

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.integrations.transformers.families import FAMILIES, loader, model, padded, rows
from tests.integrations.transformers.test_task import word_tokenizer
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, LambdaCallback, OptimizerConfig, TaskModule
from drivetrain.checkpoint import load_weights
from drivetrain.cli.main import main
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.distributed.processes import rank
from drivetrain.task.model_info import ModelInfo

hf = Lazy("drivetrain.integrations.transformers")
peft = Lazy("peft")
transformers = Lazy("transformers")

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

CLASSES = "bert, classes"
SMALL = {"vocab_size": 99, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
SMALL |= {"num_key_value_heads": 2, "intermediate_size": 16, "max_position_embeddings": 32}
SGD = OptimizerConfig("sgd", lr=0.1)
ONLY = CheckpointConfig(every="1 step", keep_last=None)


def made(name: str) -> Any:  # stored: a file with other tensors
    torch.manual_seed(3)
    if name == "llama, tied":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))
    if name == "experts":
        config = transformers.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config)
    return model(name)


def data_of(name: str) -> str:
    return name if name in FAMILIES else "gpt2"


def assert_same_tensors(folder: Path, theirs: Path) -> None:
    ours, right = load_weights(folder), load_weights(theirs)
    assert ours.keys() == right.keys()
    assert all(torch.equal(each, right[name]) for name, each in ours.items())


def assert_loads_as(folder: Path, right: Any, name: str) -> None:
    found, report = type(right).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    given = padded(rows(data_of(name), 3))
    with torch.no_grad():
        outputs, expected = found.eval()(**given), right.eval()(**given)
    right.train()
    for one, other in zip(outputs.to_tuple(), expected.to_tuple(), strict=True):
        assert not isinstance(one, torch.Tensor) or torch.equal(one, other)


def trained(folder: Path, name: str = "bert, masked", **options: Any) -> Any:
    task = hf.TransformersTask(made(name), optimizer=SGD, **options)
    quiet(max_steps=1, run_dir=folder, checkpoint=True).fit(task, loader(data_of(name), 4))
    return task


def test_an_export_replaces_its_own_files_and_no_others(tmp_path: Path) -> None:
    task = hf.TransformersTask(made(CLASSES), optimizer=SGD)
    for name in ("config.json", "model.safetensors"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / name).write_text("precious")
        with pytest.raises(CheckpointError, match=f"{name}' is a file that drivetrain has not written"):
            hf.export_pretrained(task, folder)
        assert (folder / name).read_text() == "precious"
        (folder / name).unlink()
        hf.export_pretrained(task, folder)
        (folder / "config.json").write_text("{}")
        hf.export_pretrained(task, folder)
        assert json.loads((folder / "config.json").read_text())


QUICK = (CLASSES, "t5", "llama, tied", "experts")
OTHERS = [pytest.param(each, marks=pytest.mark.nightly) for each in FAMILIES if each not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *OTHERS])
def test_a_checkpoint_is_exported_as_transformers_would_save_the_model(name: str, tmp_path: Path) -> None:
    task, theirs = trained(tmp_path / "run", name), tmp_path / "theirs"
    task.model.save_pretrained(theirs)
    names = {each.name for each in theirs.iterdir()}
    for source, folder in ((tmp_path / "run", tmp_path / "checkpoint"), (task, tmp_path / "task")):
        hf.export_pretrained(source, folder)
        assert_same_tensors(folder, theirs)
        assert {each.name for each in folder.iterdir()} == names
        for each in names - {"model.safetensors"}:
            assert json.loads((folder / each).read_text()) == json.loads((theirs / each).read_text())
        assert_loads_as(folder, task.model, name)


def test_a_finished_fit_leaves_a_folder_with_the_processor_and_the_kind_of_problem(tmp_path: Path) -> None:
    task = trained(tmp_path / "run", processing_class=word_tokenizer(tmp_path))
    folder = tmp_path / "run" / "pretrained"
    assert_loads_as(folder, task.model, "bert, masked")
    assert transformers.AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == [2, 4, 5, 3]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    hf.export_pretrained(tmp_path / "run", tmp_path / "exported")
    names = {each.name for each in folder.iterdir()}
    assert {each.name for each in (tmp_path / "exported").iterdir()} == names
    quiet(max_steps=1, checkpoint=False, run_dir=tmp_path / "none").fit(task, loader("bert, masked", 4))
    assert not (tmp_path / "none").exists()
    # The kind of problem that the first labels show.
    sample = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[1.0, 0.0, 1.0]])}
    several = hf.TransformersTask(model(CLASSES))
    several.model.config.id2label = {0: "a", 1: "b", 2: "c"}  # after the task is made
    run = tmp_path / "several"
    quiet(max_steps=1, run_dir=run, checkpoint=True).fit(several, [sample])
    hf.export_pretrained(run, run / "exported")
    configs = [transformers.AutoConfig.from_pretrained(run / name) for name in ("pretrained", "exported")]
    for config in (*configs, hf.TransformersTask.from_checkpoint(run).model.config):
        assert config.problem_type == "multi_label_classification"
        assert config.id2label[2] == "c"


def test_checkpoint_export_shards_and_casts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    task, out = trained(tmp_path / "run"), tmp_path / "out"
    words = ["checkpoint", "export", "--format", "transformers", str(tmp_path / "run"), str(out)]
    assert main([*words, "--max-shard-size", "5 KB", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["files"]) > 3
    assert_loads_as(out, task.model, "bert, masked")
    assert main(words) == 2
    assert "exists; --force replaces its files" in capsys.readouterr().err
    assert main([*words, "--force", "--dtype", "bf16"]) == 0
    assert {each.name for each in out.iterdir()} == {"config.json", "model.safetensors"}
    loaded = transformers.BertForMaskedLM.from_pretrained(out)
    assert loaded.dtype == torch.bfloat16
    right = task.model.bert.embeddings.word_embeddings.weight.detach().bfloat16()
    assert torch.equal(loaded.bert.embeddings.word_embeddings.weight, right)


def test_refusals(tmp_path: Path) -> None:
    frozen = hf.TransformersTask(made(CLASSES))
    frozen.model.bert.requires_grad_(False)
    policy = CheckpointConfig(parameters="trainable")
    quiet(max_steps=1, run_dir=tmp_path / "head", checkpoint=policy).fit(frozen, loader(CLASSES, 4))
    assert_loads_as(tmp_path / "head" / "pretrained", frozen.model, CLASSES)
    quiet(max_epochs=1, run_dir=tmp_path / "line", checkpoint=True).fit(Regression(), pairs())
    quantised = made("gpt2")
    quantised.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)

    def export(source: Any, name: str = "out") -> Any:
        return lambda: hf.export_pretrained(source, tmp_path / name)

    cases: dict[str, Any] = {
        "frozen weights": (export(tmp_path / "head"), "it lacks 39 frozen weights of BertForSequence"),
        "another task": (export(tmp_path / "line"), "was saved by Regression"),
        "a model": (export(frozen.model), "takes a TransformersTask, or the path"),
        "another quantisation": (lambda: hf.TransformersTask(quantised), "quantised by bitsandbytes"),
    }
    assert_refused((CheckpointError, ConfigError), cases)
    assert not (tmp_path / "out").exists()


def shard_and_export(folder: Path) -> None:
    task = hf.TransformersTask(made("llama, tied"), optimizer=SGD)
    last = LambdaCallback(on_step_end=lambda run: hf.export_pretrained(task, folder / "within") and None)
    trainer = quiet(max_steps=1, run_dir=folder / "run", checkpoint=True, strategy="fsdp", callbacks=[last])
    trainer.fit(task, loader("gpt2", 4))
    task.model.save_pretrained(folder / "theirs", is_main_process=rank() == 0)


@pytest.mark.landing
def test_a_sharded_run_leaves_the_same_folder_as_a_task_in_memory(tmp_path: Path) -> None:
    on_two_ranks(shard_and_export, tmp_path)
    hf.export_pretrained(tmp_path / "run", tmp_path / "checkpoint")
    for folder in (tmp_path / "within", tmp_path / "run" / "pretrained", tmp_path / "checkpoint"):
        assert_same_tensors(folder, tmp_path / "theirs")
    right = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_loads_as(tmp_path / "within", right, "llama, tied")


@pytest.fixture
def base(tmp_path: Path) -> Path:
    made(CLASSES).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, **options: Any) -> Any:
    found = transformers.BertForSequenceClassification.from_pretrained(base)
    torch.manual_seed(0)
    given = {"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS", **options}
    wrapped = peft.get_peft_model(found, peft.LoraConfig(**given))
    return hf.TransformersTask(wrapped, optimizer=OptimizerConfig("adamw", lr=1e-2))


def fit(task: Any, folder: Path, steps: int = 2, **options: Any) -> dict[str, torch.Tensor]:
    trainer = quiet(**{"max_steps": steps, "run_dir": folder, "checkpoint": ONLY} | options)
    trainer.fit(task, loader(CLASSES), resume="auto")
    return {name: each.detach().clone() for name, each in task.state_dict().items()}


def test_a_checkpoint_of_an_adapter_holds_it_alone_and_resumes_bitwise(base: Path, tmp_path: Path) -> None:
    straight = fit(adapted(base), tmp_path / "straight")
    fit(adapted(base), tmp_path / "run", steps=1)
    held = set(load_weights(tmp_path / "run" / "checkpoints" / "step-00000001"))
    assert held
    assert all("lora_" in name or ".classifier." in name for name in held)
    torch.testing.assert_close(fit(adapted(base), tmp_path / "run"), straight, rtol=0, atol=0)
    again = hf.TransformersTask.from_checkpoint(tmp_path / "run")
    torch.testing.assert_close(dict(again.state_dict()), straight, rtol=0, atol=0)
    fit(adapted(base), tmp_path / "whole", steps=1, checkpoint=CheckpointConfig(parameters="all"))
    assert set(load_weights(tmp_path / "whole" / "checkpoints" / "step-00000001")) == set(straight)
    made(CLASSES).bert.save_pretrained(tmp_path / "body")  # the head's first values are new ones
    headed = fit(adapted(tmp_path / "body"), tmp_path / "headed")
    again = hf.TransformersTask.from_checkpoint(tmp_path / "headed")
    torch.testing.assert_close(dict(again.state_dict()), headed, rtol=0, atol=0)


def test_resume_on_another_base_names_both(base: Path, tmp_path: Path) -> None:
    run, other = tmp_path / "run", tmp_path / "other"
    fit(adapted(base), run, steps=1)
    torch.manual_seed(4)
    transformers.BertForSequenceClassification(made(CLASSES).config).save_pretrained(other)
    shutil.copytree(base, tmp_path / "copy")
    nameless = hf.TransformersTask(peft.get_peft_model(made(CLASSES), peft.LoraConfig(r=2)))
    fit(nameless, tmp_path / "nameless", steps=1)
    with pytest.raises(CheckpointError, match=r"are those of '.*base', and this run has those of '.*other'"):
        fit(adapted(other), run)
    fit(adapted(tmp_path / "copy"), run)  # the same weights
    shutil.rmtree(base)
    rebuild = hf.TransformersTask.from_checkpoint
    first = run / "checkpoints" / "step-00000001"
    cases: dict[str, Any] = {
        "gone": (lambda: rebuild(first), "the frozen weights of", "base', which cannot be loaded"),
        "nameless": (lambda: rebuild(tmp_path / "nameless"), "that has no name"),
    }
    assert_refused(CheckpointError, cases)


def test_an_adapter_is_exported_as_peft_would_save_it(base: Path, tmp_path: Path) -> None:
    files = {"adapter_config.json", "adapter_model.safetensors"}
    for options in ({}, {"use_dora": True, "target_modules": "all-linear"}):
        task, place = adapted(base, **options), tmp_path / f"{len(options)}"
        fit(task, place / "run")
        task.model.save_pretrained(place / "theirs")
        hf.export_pretrained(task, place / "task")
        hf.export_pretrained(place / "run", place / "checkpoint")
        configs = []
        for folder in (place / "theirs", place / "task", place / "checkpoint", place / "run" / "pretrained"):
            assert_same_tensors(*(each / "adapter_model.safetensors" for each in (folder, place / "theirs")))
            config = json.loads((folder / "adapter_config.json").read_text())
            configs.append({**config, "target_modules": sorted(config["target_modules"])})
            assert {each.name for each in folder.iterdir()} - {"README.md"} == files
            found = transformers.BertForSequenceClassification.from_pretrained(base)
            loaded, given = peft.PeftModel.from_pretrained(found, folder).eval(), padded(rows(CLASSES, 3))
            again = adapted(base, **options)
            assert not again.load_weights(folder).missing
            with torch.no_grad():
                expected = task.model.eval()(**given).logits
                assert torch.equal(loaded(**given).logits, expected)
                assert torch.equal(again.model.eval()(**given).logits, expected)
            if folder.name == "theirs":  # without fingerprints
                continue
            torch.nn.init.zeros_(again.model.bert.embeddings.word_embeddings.weight)
            with pytest.raises(CheckpointError, match=r"word_embeddings.weight' has other values \(hash"):
                again.load_weights(folder)
        assert all(each == configs[0] for each in configs)


def test_an_adapter_is_merged_into_its_base(base: Path, tmp_path: Path) -> None:
    task = adapted(base)
    fit(task, tmp_path / "run")
    hf.export_pretrained(task, tmp_path / "task", merge=True)
    assert (
        main(
            [
                "checkpoint",
                "export",
                "--format",
                "transformers",
                "--merge",
                str(tmp_path / "run"),
                str(tmp_path / "command"),
            ]
        )
        == 0
    )
    assert_same_tensors(tmp_path / "command" / "model.safetensors", tmp_path / "task" / "model.safetensors")
    merged = transformers.BertForSequenceClassification.from_pretrained(tmp_path / "task").eval()
    tokens = torch.arange(6)[None] + 2
    torch.testing.assert_close(merged(tokens).logits, task.model.eval()(tokens).logits)
    plain = hf.TransformersTask(made(CLASSES))
    with pytest.raises(ConfigError, match="this is a BertForSequenceClassification"):
        hf.export_pretrained(plain, tmp_path / "plain", merge=True)
    layers = torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)
    settings = peft.LoraConfig(target_modules=["0", "2"], init_lora_weights=False, bias="all")
    own, alone = Regression(), Regression()
    own.net, alone.net = (torch.nn.Sequential(*copy.deepcopy(layers)) for _ in range(2))
    own.net, given = peft.get_peft_model(own.net, settings), torch.randn(3, 4)
    expected = own.net(given)
    alone.load_state_dict(hf.merged_weights(own))  # of any task
    torch.testing.assert_close(alone.net(given), expected)
    assert torch.equal(own.net(given), expected)
    torch.testing.assert_close(alone.line.weight, own.line.weight, rtol=0, atol=0)
    file = ["checkpoint", "export", "--merge", str(tmp_path / "run"), str(tmp_path / "file.safetensors")]
    assert main(file) == 2


class Own(TaskModule):  # a model of the user's own classes, which a library's model has other names for
    has_config = True
    out_names = "^out"

    def __init__(self) -> None:
        super().__init__()
        whole = made("llama, tied")
        self.trunk, self.out = whole.model, whole.lm_head
        self.scale = torch.nn.Parameter(torch.ones(1))

    def training_step(self, batch: Any) -> torch.Tensor:
        return (self.out(self.trunk(batch["input_ids"]).last_hidden_state) * self.scale).square().mean()

    def model_info(self) -> ModelInfo:
        config = transformers.LlamaConfig(**SMALL, tie_word_embeddings=True)
        names = {"^trunk": "model", self.out_names: "lm_head", "^scale$": None}
        assets = [config] if self.has_config else []
        return ModelInfo(assets=assets, export_format="transformers", export_names=names)


def test_a_task_with_a_map_of_names_is_exported_for_transformers(tmp_path: Path) -> None:
    task, tokens = Own(), torch.arange(6)[None] + 2
    options = {"max_steps": 1, "checkpoint": ONLY}
    quiet(**options, run_dir=tmp_path / "run").fit(task, [{"input_ids": tokens}])
    export = ["checkpoint", "export", "--format", "transformers"]
    assert main([*export, str(tmp_path / "run"), str(tmp_path / "out")]) == 0
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    expected = task.out(task.trunk(tokens).last_hidden_state)
    torch.testing.assert_close(loaded(tokens).logits, expected, rtol=0, atol=0)
    hf.export_pretrained(tmp_path / "run", tmp_path / "half", dtype="bf16")
    assert {each.dtype for each in load_weights(tmp_path / "half" / "model.safetensors").values()} == {
        torch.bfloat16
    }
    for name, value, message in (
        ("has_config", False, r"without the 'config\.json'"),
        ("out_names", "^uot", r"'\^uot' .* matches no weight"),
    ):
        setattr(without := Own(), name, value)
        quiet(**options, run_dir=tmp_path / name).fit(without, [{"input_ids": tokens}])
        with pytest.raises(CheckpointError, match=message):
            hf.export_pretrained(tmp_path / name, tmp_path / "other")
