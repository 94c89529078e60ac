"""Text of SQL that is put together from names."""


def sql_literal(value: str) -> str:
    """A string literal of SQL."""
    return "'" + value.replace("'", "''") + "'"
