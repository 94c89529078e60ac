"""Version, authors and date agree wherever the repository states them."""

import re
import tomllib
from pathlib import Path

import pytest

import esper

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CITATION = (ROOT / "CITATION.cff").read_text()
RELEASES = re.findall(r"^## ([\d.]+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def cited(field: str) -> str:
    """The value of a field of CITATION.cff."""
    (value,) = re.findall(rf'^[ -]*{field}: "?([^"\n]+)"?$', CITATION, re.MULTILINE)
    return value


def test_the_version_is_the_same_everywhere() -> None:
    assert esper.__version__ == PROJECT["version"] == cited("version") == RELEASES[0][0]


def test_the_citation_has_the_date_licence_and_authors_of_the_release() -> None:
    assert cited("date-released") == RELEASES[0][1]
    assert cited("license") == PROJECT["license"]
    assert [{"name": cited("name")}] == PROJECT["authors"]


def test_the_changelog_begins_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md"])
def test_links_of_a_page_lead_to_files(page: str) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", (ROOT / page).read_text()):
        assert link.startswith("https://") or (ROOT / link).exists(), link


def test_paths_named_in_the_security_policy_exist() -> None:
    paths = re.findall(r"`(src/[\w./]+)`", (ROOT / "SECURITY.md").read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).is_file(), path
