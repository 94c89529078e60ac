"""The layers that can become wider: what their sizes and their parameters mean."""

import re
from collections.abc import Iterable, Sequence
from typing import Any, get_args

from torch import Tensor, nn
from torch.nn.utils import remove_weight_norm


class _ByName(type):
    def __instancecheck__(cls, instance: object) -> bool:
        return type(instance).__name__ == "Conv1D" and hasattr(instance, "nf")


class InputsFirst(metaclass=_ByName):
    """A layer with the weight ``[inputs, outputs]``: ``Conv1D`` of Hugging Face, told by name."""


ConvTranspose = nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d
Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d | ConvTranspose
Linear = nn.Linear | InputsFirst
Table = nn.Embedding | nn.EmbeddingBag
Recurrent = nn.RNNBase | nn.RNNCellBase
Norm = nn.modules.batchnorm._NormBase | nn.GroupNorm
"""Batch, instance and group norms."""

SIZES: dict[type, tuple[str, ...]] = {
    nn.Linear: ("out_features", "in_features"),
    InputsFirst: ("nf", "nx"),
    **dict.fromkeys(get_args(Convolution), ("out_channels", "in_channels")),
    nn.modules.batchnorm._NormBase: ("num_features", "num_features"),
    nn.GroupNorm: ("num_channels", "num_channels"),
    nn.PReLU: ("num_parameters", "num_parameters"),
    **dict.fromkeys(get_args(Recurrent), ("hidden_size", "input_size")),
    **dict.fromkeys(get_args(Table), ("embedding_dim", "num_embeddings")),
    nn.MultiheadAttention: ("embed_dim", "kdim", "vdim"),
}
"""Attributes that hold how many channels a layer writes, and how many it reads."""
PREFIX = "parametrizations.weight."
"""Begins the names of the parameters of a layer whose weight is parametrized."""
WEIGHT_NORMS = {f"{PREFIX}original1": f"{PREFIX}original0", "weight_v": "weight_g"}
"""By the directions of a weight norm (Salimans and Kingma, 2016), their lengths."""


def size_names(module: nn.Module) -> tuple[str, ...]:
    """The attributes of a layer in ``SIZES``, or of one that is like a layer norm; else none."""
    shape = getattr(module, "normalized_shape", None)
    is_norm = isinstance(shape, int | tuple | list) and bool(shape)
    of_norm = ("normalized_shape", "normalized_shape") if is_norm else ()
    return next((names for kind, names in SIZES.items() if isinstance(module, kind)), of_norm)


def is_bare_norm(module: nn.Module) -> bool:
    """Whether a norm of all channels has their number alone, and no parameter."""
    shape = getattr(module, "normalized_shape", ())
    return isinstance(shape, tuple | list) and len(shape) == 1 and not tensors_of(module)


def size_of(module: nn.Module, name: str) -> int:
    """The size that a layer has in an attribute, of a shape its last one."""
    value = getattr(module, name)
    return int(value if isinstance(value, int) else value[-1])


def set_size(module: nn.Module, name: str, size: int) -> None:
    """Put a size into an attribute that holds a number or a shape."""
    value = getattr(module, name)
    setattr(module, name, size if isinstance(value, int) else (*value[:-1], size))


def is_per_channel(module: nn.Module, channels: int) -> bool:
    """Whether a module that is no layer has an entry per channel on an axis of its tensors.

    They are those of a layer norm, or of a module of the user's, such as a learned scale; others of
    torch's, such as an embedding, are not.
    """
    shapes = [x.shape for _, x in tensors_of(module)]
    is_norm = bool(size_names(module))
    if any(module.children()) or not (is_norm or is_of_user(module)):
        return False
    return all(
        shape[last_axis(shape)] == channels and not (is_norm and len(shape) > 1) for shape in shapes
    )


def last_axis(shape: Sequence[int]) -> int:
    """The last axis with several entries: that of channels in a tensor of a user's module."""
    return max((axis for axis, size in enumerate(shape) if size > 1), default=len(shape) - 1)


def is_of_user(module: nn.Module) -> bool:
    """Whether a module is none of torch's and no layer, and so may have tensors of any meaning."""
    if isinstance(module, nn.ParameterList | nn.ParameterDict):
        return True
    return not (type(module).__module__.startswith("torch.") or size_names(module))


_SIZE = re.compile("dim|width|feature|channel|emb|hidden|intermediate|units|d_model|put_size")


def numbers_of(module: object) -> list[tuple[str, int]]:
    """Numbers of a module, or a config, that have the name of a number of channels."""
    numbers = ((key, x) for key, x in vars(module).items() if type(x) is int)
    return [(key, x) for key, x in numbers if "head" not in key and _SIZE.search(key)]


def layer_at(model: nn.Module, name: str) -> tuple[nn.Module, list[tuple[str, str, Tensor]]]:
    """The layer of this name, or that of a single tensor of this name.

    Returns:
        the layer, and the full names, names there and values of its parameters and buffers.
    """
    layer, key = layer_and_key(name)
    module = model.get_submodule(layer)
    if (x := dict(tensors_of(module)).get(key)) is not None:
        return module, [(name, key, x)]
    module = model.get_submodule(name)
    return module, [(f"{name}.{key}", key, x) for key, x in tensors_of(module)]


def group_counts(module: nn.Module) -> tuple[str, ...]:
    """The attribute with the number of heads of a layer in ``SIZES``, or of groups, if several."""
    if isinstance(module, nn.MultiheadAttention):
        return ("num_heads",)
    names = ("groups", "num_groups") if size_names(module) else ()
    return tuple(name for name in names if getattr(module, name, 1) > 1)


