"""The backend of hosts that are a user's module: ``torch.vmap`` over its forward pass."""

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from esper.kasmina.hosts.host import Tensors
from esper.kasmina.hosts.module import ModuleHost
from esper.tolaria.backends.torch import TorchBackend
from esper.tolaria.plan import Plan
from esper.tolaria.slot_measures import Watch

_IMAGES = 1
"""Key of ``inputs`` for the images of all environments, from which every variant starts."""


class FunctionalBackend(TorchBackend):
    """The torch backend for ``ModuleHost``, with ``torch.vmap`` over the environments.

    Seeds are computed outside of vmap, grouped by kind. An ablated host is computed again from its
    images, because the layers before a slot of a user's module are unknown.
    """

    name = "functional"
    uses_all_threads = True
    """A forward pass stores its parameters in the module, so only one thread computes at a time."""

    host: ModuleHost

    def _resumption(self, slot: int) -> int:
        return _IMAGES

    def _forward(
        self,
        parameters: Tensors,
        buffers: Tensors,
        seeds: dict[int, Tensor],
        calls: Plan,
        x: Tensor,
        *,
        training: bool,
        start: int = 0,
        keep: Sequence[int] = (),
        inputs: dict[int, Tensor] | None = None,
        watch: Watch | None = None,
    ) -> Tensor:
        rows = len(next(iter(parameters.values())))
        x = x.expand(-1, -1, -1, rows, -1)
        if inputs is not None:
            inputs[_IMAGES] = x
        grown: dict[int, Callable[[Tensor], Tensor]] = {
            s: partial(self._at_slot, s, calls, seeds, watch)
            for s, slot_plan in enumerate(calls)
            if slot_plan is not None or watch is not None
        }
        return self.host.logits(parameters, buffers, x, training, grown)
