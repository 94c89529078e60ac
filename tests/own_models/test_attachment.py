"""A grown module is an ordinary module: copied, pickled, compiled, exported, stripped, rebuilt."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from esper.kasmina import Slot
from esper.kasmina.blueprints import BUILDERS, FAMILIES, of_family
from esper.kasmina.seed_module import FORMS, Seed, add_seed
from esper.leyline.actions import BLUEPRINTS
from esper.leyline.errors import UsageError
from esper.own_models.attachment import attach, grown_seeds, new_seed, set_hook, strip
from esper.own_models.loading import load_grown
from esper.own_models.written_code import rebuilding_code
from grown_modules import slots_of
from own_modules import Gpt, Recurrent, ResidualNet, images, perceptron, tokens

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}
HOSTS = {
    "residual": (ResidualNet, lambda: images(6)[0]),
    "gpt": (Gpt, lambda: tokens(6)[:, :-1]),
    "recurrent": (Recurrent, lambda: tokens(6)[:, :-1]),
    "perceptron": (perceptron, lambda: torch.randn(6, 5)),
}
by_host = pytest.mark.parametrize("host", HOSTS)


def grown(host: str) -> tuple[nn.Module, Tensor]:
    """A module with a seed of another blueprint and form in every slot, and its input."""
    torch.manual_seed(1)
    build, example = HOSTS[host]
    model, x = build(), example()
    for place, slot in enumerate(slots_of(model, x)):
        kind = slot.kinds[place % len(slot.kinds)]
        seed = new_seed(slot, kind, place % len(FORMS), place)
        with torch.no_grad():
            for parameter in seed.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape))
            seed.alpha.fill_(0.5)
        attach(model, slot.name, seed)
        set_hook(model.get_submodule(slot.name), add_seed)
    return model, x


def logits(output: Tensor | dict[str, Tensor]) -> Tensor:
    return output["logits"] if isinstance(output, dict) else output


def output(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return logits(model(x))


@by_host
def test_stripping_gives_back_the_original(host: str) -> None:
    torch.manual_seed(1)
    original = HOSTS[host][0]().eval()
    model, x = grown(host)
    assert not torch.equal(output(model, x), output(original, x))
    assert strip(model) is model
    assert type(model) is type(original)
    assert list(model.state_dict()) == list(original.state_dict())
    assert torch.equal(output(model, x), output(original, x))
    assert not any(module._forward_hooks for module in model.modules())
    assert repr(model) == repr(original)


@by_host
def test_copies_and_pickles_compute_the_same_and_are_their_own(host: str) -> None:
    model, x = grown(host)
    expected = output(model, x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(output(other, x), expected)
        strip(other)
        assert not torch.equal(output(other, x), expected)
    assert torch.equal(output(model, x), expected)


@by_host
def test_a_state_dict_rebuilds_the_module_and_it_trains_on(host: str, tmp_path: Path) -> None:
    model, x = grown(host)
    torch.save(model.state_dict(), tmp_path / "state.pt")
    fresh = HOSTS[host][0]().eval()
    again = load_grown(fresh, torch.load(tmp_path / "state.pt", weights_only=True))
    assert again is fresh
    assert torch.equal(output(again, x), output(model, x))
    assert {n: s.blueprint for n, s in grown_seeds(again).items()} == {
        n: s.blueprint for n, s in grown_seeds(model).items()
    }
    assert all(p.requires_grad for p in again.parameters())
    before = copy.deepcopy(again.state_dict())
    logits(again.train()(x)).square().sum().backward()
    torch.optim.SGD(again.parameters(), lr=0.1).step()
    changed = [n for n, p in again.state_dict().items() if not torch.equal(p, before[n])]
    assert any(".seed." in name for name in changed)


def test_a_state_that_does_not_fit_is_refused_and_nothing_is_loaded() -> None:
    model, x = grown("residual")
    state = model.state_dict()
    fresh = ResidualNet(width=6).eval()
    before = output(fresh, x)
    with pytest.raises(UsageError, match=r"'stem.weight' of the state does not fit ResidualNet"):
        load_grown(fresh, state)
    with pytest.raises(UsageError, match=r"Sequential has no module"):
        load_grown(perceptron(), state)
    with pytest.raises(UsageError, match=r"already has seeds"):
        load_grown(model, state)
    renamed = {name.replace(".conv_light.", ".unheard."): value for name, value in state.items()}
    assert renamed != state
    with pytest.raises(UsageError, match=r"unknown blueprint"):
        load_grown(fresh, renamed)
    assert not grown_seeds(fresh)
    assert torch.equal(output(fresh, x), before)


@by_host
def test_compiled_and_exported_modules_compute_the_same(host: str) -> None:
    model, x = grown(host)
    expected = output(model, x)
    compiled = torch.compile(model, backend="aot_eager")
    torch.testing.assert_close(output(compiled, x), expected, **TOLERANCE)
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(model, (x,), dynamic_shapes=({0: batch},))
    torch.testing.assert_close(output(program.module(), x[:4]), expected[:4], **TOLERANCE)


def test_compiled_code_notices_a_seed_that_comes_later() -> None:
    model, x = ResidualNet(dropout=0.0).eval(), images(4)[0]
    compiled = torch.compile(model, backend="eager")
    before = output(compiled, x)
    donor, _ = grown("residual")
    name, seed = next(iter(grown_seeds(donor).items()))
    attach(model, name, copy.deepcopy(seed))
    set_hook(model.get_submodule(name), add_seed)
    assert not torch.equal(output(compiled, x), before)
    assert torch.equal(output(compiled, x), output(model, x))


def rectified() -> nn.Sequential:
    """A module with ReLU and a marker, which have no parameters."""
    return nn.Sequential(
        nn.Sequential(nn.Linear(5, 8), nn.ReLU()), nn.Linear(8, 8), Slot(8), nn.Linear(8, 2)
    )


@pytest.mark.parametrize("name", ["0.1", "2"])
def test_a_seed_behind_a_module_without_parameters_has_the_dtype_and_device_of_the_model(
    name: str,
) -> None:
    x = torch.randn(4, 5, dtype=torch.float64)
    model = rectified().double()
    attach(model, name, Seed("mlp", 8, "mlp", "gate"))
    set_hook(model.get_submodule(name), add_seed)
    expected = model(x)
    assert expected.dtype == torch.float64
    again = load_grown(rectified().double(), model.state_dict())
    assert torch.equal(again(x), expected)

    elsewhere = rectified().to("meta")
    attach(elsewhere, name, Seed("mlp", 8, "mlp", "gate"))
    assert {value.device.type for value in elsewhere.state_dict().values()} == {"meta"}


def test_a_seed_has_the_dtype_of_the_nearest_module_with_numbers() -> None:
    model = rectified()
    model[0].double()
    codes = nn.Parameter(torch.ones(2).int(), requires_grad=False)
    model[0][0]._parameters = {"codes": codes, **model[0][0]._parameters}
    numberless = nn.Sequential(nn.ReLU())
    single, double = {torch.float32}, {torch.float64}
    cases = (model, "0.1", double), (model, "2", double), (model, "1", single)
    for whole, name, dtypes in (*cases, (numberless, "0", single)):
        attach(whole, name, Seed("mlp", 8, "mlp"))
        assert {p.dtype for p in whole.get_submodule(name).parameters()} == dtypes, name


CHECK = """
import sys
sys.modules["esper"] = None
sys.path.insert(0, sys.argv[1])
import importlib.util
import torch
import own_modules
for folder, builder in zip(sys.argv[2::2], sys.argv[3::2]):
    spec = importlib.util.spec_from_file_location("rebuild", folder + "/rebuild.py")
    rebuild = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(rebuild)
    kept = torch.load(folder + "/expected.pt", weights_only=True)
    model = getattr(own_modules, builder)()
    rebuild.rebuild(model, folder + "/state_dict.pt").eval()
    found = model(kept["x"])
    found = found["logits"] if isinstance(found, dict) else found
    torch.testing.assert_close(found, kept["out"], rtol=1e-5, atol=1e-5)
    model.train()
    found = model(kept["x"])
    (found["logits"] if isinstance(found, dict) else found).square().sum().backward()
    assert any(p.grad is not None and ".seed." in n for n, p in model.named_parameters())
    print("rebuilt", builder)