def weight_name(module: nn.Module) -> str:
    """The parameter of a layer with an entry for each pair of channels, of a norm the directions.

    Entries of 0 in these leave the others as long as they are.
    """
    if isinstance(module, Recurrent):
        return "weight_ih_l0" if isinstance(module, nn.RNNBase) else "weight_ih"
    if isinstance(module, nn.MultiheadAttention):
        return "in_proj_weight"
    return next((x for x in WEIGHT_NORMS if x in dict(module.named_parameters())), "weight")


def reading_names(module: nn.Module) -> tuple[str, ...]:
    """The parameters by which a layer reads channels: of one in two directions both."""
    name, is_recurrent = weight_name(module), isinstance(module, nn.RNNBase)
    return (name, f"{name}_reverse")[: 2 if is_recurrent and module.bidirectional else 1]


def has_weight_norm(module: nn.Module) -> bool:
    """Whether a layer has a weight norm with a length for each channel that it writes."""
    lengths = dict(tensors_of(module)).get(WEIGHT_NORMS.get(weight_name(module), ""))
    return lengths is not None and len(rows_first(module, lengths)) == lengths.numel()


def free_weights(module: Any) -> list[Tensor]:
    """The weights by which a layer in a copied model reads channels; now they get gradients.

    A parametrization stays: the class that torch gives a layer for it is that of the original, too.
    """
    name = weight_name(module)
    if isinstance(module, Recurrent):
        return [module.get_parameter(x).requires_grad_() for x in reading_names(module)]
    if name == "weight_v":
        remove_weight_norm(module)
    elif name != "weight":
        weight = nn.Parameter(module.weight.detach())
        module.parametrizations.weight[0].forward = lambda *_: weight
    return [module.weight.requires_grad_()]


def rows_first(
    module: nn.Module, x: Tensor, like: Tensor | None = None, axes: tuple[int, int] | None = None,
    back: bool = False,
) -> Tensor:  # fmt: skip
    """A parameter or buffer of a layer with what it writes on the first axis, or the inverse.

    The axes are those of ``like``, where ``x`` was turned. A weight of a user's module has what it
    writes and what it reads on ``axes``; these come first, or with ``back`` return.
    """
    if axes is not None:
        return x.movedim((0, 1), axes) if back else x.movedim(axes, (0, 1))
    is_convolution = isinstance(module, ConvTranspose) and module.groups == 1 and x.ndim > 2
    is_linear = isinstance(module, InputsFirst | Table) and x.ndim > 1
    if not size_names(module):
        return x.transpose(0, last_axis((x if like is None else like).shape))
    return x.transpose(0, 1) if is_convolution or is_linear else x


def row_count(
    module: nn.Module, tensors: Sequence[Tensor], axes: tuple[int, int] | None = None
) -> int:
    """How many rows a layer has, or the tensors of a user's module, see ``rows_first``."""
    names = size_names(module)
    return size_of(module, names[0]) if names else len(rows_first(module, tensors[0], axes=axes))


def channel_axis(layer: nn.Module, x: Tensor) -> int:
    """The axis of channels of what a linear layer or a convolution reads or writes."""
    if isinstance(layer, Linear | Recurrent):
        return x.ndim - 1
    return x.ndim - layer.get_parameter(weight_name(layer)).ndim + 1


def gates_of(module: nn.Module) -> int:
    """How many rows of each parameter of a layer belong to one channel."""
    gates = (nn.LSTM | nn.LSTMCell, 4), (nn.GRU | nn.GRUCell | nn.MultiheadAttention, 3)
    return next((count for kind, count in gates if isinstance(module, kind)), 1)


def reads_itself(module: nn.Module, name: str) -> bool:
    """Whether a parameter of a layer has the layer's own hidden units as columns."""
    is_matrix = isinstance(module, Recurrent) and name.startswith("weight_")
    return is_matrix and name not in reading_names(module)


def sides_of(module: nn.Module, name: str) -> int:
    """How many times a parameter of a layer has the hidden units as columns, by direction."""
    is_deep = name.startswith("weight_ih_") and reads_itself(module, name)
    return 2 if is_deep and module.bidirectional else 1


def tensors_of(module: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """Parameters and buffers of a layer that have an axis, those of a weight norm included."""
    of_norm = {name: x for name, x in module.named_parameters() if name.startswith(PREFIX)}
    both = {**module._parameters, **module._buffers, **of_norm}
    return [(name, x) for name, x in both.items() if x is not None and x.ndim]


def factors_of(module: nn.Module) -> list[nn.Parameter]:
    """The parameters of a layer that are 0 where it computes 0: not the directions of a norm."""
    parameters = ((name, x) for name, x in tensors_of(module) if isinstance(x, nn.Parameter))
    return [x for name, x in parameters if name not in WEIGHT_NORMS]


def layer_and_key(name: str) -> tuple[str, str]:
    """The layer that a parameter or buffer of a model belongs to, and its name in that layer."""
    layer, norm, key = name.rpartition(f".{PREFIX}")
    if norm:
        return layer, PREFIX + key
    layer, _, key = name.rpartition(".")
    return layer, key


def holder_of(module: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The dictionary that holds a parameter or buffer of a layer, and its key there."""
    path, _, key = name.rpartition(".")
    holder = module.get_submodule(path)
    return (holder._parameters if key in holder._parameters else holder._buffers), key
