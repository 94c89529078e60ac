"""A Python file that rebuilds a grown module without Esper: the sources of its seeds, and where
they hang."""

import io
from pathlib import Path

import torch
from torch import nn

from esper.kasmina import seed_module
from esper.kasmina.blueprints import BUILDERS
from esper.kasmina.source_copy import SourceCopy
from esper.leyline.disk import replace_synced
from esper.own_models.grafted_model import grown_seeds

STATE_FILE, CODE_FILE = "state_dict.pt", "rebuild.py"
"""What ``save_grown`` writes."""

_REBUILD = '''

def rebuild(model: nn.Module, state: dict | str) -> nn.Module:
    """Attach the seeds to ``model``, built as before it grew, and load ``state`` (or its file)."""
    for point, (blueprint, channels, layout, form) in SEEDS.items():
        attach_seed(model.get_submodule(point), Seed(blueprint, channels, layout, form))
    if isinstance(state, str):
        state = torch.load(state, map_location="cpu", weights_only=True)
    model.load_state_dict(state)
    return model
'''


def save_grown(model: nn.Module, folder: str | Path) -> Path:
    """Write a grown module as ``STATE_FILE`` and ``CODE_FILE``, see ``GrowthResult.save``.

    Args:
        model: a grown module.
        folder: made if it does not exist.

    Returns:
        the folder.
    """
    where = Path(folder)
    where.mkdir(parents=True, exist_ok=True)
    state = io.BytesIO()
    torch.save(model.state_dict(), state)
    replace_synced(where / STATE_FILE, state.getvalue())
    replace_synced(where / CODE_FILE, rebuilding_code(model).encode())
    return where


def rebuilding_code(model: nn.Module) -> str:
    """The source of a module with a function ``rebuild(model, state)``; it imports torch alone,
    besides what the files of plugin blueprints import.

    Args:
        model: a grown module.

    Raises:
        UsageError: the source of a blueprint is not in a file, or two of its names are equal.
    """
    seeds = grown_seeds(model)
    sources = SourceCopy(skip={"BUILDERS"})
    builders: dict[str, dict[str, str]] = {}
    for seed in seeds.values():
        builder = BUILDERS[seed.blueprint][seed.layout]
        builders.setdefault(seed.blueprint, {})[seed.layout] = sources.add_function(builder)
    for part in (seed_module.Seed, seed_module.attach_seed):
        sources.add_function(part)
    parts = [
        '"""Rebuilds a module that Esper grew; needs torch alone."""',
        "\n".join(sorted(sources.imports)),
        *sources.definitions,
        "BUILDERS = {\n" + "".join(f"    {_entry(*item)},\n" for item in builders.items()) + "}",
        "SEEDS = {\n"
        + "".join(
            f"    {point!r}: {(s.blueprint, s.channels, s.layout, s.form)!r},\n"
            for point, s in seeds.items()
        )
        + "}",
    ]
    return "\n\n\n".join(part.strip("\n") for part in parts) + "\n" + _REBUILD


def _entry(blueprint: str, builders: dict[str, str]) -> str:
    by_layout = ", ".join(f"{layout!r}: {builder}" for layout, builder in builders.items())
    return f"{blueprint!r}: {{{by_layout}}}"
