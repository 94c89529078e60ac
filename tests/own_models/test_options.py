"""Arguments, flags, recipe, checkpoint and documentation derive from the fields of the options."""

import inspect
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import esper
from esper.leyline.config.setting import about, in_order, meanings, setting, settings_of, up_to
from esper.own_models.options import (
    GrowOptions,
    GrowthOptions,
    compared_names,
    describe,
    flags,
    recipe_names,
    to_resume,
)
from esper.scripts.flags import parse
from esper.scripts.grow import GrowArguments, options_of, result_settings, with_options

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from write_settings_docs import page


@dataclass(frozen=True, kw_only=True)
class MoreOptions(GrowOptions):
    """The options of ``grow``, and one more."""

    warmup: int = setting(3, up_to(9), flag=int, in_recipe=True)
    """Epochs before growth."""


def test_what_options_share_with_others_comes_last() -> None:
    order = [f.name for f in in_order(MoreOptions)]
    assert order[0] == "warmup"
    assert order[1:] == [f.name for f in fields(GrowOptions)]


def names(kind: type) -> list[str]:
    return [f.name for f in fields(kind)]


def test_arguments_are_the_fields() -> None:
    for function, kind in ((esper.grow, GrowOptions), (esper.Growth, GrowthOptions)):
        parameters = inspect.signature(function).parameters
        for f in fields(kind):
            assert parameters[f.name].default == f.default
            assert parameters[f.name].kind is inspect.Parameter.KEYWORD_ONLY
            assert f"{f.name}: {meanings(kind)[f.name]}" in (function.__doc__ or "")
    assert names(GrowOptions)[: len(names(GrowthOptions))] == names(GrowthOptions)


def test_flags_recipe_checkpoint_and_page_have_the_fields() -> None:
    settings = settings_of(GrowArguments)
    given = parse(GrowArguments, "esper grow", ["--model", "net.py", "--clip", "0.5"])
    for name, f in flags(GrowOptions).items():
        assert settings[name].type == about(f).flag
        assert about(settings[name]).within == about(f).within
        assert name in result_settings(given)
    assert options_of(given)["clip"] == 0.5
    assert not {"loss", "device", "slots"} & options_of(given).keys()
    assert set(recipe_names(GrowOptions)) < set(names(GrowOptions))
    stored = to_resume(GrowOptions(slots=("a",), loss=max))
    assert (stored["slots"], stored["loss"], stored["amp_dtype"]) == (["a"], "max", None)
    assert not {"device", "checkpoint", "callbacks"} & stored.keys()
    text = page()
    assert all(f"| `{name}` |" in text for name in names(GrowOptions))


def test_a_new_option_is_one_field() -> None:
    def more(model: object, **options: object) -> None:
        """Grow."""

    describe(more, MoreOptions)
    assert inspect.signature(more).parameters["warmup"].default == 3
    assert "warmup: Epochs before growth." in (more.__doc__ or "")
    assert to_resume(MoreOptions(warmup=4), compared_names(MoreOptions))["warmup"] == 4
    assert "warmup" in recipe_names(MoreOptions)

    @dataclass(frozen=True, kw_only=True)
    @with_options(MoreOptions)
    class Arguments:
        """A command."""

    assert parse(Arguments, "grow", ["--warmup", "5"]).warmup == 5  # type: ignore[attr-defined]
