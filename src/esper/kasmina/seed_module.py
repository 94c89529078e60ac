"""Seeds as torch modules, for activations of one network: ``[B, C, H, W]``, ``[..., F]``, ``[B, T,
C]``.

They compute what ``kasmina.blueprints`` computes for stacked networks, with parameters of the same
names. Everything here is plain torch code, because ``kasmina.grafts.written_code`` copies it into
the file that rebuilds a grown module without Esper.
"""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from esper.kasmina.ops import norm_groups

FORMS = ("add", "multiply", "gate")
"""How a seed is combined with the activation; the order is that of ``tolaria.plan.Form``."""
LAYOUTS = ("conv", "mlp", "sequence")
"""Layouts of the activation: ``[B, C, H, W]``, ``[..., F]`` and ``[B, T, C]``."""


class ScaledNorm(nn.Module):
    """``tanh(s) (norm(x) - x)`` with a learned scalar s."""

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.scale = nn.Parameter(torch.zeros(()))
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """The branch of ``x``, in its shape."""
        return self.scale.tanh() * (self.norm(x) - x)


class ChannelAttention(nn.Module):
    """Squeeze-and-excitation of ``[B, C, H, W]``: ``x * (W2 relu(W1 mean(x)) + b)``."""

    def __init__(self, channels: int):
        super().__init__()
        width = max(1, channels // 4)
        self.squeeze = nn.Linear(channels, width, bias=False)
        self.excite = nn.Linear(width, channels)

    def forward(self, x: Tensor) -> Tensor:
        """The branch of ``x``, in its shape."""
        return x * self.excite(self.squeeze(x.mean((2, 3))).relu())[:, :, None, None]


class CausalAttention(nn.Module):
    """LayerNorm, causal attention with up to 4 heads and a linear map, over ``[B, T, C]``."""

    def __init__(self, channels: int):
        super().__init__()
        self.heads = next(count for count in (4, 2, 1) if channels % count == 0)
        self.norm = nn.LayerNorm(channels)
        self.joint = nn.Linear(channels, 3 * channels, bias=False)
        self.out = nn.Linear(channels, channels, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """The branch of ``x``, in its shape."""
        joint = self.joint(self.norm(x)).unflatten(-1, (3, self.heads, -1))
        query, key, value = joint.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


def group_norm(channels: int) -> nn.GroupNorm:
    """GroupNorm with at least 16 channels in a group."""
    return nn.GroupNorm(norm_groups(channels), channels)


def chain(**layers: nn.Module) -> nn.Sequential:
    """The layers one after another, under their names."""
    return nn.Sequential(OrderedDict(layers))


def conv(inputs: int, outputs: int, kernel: int, groups: int = 1) -> nn.Conv2d:
    """A convolution that keeps height and width, without bias."""
    return nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, groups=groups, bias=False)


def conv_norm(channels: int) -> nn.Module:
    """``tanh(s) (GroupNorm(x) - x)``."""
    return ScaledNorm(group_norm(channels))


def conv_small(channels: int) -> nn.Module:
    """GroupNorm, ReLU, 1x1 convolution."""
    return chain(norm=group_norm(channels), relu=nn.ReLU(), conv=conv(channels, channels, 1))


def conv_light(channels: int) -> nn.Module:
    """GroupNorm, ReLU, 3x3 convolution."""
    return chain(norm=group_norm(channels), relu=nn.ReLU(), conv=conv(channels, channels, 3))


def conv_heavy(channels: int) -> nn.Module:
    """3x3 convolution to 4 C channels, GroupNorm, ReLU, 1x1 convolution back."""
    wide = 4 * channels
    return chain(
        widen=conv(channels, wide, 3),
        norm=group_norm(wide),
        relu=nn.ReLU(),
        narrow=conv(wide, channels, 1),
    )


def depthwise(channels: int) -> nn.Module:
    """Depthwise 3x3 convolution, GroupNorm, ReLU, 1x1 convolution."""
    return chain(
        depthwise=conv(channels, channels, 3, groups=channels),
        norm=group_norm(channels),
        relu=nn.ReLU(),
        pointwise=conv(channels, channels, 1),
    )


def bottleneck(channels: int) -> nn.Module:
    """GroupNorm, 1x1 convolution to max(8, C / 4) channels, ReLU, 3x3, ReLU, 1x1 back."""
    width = max(8, channels // 4)
    return chain(
        norm=group_norm(channels),
        down=conv(channels, width, 1),
        relu=nn.ReLU(),
        conv=conv(width, width, 3),
        relu2=nn.ReLU(),
        up=conv(width, channels, 1),
    )


def perceptron(channels: int, hidden: int) -> nn.Module:
    """LayerNorm, linear map to ``hidden`` units, ReLU, linear map back."""
    return chain(
        norm=nn.LayerNorm(channels),
        widen=nn.Linear(channels, hidden),
        relu=nn.ReLU(),
        narrow=nn.Linear(hidden, channels, bias=False),
    )


def mlp_small(channels: int) -> nn.Module:
    """A perceptron with twice as many hidden units as channels."""
    return perceptron(channels, 2 * channels)


def mlp(channels: int) -> nn.Module:
    """A perceptron with four times as many hidden units as channels."""
    return perceptron(channels, 4 * channels)


def sequence_norm(channels: int) -> nn.Module:
    """``tanh(s) (LayerNorm(x) - x)``."""
    return ScaledNorm(nn.LayerNorm(channels))


def low_rank(channels: int, rank: int) -> nn.Module:
    """A linear map of the given rank."""
    return chain(
        down=nn.Linear(channels, rank, bias=False), up=nn.Linear(rank, channels, bias=False)
    )


def lora(channels: int) -> nn.Module:
    """A linear map of rank 8."""
    return low_rank(channels, 8)


def lora_large(channels: int) -> nn.Module:
    """A linear map of rank 32."""
    return low_rank(channels, 32)


BRANCHES = {
    "conv": {
        "norm": conv_norm,
        "attention": ChannelAttention,
        "conv_small": conv_small,
        "conv_light": conv_light,
        "conv_heavy": conv_heavy,
        "depthwise": depthwise,
        "bottleneck": bottleneck,
    },
    "mlp": {"mlp_small": mlp_small, "mlp": mlp},
    "sequence": {
        "norm": sequence_norm,
        "attention": CausalAttention,
        "mlp_small": mlp_small,
        "mlp": mlp,
        "lora": lora,
        "lora_large": lora_large,
    },
}
"""By layout and blueprint, the function that builds a branch for a number of channels."""


class Seed(nn.Module):
    """A residual branch f with weight alpha, in the form of ``FORMS``.

    ``add`` is ``x + alpha f(x)``, ``multiply`` is ``x (1 + alpha tanh f(x))``, and ``gate`` is
    ``x + alpha g(x) f(x)`` with a learned g in (0, 1) for each image, or each position of a
    sequence.

    The branch is a submodule called as its blueprint. ``alpha []`` and ``recipe`` (int64 ``[3]``:
    form, layout, channels) are buffers, so that a state_dict says how to rebuild the seed.

    Args:
        blueprint: name of the branch, a key of ``BRANCHES[layout]``.
        channels: channels of the activation.
        layout: one of ``LAYOUTS``.
        form: one of ``FORMS``.
    """

    alpha: Tensor
    recipe: Tensor
    gate: nn.Module

    def __init__(self, blueprint: str, channels: int, layout: str, form: str = "add"):
        super().__init__()
        self.blueprint, self.channels, self.layout, self.form = blueprint, channels, layout, form
        self.add_module(blueprint, BRANCHES[layout][blueprint](channels))
        if form == "gate":
            hidden = max(8, channels // 4)
            self.gate = chain(
                hidden=nn.Linear(channels, hidden), relu=nn.ReLU(), out=nn.Linear(hidden, 1)
            )
        self.register_buffer("alpha", torch.zeros(()))
        recipe = [FORMS.index(form), LAYOUTS.index(layout), channels]
        self.register_buffer("recipe", torch.tensor(recipe))

    def branch(self, x: Tensor) -> Tensor:
        """What the seed adds to ``x`` at alpha 1, in the shape of ``x``."""
        if (
            x.ndim == 4
            and not x.requires_grad
            and x.is_contiguous(memory_format=torch.channels_last)
        ):
            # group_norm's backward pass in torch 2.13 crashes on such an input.
            x = x.clone(memory_format=torch.contiguous_format)
        f: Tensor = self.get_submodule(self.blueprint)(x)
        if self.form == "multiply":
            return x * f.tanh()
        if self.form == "gate":
            return self._gate_values(x) * f
        return f

    def forward(self, x: Tensor) -> Tensor:
        """The activation ``x`` with alpha times the branch added, in its shape and dtype."""
        return x + (self.alpha * self.branch(x)).to(x.dtype)

    def _gate_values(self, x: Tensor) -> Tensor:
        if self.layout == "conv":
            values: Tensor = self.gate(x.mean((2, 3))).sigmoid()
            return values[:, :, None, None]
        return self.gate(x).sigmoid()

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
