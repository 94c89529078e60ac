"""Metadata hook of hatchling: the README and the links of the project for a package index.

A package index resolves no path of the repository. Where ``ESPER_REPOSITORY`` holds the address of
the repository on a code host, links and images become absolute, at the tag of the release, and the
project gets its links; ``git clone`` names the address. Otherwise the picture is left out and a
link becomes its text.
"""

import os
import re
from pathlib import Path
from typing import Any

from hatchling.metadata.plugin.interface import MetadataHookInterface

REPOSITORY = "ESPER_REPOSITORY"
PLACEHOLDER = "https://HOST/OWNER/esper"
_LINK = re.compile(r"(!?)\[([^\]]*)\]\((?!https://|#)([^)\s]+)\)")
_FENCE = re.compile(r"(^```.*?^```[^\n]*$)", re.MULTILINE | re.DOTALL)


class IndexPage(MetadataHookInterface):
    """Sets ``readme`` and ``urls``."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Fill in the dynamic fields; called by hatchling."""
        address = os.environ.get(REPOSITORY, "").rstrip("/")
        tag = f"v{metadata['version']}"
        text = (Path(self.root) / "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": absolute(
                text.replace(PLACEHOLDER, address), f"{address}/raw/{tag}", f"{address}/blob/{tag}"
            )
            if address
            else without_paths(text),
        }
        metadata["urls"] = urls(address, tag) if address else {}


def urls(address: str, tag: str) -> dict[str, str]:
    """The links of the project on a package index, by label."""
    return {
        "Source": address,
        "Documentation": f"{address}/blob/{tag}/docs/command-line.md",
        "Changelog": f"{address}/blob/{tag}/CHANGELOG.md",
        "Issues": f"{address}/issues",
    }


def absolute(markdown: str, images: str, pages: str) -> str:
    """``markdown`` with the paths of images below ``images``, and of links below ``pages``."""
    return _replaced(markdown, lambda m: f"{m[1]}[{m[2]}]({images if m[1] else pages}/{m[3]})")


def without_paths(markdown: str) -> str:
    """``markdown`` without images from the repository, with links to its files as plain text."""
    return _replaced(markdown, lambda m: "" if m[1] else m[2])


def _replaced(markdown: str, replace: Any) -> str:
    """``markdown`` with its links to paths replaced outside blocks of code."""
    parts = _FENCE.split(markdown)
    return "".join(part if part.startswith("```") else _LINK.sub(replace, part) for part in parts)
