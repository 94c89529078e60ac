"""Build the site with Zensical, from ``docs/`` and from pages that live elsewhere.

    python scripts/build_site.py [--out FOLDER]

The pages in the repository link to each other by paths that work on a code host, such as
``../benchmarks/results/text.md``. The site has the same pages under other addresses. A link to a
file that the site does not have becomes the path of that file in the repository.
"""

import argparse
import posixpath
import re
import shutil
import subprocess
import sys
import tempfile
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MOVED = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
}
"""Files of the repository, by their address in the site."""
FOLDERS = {"docs/": "", "benchmarks/results/": "results/"}
"""Folders of the repository, by their address in the site."""
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


def sources() -> dict[str, str]:
    """Every file of the site: its path in the repository, and its address in the site."""
    paths = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*"))]
    files = [path.relative_to(ROOT).as_posix() for path in paths if path.is_file()]
    return MOVED | {path: site_address(path) for path in files}


def site_address(path: str) -> str:
    """Where a file of the repository is in the site, if it is there."""
    if path in MOVED:
        return MOVED[path]
    for folder, address in FOLDERS.items():
        if path.startswith(folder):
            return address + path.removeprefix(folder)
    return path


def relinked(markdown: str, source: str, address: str, addresses: set[str]) -> str:
    """``markdown`` with the links of a page as they are in the site.

    Args:
        markdown: text of the page; code blocks stay as they are.
        source: path of the page in the repository.
        address: path of the page in the site.
        addresses: paths in the site of all files.
    """

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if (page := site_address(path)) in addresses:
            relative = posixpath.relpath(page, posixpath.dirname(address) or ".")
            return f"{image}[{text}]({relative}{mark}{anchor})"
        if (ROOT / path).exists():
            return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
        return match[0]  # the build refuses it

    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def expanded(entries: list[Any], pages: list[str]) -> list[Any]:
    """The navigation with its patterns, such as ``decisions/*.md``, replaced by the pages."""
    navigation: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            matching = [page for page in pages if fnmatch(page, entry)]
            navigation += sorted(matching, key=lambda page: not page.endswith("README.md"))
        elif isinstance(entry, dict) and isinstance(next(iter(entry.values())), list):
            ((title, children),) = entry.items()
            navigation.append({title: expanded(children, pages)})
        else:
            navigation.append(entry)
    return navigation


def assemble(folder: Path) -> None:
    """Write the pages and the configuration from which Zensical builds into a folder."""
    import yaml

    files = sources()
    for path, address in files.items():
        target = folder / "docs" / address
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.endswith(".md"):
            text = (ROOT / path).read_text(encoding="utf-8")
            page = relinked(text, path, address, set(files.values()))
            target.write_text(page, encoding="utf-8")
        else:
            shutil.copyfile(ROOT / path, target)
    settings = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    pages = sorted(address for address in files.values() if address.endswith(".md"))
    settings["nav"] = expanded(settings["nav"], pages)
    ((_, plugin),) = next(item for item in settings["plugins"] if "mkdocstrings" in item).items()
    plugin["handlers"]["python"]["paths"] = [str(ROOT / "src")]
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(settings, sort_keys=False), encoding="utf-8")


def main() -> None:
    """Build the site; a warning is an error."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "site", help="folder of the site")
    out = parser.parse_args().out
    with tempfile.TemporaryDirectory() as folder:
        assemble(Path(folder))
        command = [sys.executable, "-m", "zensical", "build", "--strict", "-f", "mkdocs.yml"]
        status = subprocess.run(command, cwd=folder, check=False).returncode
        if status == 0:
            shutil.rmtree(out, ignore_errors=True)
            shutil.copytree(Path(folder) / "site", out)
    sys.exit(status)


if __name__ == "__main__":
    main()
