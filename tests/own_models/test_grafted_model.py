"""A module of the user's own and its seeds: whose gradients are whose."""

import torch
import torch.nn.functional as F

from esper.kasmina.seeds import SeedState
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.stages import Stage
from esper.own_models.grafted_model import GraftedModel
from grown_modules import slots_of
from own_modules import ResidualNet, images


def test_the_gradient_norms_of_each_seed_are_in_its_slot() -> None:
    torch.manual_seed(0)
    model, (x, y) = ResidualNet(dropout=0.0), images(16)
    slots = slots_of(model, x)
    model.train()
    own = GraftedModel(model, slots, torch.optim.SGD(model.parameters(), lr=0.0), 10, 0)
    planted = {0: "conv_light", len(slots) - 1: "conv_small"}
    state = SeedState.dormant((1, len(slots)), torch.device("cpu"))
    for slot, name in planted.items():
        state.stage[0, slot] = Stage.TRAINING
        state.blueprint[0, slot] = BLUEPRINTS.index(name)
        own.germinate(state, slot, 0)
    own.show(state)
    F.cross_entropy(model(x), y).backward()
    own.optimizer.step()
    found = own.result(1.0)
    for slot, spec in enumerate(slots):
        norms = found.seed_tensor_norms[slot]
        assert norms.shape == (1, spec.segment_count)
        seed = own.seeds[slot]
        if slot not in planted or seed is None:
            assert norms.isnan().all()
            assert found.seed_gradient_norm[0, slot].isnan()
            continue
        named = dict(seed.get_submodule(planted[slot]).named_parameters())
        fields = spec.layouts[BLUEPRINTS.index(planted[slot])].fields
        gradients = [named[field.name].grad for field in fields]
        expected = torch.stack([torch.zeros(()) if g is None else g.norm() for g in gradients])
        torch.testing.assert_close(found.seed_gradient_norm[0, slot], expected.norm())
        host = [p.grad.norm() for n, p in model.named_parameters() if ".seed." not in n]
        scale = max(float(expected.max()), float(torch.stack(host).norm()))
        torch.testing.assert_close(norms[0, : len(expected)], expected / scale)
        assert norms[0, len(expected) :].isnan().all()
