"""Numbers on their way from a device to the host."""

from __future__ import annotations

import torch
from torch import Tensor


class Transfer:
    """A few numbers that the host will want later; neither it nor the device waits for them meanwhile."""

    def __init__(self, numbers: Tensor) -> None:
        # Elsewhere than on a GPU of NVIDIA nothing says when numbers that nobody waits for have arrived.
        self._numbers = numbers.to("cpu", non_blocking=numbers.is_cuda)
        self._arrived = torch.cuda.Event() if numbers.is_cuda else None
        if self._arrived is not None:
            # On the stream of the copy, which need not be one of the current device.
            self._arrived.record(torch.cuda.current_stream(numbers.device))

    def wait(self) -> Tensor:
        """The numbers, as soon as they are here."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._numbers
