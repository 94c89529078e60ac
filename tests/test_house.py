"""The house stays within its budgets: lines per package, sizes of functions, names."""

import re
from pathlib import Path
from statistics import median, quantiles

import pytest
from house import SOURCE, functions, is_no_noun, lines, names, package_lines

REPOSITORY = Path(__file__).parents[1]
PAGE = REPOSITORY / "docs" / "packages.md"
CEILINGS = {"esper.own_models": 6_110, "esper_lab": 4_500}
"""What the budgets of the page may not exceed, whatever it says."""

NO_NOUNS = 0.005
"""Largest share of names that are no nouns."""


def budgets() -> dict[str, int]:
    """The lines that ``docs/packages.md`` grants each package."""
    rows = re.findall(r"^\| `([\w.]+)` \|.*\| ([\d,]+) \|$", PAGE.read_text(), re.MULTILINE)
    return {package: int(count.replace(",", "")) for package, count in rows}


def measured() -> dict[str, int]:
    """The lines of every package, and of the tests."""
    return {**package_lines(), "tests": lines(REPOSITORY / "tests")}


def test_the_page_budgets_every_package() -> None:
    assert budgets().keys() == measured().keys()


@pytest.mark.parametrize("package", sorted(measured()))
def test_a_package_stays_within_its_budget(package) -> None:
    assert measured()[package] <= budgets()[package]


@pytest.mark.parametrize("package", sorted(CEILINGS))
def test_a_budget_stays_below_its_ceiling(package) -> None:
    assert budgets()[package] <= CEILINGS[package]


def test_functions_stay_short() -> None:
    sizes = functions(SOURCE)
    lengths = list(sizes.lengths.values())
    assert median(lengths) <= 8
    assert quantiles(lengths, n=20)[-1] <= 31
    assert {name: length for name, length in sizes.lengths.items() if length > 80} == {}
    assert {name: count for name, count in sizes.parameters.items() if count > 10} == {}


def test_names_are_nouns() -> None:
    total, by_file = 0, {}
    for package in ("esper", "esper_lab"):
        count, files = names(SOURCE / package)
        total += count
        by_file |= files
    bad = sum(sum(counter.values()) for counter in by_file.values())
    assert bad <= NO_NOUNS * total, by_file


def test_a_participle_is_told_from_a_noun() -> None:
    assert all(map(is_no_noun, ("found", "_kept", "CHOSEN", "planted", "own", "others")))
    assert not any(map(is_no_noun, ("seed", "_hidden", "rows", "speed", "done", "rows_kept")))
