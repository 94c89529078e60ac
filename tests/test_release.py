"""Version, authors and date agree wherever the repository states them."""

import os
import re
import subprocess
import sys
import tomllib
from email import message_from_bytes
from email.message import Message
from pathlib import Path
from zipfile import ZipFile

import esper

ROOT = Path(__file__).parents[1]
SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT = SETTINGS["project"]
CITATION = (ROOT / "CITATION.cff").read_text()
RELEASES = re.findall(r"^## ([\d.]+) \((.+)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def cited(field: str) -> str:
    """The value of a field of CITATION.cff."""
    (value,) = re.findall(rf'^[ -]*{field}: "?([^"\n]+)"?$', CITATION, re.MULTILINE)
    return value


def test_the_version_is_the_same_everywhere() -> None:
    assert esper.__version__ == PROJECT["version"] == cited("version") == RELEASES[0][0]


def test_uv_and_pip_install_the_same_versions() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = [line for line in lines if line and not line.startswith("#")]
    assert SETTINGS["tool"]["uv"]["constraint-dependencies"] == pinned


def test_the_citation_has_the_date_licence_and_authors_of_the_release() -> None:
    assert cited("date-released") == RELEASES[0][1]
    assert cited("license") == PROJECT["license"]
    assert [{"name": cited("name")}] == PROJECT["authors"]


def test_the_changelog_begins_with_what_is_unreleased() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert headings[0] == "Unreleased"


def test_paths_named_in_the_security_policy_exist() -> None:
    paths = re.findall(r"`(src/[\w./]+)`", (ROOT / "SECURITY.md").read_text())
    assert paths
    for path in paths:
        assert (ROOT / path).is_file(), path


ADDRESS = "https://host.example/esper"


def built(place: Path, repository: str) -> tuple[list[str], Message]:
    """Names of the files and metadata of a wheel without the compiled library."""
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "-o", str(place)]
    environment = os.environ | {"ESPER_REPOSITORY": repository}
    subprocess.run([*command, str(ROOT)], env=environment, capture_output=True, check=True)
    (made,) = place.glob("*.whl")
    with ZipFile(made) as wheel:
        names = wheel.namelist()
        (metadata,) = (name for name in names if name.endswith(".dist-info/METADATA"))
        return names, message_from_bytes(wheel.read(metadata))


def targets(page: str) -> list[str]:
    """Targets of the links and images of a page, outside blocks of code."""
    prose = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"\]\(([^)]+)\)", prose)


def test_a_package_index_shows_the_picture_and_the_links(tmp_path: Path) -> None:
    names, metadata = built(tmp_path, ADDRESS)
    assert {"esper/py.typed", "esper_growth.py"} <= set(names)
    text, tag = metadata.get_payload(), f"v{esper.__version__}"
    assert f"]({ADDRESS}/raw/{tag}/docs/images/growth.svg)" in text
    readme = (ROOT / "README.md").read_text()
    paths = [f"/{tag}/{target}" for target in targets(readme) if not target.startswith("https://")]
    assert len(targets(text)) == len(targets(readme)) > 0
    assert all(target.startswith("https://") for target in targets(text))
    assert all(any(target.endswith(path) for target in targets(text)) for path in paths)
    links = dict(entry.split(", ") for entry in metadata.get_all("Project-URL"))
    assert links["Source"] == ADDRESS
    for label in ("Documentation", "Changelog"):
        base, path = links[label].split(f"/blob/{tag}/")
        assert (base, (ROOT / path).is_file()) == (ADDRESS, True)


def test_without_an_address_a_package_index_shows_no_broken_link(tmp_path: Path) -> None:
    _, metadata = built(tmp_path, "")
    assert metadata["Project-URL"] is None
    assert [t for t in targets(metadata.get_payload()) if not t.startswith("https://")] == []
    assert "grow while they train" in metadata.get_payload()
