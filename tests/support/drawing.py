"""The drawing of the loop in Callback's docstring, read as a program and played."""

import re

from drivetrain.callbacks import Callback
from drivetrain.run.hooks import HOOKS


class Line:  # A line of the drawing: a hook, or a loop or condition with what is indented below it
    def __init__(self, text: str) -> None:
        self.text = re.split(r"\s{2,}", text.strip())[0]  # to the right of it stands a remark
        self.is_hook = self.text in HOOKS
        self.inner: list[Line] = []


def drawing() -> list[Line]:  # the lines of the drawing, nested as they are indented
    assert Callback.__doc__ is not None
    block = Callback.__doc__.split("::\n\n")[1]
    root: list[Line] = []
    open_lines: list[tuple[int, list[Line]]] = [(-1, root)]
    for text in block.splitlines():
        depth = len(text) - len(text.lstrip())
        if text.strip() and depth < 8:  # the prose after it
            break
        if text.strip():
            while open_lines[-1][0] >= depth:
                open_lines.pop()
            line = Line(text)
            open_lines[-1][1].append(line)
            open_lines.append((depth, line.inner))
    return root


def drawn_hooks(lines: list[Line]) -> set[str]:  # all hooks in the drawing
    inner = [drawn_hooks(line.inner) for line in lines]
    return {line.text for line in lines if line.is_hook}.union(*inner)


class Play:
    """The hooks of a run in the order of the drawing, given the steps of each epoch and what is due when."""

    def __init__(
        self,
        epochs: list[int],
        validates: set[int],
        logs: set[int],
        saves: set[int],
        batches: int,
        micro_batches: tuple[int, ...] = (2, 2, 1),
        resumed_after: int | None = None,
    ) -> None:
        self._ends = [sum(epochs[: number + 1]) for number in range(len(epochs))]
        self._validates, self._logs, self._saves = validates, logs, saves
        self._batches, self._micro_batches = batches, micro_batches
        self._resumed = resumed_after is not None
        self._step = resumed_after or 0
        self._validating = False

    def hooks(self) -> list[str]:  # every call, in order
        return self._play(drawing())

    def _play(self, lines: list[Line]) -> list[str]:
        return [hook for line in lines for hook in self._play_line(line)]

    def _play_line(self, line: Line) -> list[str]:
        if line.is_hook:
            # What is indented below a hook is what happens there, in words.
            return [line.text] * self._is_due(line.text) + self._play(line.inner)
        played: list[str] = []
        match line.text:
            case "for each epoch:":
                for end in self._ends:
                    if self._step < end:
                        played += self._play(line.inner)
            case "for each window of micro-batches:":
                end = next(end for end in self._ends if end > self._step)
                while self._step < end:
                    self._step += 1
                    played += self._play(line.inner)
            case "for each micro-batch:":
                begun = max([0, *(end for end in self._ends if end < self._step)])
                played += self._play(line.inner) * self._micro_batches[self._step - begun - 1]
            case "when validation is due:":
                self._validating = True
                played += self._play(line.inner) if self._step in self._validates else []
                self._validating = False
            case "for each batch of each loader:":
                played += self._play(line.inner) * self._batches
            case _:
                assert not line.inner, f"the drawing has a loop that this test does not know: {line.text}"
        return played

    def _is_due(self, hook: str) -> bool:
        match hook:
            case "on_checkpoint_loaded":
                return self._resumed
            case "on_log":
                return self._validating or self._step in self._logs
            case "on_epoch_end":
                return self._step in self._ends
            case "on_checkpoint_saved":
                return self._step in self._saves
        return hook != "on_exception"
