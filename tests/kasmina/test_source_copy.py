"""What a blueprint of the user's own needs is copied, whatever way its file imports it."""

from pathlib import Path

import pytest
import torch

from esper.kasmina.blueprints import BUILDERS, Blueprint
from esper.kasmina.source_copy import SourceCopy
from esper.leyline.errors import UsageError
from esper.runtime import plugins
from esper.runtime.gate import Permission
from support import own_blueprints

PLUGIN = """
from functools import cache
import torch.nn.functional as F
from esper.kasmina.blueprints import Blueprint, register
{imports}

SCALE = 2.0

@cache
def width(channels):
    return channels + 1

def build(channels):
    def forward(p, x):
        return {conv}(F.relu(SCALE * {conv}(x, p["in"])), p["out"])

    wide = width(channels)
    fields = {weight}("in", wide, channels, 1, 1), {weight}("out", channels, wide, 1, 1)
    return Blueprint(fields, forward)

register("from_a_file", build)
"""
IMPORTS = {
    "names": (
        "from esper.kasmina.ops import conv2d\nfrom esper.kasmina.stack import weight",
        "conv2d", "weight",
    ),
    "aliases": (
        "from esper.kasmina.ops import conv2d as c\nfrom esper.kasmina.stack import weight as w",
        "c", "w",
    ),
    "modules": (
        "from esper.kasmina import ops\nimport esper.kasmina.stack as st",
        "ops.conv2d", "st.weight",
    ),
}  # fmt: skip


def loaded(tmp_path: Path, source: str) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    plugins.load(str(path), Permission((str(path),)))


@pytest.mark.parametrize("way", IMPORTS)
def test_the_copy_computes_the_same_without_esper(way: str, tmp_path: Path) -> None:
    imports, conv, weight = IMPORTS[way]
    with own_blueprints():
        loaded(tmp_path, PLUGIN.format(imports=imports, conv=conv, weight=weight))
        copy = SourceCopy(set())
        name = copy.add_function(BUILDERS["from_a_file"]["conv"])
        original = BUILDERS["from_a_file"]["conv"](3)
    code = "\n\n".join(["\n".join(sorted(copy.imports)), *copy.definitions])
    assert "esper" not in code
    space: dict[str, object] = {"__name__": "elsewhere"}
    exec(code, space)
    again: Blueprint = space[name](3)
    assert [(f.name, f.shape) for f in again.fields] == [(f.name, f.shape) for f in original.fields]
    parameters = {f.name: f.initial()[None] for f in original.fields}
    x = torch.randn(2, 4, 4, 1, 3)
    assert torch.equal(again.forward(parameters, x), original.forward(parameters, x))


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import esper.kasmina.ops\n\ndef build(c):\n    return esper.kasmina.ops", "as a name"),
        (
            "from esper.kasmina.ops import conv2d\n\ndef to_images(x):\n    return x\n\n"
            "def build(c):\n    return conv2d, to_images",
            "'to_images' has two meanings",
        ),
    ],
)
def test_what_cannot_be_copied_is_refused(source: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    space: dict[str, object] = {"__name__": "mine"}
    exec(compile(source, str(path), "exec"), space)
    if says:
        with pytest.raises(UsageError, match=says):
            SourceCopy(set()).add_function(space["build"])
    code = compile("def build(c):\n    return c", "<nowhere>", "exec")
    exec(code, space)
    with pytest.raises(UsageError, match="define it at the top level of a file"):
        SourceCopy(set()).add_function(space["build"])
