"""Packed rows hold every token once, keep documents apart, and a resume gives the rows that are left."""

import copy
import itertools

import pytest
import torch
from tests.support.tasks import quiet
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from drivetrain import OptimizerConfig, TaskModule
from drivetrain.data import packed
from drivetrain.errors import ConfigError, DataError


def documents(count=40, most=30, seed=0):
    drawn = torch.Generator().manual_seed(seed)
    sizes = torch.randint(1, most, (count,), generator=drawn).tolist()
    return [torch.randint(1, 64, (size,), generator=drawn) for size in sizes]


class Stream(IterableDataset):
    """Documents with a position that can be restored."""

    def __init__(self, count=40):
        self.documents, self.at, self.drawn = documents(count), 0, 0

    def __iter__(self):
        while self.at < len(self.documents):
            self.at, self.drawn = self.at + 1, self.drawn + 1
            yield {"input_ids": self.documents[self.at - 1].tolist()}
        self.at = 0

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


def pieces(row):
    borders = [*(row["position_ids"] == 0).nonzero()[:, 0].tolist(), len(row["input_ids"])]
    return [row["input_ids"][a:b].tolist() for a, b in itertools.pairwise(borders)]


@pytest.mark.parametrize("by", ["best_fit", "concatenate"])
@pytest.mark.parametrize("length", [16, 64])
def test_every_token_comes_once_and_no_label_crosses_a_border(by, length):
    given = documents()
    rows = list(packed(given, length, by=by, buffer=16))
    assert {len(each["input_ids"]) for each in rows} == {length}
    found = [part for row in rows for part in pieces(row) if any(part)]
    assert sorted(t for part in found for t in part) == sorted(t for each in given for t in each.tolist())
    if by == "best_fit" and length == 64:
        assert sorted(map(tuple, found)) == sorted(tuple(each.tolist()) for each in given), "kept whole"
    if by == "concatenate":
        assert sum(0 in each["input_ids"] for each in rows) <= 3, "padding ends a buffer"
    for row in rows:
        starts, real = row["position_ids"] == 0, row["input_ids"] > 0
        assert (row["labels"] == row["input_ids"].where(~starts & real, torch.tensor(-100))).all()
    same = list(packed(Stream(), length, by=by, buffer=16))
    assert [each["input_ids"].tolist() for each in same] == [each["input_ids"].tolist() for each in rows]


def test_best_fit_fills_rows_with_few_gaps():
    sizes = [60, 40, 30, 30, 70, 20, 50]
    rows = packed([torch.ones(each, dtype=torch.long) for each in sizes], 100)
    assert len(rows) == 3, "300 tokens fit into three rows"


@pytest.mark.parametrize("rows_given", [0, 1, 3, 5, 8, 9])
def test_a_stream_resumes_with_the_next_row_and_reads_one_buffer_again(rows_given):
    whole = [each["input_ids"].tolist() for each in packed(Stream(), 64, buffer=8)]
    first = packed(Stream(), 64, buffer=8)
    rows = iter(first)
    given = [next(rows)["input_ids"].tolist() for _ in range(rows_given)]
    state = copy.deepcopy(first.state_dict())
    source = Stream()
    again = packed(source, 64, buffer=8)
    again.load_state_dict(state)
    assert given + [each["input_ids"].tolist() for each in again] == whole
    assert source.drawn == len(source.documents) - state["stream"]["at"]
    assert "documents" not in state
    assert set(state) == {"stream", "at"}


class Model(TaskModule):
    """One block of causal attention with positions, which takes a mask."""

    def __init__(self):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(64, 16), nn.Embedding(64, 16)
        self.mix, self.head = nn.Linear(16, 48), nn.Linear(16, 64)

    def forward(self, input_ids, position_ids, attention_mask):
        x = self.embedding(input_ids) + self.positions(position_ids)
        q, k, v = self.mix(x)[:, None].chunk(3, -1)
        return self.head(x + F.scaled_dot_product_attention(q, k, v, attention_mask)[:, 0])

    def loss(self, outputs, batch):
        return F.cross_entropy(outputs[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    def loss_weight(self, batch):
        return (batch["labels"][:, 1:] != -100).sum()

    def configure_optimizers(self):
        return OptimizerConfig("sgd", lr=1.0)


@pytest.mark.parametrize("stream", [False, True])
def test_the_gradient_of_packed_rows_is_that_of_the_documents(stream):
    torch.manual_seed(0)
    task = Model()
    alone, given = copy.deepcopy(task), documents(30)
    losses, count = torch.zeros(()), 0
    for each in given:
        size = len(each)
        causal = torch.ones(1, 1, size, size, dtype=torch.bool).tril()
        logits = alone(each[None], torch.arange(size)[None], causal)[0]
        losses = losses + F.cross_entropy(logits[:-1], each[1:], reduction="sum")
        count += size - 1
    (losses / count).backward()
    data = Stream(30) if stream else given
    rows = packed(data, 64, boundary="mask")
    if stream:
        data.documents = given
    quiet(max_epochs=1, batch_size=4, gradient_accumulation_steps=3).fit(task, rows)
    for (name, new), old in zip(task.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(old - new, old.grad, atol=1e-6, rtol=1e-5, msg=name)


def test_varlen_joins_the_rows_of_a_batch_without_padding():
    rows = packed(documents(12), 64, boundary="varlen")
    batch = rows.collate_fn([rows[0], rows[1]])
    ends = batch["cu_seq_lens_q"].tolist()
    assert batch["input_ids"].shape == (1, ends[-1])
    assert int(batch["input_ids"].min()) > 0
    sizes = [b - a for a, b in itertools.pairwise(ends)]
    assert sizes == [len(each) for row in (rows[0], rows[1]) for each in pieces(row)]
    assert batch["max_length_q"] == max(sizes)
    assert batch["cu_seq_lens_q"].dtype == torch.int32


@pytest.mark.parametrize(
    ("data", "options", "words"),
    [
        ([{"ids": [1, 2]}], {}, "columns ids"),
        ([{"input_ids": [1, 2], "text": "a"}], {}, "also has text"),
        ([{"input_ids": [1, 2], "attention_mask": [1, 0]}], {}, "padded document"),
        ([{"input_ids": [1, 2], "labels": [1]}], {}, "2 input_ids and 1 labels"),
        ([torch.ones(4)], {}, "whole numbers"),
        (["text"], {}, "whole numbers, not 'text'. Tokenise"),
        ({"input_ids": [[1, 2]]}, {}, "a mapping of columns"),
        (5, {}, "a stream of documents, not 5"),
        (DataLoader([[1, 2]]), {}, "not batches of a DataLoader"),
        ([[1, 2]], {"tokens": "ids", "labels": "ids"}, "both are 'ids'"),
        ([[1, 2]], {"boundary": "flex"}, "boundary"),
        ([[1, 2]], {"by": "bestfit"}, "best_fit"),
        ([[1, 2]], {"length": 1}, "length"),
    ],
)
def test_what_cannot_be_packed_is_refused_by_name(data, options, words):
    with pytest.raises((ConfigError, DataError), match=words):
        packed(data, **{"length": 8, **options})
