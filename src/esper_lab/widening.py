"""Wider hosts of the same kind, as static networks to compare grown ones with."""

from dataclasses import replace

from esper.kasmina.hosts.cnn import CnnHost
from esper.kasmina.hosts.host import Host
from esper.kasmina.hosts.mlp import MlpHost
from esper.kasmina.hosts.transformer import TransformerHost

_STEP = 1 / 64
"""Difference between two factors by which widths are multiplied, relative to the first."""


def widen(host: Host, parameters: int) -> Host | None:
    """``host`` with all widths multiplied by one factor, nearest in size to a number of parameters.

    Depth, kernels, pools, slots and attention heads stay as they are. Of two sizes equally near,
    the smaller one is taken.

    Args:
        host: any host.
        parameters: wanted number of parameters; the result has at least one channel per block.

    Returns:
        The wider or narrower host; None for a host of the user's own kind, whose width is unknown.
    """
    if not isinstance(host, CnnHost | MlpHost | TransformerHost):
        return None
    nearest, factor = _scale(host, 0.0), 0.0
    while True:
        factor += _STEP
        candidate = _scale(host, factor)
        if abs(candidate.parameter_count - parameters) < abs(nearest.parameter_count - parameters):
            nearest = candidate
        if candidate.parameter_count >= parameters:
            return nearest


def _scale(host: CnnHost | MlpHost | TransformerHost, factor: float) -> Host:
    if isinstance(host, CnnHost):
        return replace(host, channels=tuple(max(1, round(factor * c)) for c in host.channels))
    if isinstance(host, MlpHost):
        return replace(host, widths=tuple(max(1, round(factor * w)) for w in host.widths))
    unit = max(1, host.heads)
    return replace(host, width=unit * max(1, round(factor * host.width / unit)))
