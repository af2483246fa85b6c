"""Models that are read in rows from a folder of `from_pretrained`, and split by transformers' own plans."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integrations.lazy import Lazy
from tests.support.ranks import on_two_ranks
from tests.support.refusals import assert_refused
from tests.support.tasks import quiet

from drivetrain import ConfigError, FSDPConfig, OptimizerConfig, StrategyError
from drivetrain.checkpoint.weights.stored_rows import stored_weights
from drivetrain.core.errors import CheckpointError
from drivetrain.integrations.transformers import Trainer, TransformersTask, from_training_arguments
from drivetrain.strategies.fsdp.tensor_parallel import parallel_modules
from drivetrain.strategies.meta_device import Materialization

transformers = Lazy("transformers")

SIZES = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 4}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
IDS = torch.randint(0, 32, (3, 2, 6), generator=torch.Generator().manual_seed(3))
DATA = [{"input_ids": each, "labels": each.clone()} for each in IDS]


def saved(name: str, folder: Path, **options: Any) -> str:
    config = getattr(transformers, f"{name}Config")(**SIZES, **options)
    torch.manual_seed(0)
    getattr(transformers, f"{name}ForCausalLM")(config).save_pretrained(folder, max_shard_size="10KB")
    return str(folder)


def trained(folder: str, strategy: Any, devices: int, **load: Any) -> tuple[float, dict[str, torch.Tensor]]:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, **load)
    task = TransformersTask(model, optimizer=OptimizerConfig("sgd", lr=0.1))
    options: dict[str, Any] = {"strategy": strategy, "devices": devices, "max_grad_norm": 1.0}
    loss = quiet(max_steps=3, **options).fit(task, DATA).metrics["train/loss"]
    return loss, {name: each.detach().clone() for name, each in task.named_parameters()}


def compare(name: str, folder: Path, **options: Any) -> None:
    path = saved(name, folder, **options)
    loss, weights = trained(path, "cpu", 1)
    mapped = from_training_arguments({"output_dir": "out", "tp_size": 2}).trainer_options["strategy"]
    assert mapped == FSDPConfig(tensor_parallel=2)
    for found, split in on_two_ranks(lambda: trained(path, mapped, 2, device_map="meta")):
        assert found == pytest.approx(loss, abs=1e-6)
        torch.testing.assert_close(split, weights, atol=1e-6, rtol=0.0)


def test_tied_model_on_the_meta_device_is_split_by_its_plan_as_one_process_trains_it(tmp_path: Path) -> None:
    compare("Llama", tmp_path, tie_word_embeddings=True)


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3", "Mistral"])
def test_models_are_split_by_their_plans_as_one_process_trains_them(name: str, tmp_path: Path) -> None:
    compare(name, tmp_path)
    plain, rows = (
        on_two_ranks(lambda load=load: trained(str(tmp_path), "fsdp", 2, **load))
        for load in ({}, {"device_map": "meta"})
    )
    assert plain[0][0] == rows[0][0]
    assert all(torch.equal(plain[0][1][name], rows[0][1][name]) for name in plain[0][1])


def test_models_without_a_plan_or_with_too_few_heads_are_refused_by_name() -> None:
    def plan(name: str, change: Any = None, **options: Any) -> Any:
        config = getattr(transformers, f"{name}Config")(**options)
        model = getattr(transformers, f"{name}ForCausalLM" if name != "GPT2" else "GPT2LMHeadModel")(config)
        if change:
            model._tp_plan = change
        return parallel_modules(TransformersTask(model))

    class OfThree:
        def size(self) -> int:
            return 3

    heads = next(each for each in plan("Llama", **SIZES) if each.name.endswith("0.self_attn.k_proj"))
    gpt2 = {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 9}
    cases = {
        "no plan": (lambda: plan("GPT2", **gpt2), "GPT2LMHeadModel has no plan", "tp_size"),
        "style": (
            lambda: plan("Llama", {"lm_head": "packed_colwise"}, **SIZES),
            "style 'packed_colwise' for 'lm_head'",
        ),
    }
    assert_refused(ConfigError, cases)
    with pytest.raises(StrategyError, match=r"does not divide the 2 heads .*num_key_value_heads=2"):
        heads.style._apply(heads.module, OfThree())


def test_parts_that_a_folder_lacks_begin_with_transformers_values(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = saved("Llama", tmp_path)
    model = transformers.AutoModelForSequenceClassification.from_pretrained(path, device_map="meta")
    with caplog.at_level(logging.WARNING, "drivetrain"):
        task = TransformersTask(model)
    assert "begins with new values" in caplog.text
    assert "model.score.weight" in caplog.text
    stored = stored_weights(task)
    assert stored is not None
    assert stored.lacking(task) == (
        ["model.score.weight"],
        ["model.model.rotary_emb.inv_freq", "model.model.rotary_emb.original_inv_freq"],
    )
    Materialization(task).run([], torch.device("cpu"), 1, lambda part: None)
    assert 0 < task.model.score.weight.std() < 0.04
    whole = transformers.AutoModelForCausalLM.from_pretrained(path)
    assert torch.equal(task.model.model.rotary_emb.inv_freq, whole.model.rotary_emb.inv_freq)


def test_renamed_tensors_are_found_and_merged_ones_refused(tmp_path: Path) -> None:
    for name, options in (("GPTNeoX", {}), ("Mixtral", {"num_local_experts": 2})):
        saved(name, tmp_path / name, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, device_map="meta")
        if name == "Mixtral":
            with pytest.raises(CheckpointError, match=r"experts.*of several stored tensors, such as"):
                TransformersTask(model)
        else:
            stored = stored_weights(task := TransformersTask(model))
            assert stored is not None
            assert stored.lacking(task)[0] == []


def test_folder_that_has_moved_or_has_no_safetensors_files_is_named(tmp_path: Path) -> None:
    path = saved("Llama", tmp_path / "model")
    model = transformers.AutoModelForCausalLM.from_pretrained(path, device_map="meta")
    (tmp_path / "model").rename(tmp_path / "moved")
    (tmp_path / "pickles").mkdir()
    (tmp_path / "pickles" / "pytorch_model.bin").write_bytes(b"")

    def task(name: str) -> Any:
        model.config._name_or_path = model.name_or_path = str(tmp_path / name)
        return TransformersTask(model)

    cases = {
        "moved": (
            lambda: task("model"),
            str(tmp_path / "model"),
            "is no folder any more",
            "a path that stays",
        ),
        "pickles": (lambda: task("pickles"), "pickles", "no model.safetensors", "save_pretrained"),
    }
    assert_refused(CheckpointError, cases)
    task("moved")


def test_script_with_tp_size_plans_and_trains_as_one_process(tmp_path: Path) -> None:
    path = saved("Llama", tmp_path / "model")

    def script(split: int) -> Any:
        from accelerate import ParallelismConfig

        options: dict[str, Any] = {"num_train_epochs": 1, "warmup_steps": 0.5, "logging_steps": 1}
        options |= {"report_to": "none", "disable_tqdm": True, "save_strategy": "no", "use_cpu": True}
        if split > 1:
            options["parallelism_config"] = ParallelismConfig(tp_size=split)
        args = transformers.TrainingArguments(str(tmp_path / "out"), per_device_train_batch_size=2, **options)
        model = transformers.AutoModelForCausalLM.from_pretrained(path)
        data = [{"input_ids": each, "labels": each.clone()} for each in IDS.flatten(0, 1)]
        trainer = Trainer(model=model, args=args, train_dataset=data)
        trainer.train()
        assert trainer.get_tp_size() == split
        return [[each["loss"], each["learning_rate"]] for each in trainer.state.log_history if "loss" in each]

    alone = script(1)
    assert len(alone) == 3
    for found in on_two_ranks(script, 2):
        torch.testing.assert_close(torch.tensor(found), torch.tensor(alone), atol=1e-5, rtol=0.0)
