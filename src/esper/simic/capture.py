"""Steps of fixed shapes, captured once as a CUDA graph and replayed from then on.

For small networks the launch of kernels is the cost, and a replay launches them all at once. What
is captured must not wait for the device, and reads and writes the same memory every time: inputs
are copied into buffers, outputs are copied out of them.
"""

import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]
Function = Callable[[Tensors], Tensors]

WARMUPS = 3
"""Calls that run as they are, so that libraries choose their kernels and buffers come to be."""


class Recorder(Protocol):
    """Something that records a function's work once so that it can be done again."""

    def warm(self, function: Callable[[], Tensors]) -> Tensors:
        """Call it as it is, in preparation."""
        ...

    def record(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """What does the work again, and the tensors in which its results appear."""
        ...


class CudaRecorder:
    """Records CUDA graphs.

    Warming up happens on a stream of its own, as torch asks for where gradients are captured.
    """

    def __init__(self) -> None:
        self._side = torch.cuda.Stream()

    def warm(self, function: Callable[[], Tensors]) -> Tensors:
        """See ``Recorder.warm``."""
        current = torch.cuda.current_stream()
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            results = function()
        current.wait_stream(self._side)
        return results

    def record(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See ``Recorder.record``. Recording computes nothing."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = function()
        return graph.replay, results


class Captured:
    """``function``, replayed wherever the shapes of its inputs are those that were recorded.

    The first ``WARMUPS`` calls run as they are, and so do all calls with other shapes. Where
    recording fails this is said once, and every call runs as it is.

    Args:
        function: of named tensors; may change other tensors in place, always the same ones.
        recorder: see ``Recorder``.
        name: for the message.
    """

    def __init__(self, function: Function, recorder: Recorder, name: str):
        self.function, self.recorder, self.name = function, recorder, name
        self.calls = 0
        self.failed = False
        self.buffers: Tensors = {}
        self._replay: Callable[[], None] | None = None
        self._results: Tensors = {}

    def __call__(self, inputs: Tensors) -> Tensors:
        """The results of ``function(inputs)``, in tensors of their own."""
        if self.failed or not self._same_shapes(inputs):
            return self.function(inputs)
        self.calls += 1
        if self.calls <= WARMUPS:
            return self.recorder.warm(lambda: self.function(inputs))
        for name, x in inputs.items():
            self.buffers[name].copy_(x, non_blocking=True)
        if self._replay is None and not self._record():
            return self.function(inputs)
        assert self._replay is not None
        self._replay()
        return {name: x.clone() for name, x in self._results.items()}

    def _same_shapes(self, inputs: Tensors) -> bool:
        """Whether ``inputs`` fit the buffers, which the first call makes."""
        if not self.buffers:
            self.buffers = {name: torch.empty_like(x) for name, x in inputs.items()}
        return inputs.keys() == self.buffers.keys() and all(
            x.shape == self.buffers[name].shape and x.dtype == self.buffers[name].dtype
            for name, x in inputs.items()
        )

    def _record(self) -> bool:
        try:
            self._replay, self._results = self.recorder.record(lambda: self.function(self.buffers))
        except Exception as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            log.warning("%s: not captured as a CUDA graph (%s); going on", self.name, reason)
            self.failed = True
            return False
        return True
