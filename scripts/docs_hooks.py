"""Hooks of mkdocs: pages from outside ``docs/``, links to them, and patterns in the navigation.

The pages in the repository link to each other by paths that work on a code host, such as
``../benchmarks/results/text.md``. The site has the same pages under other addresses. A link to a
file that the site does not have becomes the path of that file in the repository.
"""

from __future__ import annotations

import copy
import posixpath
import re
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

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


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Expand patterns in the navigation; an entry without pages is left out."""
    pages = {path.relative_to(config.docs_dir).as_posix() for path in _files(Path(config.docs_dir))}
    pages |= set(_outside().values())
    assert config.nav is not None
    config.nav = _expanded(copy.deepcopy(config.nav), sorted(pages))
    return config


def _expanded(entries: list[Any], pages: list[str]) -> list[Any]:
    found: list[Any] = []
    for entry in entries:
        if isinstance(entry, str) and "*" in entry:
            matching = [page for page in pages if fnmatch(page, entry)]
            found += sorted(matching, key=lambda page: not page.endswith("README.md"))
        elif isinstance(entry, dict) and isinstance(next(iter(entry.values())), list):
            ((title, children),) = entry.items()
            if kept := _expanded(children, pages):
                found.append({title: kept})
        else:
            found.append(entry)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the files from outside ``docs/``."""
    from mkdocs.structure.files import File

    for path, address in _outside().items():
        files.append(File.generated(config, address, abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links between files of the repository to addresses in the site."""
    address = page.file.src_uri
    source = {new: old for old, new in _outside().items()}.get(address, f"docs/{address}")
    known = set(files.src_uris)
    return relinked(markdown, source, address, known)


def relinked(markdown: str, source: str, address: str, known: set[str]) -> str:
    """``markdown`` with the links of a page as they are in the site.

    Args:
        markdown: text of the page; code blocks stay as they are.
        source: path of the page in the repository.
        address: path of the page in the site.
        known: paths in the site of all files.
    """

    def link(match: re.Match[str]) -> str:
        image, text, target = match.groups()
        path, mark, anchor = target.partition("#")
        if not path or re.match(r"[a-z]+:", path):
            return match[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        moved = site_address(path)
        if moved in known:
            relative = posixpath.relpath(moved, posixpath.dirname(address) or ".")
            return f"{image}[{text}]({relative}{mark}{anchor})"
        if (ROOT / path).exists():
            return f"`{path}`" if text.strip("`") in path else f"{text} (`{path}`)"
        return match[0]  # mkdocs refuses it

    parts = FENCE.split(markdown)
    return "".join(part if i % 2 else LINK.sub(link, part) for i, part in enumerate(parts))


def site_address(path: str) -> str:
    """Where a file of the repository is in the site, if it is there."""
    if path in MOVED:
        return MOVED[path]
    for folder, moved in FOLDERS.items():
        if path.startswith(folder):
            return moved + path.removeprefix(folder)
    return path


def _outside() -> dict[str, str]:
    """Files from outside ``docs/`` that the site has, with their addresses."""
    results = (path.relative_to(ROOT).as_posix() for path in _files(ROOT / "benchmarks/results"))
    return MOVED | {path: site_address(path) for path in results}


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())
