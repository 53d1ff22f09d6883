"""Recording what a function does on a GPU, with what PyTorch wants to be told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def rounding_anew(device: str) -> Iterator[None]:
    """Autocast as it is, but for weights that were rounded before: kept, they would stay as they are now."""
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    with torch.autocast(device, dtype, enabled, cache_enabled=False):
        yield


def run_aside(run: Callable[[], None], on_gpu: bool) -> None:
    """Once outside of a graph: the first run compiles kernels and sets up libraries, which a graph cannot hold."""
    if not on_gpu:
        run()
        return
    current, aside = torch.cuda.current_stream(), torch.cuda.Stream()
    aside.wait_stream(current)
    with torch.cuda.stream(aside):
        run()
    current.wait_stream(aside)


def record_graph(run: Callable[[], None], beside: torch.cuda.CUDAGraph | None = None) -> torch.cuda.CUDAGraph:
    """Record what a function does, in the memory of another graph if that is always replayed before."""
    graph = torch.cuda.CUDAGraph()
    # Other threads, such as the loader's, may use the device meanwhile.
    with torch.cuda.graph(graph, pool=None if beside is None else beside.pool(), capture_error_mode="thread_local"):
        run()
    return graph


class OneStreamAfterAnother:
    """What is written into a graph's memory on one stream may still be read on the stream of the last call."""

    def __init__(self) -> None:
        self._last: torch.cuda.Stream | None = None

    def wait(self, device: torch.device) -> None:
        """Let the current stream wait for that of the last call."""
        if device.type != "cuda":
            return
        current = torch.cuda.current_stream(device)
        if self._last is not None and self._last != current:
            current.wait_stream(self._last)
        self._last = current


class WeightsInPlace:
    """Where a network's weights were when a graph was recorded, which reads them there.

    They are held on to, so that the graph never reads memory that is somebody else's by now.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._then = [(tensor.detach(), tensor.requires_grad) for tensor in _weights_of(network)]

    def have_changed(self) -> bool:
        """Whether weights lie elsewhere now, or others of them learn."""
        now = [(tensor.data_ptr(), tensor.requires_grad) for tensor in _weights_of(self._network)]
        return now != [(tensor.data_ptr(), learned) for tensor, learned in self._then]


def _weights_of(network: nn.Module) -> list[Tensor]:
    return [*network.parameters(), *network.buffers()]
