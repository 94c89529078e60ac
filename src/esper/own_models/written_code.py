"""A Python file that rebuilds a grown module without Esper: the sources of its seeds, and where
they hang."""

import io
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from esper.kasmina import seed_module
from esper.kasmina.blueprints import BUILDERS
from esper.kasmina.deeper_stacks import numbering
from esper.kasmina.source_copy import SourceCopy
from esper.leyline.disk import replace_synced
from esper.leyline.errors import UsageError
from esper.own_models.attachment import grown_seeds

STATE_FILE, CODE_FILE = "state_dict.pt", "rebuild.py"
"""What ``save_grown`` writes."""

_REBUILD = '''

def rebuild(model: nn.Module, state: dict | str) -> nn.Module:
    """Give ``model``, built as before it grew, its blocks, widths and seeds, and load ``state``."""
    for name, index in COPIES:
        with numbering(model, name) as stack:
            stack.insert(index + 1, copy.deepcopy(stack[index]))
    for point, (blueprint, channels, layout, form) in SEEDS.items():
        attach_seed(model.get_submodule(point), Seed(blueprint, channels, layout, form))
    if isinstance(state, str):
        state = torch.load(state, map_location="cpu", weights_only=True)
    for name, sizes in WIDTHS.items():
        layer = model.get_submodule(name)
        for key, size in sizes.items():
            is_number = isinstance(getattr(layer, key), int)
            setattr(layer, key, size if is_number else (size,))
    shared = {}  # by its id, a tensor that layers may share, kept as its id would be reused
    for path, part in model.named_modules():
        for key, before in [*part._parameters.items(), *part._buffers.items()]:
            value = state.get(f"{path}.{key}".lstrip("."))
            is_free = before is None or value is None or nn.parameter.is_lazy(before)
            if is_free or value.shape == before.shape:
                continue
            new = torch.empty_like(value)
            new = nn.Parameter(new) if isinstance(before, nn.Parameter) else new
            setattr(part, key, shared.setdefault(id(before), (before, new))[1])
    model.load_state_dict(state)
    return model
'''


Widths = Mapping[str, Mapping[str, tuple[int, int]]]
"""See ``GrowthResult.widths``."""
Copies = Sequence[tuple[str, int]]
"""See ``GrowthResult.copies``."""


def save_grown(model: nn.Module, folder: str | Path, widths: Widths, copies: Copies = ()) -> Path:
    """Write a grown module as ``STATE_FILE`` and ``CODE_FILE``, see ``GrowthResult.save``.

    Args:
        model: a grown module.
        folder: made if it does not exist.
        widths: the layers that became wider.
        copies: the blocks that were copied.

    Returns:
        the folder.

    Raises:
        UsageError: the folder cannot be written; see also ``rebuilding_code``.
    """
    where = Path(folder)
    try:
        write_grown(model, where, widths, copies)
    except OSError as error:
        raise UsageError(
            f"save: cannot write into {where} ({error.strerror or error}); give another folder"
        ) from error
    return where


def write_grown(model: nn.Module, folder: Path, widths: Widths, copies: Copies = ()) -> None:
    """As ``save_grown``.

    Raises:
        OSError: the folder cannot be written.
    """
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    code = rebuilding_code(model, widths, copies).encode()
    folder.mkdir(parents=True, exist_ok=True)
    replace_synced(folder / STATE_FILE, state.getvalue())
    replace_synced(folder / CODE_FILE, code)


def rebuilding_code(model: nn.Module, widths: Widths, copies: Copies = ()) -> str:
    """The source of a module with a function ``rebuild(model, state)``; it imports torch alone,
    besides what the files of plugin blueprints import.

    Args:
        model: a grown module.
        widths: the layers that became wider.
        copies: the blocks that were copied.

    Raises:
        UsageError: the source of a blueprint is not in a file, or two of its names are equal.
    """
    seeds = grown_seeds(model)
    sources = SourceCopy(skip={"BUILDERS"})
    builders: dict[str, dict[str, str]] = {}
    for seed in seeds.values():
        builder = BUILDERS[seed.blueprint][seed.layout]
        builders.setdefault(seed.blueprint, {})[seed.layout] = sources.add_function(builder)
    for part in (seed_module.Seed, seed_module.attach_seed, numbering):
        sources.add_function(part)
    parts = [
        '"""Rebuilds a module that Esper grew; needs torch alone."""',
        "\n".join(sorted({"import copy", *sources.imports})),
        *sources.definitions,
        "BUILDERS = {\n" + "".join(f"    {_entry(*item)},\n" for item in builders.items()) + "}",
        "SEEDS = {\n"
        + "".join(
            f"    {point!r}: {(s.blueprint, s.channels, s.layout, s.form)!r},\n"
            for point, s in seeds.items()
        )
        + "}",
        f"COPIES = {[tuple(each) for each in copies]!r}",
        "WIDTHS = {\n"
        + "".join(
            f"    {name!r}: { ({key: after for key, (_, after) in sizes.items()})!r},\n"
            for name, sizes in widths.items()
        )
        + "}",
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n" + _REBUILD


def _entry(blueprint: str, builders: dict[str, str]) -> str:
    by_layout = ", ".join(f"{layout!r}: {builder}" for layout, builder in builders.items())
    return f"{blueprint!r}: {{{by_layout}}}"
