"""Deepening of stacks of blocks: the function is kept, and what trains them goes on."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.deeper_stacks import deepen, match_depth, numbering, repeats
from esper.kasmina.nested import tensors
from own_modules import Gpt, ResidualNet, images, tokens
from wide_modules import temporal, transformer


class Steps(nn.Module):
    """A recurrent layer that adds to what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gru = nn.LayerNorm(6), nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.gru(self.norm(x))[0]


class Told(Steps):
    """It is given its input by name, and returns it in a tuple with its states."""

    def forward(self, *, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        output, states = self.gru(self.norm(hidden_states))
        return hidden_states + output, states


class Teller(nn.Module):
    """It calls blocks by name and takes the first of what they return."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(5, 6), nn.ModuleList([Told(), Told()])
        self.attention = nn.ModuleList()
        self.attention.add_module("0", None)  # as in a U-Net without it

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(hidden_states=x)[0]
        return x


HOSTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor], dict[str, int]]] = {
    "residual": (ResidualNet, lambda: images(8)[0], {"layer1": 2}),
    "language": (Gpt, lambda: tokens(8)[:, :-1], {"blocks": 3}),
    "recurrent": (
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Sequential(Steps(), Steps()), nn.Linear(6, 3)),
        lambda: torch.randn(8, 4, 5),
        {"1": 2},
    ),
    "tuples": (Teller, lambda: torch.randn(8, 4, 5), {"blocks": 2}),
    "weight norms": (temporal, lambda: torch.randn(8, 1, 7), {"2": 2}),
}
"""By name: the module, inputs, and how many blocks each of its stacks has."""


def outputs(model: nn.Module, x: Tensor) -> list[Tensor]:
    model.eval()
    with torch.no_grad():
        return [y.clone() for y in tensors(model(x))]


@pytest.fixture(params=HOSTS)
def host(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, dict[str, int]]:
    torch.manual_seed(0)
    make, inputs, depths = HOSTS[request.param]
    model, x = make(), inputs()
    # Statistics of a trained network, so that a norm is not the identity.
    model.train()
    model(x)
    return model, x, depths


def test_copies_keep_the_function_learn_and_are_taken_out_to_the_bit(
    host: tuple[nn.Module, Tensor, dict[str, int]],
) -> None:
    model, x, depths = host
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    sum(y.square().mean() for y in tensors(model(x))).backward()
    optimizer.step()
    before, state = outputs(model, x), copy.deepcopy(model.state_dict())
    group_sizes = [len(group["params"]) for group in optimizer.param_groups]
    with torch.no_grad():
        copyable, reasons = repeats(model.eval(), lambda: model(x))
    assert not reasons
    assert {name: sum(r.container == name for r in copyable) for name in depths} == depths
    changes = [
        deepen(model, each.container, each.index, each.zeros, optimizer)
        for each in reversed(copyable)
    ]
    for name, depth in depths.items():
        assert len(model.get_submodule(name)) == 2 * depth  # type: ignore[arg-type]
    for y, z in zip(before, outputs(model, x), strict=True):
        assert torch.allclose(y, z, rtol=1e-6, atol=1e-6 * float(y.abs().max()))
    parameters = {id(p) for p in model.parameters()}
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == parameters
    new = next(model.get_submodule(each.container)[each.index] for each in changes)
    weights = [p.detach().clone() for p in new.parameters()]
    for _ in range(2):
        optimizer.zero_grad()
        sum(y.square().mean() for y in tensors(model.train()(x))).backward()
        optimizer.step()
    assert all(not torch.equal(p, w) for p, w in zip(new.parameters(), weights, strict=True))
    for change in reversed(changes):
        change.undo()
    assert [len(group["params"]) for group in optimizer.param_groups] == group_sizes
    assert {id(p) for p in optimizer.state} <= {id(p) for p in model.parameters()}
    model.load_state_dict(state)
    assert all(torch.equal(y, z) for y, z in zip(before, outputs(model, x), strict=True))


def test_a_module_gets_the_depth_of_a_state_and_back(
    host: tuple[nn.Module, Tensor, dict[str, int]],
) -> None:
    model, x, _ = host
    shallow, initial = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    with torch.no_grad():
        copyable, _ = repeats(model.eval(), lambda: model(x))
    for each in reversed(copyable):
        deepen(model, each.container, each.index, each.zeros)
    match_depth(shallow, model.state_dict())
    shallow.load_state_dict(model.state_dict())
    for y, z in zip(outputs(model, x), outputs(shallow, x), strict=True):
        assert torch.equal(y, z)
    match_depth(model, initial)
    model.load_state_dict(initial)


class Shifted(nn.Module):
    """A residual block that looks as far back as its number says, which is no parameter."""

    def __init__(self, width: int, hidden: int, shift: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, hidden), nn.Linear(hidden, width)
        self.scale, self.shift = nn.Parameter(torch.full((width,), 1e-8)), shift
        self.further = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.scale * self.last(self.first(x.roll(self.shift, 1)).relu())
        return x + self.scale * self.further(x)


def test_blocks_keep_what_is_no_parameter_and_stand_among_others() -> None:
    """As windows of attention that are shifted in every other block; the list has two shapes."""
    torch.manual_seed(0)

    def new() -> nn.Module:
        wide = (Shifted(6, 8, shift) for shift in range(1, 5))
        return nn.Sequential(nn.Linear(5, 6), nn.Sequential(Shifted(6, 4, 0), *wide))

    model, x, shallow = new(), torch.randn(8, 7, 5), new()
    initial = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        copyable, _ = repeats(model.eval(), lambda: model(x))
    # A scale that begins near 0 does not hide that what it scales is not 0.
    assert [each.zeros for each in copyable] == [("further", "last")] * 4
    for each in reversed(copyable):
        deepen(model, each.container, each.index, each.zeros)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    match_depth(shallow, model.state_dict())
    shallow.load_state_dict(model.state_dict())
    assert torch.equal(model(x), shallow(x))
    match_depth(model, initial)
    assert [block.shift for block in model[1]] == [0, 1, 2, 3, 4]
    deepen(model, "1", 1, ())  # as where no more parameters are allowed
    match_depth(again := new(), model.state_dict())
    assert [block.shift for block in again[1]] == [0, 1, 1, 2, 3, 4]


class Noting(nn.Module):
    """A block that is told what came before, and notes that it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gate = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, calls: list[str], *, notes: SimpleNamespace) -> Tensor:
        calls.append("call")
        notes.count += 1
        assert len(calls) == notes.count <= 2
        return x + self.layer(x) * self.gate(x).exp()


