"""Columns that stay columns, whatever the texts are."""

import pytest

from drivetrain.cli.printing import plain, section, shortened, sized, span, table


@pytest.fixture(autouse=True)
def forty_columns(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")


def test_numbers_stand_under_each_other(capsys):
    table(("name", "size"), [("a", "5"), ("bcd", "1,000")], numbers=(1,))
    assert capsys.readouterr().out == "name   size\na         5\nbcd   1,000\n"


def test_long_values_are_wrapped_and_paths_are_not(capsys):
    path = "/a/long/path" * 5
    section("title", [("name", "word " * 12), ("path", path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["", "title"]
    assert lines[2].startswith("  name  word")
    assert lines[3].startswith("        word")
    assert max(map(len, lines[:4])) <= 40
    assert lines[-1].endswith(path)


def test_nothing_is_printed_of_nothing(capsys):
    table(("a",), [])
    section("title", [])
    assert capsys.readouterr().out == ""


def test_control_characters_become_escapes():
    assert plain("a\x1b[31m\r\n\u202e\ud800é日") == r"a\x1b[31m\r\n\u202e\ud800é日"


def test_long_values_end_early():
    assert shortened([1.5, None, "é"]) == '[1.5, null, "é"]'
    assert len(shortened(list(range(1000)))) == 60


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 bytes"), (999, "999 bytes"), (1000, "1.0 kB"), (999_960, "1.0 MB"), (123_456_789, "123 MB")],
)
def test_sizes_have_units(count, text):
    assert sized(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(-3, "0.0 s"), (59, "59.0 s"), (60, "1 min 00 s"), (7300, "2 h 01 min"), (200_000, "2 d 07 h")],
)
def test_spans_of_time_have_units(seconds, text):
    assert span(seconds) == text
