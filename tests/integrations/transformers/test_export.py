"""Folders that `from_pretrained` loads: from tasks, checkpoints and finished fits."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.messages import heard
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import CheckpointConfig, DeepSpeedConfig, LambdaCallback, OptimizerConfig
from drivetrain.checkpoint import load_weights
from drivetrain.cli.main import main
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.distributed.processes import rank
from drivetrain.testing import run_distributed

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

from tests.integrations.transformers.families import FAMILIES, loader, model, padded, rows  # noqa: E402
from tests.integrations.transformers.test_task import INEXACT, word_tokenizer  # noqa: E402

from drivetrain.integrations.transformers import TransformersTask, export_pretrained  # noqa: E402

pytestmark = [
    pytest.mark.full,
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),  # peft's
]

transformers.modeling_utils.unwrap_model(torch.nn.Linear(1, 1))  # sets variables of the environment once


def tied_llama() -> Any:
    torch.manual_seed(3)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, tie_word_embeddings=True))


def experts() -> Any:
    """A model whose files have other tensors than it has: transformers stacks the experts of a layer."""
    torch.manual_seed(3)
    config = transformers.MixtralConfig(**SMALL, num_local_experts=3, num_experts_per_tok=2)
    return transformers.MixtralForCausalLM(config)


SMALL = {
    "vocab_size": 99,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 16,
    "max_position_embeddings": 32,
}
MODELS = {**{name: name for name in FAMILIES}, "llama, tied": tied_llama, "experts": experts}


def made(name: str) -> Any:
    make = MODELS[name]
    return model(make) if isinstance(make, str) else make()


def batch(name: str) -> Any:
    return padded(rows(name if name in FAMILIES else "gpt2", 3))


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_weights(folder)


def assert_loads_as(folder: Path, right: Any, name: str) -> None:
    """Check that `from_pretrained` takes every tensor, finds each, and that the outputs are bitwise equal."""
    found, report = type(right).from_pretrained(folder, output_loading_info=True)
    assert not any(report.values()), report
    given = batch(name)
    with torch.no_grad():
        outputs, expected = found.eval()(**given), right.eval()(**given)
    for one, other in zip(outputs.to_tuple(), expected.to_tuple(), strict=True):
        if isinstance(one, torch.Tensor):
            assert torch.equal(one, other)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_exported_as_transformers_would_save_the_model(name: str, tmp_path: Path) -> None:
    data = loader(name if name in FAMILIES else "gpt2", 4)
    task = TransformersTask(made(name), optimizer=OptimizerConfig("sgd", lr=0.1))
    with heard(INEXACT):
        quiet(max_steps=1, run_dir=tmp_path / "run", checkpoint=True).fit(task, data)
    task.model.save_pretrained(tmp_path / "theirs")
    theirs = stored(tmp_path / "theirs")
    for source, folder in ((tmp_path / "run", "checkpoint"), (task, "task")):
        export_pretrained(source, tmp_path / folder)
        ours = stored(tmp_path / folder)
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(each, theirs[key]) for key, each in ours.items())
        names = {each.name for each in (tmp_path / "theirs").iterdir()}
        assert {each.name for each in (tmp_path / folder).iterdir()} == names
        for each in names - {"model.safetensors"}:
            values = json.loads((tmp_path / "theirs" / each).read_text())
            assert json.loads((tmp_path / folder / each).read_text()) == values
        assert_loads_as(tmp_path / folder, task.model, name)


def trained(folder: Path, name: str = "bert, masked", **options: Any) -> TransformersTask:
    """A task after one update, with its run directory."""
    task = TransformersTask(made(name), optimizer=OptimizerConfig("sgd", lr=0.1), **options)
    quiet(max_steps=1, run_dir=folder, checkpoint=True).fit(task, loader(name, 4))
    return task


def test_a_finished_fit_leaves_a_folder_with_the_processor(tmp_path: Path) -> None:
    task = trained(tmp_path / "run", processing_class=word_tokenizer(tmp_path))
    folder = tmp_path / "run" / "pretrained"
    assert_loads_as(folder, task.model, "bert, masked")
    assert transformers.AutoTokenizer.from_pretrained(folder)("a b")["input_ids"] == [2, 4, 5, 3]
    assert not (tmp_path / "run" / "model.safetensors").exists()
    export_pretrained(tmp_path / "run", tmp_path / "exported")
    names = {each.name for each in folder.iterdir()}
    assert {each.name for each in (tmp_path / "exported").iterdir()} == names
    quiet(max_steps=1, checkpoint=False, run_dir=tmp_path / "none").fit(task, loader("bert, masked", 4))
    assert not (tmp_path / "none").exists()


def test_the_kind_of_problem_that_the_first_labels_show_is_kept(tmp_path: Path) -> None:
    sample = {"input_ids": torch.tensor([[3, 4, 5]]), "labels": torch.tensor([[1.0, 0.0, 1.0]])}
    made = TransformersTask(model("bert, classes"))
    made.model.config.id2label = {0: "a", 1: "b", 2: "c"}  # after the task is made
    quiet(max_steps=1, run_dir=tmp_path, checkpoint=True).fit(made, [sample])
    export_pretrained(tmp_path, tmp_path / "exported")
    configs = [
        transformers.AutoConfig.from_pretrained(tmp_path / name) for name in ("pretrained", "exported")
    ]
    for config in (*configs, TransformersTask.from_checkpoint(tmp_path).model.config):
        assert config.problem_type == "multi_label_classification"
        assert config.id2label[2] == "c"


def test_the_command_exports_in_several_files_and_in_another_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    task = trained(tmp_path / "run")
    words = ["checkpoint", "export", "--format", "transformers", str(tmp_path / "run"), str(tmp_path / "out")]
    assert main([*words, "--max-shard-size", "5 KB", "--json"]) == 0
    written = json.loads(capsys.readouterr().out)["files"]
    assert len(written) > 3
    assert_loads_as(tmp_path / "out", task.model, "bert, masked")
    assert main(words) == 2
    assert "exists; --force replaces its files" in capsys.readouterr().err
    assert main([*words, "--force", "--dtype", "bf16"]) == 0
    assert {each.name for each in (tmp_path / "out").iterdir()} == {"config.json", "model.safetensors"}
    loaded = transformers.BertForMaskedLM.from_pretrained(tmp_path / "out")
    assert loaded.dtype == torch.bfloat16
    assert torch.equal(loaded.bert.embeddings.word_embeddings.weight.float(), stored_as_bf16(task))


def stored_as_bf16(task: TransformersTask) -> torch.Tensor:
    return task.model.bert.embeddings.word_embeddings.weight.detach().bfloat16().float()


def test_what_cannot_be_exported_is_refused(tmp_path: Path) -> None:
    frozen = TransformersTask(made("bert, classes"))
    frozen.model.bert.requires_grad_(False)
    policy = CheckpointConfig(parameters="trainable")
    quiet(max_steps=1, run_dir=tmp_path / "head", checkpoint=policy).fit(frozen, loader("bert, classes", 4))
    with pytest.raises(CheckpointError, match=r"it lacks 39 frozen weights of BertForSequenceClassification"):
        export_pretrained(tmp_path / "head", tmp_path / "out")
    assert_loads_as(tmp_path / "head" / "pretrained", frozen.model, "bert, classes")
    quiet(max_epochs=1, run_dir=tmp_path / "line", checkpoint=True).fit(Regression(), pairs())
    with pytest.raises(CheckpointError, match="was saved by Regression, and has no model of transformers"):
        export_pretrained(tmp_path / "line", tmp_path / "out")
    with pytest.raises(ConfigError, match="takes a TransformersTask, or the path"):
        export_pretrained(frozen.model, tmp_path / "out")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file; give a folder"):
        export_pretrained(frozen, tmp_path / "file")
    assert not (tmp_path / "out").exists()


def shard_and_export(folder: Path) -> None:
    """Train under FSDP, and export the sharded task within the fit and after it."""
    task = TransformersTask(made("llama, tied"), optimizer=OptimizerConfig("sgd", lr=0.1))
    last = LambdaCallback(on_step_end=lambda run: export_pretrained(task, folder / "within") and None)
    trainer = quiet(max_steps=1, run_dir=folder / "run", checkpoint=True, strategy="fsdp", callbacks=[last])
    trainer.fit(task, loader("gpt2", 4))
    task.model.save_pretrained(folder / "theirs", is_main_process=rank() == 0)


def test_a_sharded_run_leaves_the_same_folder_as_a_task_in_memory(tmp_path: Path) -> None:
    run_distributed(shard_and_export, tmp_path, timeout=120)
    export_pretrained(tmp_path / "run", tmp_path / "checkpoint")
    theirs = stored(tmp_path / "theirs")
    for folder in (tmp_path / "within", tmp_path / "run" / "pretrained", tmp_path / "checkpoint"):
        assert stored(folder).keys() == theirs.keys()
        assert all(torch.equal(each, theirs[name]) for name, each in stored(folder).items())
    right = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "theirs")
    assert_loads_as(tmp_path / "within", right, "llama, tied")


def export_within(folder: Path) -> None:
    """Export the task in the middle of a fit under ZeRO 3, which has divided it."""
    task = TransformersTask(made("gpt2"))
    acts = LambdaCallback(on_step_end=lambda run: export_pretrained(task, folder / "out") and None)
    config = {"zero_optimization": {"stage3_param_persistence_threshold": 0}}  # small ones are divided too
    strategy = DeepSpeedConfig(stage=3, config=config)
    quiet(max_steps=1, strategy=strategy, callbacks=[acts]).fit(task, loader("gpt2", 4))


def test_a_task_that_deepspeed_has_divided_is_not_exported_from_memory(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"is divided by DeepSpeed, (.*)\. Export a checkpoint of the run"):
        run_distributed(export_within, tmp_path, timeout=120)
    assert not (tmp_path / "out").exists()


LARGE = {**SMALL, "vocab_size": 1000, "hidden_size": 1024, "num_hidden_layers": 3, "intermediate_size": 4096}

PEAK = """
import re, sys
from drivetrain.integrations.transformers import export_pretrained

