"""Watches interpreted kernels: whatever they read or write must lie in a tensor that they were given."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from torch import Tensor


class _Watch:
    def __init__(self) -> None:
        self.kernel = ""
        self.storages: list[tuple[int, int]] = []
        self.accesses = 0

    def check(self, pointers: Any, mask: Any, what: str) -> None:
        from triton.runtime.interpreter import _get_np_dtype

        size = np.dtype(_get_np_dtype(pointers.get_element_ty())).itemsize
        chosen = np.broadcast_to(np.asarray(mask.data), pointers.data.shape).astype(bool)
        places = np.asarray(pointers.data)[chosen].astype(np.uint64)
        inside = np.zeros(places.shape, dtype=bool)
        for first, length in self.storages:
            inside |= (places >= first) & (places + size <= first + length)
        self.accesses += 1
        assert inside.all(), (
            f"{self.kernel} {what}s outside of its tensors, at {(~inside).sum()} of {inside.size} places"
        )


@contextmanager
def watched() -> Iterator[_Watch]:
    """While this is open, an interpreted kernel that leaves its tensors fails the test."""
    from triton.runtime.interpreter import InterpreterBuilder

    from asc.kernels import launch

    watch = _Watch()
    start, load, store = (
        launch._launch_by_triton,
        InterpreterBuilder.create_masked_load,
        InterpreterBuilder.create_masked_store,
    )

    def watched_start(kernel: Any, grid: Any, tensors: Sequence[Tensor], *others: Any) -> Any:
        watch.kernel = kernel.fn.__name__
        watch.storages = [(x.untyped_storage().data_ptr(), x.untyped_storage().nbytes()) for x in tensors]
        return start(kernel, grid, tensors, *others)

    def watched_load(self: Any, pointers: Any, mask: Any, *others: Any) -> Any:
        watch.check(pointers, mask, "read")
        return load(self, pointers, mask, *others)

    def watched_store(self: Any, pointers: Any, value: Any, mask: Any, *others: Any) -> Any:
        watch.check(pointers, mask, "write")
        return store(self, pointers, value, mask, *others)

    launch._launch_by_triton = watched_start
    InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = watched_load, watched_store
    try:
        yield watch
    finally:
        launch._launch_by_triton = start
        InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store = load, store
