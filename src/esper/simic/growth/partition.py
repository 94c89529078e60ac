"""Cutting environments into parts of whole groups, and naming a part."""


def span(environments: list[int]) -> str:
    """Environments for a message: the identity of one, or the number and range of several."""
    if len(environments) == 1:
        return f"environment {environments[0]}"
    return f"{len(environments)} environments from {min(environments)} to {max(environments)}"


def cut(runs: list[int], parts: int) -> list[int]:
    """Sizes of at most ``parts`` parts of about equal size, each of whole consecutive runs."""
    total, sizes, position = sum(runs), [0] * parts, 0
    for run in runs:
        sizes[min(parts - 1, (position + run // 2) * parts // total)] += run
        position += run
    return [size for size in sizes if size]