"""


def test_the_written_file_rebuilds_each_module_without_esper(tmp_path: Path) -> None:
    arguments = []
    for host, (build, _) in HOSTS.items():
        model, x = grown(host)
        folder = tmp_path / host
        folder.mkdir()
        (folder / "rebuild.py").write_text(rebuilding_code(model, {}))
        torch.save(model.state_dict(), folder / "state_dict.pt")
        torch.save({"x": x, "out": output(model, x)}, folder / "expected.pt")
        arguments += [str(folder), build.__name__]
    command = [sys.executable, "-c", CHECK, str(Path(__file__).parents[1]), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    names = [build.__name__ for build, _ in HOSTS.values()]
    assert done.stdout.splitlines() == [f"rebuilt {name}" for name in names], done.stderr


def test_every_branch_can_be_written(tmp_path: Path) -> None:
    model = nn.ModuleDict()
    for layout in FAMILIES:
        for kind in of_family(layout):
            model[f"{layout}_{BLUEPRINTS[kind]}"] = carrier = nn.Identity()
            carrier.add_module("seed", Seed(BLUEPRINTS[kind], 8, layout))
    code = rebuilding_code(model, {})
    space: dict[str, object] = {}
    exec(compile(code, "rebuild.py", "exec"), space)
    assert {name: set(by_layout) for name, by_layout in space["BUILDERS"].items()} == {
        name: set(by_layout) for name, by_layout in BUILDERS.items()
    }
    assert "esper" not in code.lower().replace("esper grew", "")
