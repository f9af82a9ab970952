"""How single values look."""

import pytest

from mmcache_tools.inspection.rows import printable, written_shape, written_span


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "-"),
        (-1.0, "-"),
        (0.0125, "12.5 ms"),
        (1.0, "1.0 s"),
        (90, "1.5 min"),
        (5400, "1.5 h"),
        (86400 * 1.5, "1.5 d"),
    ],
)
def test_spans(seconds, text):
    assert written_span(seconds) == text


def test_shapes():
    assert written_shape((256, 3584)) == "256x3584"
    assert written_shape(()) == "()"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ümlaut", "plain ümlaut"),
        ("\x1b[31m\n\u202e\ud800", "\\x1b[31m\\n\\u202e\\ud800"),
        ("abcdefgh", "abcdefgh"),
        ("abcdefghi", "abcdefg…"),
    ],
)
def test_what_reaches_a_terminal(text, shown):
    assert printable(text, None if "\x1b" in text or " " in text else 8) == shown
