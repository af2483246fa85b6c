"""Rows of one length, packed from documents of different lengths; no document of a row sees another."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from drivetrain.core.errors import ConfigError, DataError
from drivetrain.core.messages import logger
from drivetrain.core.types import Batch
from drivetrain.core.validation import count, one_of
from drivetrain.data.orders.length_grouped import lengths_of
from drivetrain.data.streams.buffered import BufferedStream

_LOG = logger(__name__)

NO_LABEL = -100
"""The label of a token that is not predicted, as in torch's `cross_entropy`."""

Row: TypeAlias = dict[str, Any]


class Part(NamedTuple):
    """Part of a document, or all of it: its number, and the first token and the one after the last."""

    document: int
    start: int
    stop: int


def packed(
    data: Any,
    length: int,
    *,
    tokens: str = "input_ids",
    labels: str = "labels",
    boundary: str = "positions",
    by: str = "best_fit",
    buffer: int = 1024,
) -> PackedDataset | PackedStream:
    """Pack documents into rows of one length, so that hardly a token is padding.

    A row has the columns `tokens`, `labels` and `position_ids`, which begin at 0 with each document. The
    label of a document's first token is -100, because nothing of the document comes before it. Each label is
    at the position of its token, as in transformers: a token's logits are compared with the next label.

    A dataset becomes a dataset of rows, which can be shuffled; its documents are read once for their lengths.
    A stream becomes a stream of rows. Its state is the stream's own, so that it holds no documents.

    Args:
        data: A dataset or a list of documents, or an iterable of them. A document is a sequence of token ids,
            or a mapping that has one under `tokens`. The mapping may have labels of the same length, and an
            `attention_mask` that is 1 everywhere.
        length: Tokens of a row. A longer document is cut into parts, and each part counts as a
            document.
        tokens: The column of the token ids.
        labels: The column of the labels. Documents without labels get their tokens as labels.
        boundary: How the documents of a row are kept apart. "positions": by `position_ids` alone, which
            transformers' causal models read if there is no attention mask. "mask": also by an
            `attention_mask` for causal attention, bool of shape [1, length, length], True where a token
            attends; torch's `scaled_dot_product_attention` takes it. "varlen": the rows of a batch become one
            row without padding, with `cu_seq_lens_q`, `cu_seq_lens_k` (int32, of shape [documents + 1]),
            `max_length_q` and `max_length_k` for attention over variable lengths.
        by: "best_fit" keeps documents whole and puts each into the row with the least room in which it fits.
            "concatenate" joins them and cuts the result, so that only the last row of a buffer has padding.
        buffer: Documents that are packed together, in their order in the data.

    Returns:
        A dataset, or a stream if `data` has no length and index.

    Raises:
        ConfigError: An argument is out of range.
        DataError: A document cannot be packed.
    """
    if tokens == labels:
        raise ConfigError(f"packed(): tokens and labels are two columns, and both are {tokens!r}")
    form = _Packing(
        count("length", length, at_least=2),
        tokens,
        labels,
        one_of("boundary", boundary, ("positions", "mask", "varlen")),
        one_of("by", by, ("best_fit", "concatenate")),
        count("buffer", buffer, at_least=1),
    )
    if isinstance(data, Mapping):
        raise DataError("packed() takes a sequence of documents: make rows of a mapping of columns")
    if not hasattr(data, "__iter__") and not hasattr(data, "__getitem__"):
        raise DataError(f"packed() takes a dataset, a list or a stream of documents, not {data!r:.60}")
    if isinstance(data, DataLoader) and data.batch_sampler is not None:
        raise DataError("packed() takes documents, not batches of a DataLoader. Give the loader's dataset")
    is_stream = isinstance(data, IterableDataset) or not (
        hasattr(data, "__len__") and hasattr(data, "__getitem__")
    )
    return PackedStream(data, form) if is_stream else PackedDataset(data, form)


