"""Columns of plain text."""

from esper.own_models.growth_result import aligned


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    rows = [("", "size", "time"), ("grown", "1,464", "2.0 s"), ("never grown", "438", "")]
    assert aligned(rows, left=1) == [
        "              size   time",
        "grown        1,464  2.0 s",
        "never grown    438",
    ]
    assert aligned(rows, left=3)[1:] == ["grown        1,464  2.0 s", "never grown  438"]
