"""The pictures, tables, texts and sounds that a run has logged, read from TensorBoard's files, and small."""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from drivetrain.core.errors import plain

STEPS = 20
"""The most steps of a name that are kept: evenly chosen, with the first and the last."""

PIXELS = 320
"""The most pixels of a picture's side; larger ones are made smaller, which Pillow does."""

_SMALL, _LARGEST = 20_000, 400_000
"""The bytes of a picture that is taken as it is, and those of the largest file that the page takes."""

_LETTERS, _ROWS, _COLUMNS = 4_000, 50, 20

# Only events with one of these bytes can hold more than numbers. To parse all events would take minutes.
_MARKS = (b"\x89PNG", b"GIF8", b"\xff\xd8\xff", b"RIFF", b"\n\x04text", b":\x02\x08\x01")
_TABLE = re.compile(r"\|.*\|\n\|( --- \|)+(\n|$)")

Item = dict[str, Any]


def logged_media(directory: Path) -> list[Item]:
    """Return a run's values beside numbers, by name.

    Returns:
        A mapping for each name: its "name", its "kind" ("image", "audio", "text" or "table"), the number of
        "steps" that were logged, and "items": for each step "step" with "src", "text", "columns" and "rows",
        or "left", which says why it is left out.
    """
    found: dict[tuple[str, str], dict[int, Any]] = {}
    for event in _events(directory):
        if event.session_log.status == 1:  # a resumed run: what was logged from here on is replaced
            for steps in found.values():
                for step in [each for each in steps if each >= event.step]:
                    del steps[step]
        for value in event.summary.value:
            kind = value.WhichOneof("value")
            if kind in ("image", "audio"):
                found.setdefault((value.tag, kind), {})[event.step] = value
            elif value.metadata.plugin_data.plugin_name == "text" and value.tag != "config/text_summary":
                found.setdefault((value.tag, "text"), {})[event.step] = value
    made = []
    for (name, kind), steps in sorted(found.items()):
        items = [{"step": step, **_item(kind, steps[step])} for step in _even(sorted(steps), STEPS)]
        is_table = kind == "text" and all("rows" in each for each in items)
        made.append(
            {"name": plain(name), "kind": "table" if is_table else kind, "steps": len(steps), "items": items}
        )
    return [each for each in made if each["steps"]]


def fit_to(runs: Sequence[Sequence[Item]], most: int) -> tuple[list[list[Item]], int]:
    """Return the values with at most so many characters together, and the number of those left out.

    The last step of each name is left out last.
    """
    found = [
        (rank, run, name, len(each["items"]) - 1 - rank)
        for run, media in enumerate(runs)
        for name, each in enumerate(media)
        for rank in range(len(each["items"]))
    ]
    kept = [[{**each, "items": list(each["items"])} for each in media] for media in runs]
    left = room = 0
    for _, run, name, index in sorted(found):
        items = kept[run][name]["items"]
        room += len(items[index].get("src") or items[index].get("text") or str(items[index].get("rows")))
        if room > most and "left" not in items[index]:
            items[index] = {"step": items[index]["step"], "left": "left out: the page has no room for it"}
            left += 1
    return kept, left


def _even(steps: Sequence[int], most: int) -> list[int]:
    if len(steps) <= most:
        return list(steps)
    return [steps[round(each * (len(steps) - 1) / (most - 1))] for each in range(most)]


def _events(directory: Path) -> Iterator[Any]:
    """Yield the events that may have more than numbers."""
    for path in sorted(directory.glob("events.out.tfevents.*")):
        with open(path, "rb") as file:
            # A record is its length, a checksum, the event and a checksum.
            while len(header := file.read(12)) == 12:
                data = file.read(struct.unpack_from("<Q", header)[0])
                is_whole = len(file.read(4)) == 4  # a kill, or a write under way, has cut the last one short
                if is_whole and any(mark in data for mark in _MARKS):
                    from tensorboard.compat.proto.event_pb2 import Event

                    yield Event.FromString(data)


def _item(kind: str, value: Any) -> Item:
    if kind == "image":
        return _picture(value.image.encoded_image_string)
    if kind == "audio":
        return _file(value.audio.encoded_audio_string, value.audio.content_type or "audio/wav")
    text = b"".join(value.tensor.string_val).decode("utf-8", "replace")
    if _TABLE.match(text):
        lines = text.split("\n")
        columns, rows = _cells(lines[0]), [_cells(each) for each in lines[2:]]
        return {
            "columns": columns[:_COLUMNS],
            "rows": [each[:_COLUMNS] for each in rows[:_ROWS]],
            "more": f"{len(rows)} rows and {len(columns)} columns"
            if len(rows) > _ROWS or len(columns) > _COLUMNS
            else "",
        }
    more = f"{len(text):,} letters" if len(text) > _LETTERS else ""
    return {"text": plain(text[:_LETTERS], "\n\t"), "more": more}


def _cells(line: str) -> list[str]:
    cells = re.split(r"(?<!\\)\|", line.strip()[1:-1])
    return [plain(each.strip().replace("\\|", "|")) for each in cells]


def _picture(data: bytes) -> Item:
    kinds = {b"\x89PNG": "image/png", b"GIF8": "image/gif"}
    kind = kinds.get(data[:4], "image/jpeg")
    if kind == "image/gif" or len(data) <= _SMALL:
        return _file(data, kind)
    from PIL import Image

    with Image.open(io.BytesIO(data)) as picture:
        size = list(picture.size)
        picture.thumbnail((PIXELS, PIXELS))
        file = io.BytesIO()
        if picture.mode in ("RGBA", "LA", "P"):
            picture.save(file, "PNG", optimize=True)
            return _file(file.getvalue(), "image/png") | {"size": size}
        picture.save(file, "JPEG", quality=85)
        return _file(file.getvalue(), "image/jpeg") | {"size": size}


def _file(data: bytes, content_type: str) -> Item:
    if len(data) > _LARGEST:
        return {"left": f"left out: {len(data) / 1e6:.1f} MB, and a report takes {_LARGEST / 1e6:.1f} MB"}
    return {"src": f"data:{content_type};base64,{base64.b64encode(data).decode()}"}
