"""Tables of what is refused: a call, and the words that its error must have."""

from collections.abc import Callable, Mapping
from typing import Any


def assert_refused(
    error: type[BaseException] | tuple[type[BaseException], ...],
    cases: Mapping[str, tuple[Callable[[], Any] | str, ...]],
) -> None:
    """Call each case, by name, and list all that are not refused with its words, in any order and case."""
    wrong = []
    for name, (call, *words) in cases.items():
        assert words, f"{name}: give a word that the message must have"
        try:
            call()
        except error as refusal:
            text = str(refusal)
            missing = [word for word in words if str(word).lower() not in text.lower()]
            if missing:
                wrong.append(f"{name}: the message lacks {missing}: {text}")
        except Exception as other:
            wrong.append(f"{name}: {type(other).__name__} instead: {other}")
        else:
            wrong.append(f"{name}: is not refused")
    assert not wrong, "\n".join(wrong)
