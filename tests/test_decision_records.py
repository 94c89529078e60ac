"""The decision records: their form, and their figures against the committed results they link."""

import re
from itertools import permutations
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "decisions"
RECORDS = sorted(FOLDER.glob("[0-9]*.md"))
HEADINGS = ["Context", "Decision", "Measurement", "Consequences", "When to reconsider"]
FIGURES = ROOT / "benchmarks" / "results" / "decisions.md"
NUMBER = re.compile(r"(?<![\w.^-])-?\d[\d,]*(?:\.\d+)?(?![\w.]*\w)")
by_record = pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.stem)


def numbers(text: str) -> list[str]:
    """The numbers of a text without its links, paths, code and dates."""
    text = re.sub(r"\]\([^)]*\)|`[^`]*`|\d{4}-\d\d-\d\d|[\w-]+\.md", " ", text)
    return [found.replace(",", "").strip("-") for found in NUMBER.findall(text)]


def title(record: Path) -> str:
    return record.read_text().partition("\n")[0].removeprefix("# ")


def result_bullets() -> list[tuple[str, str]]:
    """Each bullet of the figures that links committed results, and the text of these."""
    bullets = []
    for bullet in re.split(r"^- |^## ", FIGURES.read_text(), flags=re.MULTILINE)[1:]:
        files = re.findall(r"\]\(([\w.]+)\)", bullet)
        if files and "prototype" not in bullet:
            texts = [(FIGURES.parent / file).read_text() for file in files]
            bullets.append((bullet, "\n".join(texts)))
    return bullets


def agrees(quoted: str, known: list[float], beside: list[float]) -> bool:
    """Whether ``quoted`` is one of ``known`` or the ratio of two numbers ``beside`` it, rounded."""
    tolerance = 0.5 * 10.0 ** -len(quoted.partition(".")[2]) + 1e-9
    ratios = [x / y for x, y in permutations(beside, 2) if y]
    return any(abs(x - float(quoted)) <= tolerance for x in known + ratios)


def test_the_index_lists_every_record_by_its_title() -> None:
    index = re.findall(
        r"^\| \[(\d{4})\]\((\S+)\) \| (.*) \|$", (FOLDER / "README.md").read_text(), re.M
    )
    titles = [title(record) for record in RECORDS]
    assert [f"{number}: {text}" for number, _, text in index] == titles
    assert [file for _, file, _ in index] == [record.name for record in RECORDS]
    assert len(RECORDS) >= 15


@by_record
def test_a_record_has_its_five_parts(record: Path) -> None:
    text = record.read_text()
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == HEADINGS
    assert re.search(r"\]\(\.\./\.\./(benchmarks/results|tests)/", text)


def test_figures_are_those_of_the_linked_results() -> None:
    assert len(result_bullets()) >= 10
    for bullet, results in result_bullets():
        known, beside = ([float(x) for x in numbers(text)] for text in (results, bullet))
        for quoted in numbers(bullet):
            exact = "." in quoted or len(quoted) > 2
            assert not exact or agrees(quoted, known, beside), f"{quoted}: {bullet}"


def test_every_record_has_its_figures() -> None:
    titles = re.findall(r"^## (.*)$", FIGURES.read_text(), re.MULTILINE)
    assert titles == [
        record.read_text().partition("\n")[0].removeprefix("# ") for record in RECORDS
    ]


def test_a_wrong_figure_is_found() -> None:
    known = [float(x) for x in numbers("| 1,238 | 36.9 | 176 |")]
    assert agrees("37", known, [])
    assert agrees("7.0", known, [1238.0, 176.0])
    assert not agrees("7.0", known, [])
    assert not agrees("1239", known, [])
