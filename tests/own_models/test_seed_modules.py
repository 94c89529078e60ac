"""Seeds as modules compute what the stacked blueprints compute, and learn behind a host unseen."""

import copy

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import FAMILIES, FORM_OF_STYLE, Form, of_family
from esper.kasmina.seed_module import FORMS, Seed, add_seed
from esper.kasmina.slots import SlotSpec
from esper.leyline.actions import BLUEPRINTS, Style
from esper.own_models import attachment
from esper.own_models.attachment import REACH, attach, learn_behind, new_seed, set_hook
from esper.tolaria.backends.torch import branch, seed_views
from own_modules import ResidualNet, images

CHANNELS = 8
SHAPES = {"conv": (3, CHANNELS, 5, 4), "mlp": (3, CHANNELS), "sequence": (3, 5, CHANNELS)}
EVERY = [(layout, BLUEPRINTS[kind]) for layout in FAMILIES for kind in of_family(layout)]
by_branch = pytest.mark.parametrize(("layout", "name"), EVERY)


def slot_of(layout: str) -> SlotSpec:
    return SlotSpec("here", CHANNELS, (5, 4), 1.0, layout)


def seed_of(layout: str, name: str, form: str) -> Seed:
    seed = new_seed(slot_of(layout), BLUEPRINTS.index(name), FORMS.index(form), 3)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in seed.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
        seed.double().alpha.fill_(0.7)
    return seed


def stacked(x: Tensor, layout: str) -> Tensor:
    """``x`` in the layout of the stacked blueprints, ``[B, H, W, 1, C]``."""
    if layout == "conv":
        return x.permute(0, 2, 3, 1)[:, :, :, None].contiguous()
    return (x[:, None, None, None] if layout == "mlp" else x[:, None, :, None]).contiguous()


def unstacked(x: Tensor, layout: str) -> Tensor:
    if layout == "conv":
        return x[:, :, :, 0].permute(0, 3, 1, 2)
    return x[:, 0, 0, 0] if layout == "mlp" else x[:, 0, :, 0]


@pytest.mark.parametrize("form", FORMS)
@by_branch
def test_values_and_gradients_are_those_of_the_stacked_blueprint(
    layout: str, name: str, form: str
) -> None:
    slot, kind = slot_of(layout), BLUEPRINTS.index(name)
    seed = seed_of(layout, name, form)
    own = {n.removeprefix(f"{name}."): p for n, p in seed.named_parameters()}
    fields = [*slot.layouts[kind].fields]
    row = torch.zeros(slot.width, dtype=torch.float64)
    row[: slot.layouts[kind].size] = torch.cat([own[f.name].detach().flatten() for f in fields])
    if form == "gate":
        row[slot.gate_offset :] = torch.cat(
            [own[f.name].detach().flatten() for f in slot.gate_layout.fields]
        )
    row = row.requires_grad_()
    x = torch.randn(SHAPES[layout], dtype=torch.float64, requires_grad=True)
    views = seed_views(slot, kind, Form(FORMS.index(form)), row[None])
    wide = stacked(x, layout)
    expected = unstacked(
        wide + 0.7 * branch(slot, kind, Form(FORMS.index(form)), views, wide), layout
    )
    weights = torch.randn_like(expected)
    of_x, of_row = torch.autograd.grad((weights * expected).sum(), [x, row])
    found = seed(x)
    gradients = torch.autograd.grad((weights * found).sum(), [x, *seed.parameters()])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[0], of_x, rtol=1e-11, atol=1e-11)
    by_name = dict(zip(own, gradients[1:], strict=True))
    for part, gradient in slot.layouts[kind].views(of_row[None]).items():
        torch.testing.assert_close(by_name[part], gradient[0], rtol=1e-11, atol=1e-11)
    size = int(slot.parameter_table[kind, _style(form)])
    assert sum(p.numel() for p in seed.parameters()) == size


def _style(form: str) -> Style:
    return next(s for s, f in FORM_OF_STYLE.items() if f == FORMS.index(form))


@pytest.mark.parametrize("form", FORMS)
@by_branch
def test_a_newborn_seed_changes_nothing_and_learns_at_once(
    layout: str, name: str, form: str
) -> None:
    seed = new_seed(slot_of(layout), BLUEPRINTS.index(name), FORMS.index(form), 0)
    seed.alpha.fill_(1.0)
    x = torch.randn(SHAPES[layout])
    out = seed(x)
    assert torch.equal(out, x)
    (out * torch.randn_like(out)).sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in seed.parameters())


