"""How ZeRO lays parameters out in flat pieces, and how they are put together from them again.

Stages 1 and 2 lay the parameters of a group end to end and cut the whole into one piece for each process.
Stage 3 cuts each parameter by itself, and a process's piece has its parts end to end. The optimizer's slots
lie in pieces of their own in the same way. As DeepSpeed's utils/zero_to_fp32.py reads it; the mappings that
its checkpoint/ds_to_universal.py goes by are wrong where gradients are divided in turn
(`round_robin_gradients`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from drivetrain.errors import CheckpointError


class _Part(NamedTuple):
    """What a piece has of a parameter: from where on, and how many numbers."""

    name: str
    offset: int
    size: int


class Joining:
    """The weights of a group, or one slot of the optimizer's, being put together from the processes' pieces.

    Attributes:
        values: By parameter, in float32.

    Args:
        shapes: Of the parameters, in their order.
        paddings: How many numbers lie behind each; nothing for none.
        stage: Of ZeRO.
        processes: How many there are.
        first: The first process's piece, the largest: no memory is taken for what the files cannot have.
        what: What to call it in messages.

    Raises:
        CheckpointError: The pieces cannot have all of it.
    """

    def __init__(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        paddings: Sequence[int],
        stage: int,
        processes: int,
        first: Tensor,
        what: str,
    ) -> None:
        self._sizes = {name: math.prod(shape) for name, shape in shapes.items()}
        self._paddings = list(paddings) or [0] * len(shapes)
        self._stage, self._processes, self._what = stage, processes, what
        if len(self._paddings) != len(shapes) or sum(self._sizes.values()) > first.numel() * processes:
            raise self._misfit()
        self.values = {name: torch.empty(shape) for name, shape in shapes.items()}
        self._filled = dict.fromkeys(shapes, 0)
        self._start = 0

    def add(self, rank: int, piece: Tensor) -> None:
        """Put the piece of the next process behind those before it.

        Raises:
            CheckpointError: It is not one of this layout.
        """
        parts = self._parts_of_each(rank) if self._stage == 3 else self._parts_of_all(piece.numel())
        end = 0
        for name, offset, size in parts:
            start, end = self._filled[name], offset + size
            if end > piece.numel() or start + size > self._sizes[name]:
                raise self._misfit()
            self.values[name].view(-1)[start : start + size] = piece[offset:end]
            self._filled[name] += size
        self._start += piece.numel()

    def finish(self) -> None:
        """To be called after the last piece.

        Raises:
            CheckpointError: There is less, or more, than belongs there.
        """
        needed = sum(self._sizes.values()) + sum(self._paddings)
        surplus = self._start - needed if self._stage < 3 else 0
        # The whole is filled up so that it can be divided, to at most this.
        if self._filled != self._sizes or surplus >= 2 * self._processes:
            raise self._misfit()

    def _parts_of_all(self, length: int) -> Iterator[_Part]:
        position = 0
        for (name, size), padding in zip(self._sizes.items(), self._paddings, strict=True):
            begin, end = max(position, self._start), min(position + size, self._start + length)
            if begin < end:
                yield _Part(name, begin - self._start, end - begin)
            position += size + padding

    def _parts_of_each(self, rank: int) -> Iterator[_Part]:
        offset = 0
        for name, size in self._sizes.items():
            room = -(-size // self._processes)
            yield _Part(name, offset, max(0, min(room, size - rank * room)))
            offset += room

    def _misfit(self) -> CheckpointError:
        return CheckpointError(
            f"{self._what} are not as ZeRO {self._stage} divides the {sum(self._sizes.values())} numbers of"
            f" {', '.join(map(repr, list(self._sizes)[:3]))}{', ...' if len(self._sizes) > 3 else ''} among"
            f" {self._processes} processes: a file is of another checkpoint, or of a version of"
            " DeepSpeed that is not known here"
        )
