"""Columns that stay columns, whatever the texts are."""

from drivetrain.cli.printing import plain, section, shortened, sized, span, table


def test_tables_and_sections_wrap_texts_and_not_paths(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    table(("a",), [])
    section("title", [])
    assert capsys.readouterr().out == ""
    table(("name", "size"), [("a", "5"), ("bcd", "1,000")], numbers=(1,))
    assert capsys.readouterr().out == "name   size\na         5\nbcd   1,000\n"
    path = "/a/long/path" * 5
    section("title", [("name", "word " * 12), ("path", path)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["", "title"]
    assert lines[2].startswith("  name  word")
    assert lines[3].startswith("        word")
    assert max(map(len, lines[:4])) <= 40
    assert lines[-1].endswith(path)


def test_texts_sizes_and_times_are_short_and_harmless():
    assert plain("a\x1b[31m\r\n\u202e\ud800é日") == r"a\x1b[31m\r\n\u202e\ud800é日"
    assert shortened([1.5, None, "é"]) == '[1.5, null, "é"]'
    assert len(shortened(list(range(1000)))) == 60
    sizes = [sized(count) for count in (0, 999, 1000, 999_960, 123_456_789)]
    assert sizes == ["0 bytes", "999 bytes", "1.0 kB", "1.0 MB", "123 MB"]
    spans = [span(seconds) for seconds in (-3, 59, 60, 7300, 200_000)]
    assert spans == ["0.0 s", "59.0 s", "1 min 00 s", "2 h 01 min", "2 d 07 h"]
