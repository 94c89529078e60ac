"""One JSON file and one page, rewritten after every section and every row."""

import sys
import threading
import time
import traceback
from dataclasses import asdict
from pathlib import Path

from reporting import table

from gpu_checks import claims
from gpu_checks.files import write, write_json
from gpu_checks.processes import Outcome
from gpu_checks.section import Found, Section

VIRTUAL = (
    "**VIRTUAL DEVICE: nothing here was measured on a GPU.** Times and speeds are those of a CPU "
    "that imitates one; they show only that the check runs."
)
VERSIONS = ("device_name", "driver", "cuda", "torch", "git")


class Results:
    """What was found so far.

    Args:
        output: folder of both files.
        virtual: whether the device is virtual.
    """

    def __init__(self, output: Path, virtual: bool):
        self.output, self.virtual = output / "gpu_check", virtual
        self.began, self.clock = time.strftime("%Y-%m-%d %H:%M:%S"), time.monotonic()
        self.command = f"python {' '.join(sys.argv)}"
        self.lock = threading.Lock()
        self.outcomes: dict[str, tuple[Section, Outcome]] = {}
        output.mkdir(parents=True, exist_ok=True)

    @property
    def seconds(self) -> float:
        """Seconds since the check began."""
        return time.monotonic() - self.clock

    @property
    def failed(self) -> list[str]:
        """Names of the sections that failed."""
        return [name for name, (_, found) in self.outcomes.items() if found.status == "failed"]

    def put(self, section: Section, outcome: Outcome) -> None:
        """Take over what a section has found so far, and write both files; one thread at a time."""
        with self.lock:
            self._put(section, outcome)

    def _put(self, section: Section, outcome: Outcome) -> None:
        self.outcomes[section.name] = section, outcome
        text = self.page()
        sections = {
            name: {"title": of.title, **asdict(found)}
            for name, (of, found) in self.outcomes.items()
        }
        about = {"virtual": self.virtual, "began": self.began, "command": self.command}
        content = about | {"seconds": self.seconds, "sections": sections}
        write_json(self.output.with_suffix(".json"), content)
        write(self.output.with_suffix(".md"), text)

    def page(self) -> str:
        """Return the whole page in Markdown."""
        parts = [
            f"# GPU check{' (virtual)' if self.virtual else ''}",
            *([VIRTUAL] if self.virtual else []),
            f"`{self.command}`",
            self.versions(),
            self.summary(),
            f"## The documents\n\n{claims.page(self.rows)}",
            *(self.part(section) for section, _ in self.outcomes.values()),
        ]
        return "\n\n".join(parts) + "\n"

    def summary(self) -> str:
        """Return what became of every section, as a table."""
        lines = [
            (found.status, section.title, f"{found.seconds:.0f}", len(found.rows))
            for section, found in self.outcomes.values()
        ]
        return table(("status", "section", "seconds", "rows"), lines)

    def versions(self) -> str:
        """Return GPU, driver, CUDA, torch and revision of Esper, as far as they are known."""
        _, facts = self.outcomes.get("facts", (None, Outcome()))
        known = {row["what"]: row["value"] for row in facts.rows}
        named = [f"{name} {known[name]}" for name in VERSIONS if known.get(name) is not None]
        return ", ".join([*named, self.began])

    @property
    def rows(self) -> Found:
        """The rows of all sections so far, by name."""
        return {name: outcome.rows for name, (_, outcome) in self.outcomes.items()}

    def part(self, section: Section) -> str:
        """Return the part of a section; a page that cannot be written is an error of its own."""
        _, outcome = self.outcomes[section.name]
        parts = [f"## {section.title}"]
        if outcome.status in ("cut", "running"):
            parts.append(f"**{outcome.status}** after {outcome.seconds:.0f} s.")
        if outcome.status == "skipped":
            parts.append(f"**skipped:** needs {', '.join(outcome.missing)}.")
        if outcome.error is not None:
            parts.append(f"**failed:** `{outcome.error.strip().splitlines()[-1]}`")
        try:
            if outcome.rows:
                parts.append(section.page(outcome.rows, self.rows))
        except Exception:
            outcome.error = outcome.error or traceback.format_exc()
            if outcome.status == "done":
                outcome.status = "failed"
            parts.append("The rows stand in the JSON file; they could not be written here.")
        return "\n\n".join(parts)
