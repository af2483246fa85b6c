"""EleutherAI's harness during a fit, on local tasks, under one process and on shards."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.support.refusals import assert_refused
from tests.support.tasks import Regression, pairs, quiet

from drivetrain import ConfigError
from drivetrain.callbacks import LMEval
from drivetrain.core.registry import is_installed
from drivetrain.errors import MissingDependencyError
from drivetrain.testing import run_distributed

TASK = """
task: mine
dataset_path: json
dataset_kwargs: {{data_files: {{test: {0}/mine.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def scores(folder: Path, strategy: str, size: int) -> list[dict[str, float]]:
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from drivetrain import LambdaCallback
    from drivetrain.integrations.transformers import TransformersTask

    words = Tokenizer(models.WordLevel({word: at for at, word in enumerate("?.abcd")}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?", eos_token=".", pad_token=".")
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=6, max_position_embeddings=32, **sizes))
    tokens = torch.tensor([[2, 3, 4, 1]] * (4 // size))
    logged: list[dict[str, float]] = []
    note = LambdaCallback(on_log=lambda run: logged.append(dict(run.logged)))
    harness = LMEval("mine", include_path=str(folder), every="2 steps", bootstrap_iters=0)
    trainer = quiet(max_steps=4, log_every=2, strategy=strategy, devices=size, callbacks=[harness, note])
    data = [{"input_ids": tokens, "labels": tokens}] * 4 * size
    trainer.fit(TransformersTask(model, processing_class=tokenizer), data)
    return [{name: value for name, value in each.items() if "lm_eval" in name} for each in logged]


def refused(folder: Path) -> None:
    def fit(**options: Any) -> Any:
        return quiet(max_epochs=1, callbacks=[LMEval(every=1, **options)]).fit(Regression(), pairs())

    cases: dict[str, tuple[Any, ...]] = {
        "an option": (lambda: LMEval("mine", limits=3), "'limits'", "'limit'"),
        "no task": (lambda: LMEval([]), "is empty"),
        "no model": (lambda: fit(tasks="mine"), "Regression", "model=function"),
        "a task": (lambda: fit(tasks="mime", include_path=str(folder), model=id), "'mime'", "'mine'"),
    }
    assert_refused(ConfigError, cases)


@pytest.mark.nightly
@pytest.mark.skipif(not is_installed("lm_eval"), reason="needs lm_eval")
def test_the_harness_scores_shards_as_one_process(tmp_path: Path, monkeypatch: Any) -> None:
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "mine.yaml").write_text(TASK.format(tmp_path))
    rows = [{"question": "a b", "choices": ["c", "d"], "answer": int(at > 2)} for at in range(8)]
    (tmp_path / "mine.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # In processes of their own, because importing the harness changes the environment.
    (expected,) = run_distributed(scores, tmp_path, "cpu", 1, world_size=1)
    assert expected in [[{"lm_eval/mine/acc": each}] * 2 for each in (3 / 8, 5 / 8)]
    assert run_distributed(scores, tmp_path, "fsdp", 2) == [expected] * 2
    run_distributed(refused, tmp_path, world_size=1)


@pytest.mark.skipif(is_installed("lm_eval"), reason="has lm_eval")
def test_without_the_harness_the_extra_is_named() -> None:
    with pytest.raises(MissingDependencyError, match=r"drivetrain\[lm-eval\]"):
        LMEval("arc_easy")
