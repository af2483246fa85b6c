"""Packed documents give the logits and the gradients of the documents alone, or are refused by name."""

import copy

import pytest
import torch
import transformers
from tests.support.tasks import quiet
from torch.nn import functional as F

from drivetrain import OptimizerConfig
from drivetrain.data import packed
from drivetrain.errors import DataError
from drivetrain.integrations.transformers import TransformersTask

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "llama": lambda **own: transformers.LlamaConfig(vocab_size=64, num_key_value_heads=2, **SMALL, **own),
    "qwen3": lambda **own: transformers.Qwen3Config(
        vocab_size=64, num_key_value_heads=2, head_dim=8, **SMALL, **own
    ),
    "gpt2": lambda **own: transformers.GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **own
    ),
}


def documents():
    drawn = torch.Generator().manual_seed(3)
    return [torch.randint(1, 64, (size,), generator=drawn) for size in (7, 9, 5, 11, 1, 14, 2)]


def model(name, attention="sdpa"):
    torch.manual_seed(0)
    config = CONFIGS[name](attn_implementation=attention)
    return transformers.AutoModelForCausalLM.from_config(config)


def expected(network):
    given, losses, logits = documents(), [], {}
    for each in given:
        found = network(each[None]).logits[0]
        losses.append(F.cross_entropy(found[:-1], each[1:], reduction="sum"))
        logits[tuple(each.tolist())] = found.detach()
    (sum(losses) / sum(len(each) - 1 for each in given)).backward()
    return logits, torch.cat([each.grad.flatten() for each in network.parameters()])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("attention", "boundary"),
    [("sdpa", "positions"), ("eager", "positions"), ("sdpa", "mask"), ("sdpa", "varlen")],
)
def test_packed_documents_have_their_own_logits_and_gradients(name, attention, boundary):
    alone, packed_model = model(name, attention), model(name, attention)
    logits, gradient = expected(alone)
    task = TransformersTask(packed_model, optimizer=OptimizerConfig("sgd", lr=1.0))
    rows = packed(documents(), 24, boundary=boundary)
    outputs = quiet(batch_size=1).predict(task, rows)  # in evaluation mode
    for row, found in zip(rows, outputs, strict=True):
        starts = (row["position_ids"] == 0).nonzero()[:, 0].tolist()
        for start, stop in zip(starts, [*starts[1:], len(row["input_ids"])], strict=True):
            ids = tuple(row["input_ids"][start:stop].tolist())
            if any(ids):  # no padding
                torch.testing.assert_close(found["logits"][0, start:stop], logits[ids], atol=1e-5, rtol=1e-5)
    before = [each.detach().clone() for each in packed_model.parameters()]
    quiet(max_epochs=1, batch_size=1, gradient_accumulation_steps=len(rows)).fit(task, rows)
    moved = [(o - n).flatten() for o, n in zip(before, packed_model.parameters(), strict=True)]
    torch.testing.assert_close(torch.cat(moved).detach(), gradient, atol=2e-6, rtol=1e-4)


def batch(**columns):
    rows = packed(documents(), 32)
    return [{**rows.collate_fn([rows[0], rows[1]]), **columns}]


@pytest.mark.parametrize(
    ("name", "attention", "columns", "words"),
    [
        (
            "llama",
            "sdpa",
            {"attention_mask": torch.ones(2, 32, dtype=torch.long)},
            "Leave attention_mask out",
        ),
        (
            "gpt2",
            "eager",
            {"attention_mask": torch.ones(2, 32, dtype=torch.long)},
            "Leave attention_mask out",
        ),
        ("llama", "sdpa", {"use_cache": True}, "Leave use_cache out"),
        (
            "llama",
            "eager",
            {"attention_mask": packed(documents(), 32, boundary="mask")},
            "not take a mask of bool",
        ),
    ],
)
def test_attention_across_documents_is_refused_with_what_to_give(name, attention, columns, words):
    if not isinstance(mask := columns.get("attention_mask", True), (bool, torch.Tensor)):
        columns = {"attention_mask": torch.stack([mask[0]["attention_mask"], mask[1]["attention_mask"]])}
    task = TransformersTask(model(name, attention), optimizer=OptimizerConfig("sgd", lr=1.0))
    given = batch(**columns)
    with pytest.raises(DataError, match=words):
        quiet(max_steps=1).fit(task, given)
    with pytest.raises(DataError, match=words):
        quiet().validate(copy.deepcopy(task), given)


def test_a_model_without_borders_is_refused_and_positions_of_one_document_are_not():
    config = transformers.BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=4)
    plain = transformers.LlamaForCausalLM(CONFIGS["llama"]())
    one = {"input_ids": torch.arange(1, 17)[None], "labels": torch.arange(1, 17)[None]}
    quiet(max_steps=1).fit(TransformersTask(plain), [{**one, "position_ids": torch.arange(16)[None]}])
    task = TransformersTask(transformers.BloomForCausalLM(config))
    with pytest.raises(DataError, match=r'BloomForCausalLM lets .* Give packed\(boundary="mask"\)'):
        quiet(max_steps=1).fit(task, batch())