class _Packing(NamedTuple):
    """The arguments of `packed`."""

    length: int
    tokens: str
    labels: str
    boundary: str
    by: str
    buffer: int

    def read(self, document: Any) -> tuple[Tensor, Tensor]:
        """Return the token ids of a document, and the label of each."""
        if not isinstance(document, Mapping):
            document = {self.tokens: document}
        if self.tokens not in document:
            raise DataError(
                f"packed(tokens={self.tokens!r}): a document has the columns {', '.join(map(str, document))}."
                " Name the column of the token ids"
            )
        others = set(document) - {self.tokens, self.labels, "attention_mask"}
        if others:
            raise DataError(
                f"packed() takes the columns {self.tokens}, {self.labels} and attention_mask, and a document"
                f" also has {', '.join(sorted(map(str, others)))}. Leave them out, as with"
                " dataset.select_columns([...]); packed(labels=...) names the column of the labels"
            )
        ids = _column(document[self.tokens], self.tokens)
        mask = document.get("attention_mask")
        if mask is not None and not bool(torch.as_tensor(mask).all()):
            raise DataError(
                "packed() was given a padded document: its attention_mask is 0 at some tokens. Give documents"
                " without padding, as a tokenizer makes them with padding=False"
            )
        found = document.get(self.labels)
        labels = ids if found is None else _column(found, self.labels)
        if len(labels) != len(ids):
            raise DataError(
                f"packed(): a document has {len(ids)} {self.tokens} and {len(labels)} {self.labels}. Each"
                " token needs a label; -100 leaves it out of the loss"
            )
        return ids, labels

    def size(self, document: Any) -> int:
        """Return the number of a document's tokens."""
        return len(self.read(document)[0])

    @property
    def tokens_per_sample(self) -> int | None:
        """The tokens of each row, with padding; None if rows are not padded."""
        return None if self.boundary == "varlen" else self.length

    def rows_of(self, lengths: Sequence[int]) -> list[list[Part]]:
        """Distribute the documents of a buffer over rows."""
        if self.by == "concatenate":
            return _concatenated(lengths, self.length)
        return _best_fit(lengths, self.length)

    def row(self, pieces: Iterable[Part], read: Callable[[int], tuple[Tensor, Tensor]]) -> Row:
        """Make a row of its pieces.

        Args:
            pieces: What the row holds, in order.
            read: Returns the tokens and the labels of a document by its number.
        """
        ids, labels, positions = [], [], []
        for piece in pieces:
            of_ids, of_labels = read(piece.document)
            if piece.stop > len(of_ids):
                raise DataError(
                    f"packed(): document {piece.document} has {len(of_ids)} tokens and had {piece.stop} or"
                    " more when the rows were made. Its length must not change"
                )
            ids.append(of_ids[piece.start : piece.stop])
            own = of_labels[piece.start : piece.stop].clone()
            own[0] = NO_LABEL
            labels.append(own)
            positions.append(torch.arange(len(own)))
        missing = 0 if self.boundary == "varlen" else self.length - sum(map(len, ids))
        if missing:  # padding is a document of its own, so that no row of the mask is empty
            ids.append(torch.zeros(missing, dtype=torch.long))
            labels.append(torch.full((missing,), NO_LABEL))
            positions.append(torch.arange(missing))
        row = {
            self.tokens: torch.cat(ids),
            self.labels: torch.cat(labels),
            "position_ids": torch.cat(positions),
        }
        if self.boundary == "mask":
            of = torch.repeat_interleave(torch.tensor([len(each) for each in ids]))
            row["attention_mask"] = (of[:, None] == of).tril()[None]
        return row

    def collate(self, rows: list[Row]) -> Batch:
        """Make a batch of rows."""
        if any(each.keys() != rows[0].keys() for each in rows):
            raise DataError(
                "packed(): the rows of a batch differ in their columns. Give all sources of a mixture the"
                " same boundary, tokens and labels"
            )
        if self.boundary != "varlen":
            return default_collate(rows)
        own = (self.tokens, self.labels, "position_ids")
        batch = {name: torch.cat([each[name] for each in rows]) for name in own}
        others = default_collate([{name: each[name] for name in each if name not in own} for each in rows])
        positions = batch["position_ids"]
        starts = (positions == 0).nonzero()[:, 0]
        ends = torch.cat((starts, torch.tensor([len(positions)]))).to(torch.int32)
        longest = int(positions.max()) + 1
        return (
            {name: each[None] for name, each in batch.items()}
            | others
            | {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends, "max_length_q": longest, "max_length_k": longest}
        )


def _column(values: Any, name: str) -> Tensor:
    try:
        found = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError):
        raise DataError(
            f"packed(): {name} of a document must be a sequence of whole numbers, not {values!r:.60}."
            " Tokenise text first"
        ) from None
    if found.ndim != 1 or (found.is_floating_point() and len(found)) or found.is_complex():
        raise DataError(
            f"packed(): {name} of a document must be a sequence of whole numbers, not {found.dtype} of shape"
            f" {list(found.shape)}"
        )
    return found.long()


