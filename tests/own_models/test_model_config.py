"""A model that is built of its config is built by it again when it has grown."""

import copy
import runpy
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import esper
from configured import Config, Decoder
from esper.kasmina import model_config
from esper.kasmina.deeper_stacks import match_depth
from esper.own_models import width_search


def windows(count: int = 24) -> Tensor:
    return torch.randint(23, (count, 9), generator=torch.Generator().manual_seed(1))


def batches() -> list[tuple[Tensor, Tensor]]:
    return [(x[:, :-1], x[:, 1:]) for x in windows().split(8)]


def trained(config: Config | None = None) -> tuple[Decoder, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Decoder(config or Config())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for inputs, target in batches():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs).transpose(1, 2), target).backward()
        optimizer.step()


def output(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.eval()(tokens)


def token_by_token(model: Decoder, tokens: Tensor) -> Tensor:
    cache: list[Any] = [None] * model.config.num_hidden_layers
    with torch.no_grad():
        return torch.cat([model.eval()(x, cache) for x in tokens.split(1, 1)], 1)


def assert_is_built_by_its_config(model: Decoder) -> None:
    twin = Decoder(copy.deepcopy(model.config))
    twin.load_state_dict(model.state_dict())
    assert torch.equal(output(twin, windows()), output(model, windows()))
    cached = token_by_token(twin, windows())
    assert torch.allclose(cached, output(model, windows()), atol=1e-5)


def test_numbers_follow_where_layers_become_wider_and_return() -> None:
    model, optimizer = trained()
    before, config = output(model, windows()), copy.deepcopy(model.config)
    random_numbers = torch.get_rng_state()
    result = esper.widen(model, batches(), optimizer=optimizer, factor=2)
    assert torch.equal(torch.get_rng_state(), random_numbers)
    numbers = "hidden_size 8 -> 16, intermediate_size 16 -> 32, num_attention_heads 2 -> 4"
    assert f"config: {numbers}" in result.lines
    later = Config(hidden_size=16, intermediate_size=32, num_attention_heads=4)
    assert model.config == later
    assert torch.allclose(output(model, windows()), before, atol=1e-5)
    train(model.train(), optimizer)
    assert_is_built_by_its_config(model)
    result.undo()
    assert model.config == config


class Stages(nn.Module):
    """Attention in stages, whose widths and heads its config lists, beside other lists."""

    def __init__(self, config: SimpleNamespace):
        super().__init__()
        self.config, widths = config, [6, *config.hidden_sizes]
        self.maps = nn.ModuleList(nn.Linear(*sizes) for sizes in pairwise(widths))
        self.attention = nn.ModuleList(
            nn.MultiheadAttention(width, heads, batch_first=True)
            for width, heads in zip(widths[1:], config.num_attention_heads, strict=True)
        )
        self.head = nn.Linear(widths[-1], 3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, attention in zip(self.maps, self.attention, strict=True):
            x = layer(x)
            x = x + attention(x, x, x)[0]
        return self.head(x.mean(1))


def test_numbers_of_several_stages_follow_in_their_list() -> None:
    torch.manual_seed(0)
    numbers = {"hidden_sizes": [4, 8], "num_attention_heads": (2, 4), "hidden_size": 8}
    model = Stages(SimpleNamespace(**numbers, strides=(2, 1), depths=[8, 8]))
    inputs = torch.randn(16, 5, 6)
    result = esper.widen(model, [(inputs, torch.randint(3, (16,)))], factor=2)
    later = {"hidden_sizes": [8, 16], "num_attention_heads": (4, 8), "hidden_size": 16}
    assert model.config == SimpleNamespace(**later, strides=(2, 1), depths=[8, 8])
    texts = (f"{key} {old} -> {later[key]}" for key, old in numbers.items())
    assert f"config: {', '.join(texts)}" in result.lines
    result.undo()
    assert model.config == SimpleNamespace(**numbers, strides=(2, 1), depths=[8, 8])


def test_a_width_of_heads_is_named_where_the_stream_no_longer_gives_it() -> None:
    model, optimizer = trained()
    slots = ["embedding", "layers.0.down", "layers.1.down"]
    result = esper.widen(model, batches(), optimizer=optimizer, factor=2, slots=slots)
    assert "config: hidden_size 8 -> 16, head_dim unset -> 4" in result.lines
    assert_is_built_by_its_config(model)
    result.undo()
    assert not hasattr(model.config, "head_dim")


@pytest.mark.parametrize(
    ("factor", "hint"), [(None, "; factor=2 makes all layers wider alike"), (2, "")]
)
def test_a_config_without_fitting_numbers_stays_and_a_line_says_so(
    factor: float | None, hint: str
) -> None:
    model, optimizer = trained()
    result = esper.widen(
        model, batches(), optimizer=optimizer, factor=factor, slots=["layers.0"], price=0.001
    )
    assert result.parameters[1] > result.parameters[0]
    line = f"config: no numbers of it give these sizes: its class builds no such model{hint}"
    assert line in result.lines
    assert model.config == Config()


@pytest.mark.parametrize("heads", [2, 4])
def test_a_count_of_heads_by_which_the_model_computes_something_else_is_not_taken(
    heads: int,
) -> None:
    """Heads of any number have the same parameters."""
    model, _ = trained()
    for layer in model.layers:
        layer.attention.num_heads = heads
    half = {"norm.weight": torch.Size([4])}
    change = model_config.follow(model, half, lambda x: output(x, windows()))
    assert change is not None
    assert model.config == Config(num_attention_heads=heads)
    change.undo()
    assert model.config == Config()


class Scaled(Decoder):
    """It scales by a number of its own and one of its config."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.scale = config.hidden_size

    def forward(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        return super().forward(tokens, cache) * (self.scale / self.config.hidden_size)


def test_numbers_that_would_change_what_the_model_computes_are_not_taken() -> None:
    torch.manual_seed(0)
    model = Scaled(Config())
    before = output(model, windows())
    result = esper.widen(model, batches(), factor=2)
    assert result.parameters[1] > result.parameters[0]
    assert model.config == Config()
    assert torch.allclose(output(model, windows()), before, atol=1e-5)


class Counting(Decoder):
    """It counts its layers beside the config, by a name that is known or one that is not."""

    def __init__(self, config: Config, name: str):
        super().__init__(config)
        self.name = name
        setattr(self, name, config.num_hidden_layers)

    def forward(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        return super().forward(tokens, [None] * getattr(self, self.name))


@pytest.mark.parametrize(("name", "depth"), [("n_layer", 4), ("steps", 2)])
def test_a_count_that_is_not_known_leaves_a_stack_as_it_was(name: str, depth: int) -> None:
    torch.manual_seed(0)
    model = Counting(Config(), name)
    before = output(model, windows())
    result = esper.deepen(model, batches())
    assert len(model.layers) == getattr(model, name) == model.config.num_hidden_layers == depth
    line = "nothing is deepened (its forward pass fails then: list index out of range)"
    assert (line in result.lines) == (depth == 2)
    assert torch.allclose(output(model, windows()), before, atol=1e-6)


class Adapter(nn.Module):
    """A block that adds to its input."""

    def __init__(self, width: int):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.layer(self.norm(x))


class Adapted(Decoder):
    """It has blocks that its config does not count."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.adapters = nn.Sequential(*(Adapter(config.vocab_size) for _ in range(2)))

    def forward(self, tokens: Tensor, cache: list[Any] | None = None) -> Tensor:
        return self.adapters(super().forward(tokens, cache))


def test_a_stack_that_the_config_does_not_count_has_a_line() -> None:
    torch.manual_seed(0)
    result = esper.deepen(Adapted(Config()), batches())
    assert result.lines[-1].endswith("sizes: its class builds no such model")


class FromDict(nn.Module):
    """A model that is built of a dict."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.config = config
        self.decoder = Decoder(Config(**config))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.decoder(tokens)


def test_the_entries_of_a_dict_follow() -> None:
    torch.manual_seed(0)
    model = FromDict({"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2})
    result = esper.widen(model, batches(), factor=2)
    later = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4}
    assert model.config == later
    rebuilt = FromDict(model.config)
    rebuilt.load_state_dict(model.state_dict())
    result.undo()
    assert model.config == {"hidden_size": 8, "intermediate_size": 16, "num_attention_heads": 2}


class Unnamed(nn.Module):
    """A model whose config has no names."""

    def __init__(self, config: dict[int, int]):
        super().__init__()
        self.config, (width, classes) = config, config.values()
        self.layers = nn.Sequential(nn.Embedding(23, width), nn.Linear(width, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(tokens)


def test_a_config_without_names_has_a_line() -> None:
    torch.manual_seed(0)
    result = esper.widen(Unnamed({0: 4, 1: 23}), batches(), factor=2)
    assert any(line.startswith("config: no numbers of it give") for line in result.lines)


@dataclass
class PairConfig:
    """What has the config of another model in it."""

    text_config: Config
    size: int = 3


class Pair(nn.Module):
    """A model in another."""

    def __init__(self, config: PairConfig):
        super().__init__()
        self.config, self.text = config, Decoder(config.text_config)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.text(tokens)


def test_a_config_within_a_config_follows() -> None:
    torch.manual_seed(0)
    model = Pair(PairConfig(Config()))
    result = esper.widen(model, batches(), factor=2)
    assert model.config == PairConfig(
        Config(hidden_size=16, intermediate_size=32, num_attention_heads=4)
    )
    assert model.text.config is model.config.text_config
    result.undo()
    esper.deepen(model, batches())
    assert model.config == PairConfig(
        Config(num_hidden_layers=4, layer_types=["near", "near", "far", "far"])
    )


def test_a_class_that_is_built_of_something_else_has_no_line() -> None:
    class Other(Decoder):
        def __init__(self) -> None:
            super().__init__(Config())

    torch.manual_seed(0)
    model = Other()
    result = esper.widen(model, batches(), factor=2)
    assert result.parameters[1] > result.parameters[0]
    assert not any(line.startswith("config") for line in result.lines)
    assert model.config == Config()


def test_deeper_stacks_are_called_numbered_and_cached_as_built_by_the_config() -> None:
    model, optimizer = trained()
    before = output(model, windows())
    result = esper.deepen(model, batches(), optimizer=optimizer)
    assert result.lines == ("layers: 2 -> 4 blocks; copies add nothing yet",)
    assert torch.allclose(output(model, windows()), before, atol=1e-6)
    assert [layer.attention.layer_idx for layer in model.layers] == [0, 1, 2, 3]
    assert model.config == Config(num_hidden_layers=4, layer_types=["near", "near", "far", "far"])
    train(model.train(), optimizer)
    assert_is_built_by_its_config(model)
    assert not torch.allclose(output(model, windows()), before, atol=1e-3)
    result.undo()
    assert model.config == Config()
    assert [layer.attention.layer_idx for layer in model.layers] == [0, 1]


def test_a_state_of_a_deeper_model_brings_its_numbers() -> None:
    model, _ = trained()
    initial = copy.deepcopy(model.state_dict())
    esper.deepen(model, batches())
    fresh = Decoder(Config())
    esper.load_grown(fresh, model.state_dict())
    assert fresh.config.num_hidden_layers == 4
    assert torch.equal(output(fresh, windows()), output(model, windows()))
    assert torch.allclose(token_by_token(fresh, windows()), output(model, windows()), atol=1e-5)
    match_depth(fresh, initial)
    assert fresh.config == Config()


@pytest.mark.parametrize("policy", ["widen", "deepen"])
def test_grow_leaves_a_config_by_which_the_model_is_built(
    policy: str, monkeypatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(width_search, "expected_gain", lambda plan: 9.0)
    (model, _), data = trained(), batches()
    result = esper.grow(
        model, data, data, policy=policy, epochs=4, progress=False, twin=False, price=0.0
    )
    assert result.parameters > sum(p.numel() for p in Decoder(Config()).parameters())
    assert result.model.config != Config()
    assert_is_built_by_its_config(result.model)
    folder = result.save(tmp_path / "grown")
    rebuild = runpy.run_path(str(folder / "rebuild.py"))["rebuild"]
    rebuilt = rebuild(Decoder(Config()), str(folder / "state_dict.pt"))
    assert rebuilt.config.num_hidden_layers == (4 if policy == "deepen" else 2)
    cached = token_by_token(rebuilt, windows())
    assert torch.allclose(cached, output(result.model, windows()), atol=1e-5)