def test_new_seeds_leave_torchs_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    one = new_seed(slot_of("conv"), BLUEPRINTS.index("conv_heavy"), 2, 9)
    assert torch.equal(torch.rand(3), expected)
    same = new_seed(slot_of("conv"), BLUEPRINTS.index("conv_heavy"), 2, 9)
    other = new_seed(slot_of("conv"), BLUEPRINTS.index("conv_heavy"), 2, 10)
    weights = [each.get_parameter("conv_heavy.widen.weight") for each in (one, same, other)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    bound = slot_of("conv").layouts[BLUEPRINTS.index("conv_heavy")].fields[0].bound
    assert 0.8 * bound < float(weights[0].detach().abs().max()) <= bound


def gradients_of(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    out = model(x)
    (out * torch.arange(out.shape[1])).sum().backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def test_a_seed_in_training_leaves_values_and_gradients_of_its_host_as_they_are() -> None:
    x, _ = images(8)
    plain = ResidualNet(dropout=0.0)
    grown = copy.deepcopy(plain)
    module = grown.layer1[1]
    seed = new_seed(
        SlotSpec("layer1.1", 4, (8, 8), 0.5, "conv"), BLUEPRINTS.index("conv_light"), 0, 1
    )
    with torch.no_grad():
        seed.conv_light.conv.weight.normal_()
    attach(grown, "layer1.1", seed)
    set_hook(module, learn_behind)
    expected, found = gradients_of(plain, x), gradients_of(grown, x)
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name
    assert torch.equal(plain(x), grown(x))

    # Its own gradient is that of a step of bounded length against the activation's gradient.
    kept: dict[str, Tensor] = {}
    hooks = [
        plain.layer1[1].register_forward_hook(lambda m, i, o: kept.update(at=o.detach().clone())),
        plain.layer1[1].register_forward_hook(
            lambda m, i, o: o + torch.zeros_like(o).requires_grad_()
        ),
    ]
    plain.eval()
    grown.eval()
    found = gradients_of(grown, x)
    of_slot: dict[str, Tensor] = {}
    hooks.append(
        plain.layer1[1].register_forward_hook(
            lambda m, i, o: o.register_hook(lambda g: of_slot.update(g=g)) and None
        )
    )
    gradients_of(plain, x)
    separate = copy.deepcopy(seed)
    separate.zero_grad()
    branch, g = separate.branch(kept["at"]), of_slot["g"]
    weight = g.norm() / (REACH * kept["at"].norm())
    ((g * branch).sum() + 0.5 * weight * branch.square().sum()).backward()
    torch.testing.assert_close(
        separate.conv_light.conv.weight.grad, found["layer1.1.seed.conv_light.conv.weight"]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_branch_in_training_learns_in_the_dtype_of_its_activation(dtype: torch.dtype) -> None:
    host = nn.Sequential(nn.Linear(5, CHANNELS), nn.BatchNorm1d(CHANNELS)).to(dtype)
    attach(host, "1", Seed("mlp", CHANNELS, "mlp"))
    set_hook(host[1], learn_behind)
    host(torch.randn(6, 5, dtype=dtype)).square().sum().backward()
    for name, parameter in host[1].seed.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.dtype == dtype
        assert bool(parameter.grad.isfinite().all())


class Free(nn.Module):
    """A branch that can become any function of its inputs, as their number is one."""

    def __init__(self, x: Tensor):
        super().__init__()
        self.f = nn.Parameter(torch.zeros_like(x))

    def branch(self, x: Tensor) -> Tensor:
        return self.f


def test_a_branch_in_training_learns_a_step_of_bounded_length_down_the_gradient(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, target = torch.randn(16, 8), torch.randn(16, 8)
    module, seed = nn.Identity(), Free(x)
    monkeypatch.setattr(attachment, "Seed", Free)
    module.add_module("seed", seed)
    module.register_forward_hook(learn_behind)
    optimizer = torch.optim.SGD(seed.parameters(), lr=1.0)
    for _ in range(400):
        optimizer.zero_grad()
        (module(x) - target).square().mean().backward()
        optimizer.step()
    g = x - target
    torch.testing.assert_close(
        seed.f.detach(), -REACH * x.norm() * g / g.norm(), rtol=1e-3, atol=1e-3
    )


@pytest.mark.parametrize("name", [name for layout, name in EVERY if layout == "conv"])
def test_an_input_without_gradient_in_channels_last_is_no_trouble(name: str) -> None:
    seed = seed_of("conv", name, "add").float()
    for shape in (SHAPES["conv"], (2, CHANNELS, 1, 1)):
        x = torch.randn(shape).to(memory_format=torch.channels_last)
        seed(x).sum().backward()
        expected = seed(x.contiguous(memory_format=torch.contiguous_format).requires_grad_())
        torch.testing.assert_close(seed(x), expected)


def test_the_dtype_of_the_activation_is_kept_under_autocast() -> None:
    host = nn.Sequential(nn.Conv2d(1, CHANNELS, 3), nn.ReLU())
    attach(host, "1", seed_of("conv", "conv_light", "gate").float())
    set_hook(host[1], add_seed)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = host(torch.randn(2, 1, 6, 6))
    assert out.dtype == torch.bfloat16
    out.float().sum().backward()
