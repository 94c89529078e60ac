"""The pages: what they name exists, their commands parse, and generated pages are up to date."""

import ast
import builtins
import keyword
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Iterator
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import gymnasium
import pytest

import esper
from esper.karn import query
from esper.leyline.config import canonical, check, unflatten
from esper.leyline.config.setting import spellings
from esper.leyline.metrics import METRICS, PER_HEAD
from esper.runtime.tasks import SUITES, TASKS
from esper.scripts.flags import read_flags
from esper.scripts.grow import GrowArguments
from esper.scripts.main import COMMANDS
from esper.scripts.play import PlayArguments
from esper.scripts.policies import PoliciesArguments
from esper.scripts.query import QueryArguments
from esper.scripts.replay import ReplayArguments
from esper.scripts.report import ReportArguments
from esper.scripts.runs import PruneArguments, RunsArguments
from esper.scripts.sanctum import SanctumArguments
from esper.scripts.tasks import CheckArguments, FetchArguments, TasksArguments
from esper.scripts.train import flags_of_commands
from esper.simic.gym.registration import register_envs
from esper_lab.evaluate import EvaluateArguments

ROOT = Path(__file__).parents[1]
PACKAGE = Path(esper.__file__).parent
DOCS = ROOT / "docs"
SITE = ROOT / "scripts" / "build_site.py"
PAGES = sorted([*DOCS.rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"])
RECORDED = ROOT / "tests" / "recorded" / "healthy"

ARGUMENTS: dict[str, type] = {
    **{f"train {name}": flags for name, flags in flags_of_commands().items()},
    "evaluate": EvaluateArguments, "grow": GrowArguments, "play": PlayArguments,
    "policies": PoliciesArguments, "sanctum": SanctumArguments, "report": ReportArguments,
    "query": QueryArguments, "runs prune": PruneArguments, "runs": RunsArguments,
    "replay": ReplayArguments, "tasks check": CheckArguments, "tasks fetch": FetchArguments,
    "tasks": TasksArguments,
}  # fmt: skip
NUMBERS = {"TOTAL": "60", "ROUNDS": "60", "N": "3", "DAYS": "7"}
"""Placeholders of commands that stand for a number."""

OF_A_RUN = (
    {"config.json", "events.jsonl", "events.parquet", "report.html", "manifest.json"}
    | {"console.log", ".venv", "RUN", "runs", "data", "tensorboard", "wandb", "checkpoints"}
    | {"records", "events", "refused", "rebuild.py", "grown"}
)
"""First parts of paths that a run or a user makes."""


def short(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


by_page = pytest.mark.parametrize("page", PAGES, ids=short)


def blocks(page: Path, language: str = "[^\n]*") -> list[str]:
    """The code blocks of a page in one language."""
    pattern = rf"^```({language})\n(.*?)^```\s*$"
    found = re.findall(pattern, page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for _, text in found]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```\s*$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def spans(page: Path) -> list[str]:
    """What stands in backticks."""
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose(page))]


@cache
def targets() -> set[str]:
    return set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands(page: Path) -> Iterator[str]:
    """Commands of a page, those in its prose and those in its blocks."""
    yield from (text for text in spans(page) if re.match(r"(esper|make|python) [\w-]", text))
    for block in blocks(page, "(?!python|text)[^\n]*"):
        for line in block.splitlines():
            if re.match(r"(\.venv/bin/)?(esper|make|python) [\w-]", line):
                yield re.split(r"\s+# ", line.removeprefix(".venv/bin/"))[0].strip()


def parsed(words: list[str]) -> tuple[str, dict[str, Any]]:
    """The command that the words behind ``esper`` name, and the settings they give."""
    name = next(name for name in ARGUMENTS if words[: len(name.split())] == name.split())
    rest = [word for word in words[len(name.split()) :] if word not in ("--help", "--help-all")]
    return name, read_flags(ARGUMENTS[name], f"esper {name}", rest)


def words_of(command: str) -> list[str]:
    """The words of a command, with numbers in the place of placeholders for numbers."""
    bare = re.sub(r"\[([\w.]+)\]", r"\1", command).replace("...", "")
    return [NUMBERS.get(word, word) for word in shlex.split(bare)]


def test_every_command_has_its_grammar_here() -> None:
    assert {name.split()[0] for name in ARGUMENTS} == set(COMMANDS)


@by_page
def test_commands_parse(page: Path, monkeypatch) -> None:
    for command in commands(page):
        program, *words = words_of(command)
        if program == "make":
            for word in words:
                family = word.endswith("-") and any(name.startswith(word) for name in targets())
                assert word in targets() or "=" in word or family, command
        elif program == "python":
            if words[0] != "-m":
                flags = [word for word in words if word.startswith("--")]
                text = (ROOT / words[0]).read_text()
                assert all(f'"{flag}"' in text for flag in flags), command
        elif words[0] in COMMANDS and (words[0] != "train" or len(words) > 1):
            name, given = parsed(words)
            asked = given.get("task") or given.get("names") or ()
            if not given.get("plugin") and name not in ("tasks fetch", "policies"):
                known = {*TASKS, *SUITES, "NAME", "T"}
                assert known.issuperset([asked] if isinstance(asked, str) else asked), command
            from_records = name in ("train imitation", "train offline")
            if name.startswith("train") and "resume" not in given and not from_records:
                own = ("sanctum", "config_json", "seeds")
                settings = {k: v for k, v in given.items() if k not in own}
                if name == "train impala":
                    settings["algorithm"] = "impala"
                check(unflatten(canonical(settings)))
            if name == "query" and "runs" in given:
                query(RECORDED, given["runs"][-1])
        else:
            assert words[0] in ("--help", "--version", "--completion", "train", "COMMAND"), command


@by_page
def test_flags_exist(page: Path) -> None:
    if page.name == "from-esper-lite.md":
        return  # it names flags of another program
    known = {"help", "help-all", "version", "completion"}
    for arguments in ARGUMENTS.values():
        known |= {word.replace("_", "-") for word in spellings(arguments)}
    scripts = [path.read_text() for path in ROOT.glob("*s/**/*.py") if path.parts[-2] != "docs"]
    known |= set(re.findall(r'"--([\w-]+)"', "".join(scripts)))
    for text in spans(page):
        if not re.match("--|(esper|python|make) ", text):
            continue  # another program's
        for flag in re.findall(r"(?:^|\s)--([a-z][\w-]*)", text):
            assert flag in known or flag.removeprefix("no-") in known, text


@by_page
def test_paths_exist(page: Path) -> None:
    places = (ROOT, page.parent, ROOT / "src", PACKAGE, PACKAGE / "native/src", ROOT / "tests")
    names = {path.name for place in (ROOT, PACKAGE) for path in tracked(place)}
    made = {*re.findall(r"Save this as `([^`]+)`", page.read_text())}
    made |= {*re.findall(r'title="([^"]+)"', page.read_text())}
    register_envs()
    made |= {word for command in commands(page) for word in words_of(command)[1:]}
    for text in spans(page):
        if not re.fullmatch(r"[\w.*/-]+", text) or text.startswith("/"):
            continue
        first, slash, _ = text.removeprefix("./").partition("/")
        if first in OF_A_RUN or text in made or _is_metric(text) or text in gymnasium.registry:
            continue
        if slash:
            assert any(list(place.glob(text.strip("/"))) for place in places), text
        elif re.search(r"\.(py|h|cpp|sh|md|yml|toml)$", text):
            assert text in names, text


def _is_metric(text: str) -> bool:
    root = text.partition("/")[0]
    return root in METRICS or root in PER_HEAD or text in METRICS


@cache
def tracked(folder: Path) -> tuple[Path, ...]:
    skipped = {".venv", ".git", "site", "runs"}
    return tuple(
        path
        for top in folder.iterdir()
        if top.name not in skipped
        for path in ([top] if top.is_file() else top.rglob("*"))
        if path.is_file()
    )


@by_page
def test_dotted_names_resolve_name(page: Path) -> None:
    packages = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    for text in spans(page):
        match = re.fullmatch(r"(\w+)((?:\.\w+)+)(\(.*\))?", text)
        if match is None or re.search(r"\.(py|h|md|json|jsonl)$", text):
            continue
        root, rest = match[1], match[2]
        if root in packages:
            resolve_name(f"esper.{root}{rest}")
        elif root in ("esper", "esper_lab", "torch", "nn"):
            resolve_name(f"{'torch.' if root == 'nn' else ''}{root}{rest}")


@cache
def code_words() -> frozenset[str]:
    """Every identifier and word in the code."""
    texts = [
        path.read_text(errors="ignore")
        for folder in ("src", "scripts", "benchmarks", "tests", "examples")
        for path in tracked(ROOT / folder)
        if path.suffix in (".py", ".h", ".cpp") and path != Path(__file__)
    ]
    return frozenset(re.findall(r"\w+", "\n".join(texts)))


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "events.md"], ids=short)
def test_identifiers_are_in_the_code(page: Path) -> None:
    """Not in events.md, which is generated and has names made of two."""
    known = code_words() | set(re.findall(r"\w+", "\n".join(blocks(page)))) | set(dir(builtins))
    for text in spans(page):
        if re.fullmatch(r"[A-Za-z]\w{3,}(\.\w+)*(\(\))?", text) and re.search("_|.[A-Z]", text):
            first = text.split(".")[0].removesuffix("()")
            assert first in known or keyword.iskeyword(first), text


@by_page
def test_python_blocks_are_python_and_import_what_exists(page: Path) -> None:
    for block in blocks(page, "python[^\n]*"):
        source = block if not block.startswith(" ") else "class _:\n" + block
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("esper"):
                for name in node.names:
                    resolve_name(f"{node.module}.{name.name}")
            elif isinstance(node, ast.Import):
                for name in node.names:
                    resolve_name(name.name)


OTHERS = [ROOT / f"{name}.md" for name in ("CHANGELOG", "CODE_OF_CONDUCT", "SECURITY")]
OTHERS += sorted((ROOT / "benchmarks" / "results").glob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=short)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_every_page_is_in_the_navigation() -> None:
    entries = re.findall(r"^ +- (?:[^#\n:]+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert not [page for page in pages if not any(fnmatch(page, entry) for entry in entries)]
    moved = set(runpy.run_path(str(SITE))["MOVED"].values())
    assert {entry for entry in entries if "*" not in entry} <= pages | moved


def test_links_that_leave_the_docs_are_rewritten_for_the_site() -> None:
    relinked = runpy.run_path(str(SITE))["relinked"]
    known = {"index.md", "tasks.md", "results/text.md", "decisions/0001-a.md"}

    def rewritten(text: str, source: str, address: str) -> str:
        return relinked(text, source, address, known)

    assert rewritten("[t](../benchmarks/results/text.md#a)", "docs/tasks.md", "tasks.md") == (
        "[t](results/text.md#a)"
    )
    assert rewritten("[t](docs/tasks.md)", "README.md", "index.md") == "[t](tasks.md)"
    assert rewritten("[t](../tasks.md)", "docs/decisions/0001-a.md", "decisions/0001-a.md") == (
        "[t](../tasks.md)"
    )
    assert rewritten("see [LICENSE](LICENSE)", "README.md", "index.md") == "see `LICENSE`"
    assert rewritten("[the make file](../Makefile)", "docs/tasks.md", "tasks.md") == (
        "the make file (`Makefile`)"
    )
    for unchanged in ("[a](#b)", "[a](https://b.c)", "```\n[a](../Makefile)\n```\n", "[a](no.md)"):
        assert rewritten(unchanged, "docs/tasks.md", "tasks.md") == unchanged


GENERATED = {"docs/events.md", "docs/from-esper-lite.md", "docs/settings-reference.md"}
"""Pages that scripts write; those in ``docs/reference`` are written from docstrings."""


def test_the_pages_stay_short() -> None:
    """Without generated pages, and without the texts that ``write_figures.py`` writes."""
    words = 0
    for page in DOCS.rglob("*.md"):
        if short(page) not in GENERATED and page.parent.name != "reference":
            text = page.read_text()
            words += len(re.sub(r"<!-- figures.*?<!-- end -->", "", text, flags=re.DOTALL).split())
    assert words <= 30_000


def test_the_settings_page_is_generated_from_the_fields() -> None:
    command = [sys.executable, str(ROOT / "scripts" / "write_settings_docs.py"), "--check"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_reference_pages_name_modules_that_exist() -> None:
    named = [
        name
        for page in (DOCS / "reference").glob("*.md")
        for name in re.findall(r"^::: (\S+)$", page.read_text(), re.MULTILINE)
    ]
    assert len(named) == len(set(named)) > 40
    for name in named:
        resolve_name(name)


def test_documented_parameters_are_those_of_the_function() -> None:
    checked = 0
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or not (text := ast.get_docstring(node)):
                continue
            section = re.search(r"^Args:\n((?:    .*\n?|\n)+)", text, re.MULTILINE)
            own = node.args
            arguments = [*own.posonlyargs, *own.args, *own.kwonlyargs, own.vararg, own.kwarg]
            known = {argument.arg for argument in arguments if argument}
            for names in re.findall(r"^    (\w[\w*, ]*):", section[1] if section else "", re.M):
                for name in names.split(","):
                    assert name.strip(" *") in known, f"{path}: {node.name}: {name}"
                    checked += 1
    assert checked > 200


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings")
    command = [sys.executable, str(SITE), "--out", str(tmp_path / "site")]
    built = subprocess.run(command, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    assert (tmp_path / "site" / "results" / "text.html").exists()
    assert "train_ppo_vectorized" in (tmp_path / "site" / "reference" / "training.html").read_text()
