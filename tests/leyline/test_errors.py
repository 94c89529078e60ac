"""What is quoted of another library's error."""

import pytest

from esper.leyline.errors import first_line


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("too long"), "too long"),
        (ValueError("\n  sizes differ\nfor conv.weight"), "sizes differ"),
        (KeyError(), "KeyError"),
        (RuntimeError(" \n"), "RuntimeError"),
    ],
)
def test_the_first_line_of_an_error(error: Exception, line: str) -> None:
    assert first_line(error) == line
