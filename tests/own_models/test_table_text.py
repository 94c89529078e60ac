"""Columns of plain text."""

from esper.own_models.verdict import table_lines


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("", "size", "time"), ("grown", "1,464", "2.0 s"), ("never grown", "438", "")]
    assert table_lines(rows, labels=1) == [
        "              size   time",
        "grown        1,464  2.0 s",
        "never grown    438",
    ]
    assert table_lines(rows, labels=3)[1:] == ["grown        1,464  2.0 s", "never grown  438"]
