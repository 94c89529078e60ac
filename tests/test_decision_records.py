"""The decision records: their form, and their figures against the committed results they link."""

import re
from itertools import permutations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
HEADINGS = ["Context", "Decision", "Measurement", "Consequences", "When to reconsider"]
NUMBER = re.compile(r"(?<![\w.^-])-?\d[\d,]*(?:\.\d+)?(?![\w.]*\w)")
by_record = pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)


def numbers(text: str) -> list[str]:
    """The numbers of a text without its links, paths, code and dates."""
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|\d{4}-\d\d-\d\d|[\w-]+\.md", " ", text)
    return [found.replace(",", "").strip("-") for found in NUMBER.findall(text)]


def result_bullets(record: Path) -> list[tuple[str, str]]:
    """Each bullet that links committed results, and the text of these."""
    section = record.read_text().split("## Measurement\n")[1].split("\n## ")[0]
    found = []
    for bullet in re.split(r"^- ", section, flags=re.MULTILINE)[1:]:
        files = re.findall(r"\((\.\./\.\./benchmarks/results/[\w.]+)\)", bullet)
        if files and "prototype" not in bullet:
            found.append((bullet, "\n".join((FOLDER / file).read_text() for file in files)))
    return found


def agrees(quoted: str, known: list[float], beside: list[float]) -> bool:
    """Whether ``quoted`` is one of ``known`` or the ratio of two numbers ``beside`` it, rounded."""
    tolerance = 0.5 * 10.0 ** -len(quoted.partition(".")[2]) + 1e-9
    ratios = [x / y for x, y in permutations(beside, 2) if y]
    return any(abs(x - float(quoted)) <= tolerance for x in known + ratios)


def test_the_index_lists_every_record_by_its_title() -> None:
    index = re.findall(
        r"^\| \[(\d{4})\]\((\S+)\) \| (.*) \|$", (FOLDER / "README.md").read_text(), re.M
    )
    titles = [record.read_text().partition("\n")[0].removeprefix("# ") for record in RECORDS]
    assert [f"{number}: {title}" for number, _, title in index] == titles
    assert [file for _, file, _ in index] == [record.name for record in RECORDS]
    assert len(RECORDS) >= 15


@by_record
def test_a_record_has_its_five_parts(record: Path) -> None:
    text = record.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert re.search(r"\]\(\.\./\.\./(benchmarks/results|tests)/", text)


@by_record
def test_figures_are_those_of_the_linked_results(record: Path) -> None:
    for bullet, results in result_bullets(record):
        known, beside = ([float(x) for x in numbers(text)] for text in (results, bullet))
        for quoted in numbers(bullet):
            exact = "." in quoted or len(quoted) > 2
            assert not exact or agrees(quoted, known, beside), f"{quoted}: {bullet}"


def test_a_wrong_figure_is_found() -> None:
    known = [float(x) for x in numbers("| 1,238 | 36.9 | 176 |")]
    assert agrees("37", known, [])
    assert agrees("7.0", known, [1238.0, 176.0])
    assert not agrees("7.0", known, [])
    assert not agrees("1239", known, [])
