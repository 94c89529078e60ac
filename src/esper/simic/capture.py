"""Functions of tensors with fixed shapes, captured once as a CUDA graph and then replayed.

Small networks spend most of their time on kernel launches; a replay launches all kernels at once.
A captured function must not wait for the device, and it reads and writes the same memory in every
call: inputs are copied into buffers and outputs out of them.
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
"""Eager calls before recording, in which libraries choose kernels and allocate buffers."""


class Recorder(Protocol):
    """Records the operations of a function once so that they can be replayed."""

    def warm(self, function: Callable[[], Tensors]) -> Tensors:
        """Call ``function`` eagerly, in preparation for recording."""
        ...

    def record(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """Record ``function``; returns the replay and the tensors that hold its results."""
        ...


class CudaRecorder:
    """Records CUDA graphs.

    Warm-up calls run on a side stream, which torch requires if gradients are captured.

    Args:
        device: device of the functions; another one may be current.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._side = torch.cuda.Stream(device)

    def warm(self, function: Callable[[], Tensors]) -> Tensors:
        """See ``Recorder.warm``."""
        current = torch.cuda.current_stream(self._device)
        self._side.wait_stream(current)
        with torch.cuda.stream(self._side):
            results = function()
        current.wait_stream(self._side)
        return results

    def record(self, function: Callable[[], Tensors]) -> tuple[Callable[[], None], Tensors]:
        """See ``Recorder.record``. Recording computes nothing."""
        graph = torch.cuda.CUDAGraph()
        # The telemetry thread may wait for a copy meanwhile, which other modes take for an error.
        mode = "thread_local"
        with (
            torch.cuda.device(self._device),
            torch.cuda.graph(graph, stream=self._side, capture_error_mode=mode),
        ):
            results = function()

        def replay() -> None:
            with torch.cuda.device(self._device):
                graph.replay()

        return replay, results


class Captured:
    """``function``, replayed if its inputs have the recorded shapes and dtypes.

    The first ``WARMUPS`` calls run eagerly, and so do all calls with other shapes. If recording
    fails, one warning is logged and every call runs eagerly.

    Args:
        function: maps named tensors to named tensors; may change other tensors in place, the same
            ones in every call.
        recorder: see ``Recorder``.
        name: name of the function in the warning.
    """

    def __init__(self, function: Function, recorder: Recorder, name: str):
        self.function, self.recorder, self.name = function, recorder, name
        self.calls = 0
        self.failed = False
        self.buffers: Tensors = {}
        self._replay: Callable[[], None] | None = None
        self._results: Tensors = {}

    def __call__(self, inputs: Tensors) -> Tensors:
        """The results of ``function(inputs)``, in new tensors."""
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
        """Whether ``inputs`` fit the buffers, which the first call allocates."""
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
            log.warning("%s: not captured as a CUDA graph (%s); running eagerly", self.name, reason)
            self.failed = True
            return False
        return True
