"""A seed as a torch module, for the activation of one network.

It computes what its blueprint computes for stacked networks, as a stack of one.
``own_models.written_code`` copies the definitions that it uses into the file that rebuilds a
grown module without Esper.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from esper.kasmina.blueprints import BUILDERS, FAMILIES
from esper.kasmina.blueprints.blueprint import Form, branch, gate_fields

FORMS = tuple(form.name.lower() for form in Form)
"""How a seed is combined with the activation, by ``Form``."""


class NamedTensors(nn.Module):
    """A module whose parameters and buffers have dotted names, like those of nested modules."""

    def __init__(
        self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], trainable: bool
    ):
        super().__init__()
        self._names = tuple(parameters), tuple(buffers)
        for name, value in parameters.items():
            holder, leaf = self._holder(name)
            holder.register_parameter(leaf, nn.Parameter(value.detach().clone(), trainable))
        for name, value in buffers.items():
            holder, leaf = self._holder(name)
            holder.register_buffer(leaf, value.detach().clone())

    def _holder(self, name: str) -> tuple[nn.Module, str]:
        *path, leaf = name.split(".")
        holder: nn.Module = self
        for part in path:
            if part not in holder._modules:
                holder.add_module(part, nn.Module())
            holder = holder.get_submodule(part)
        return holder, leaf

    def stack(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Parameters and buffers as a stack of one row, ``[1, *shape]``."""
        parameters, buffers = self._names
        return (
            {name: self.get_parameter(name)[None] for name in parameters},
            {name: self.get_buffer(name)[None] for name in buffers},
        )


class Seed(NamedTensors):
    """A residual branch f with weight alpha, in the form of ``FORMS``; see ``Form``.

    The parameters are those of its blueprint, under the blueprint's name, and of the gate. ``alpha
    []`` and ``recipe`` (int64 ``[3]``: form, layout, channels) are buffers, so that a state_dict
    says how to rebuild the seed.

    Args:
        blueprint: name of the blueprint.
        channels: channels of the activation.
        layout: family of the blueprint and layout of the activation: ``conv`` is ``[B, C, H, W]``,
            ``mlp`` is ``[..., C]``, ``sequence`` is ``[B, T, C]``.
        form: one of ``FORMS``.
        generator: draws the initial weights; torch's global one if None.
    """

    alpha: Tensor
    recipe: Tensor

    def __init__(
        self,
        blueprint: str,
        channels: int,
        layout: str,
        form: str = "add",
        generator: torch.Generator | None = None,
    ):
        fields = BUILDERS[blueprint][layout](channels).fields
        fields_by_name = {f"{blueprint}.{field.name}": field for field in fields}
        if form == "gate":
            fields_by_name |= {field.name: field for field in gate_fields(channels)}
        recipe = [FORMS.index(form), FAMILIES.index(layout), channels]
        super().__init__(
            {name: field.initial(generator) for name, field in fields_by_name.items()},
            {"alpha": torch.zeros(()), "recipe": torch.tensor(recipe)},
            trainable=True,
        )
        self.blueprint, self.channels, self.layout, self.form = blueprint, channels, layout, form
        self._find_forward()

    def _find_forward(self) -> None:
        self._branch_forward = BUILDERS[self.blueprint][self.layout](self.channels).forward

    def __getstate__(self) -> dict[str, Any]:
        # A blueprint's forward is often a function within a function, which pickle refuses.
        return {name: x for name, x in self.__dict__.items() if name != "_branch_forward"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._find_forward()

    def branch(self, x: Tensor) -> Tensor:
        """What the seed adds to ``x`` at alpha 1, in the shape of ``x``."""
        prefix = f"{self.blueprint}."
        parameters = {name.removeprefix(prefix): p for name, p in self.stack()[0].items()}
        if self.layout == "conv":
            images = x.permute(0, 2, 3, 1)[:, :, :, None].contiguous()
        elif self.layout == "sequence":
            images = x[:, None, :, None].contiguous()
        else:
            images = x.flatten(0, -2)[:, None, None, None].contiguous()
        form = FORMS.index(self.form)
        f = branch(self._branch_forward, form, self.layout, parameters, images)
        return f[:, :, :, 0].permute(0, 3, 1, 2) if self.layout == "conv" else f.view_as(x)

    def forward(self, x: Tensor) -> Tensor:
        """The activation ``x`` with alpha times the branch added, in its shape and dtype."""
        return x + (self.alpha * self.branch(x)).to(x.dtype)

    def extra_repr(self) -> str:
        """Form and alpha."""
        return f"{self.form}, alpha={float(self.alpha):.2g}"


def add_seed(module: nn.Module, inputs: object, output: object) -> object:
    """Forward hook of a module with a blended seed: the output, with the seed's branch added.

    Of a tuple, such as an LSTM's output and state, the first element is changed.
    """
    seed = module.get_submodule("seed")
    if isinstance(output, tuple):
        return (seed(output[0]), *output[1:])
    return seed(output)


def attach_seed(module: nn.Module, seed: nn.Module) -> None:
    """Hang ``seed`` behind ``module``, as its submodule ``seed``."""
    module.add_module("seed", seed)
    module.register_forward_hook(add_seed)