def _concatenated(lengths: Sequence[int], length: int) -> list[list[Part]]:
    """Join the documents and cut the result into rows."""
    rows: list[list[Part]] = []
    room = 0
    for document, size in enumerate(lengths):
        start = 0
        while start < size:
            if not room:
                rows.append([])
                room = length
            stop = min(size, start + room)
            rows[-1].append(Part(document, start, stop))
            room -= stop - start
            start = stop
    return rows


def _best_fit(lengths: Sequence[int], length: int) -> list[list[Part]]:
    """Put each document, the longest first, into the row with the least room that is enough.

    Ding et al., "Fewer Truncations Improve Language Modeling", 2024, https://arxiv.org/abs/2404.10830.
    """
    pieces = [
        Part(document, start, min(size, start + length))
        for document, size in enumerate(lengths)
        for start in range(0, size, length)
    ]
    rows: list[list[Part]] = []
    rooms: list[tuple[int, int]] = []  # with the number of the row, in order
    for piece in sorted(pieces, key=lambda each: each.start - each.stop):
        size = piece.stop - piece.start
        at = bisect_left(rooms, (size, -1))
        if at == len(rooms):
            room, row = length, len(rows)
            rows.append([])
        else:
            room, row = rooms.pop(at)
        rows[row].append(piece)
        if room > size:
            insort(rooms, (room - size, row))
    return sorted(map(sorted, rows))  # in the order of the documents, so that long ones do not come first


class PackedDataset(Dataset[Row]):
    """The rows of documents that have a length and an index; see `packed`."""

    def __init__(self, data: Any, form: _Packing) -> None:
        self._data = data
        self._form = form
        self.tokens_per_sample = form.tokens_per_sample
        has_column = form.tokens in getattr(data, "column_names", ())  # which is read without the others
        lengths = lengths_of(data, form.tokens if has_column else form.size, "packed")
        pieces, self._starts = [], [0]
        for first in range(0, len(lengths), form.buffer):
            for row in form.rows_of(lengths[first : first + form.buffer]):
                pieces += [(first + each.document, each.start, each.stop) for each in row]
                self._starts.append(len(pieces))
        self._pieces = np.array(pieces, dtype=np.int64).reshape(-1, 3)
        _say(len(lengths), sum(lengths), len(self), form)

    def __len__(self) -> int:
        return len(self._starts) - 1

    def __getitem__(self, index: int) -> Row:
        index = range(len(self))[index]
        found = self._pieces[self._starts[index] : self._starts[index + 1]].tolist()
        return self._form.row([Part(*each) for each in found], self._read)

    def _read(self, document: int) -> tuple[Tensor, Tensor]:
        return self._form.read(self._data[document])

    def collate_fn(self, rows: list[Row]) -> Batch:
        """Make a batch of rows."""
        return self._form.collate(rows)


class PackedStream(BufferedStream):
    """The rows of a stream of documents; see `packed`."""

    def __init__(self, data: Iterable[Any], form: _Packing) -> None:
        super().__init__(data, form.buffer)
        self._form = form
        self.tokens_per_sample = form.tokens_per_sample
        self._said = False

    def _settings(self) -> str:
        form = self._form
        return f"packed(length={form.length}, by={form.by!r}, buffer={form.buffer})"

    def _of(self, data: Iterable[Any]) -> PackedStream:
        return PackedStream(data, self._form)

    def _made(self, samples: list[Any], epoch: int, number: int) -> Iterator[Row]:
        read = [self._form.read(each) for each in samples]
        lengths = [len(ids) for ids, _ in read]
        rows = self._form.rows_of(lengths)
        if not self._said:
            self._said = True
            _say(len(read), sum(lengths), len(rows), self._form)
        return (self._form.row(pieces, read.__getitem__) for pieces in rows)

    def collate_fn(self, rows: list[Row]) -> Batch:
        """Make a batch of rows."""
        return self._form.collate(rows)


def _say(documents: int, tokens: int, rows: int, form: _Packing) -> None:
    share = tokens / (rows * form.length) if rows else 1
    _LOG.info(f"packed {documents} documents into {rows} rows of {form.length} tokens: {share:.1%} are real")