def memory(key):
    with open("/proc/self/status") as file:
        return int(re.search(rf"^{key}:\\s+(\\d+) kB", file.read(), re.M)[1]) * 1024

small, large, out = sys.argv[1:]
export_pretrained(small, out + "/small")  # whatever is imported or made once
with open("/proc/self/clear_refs", "w") as file:
    file.write("5")  # the peak begins anew
before = memory("VmRSS")
export_pretrained(large, out + "/large", max_shard_size="80 MB")
sys.stdout.write(str(memory("VmHWM") - before))
"""


def train_sharded(folder: Path, sizes: dict[str, int]) -> None:
    """Make a checkpoint of two processes' shards."""
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    task = TransformersTask(llama, optimizer=OptimizerConfig("sgd", lr=0.1))
    policy = CheckpointConfig(every="1 step", best=0)
    trainer = quiet(max_steps=1, run_dir=folder, checkpoint=policy, strategy="fsdp")
    trainer.fit(task, loader("llama", 2))


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_export_of_a_sharded_checkpoint_holds_one_tensor_at_a_time(tmp_path: Path) -> None:
    for name, sizes in (("small", SMALL), ("large", LARGE)):
        run_distributed(train_sharded, tmp_path / name, sizes, timeout=200)
    command = [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    files = list((tmp_path / "large").glob("*.safetensors"))
    assert len(files) == 3
    assert sum(each.stat().st_size for each in files) > 200e6
    assert int(done.stdout) < 100e6  # the largest tensor has 17 MB; pages of mapped files count too


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A pretrained classifier in a folder."""
    made("bert, classes").save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(base: Path, seed: int = 0, **options: Any) -> TransformersTask:
    """A base with an adapter and a head that is trained, as PEFT makes it."""
    found = transformers.BertForSequenceClassification.from_pretrained(base)
    torch.manual_seed(seed)
    config = peft.LoraConfig(
        **{"r": 2, "target_modules": ["query", "value"], "task_type": "SEQ_CLS"} | options
    )
    return TransformersTask(peft.get_peft_model(found, config), optimizer=OptimizerConfig("adamw", lr=1e-2))


ONLY = CheckpointConfig(every="1 step", keep_last=None)


def fit(task: TransformersTask, folder: Path, updates: int = 2, **options: Any) -> dict[str, torch.Tensor]:
    """Train, and return copies of the weights."""
    trainer = quiet(**{"max_steps": updates, "run_dir": folder, "checkpoint": ONLY} | options)
    trainer.fit(task, loader("bert, classes"), resume="auto")
    return {name: each.detach().clone() for name, each in task.state_dict().items()}


def test_a_checkpoint_of_an_adapter_holds_it_alone_and_resumes_bitwise(base: Path, tmp_path: Path) -> None:
    straight = fit(adapted(base), tmp_path / "straight")
    fit(adapted(base), tmp_path / "run", updates=1)
    held = set(stored(tmp_path / "run" / "checkpoints" / "update-00000001"))
    assert held
    assert all("lora_" in name or ".classifier." in name for name in held)
    resumed = fit(adapted(base), tmp_path / "run")
    torch.testing.assert_close(resumed, straight, rtol=0, atol=0)
    again = TransformersTask.from_checkpoint(tmp_path / "run")
    torch.testing.assert_close(dict(again.state_dict()), straight, rtol=0, atol=0)
    whole = CheckpointConfig(parameters="all")
    fit(adapted(base), tmp_path / "whole", updates=1, checkpoint=whole)
    held = set(stored(tmp_path / "whole" / "checkpoints" / "update-00000001"))
    assert held == set(straight)


def test_a_resume_on_another_base_names_both(base: Path, tmp_path: Path) -> None:
    fit(adapted(base), tmp_path / "run", updates=1)
    torch.manual_seed(4)
    transformers.BertForSequenceClassification(made("bert, classes").config).save_pretrained(
        tmp_path / "other"
    )
    with pytest.raises(CheckpointError, match=r"are those of '.*base', and this run has those of '.*other'"):
        fit(adapted(tmp_path / "other"), tmp_path / "run")
    shutil.copytree(base, tmp_path / "copy")
    fit(adapted(tmp_path / "copy"), tmp_path / "run")  # the same weights
    shutil.rmtree(base)
    with pytest.raises(CheckpointError, match=r"the frozen weights of '.*base', which cannot be loaded"):
        TransformersTask.from_checkpoint(tmp_path / "run" / "checkpoints" / "update-00000001")
    nameless = TransformersTask(peft.get_peft_model(made("bert, classes"), peft.LoraConfig(r=2)))
    fit(nameless, tmp_path / "nameless", updates=1)
    with pytest.raises(CheckpointError, match="that has no name"):
        TransformersTask.from_checkpoint(tmp_path / "nameless")


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"target_modules": "all-linear"}])
def test_an_adapter_is_exported_as_peft_would_save_it(
    options: dict[str, Any], base: Path, tmp_path: Path
) -> None:
    task = adapted(base, **options)
    fit(task, tmp_path / "run")
    task.model.save_pretrained(tmp_path / "theirs")
    export_pretrained(task, tmp_path / "task")
    export_pretrained(tmp_path / "run", tmp_path / "checkpoint")
    theirs = load_weights(tmp_path / "theirs" / "adapter_model.safetensors")
    right = json.loads((tmp_path / "theirs" / "adapter_config.json").read_text())
    for folder in (tmp_path / "task", tmp_path / "checkpoint", tmp_path / "run" / "pretrained"):
        ours = load_weights(folder / "adapter_model.safetensors")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        config = json.loads((folder / "adapter_config.json").read_text())
        assert {**config, "target_modules": sorted(config["target_modules"])} == {
            **right,
            "target_modules": sorted(right["target_modules"]),
        }
        assert {each.name for each in folder.iterdir()} == {
            "adapter_config.json",
            "adapter_model.safetensors",
        }
        found = transformers.BertForSequenceClassification.from_pretrained(base)
        loaded = peft.PeftModel.from_pretrained(found, folder).eval()
        given = batch("bert, classes")
        with torch.no_grad():
            assert torch.equal(loaded(**given).logits, task.model.eval()(**given).logits)


def test_prompts_are_exported_too(tmp_path: Path) -> None:
    gpt2 = TransformersTask(
        peft.get_peft_model(
            made("gpt2"), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
        )
    )
    quiet(max_steps=1, run_dir=tmp_path / "run", checkpoint=ONLY).fit(gpt2, loader("gpt2", 4))
    gpt2.model.save_pretrained(tmp_path / "theirs")
    export_pretrained(tmp_path / "run", tmp_path / "checkpoint")
    theirs = load_weights(tmp_path / "theirs" / "adapter_model.safetensors")
    for folder in (tmp_path / "checkpoint", tmp_path / "run" / "pretrained"):
        ours = load_weights(folder / "adapter_model.safetensors")
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("bits", [4, 8])
def test_an_adapter_on_a_quantised_base_resumes_bitwise_and_is_exported(bits: int, tmp_path: Path) -> None:
    quantization = pytest.importorskip("torchao.quantization")
    config = transformers.LlamaConfig(**SMALL | {"hidden_size": 64, "intermediate_size": 64})
    torch.manual_seed(3)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "base")
    kind = (
        quantization.IntxWeightOnlyConfig(weight_dtype=torch.int4)
        if bits == 4
        else quantization.Int8WeightOnlyConfig()
    )

    def task() -> TransformersTask:
        given = transformers.TorchAoConfig(kind)
        base = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "base", quantization_config=given)
        torch.manual_seed(1)
        return TransformersTask(
            peft.get_peft_model(base, peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
        )

    def trained(folder: str, updates: int) -> dict[str, torch.Tensor]:
        made = task()
        run = quiet(max_steps=updates, run_dir=tmp_path / folder, checkpoint=ONLY)
        run.fit(made, loader("gpt2"), resume="auto")
        return {name: each.detach() for name, each in made.named_parameters() if each.requires_grad}

    straight = trained("straight", 4)
    trained("run", 2)
    torch.testing.assert_close(trained("run", 4), straight, rtol=0, atol=0)
    again = dict(TransformersTask.from_checkpoint(tmp_path / "run").named_parameters())
    assert all(torch.equal(again[name], each) for name, each in straight.items())
    export_pretrained(tmp_path / "run", tmp_path / "out")
    assert {each.name for each in (tmp_path / "out").iterdir()} == {
        "adapter_config.json",
        "adapter_model.safetensors",
    }


def test_a_base_of_another_quantisation_is_refused() -> None:
    found = made("gpt2")
    found.config.quantization_config = transformers.BitsAndBytesConfig(load_in_8bit=True)
    with pytest.raises(ConfigError, match="quantised by bitsandbytes, whose layers do not load all"):
        TransformersTask(found)