def test_trials_of_a_block_leave_what_it_notes_as_it_was() -> None:
    blocks = nn.ModuleList([Noting(), Noting()])
    model, notes, calls = nn.Sequential(blocks), SimpleNamespace(count=0), list[str]()

    @torch.no_grad()
    def run() -> None:
        x = torch.ones(2, 4)
        for block in blocks:
            x = block(x, calls, notes=notes)

    copyable, reasons = repeats(model, run)
    assert [(each.index, each.zeros) for each in copyable] == [(0, ("layer",)), (1, ("layer",))]
    assert (reasons, len(calls), notes.count) == ({}, 2, 2)


class Numbered(nn.Module):
    """A block that holds its number within, and other numbers."""

    def __init__(self, number: int):
        super().__init__()
        self.norm, self.inner = nn.LayerNorm(4), nn.Linear(4, 4)
        self.inner.layer_idx, self.dilation, self.num_layers = 5 + number, 1 + number, 3
        if number == 1:
            self.cross_layer = 1


def test_numbers_of_blocks_and_counts_of_the_configs_around_them_follow() -> None:
    model, inner = nn.Module(), nn.Module()
    model.encoder, model.rest = inner, nn.Module()
    inner.layers = nn.ModuleList(map(Numbered, range(3)))
    model.config = SimpleNamespace(
        encoder_layers=3, decoder_layers=3, num_layers=3, block_size=3, layer_types=["a", "b", "c"],
        layer_ranks=[1, 2], widths=[1, 2, 3], name="layers",
    )  # fmt: skip
    inner.config, model.rest.config = {"depth": 3}, {"depth": 3}
    before = copy.deepcopy((model.config, inner.config))
    with numbering(model, "encoder.layers") as stack:
        stack.insert(2, copy.deepcopy(stack[1]))
    assert [block.inner.layer_idx for block in stack] == [5, 6, 7, 8]
    assert [block.dilation for block in stack] == [1, 2, 2, 3]
    assert {block.num_layers for block in stack} == {3}
    assert [block.cross_layer for block in stack[1:3]] == [1, 1]
    assert model.config == SimpleNamespace(
        encoder_layers=4, decoder_layers=3, num_layers=4, block_size=3,
        layer_types=["a", "b", "b", "c"], layer_ranks=[1, 2], widths=[1, 2, 3], name="layers",
    )  # fmt: skip
    assert (inner.config["depth"], model.rest.config["depth"]) == (4, 3)
    with numbering(model, "encoder.layers"):
        del stack[2]
    assert (model.config, inner.config) == before
    assert [block.inner.layer_idx for block in stack] == [5, 6, 7]


def post_norm() -> nn.Module:
    """As it is after training: its layer norms change what they are given."""
    model = transformer()
    for name, parameter in model.named_parameters():
        if "norm" in name:
            nn.init.uniform_(parameter, 0.5, 1.5)
    return model


class Weighted(nn.Module):
    """Blocks that scale what they are given, so that none passes it on."""

    def __init__(self, twice: bool):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2))
        self.twice = twice

    def forward(self, x: Tensor) -> Tensor:
        for block in [*self.blocks] * (2 if self.twice else 1):
            x = block(x)
        return x


@pytest.mark.parametrize(
    ("model", "x", "reason"),
    [
        (Weighted(False), torch.randn(3, 4), "do not pass on"),
        (Weighted(True), torch.randn(3, 4), "are called 2 times"),
        (post_norm(), torch.randn(3, 4, 5), "do not pass on"),
    ],
    ids=["no residual", "called twice", "post-norm"],
)
def test_blocks_that_cannot_be_copied_are_named(model: nn.Module, x: Tensor, reason: str) -> None:
    with torch.no_grad():
        copyable, reasons = repeats(model.eval(), lambda: model(x))
    assert not copyable
    assert [reason in text for text in reasons.values()] == [True]


def test_blocks_that_do_not_stand_beside_each_other_are_no_repeats() -> None:
    blocks = [
        nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True, norm_first=True)
        for _ in range(2)
    ]
    model, x = nn.Sequential(nn.Sequential(*blocks)).eval(), torch.randn(2, 4, 8)
    with torch.no_grad():
        assert len(repeats(model, lambda: model(x))[0]) == 2
        model[0].insert(1, nn.Tanh())
        assert repeats(model, lambda: model(x)) == ([], {})
