"""One number for the whole network: the mean share of the original tokens that its blocks work on.

The budget fixes the total. How it is spent over the blocks is learned: free parameters give every block
its share under the fixed total, with a floor for each. The controllers of the blocks (``Threshold``) see
that the shares are kept. Everything here is arithmetic on a dozen numbers, done on the host in fp64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from asc.distributed import several_processes, summed_over_processes
from asc.grouping.threshold import Threshold
from asc.precision import NeverHalf
from asc.transfer import Transfer

Floats = NDArray[np.float64]
Control = Literal["block", "total"]

# Shares are kept in fp32, a budget is told from another far above that.
_ROUNDING = 1e-4


class TokenBudget(NeverHalf):
    """Shares of the blocks under a fixed total, their learned allocation, and the step of the controllers.

    Args:
        budget: Mean over all blocks of the share of the original tokens that enters the block, in (0, 1).
        blocks: Which blocks hold a superpixel layer, rising.
        depth: Number of blocks of the network.
        floor: Smallest share a block may be given, as a fraction of the share it has when all blocks keep
            the same.
        learn: Whether the allocation over the blocks is learned.
        keep: Share that every superpixel layer keeps, in place of a budget.
        control: What the controllers hold: each its own ``block`` to its share, or all alike the ``total``.
    """

    targets_L: Tensor
    jacobian_LL: Tensor

    def __init__(
        self,
        budget: float,
        blocks: Sequence[int],
        depth: int,
        floor: float,
        learn: bool,
        keep: float | None = None,
        control: Control = "block",
    ) -> None:
        super().__init__()
        if not 0.0 < floor < 1.0:
            raise ValueError(f"floor must lie in (0, 1), got {floor}")
        self.blocks = tuple(blocks)
        self.depth = depth
        self.control = control
        equal = equal_keep(budget, self.blocks, depth) if keep is None else keep
        self.budget = mean_share(np.full(len(blocks), equal), self.blocks, depth)
        self.floor = floor * equal
        self.allocation = nn.Parameter(torch.zeros(len(self.blocks)), requires_grad=learn)
        keep_L, jacobian_LL = np.full(len(blocks), equal), np.zeros((len(blocks), len(blocks)))
        if learn:
            keep_L, jacobian_LL = self._allocated(torch.zeros(len(blocks), device="cpu"))
        self.first_targets: list[float] = keep_L.astype(np.float32).tolist()
        """The shares at the beginning, on the host."""
        # Not from NumPy's memory: made on the meta device, they are to be there as well.
        self.register_buffer("targets_L", torch.tensor(self.first_targets))
        self.register_buffer("jacobian_LL", torch.tensor(jacobian_LL.tolist()))
        self._told: Transfer | None = None
        self.register_load_state_dict_post_hook(_keep_own_budget)  # type: ignore[no-untyped-call]

    def targets(self) -> Tensor:
        """Share of its input that each superpixel layer should keep; gradients lead to the allocation."""
        change_L = self.allocation - self.allocation.detach()
        return self.targets_L + self.jacobian_LL @ change_L

    @torch.no_grad()
    def refresh(self) -> None:
        """Work out shares and their derivatives anew after the allocation has changed."""
        keep_L, jacobian_LL = self._allocated(self.allocation.detach().cpu())
        self.targets_L.copy_(torch.from_numpy(keep_L))
        self.jacobian_LL.copy_(torch.from_numpy(jacobian_LL))

    def _allocated(self, allocation_L: Tensor) -> tuple[Floats, Floats]:
        return allocate(allocation_L.double().numpy(), self.budget, self.blocks, self.depth, self.floor)

    def known(self, thresholds: Sequence[Threshold]) -> Tensor:
        """All that the host must know for ``update``, in one vector on the device."""
        state = torch.stack([tensor.detach() for t in thresholds for tensor in t.controller()])
        return torch.cat([self.allocation.detach(), self.targets_L, state])

    def tell(self, known: Tensor) -> None:
        """Send the host ``known``, as it is in a forward pass, for the ``update`` that comes after it.

        So the host need not wait for the optimiser; the shares follow the allocation one step late.
        """
        self._told = Transfer(known)

    def forget(self) -> None:
        """What the host was told no longer holds."""
        self._told = None

    def __getstate__(self) -> dict[str, Any]:
        # What is on its way to the host can be neither copied nor saved, and need not be.
        return self.__dict__ | {"_told": None}

    @torch.no_grad()
    def update(self, thresholds: Sequence[Threshold]) -> None:
        """One step of every controller; call once after each optimiser step.

        Uses what the forward passes since the last call have counted, summed over all processes, so that
        the thresholds stay identical everywhere. All that the host must know came in one transfer (``tell``),
        and all that is new goes back in one.
        """
        count, learns = len(self.blocks), self.allocation.requires_grad
        if self._told is None:
            self.tell(self.known(thresholds))
        assert self._told is not None
        known = self._told.wait()
        self._told = None
        targets_L, jacobian_LL = known[count : 2 * count].numpy(), np.zeros(0)
        if learns:
            keep_L, jacobian_LL = self._allocated(known[:count])
            targets_L = keep_L.astype(np.float32)
        states_L3 = known[2 * count :].view(-1, 3).tolist()
        goals, counts = targets_L.tolist(), self._counts(thresholds)
        if self.control == "total":
            goals, counts = [self.budget] * count, [self._total(counts)] * count
        places: list[Tensor] = [t.target for t in thresholds]
        moved: list[float] = []
        for threshold, goal, state, (tokens_in, tokens_out) in zip(thresholds, goals, states_L3, counts, strict=True):
            # Others must not be touched: what the host was told of a learned threshold is older than it is by now.
            if threshold.kind == "budget" and tokens_in:
                places.extend(threshold.controller())
                moved.extend(threshold.controlled(goal, tokens_out / tokens_in, *state))
        news = np.concatenate([targets_L, moved, jacobian_LL.ravel()]).astype(np.float32)
        values = torch.from_numpy(news).to(self.allocation.device, non_blocking=True)
        torch._foreach_copy_(places, values[: len(places)].unbind())
        if learns:
            torch._foreach_copy_(
                [self.targets_L, self.jacobian_LL], [values[:count], values[len(places) :].view(count, count)]
            )
        for threshold in thresholds:
            threshold.reset_counts()

    def _counts(self, thresholds: Sequence[Threshold]) -> list[list[float]]:
        # fp64 holds counts exactly, whatever order the processes are summed in.
        counts_L2 = torch.tensor([[t.tokens_in, t.tokens_out] for t in thresholds], dtype=torch.float64)
        if several_processes():
            counts_L2 = summed_over_processes(counts_L2.to(self.allocation.device))
        numbers: list[list[float]] = counts_L2.tolist()
        return numbers

    def _total(self, counts: Sequence[Sequence[float]]) -> list[float]:
        """The mean share of the original tokens that entered a block, as a count; nothing counted: zeros."""
        if not all(tokens_in for tokens_in, _ in counts):
            return [0.0, 0.0]
        return [1.0, mean_share(np.array([out / tokens_in for tokens_in, out in counts]), self.blocks, self.depth)]


def _keep_own_budget(budget: TokenBudget, _: object) -> None:
    """Weights of a network with another budget bring its shares along; how they are allocated may stay."""
    budget.forget()
    loaded = mean_share(budget.targets_L.double().cpu().numpy(), budget.blocks, budget.depth)
    if abs(loaded - budget.budget) > _ROUNDING:
        budget.refresh()


def mean_share(keep_L: Floats, blocks: Sequence[int], depth: int) -> float:
    """Mean over the blocks of the share of the original tokens that enters them."""
    return _share_function(blocks, depth)(keep_L)


def _share_function(blocks: Sequence[int], depth: int) -> Callable[[Floats], float]:
    """``mean_share`` for a search that asks many times in every training step."""
    after, places = np.ones(depth + 1), np.asarray(blocks) + 1

    def share(keep_L: Floats) -> float:
        after[places] = keep_L
        return float(np.add.reduce(np.multiply.accumulate(after)[:-1]) / depth)

    return share


def equal_keep(budget: float, blocks: Sequence[int], depth: int) -> float:
    """The share that every superpixel layer keeps when all keep the same and the budget is met."""
    least = (min(blocks) + 1) / depth if blocks else 1.0
    if not least < budget < 1.0:
        raise ValueError(
            f"budget must lie in ({least:.3g}, 1) for superpixel layers in blocks {tuple(blocks)} of {depth}, "
            f"got {budget}: it is the mean share of the original tokens that enters a block, and the first "
            f"layer only helps the blocks behind it"
        )
    return _crossing(lambda keep: mean_share(np.full(len(blocks), keep), blocks, depth) - budget, 0.0, 1.0)


def allocate(
    allocation_L: Floats, budget: float, blocks: Sequence[int], depth: int, floor: float
) -> tuple[Floats, Floats]:
    """Share that each layer keeps, and the derivative of the shares by the allocation at constant budget.

    A larger entry of the allocation makes its layer merge more: ``keep = floor + (1 - floor) exp(-c w)``
    with w the softmax of the allocation, and one factor c for all that meets the budget.
    """
    count = len(allocation_L)
    exponentials_L = np.exp(allocation_L - allocation_L.max())
    weights_L = count * exponentials_L / exponentials_L.sum()

    def keep_at(factor: float) -> Floats:
        keep_L: Floats = floor + (1 - floor) * np.exp(-factor * weights_L)
        return keep_L

    largest = 60.0 / weights_L.min()
    share = _share_function(blocks, depth)
    factor = _crossing(lambda c: budget - share(keep_at(c)), 0.0, largest)
    keep_L = keep_at(factor)
    by_weight_L = -factor * (keep_L - floor)
    by_factor_L = -weights_L * (keep_L - floor)
    weight_by_allocation_LL = np.diag(weights_L) - np.outer(weights_L, weights_L) / count
    direct_LL = by_weight_L[:, None] * weight_by_allocation_LL
    share_by_keep_L = _share_by_keep(keep_L, blocks, depth)
    # The factor answers so that the budget does not move.
    factor_by_allocation_L = -(share_by_keep_L @ direct_LL) / (share_by_keep_L @ by_factor_L)
    return keep_L, direct_LL + np.outer(by_factor_L, factor_by_allocation_L)


def _entering_shares(keep_L: Floats, blocks: Sequence[int], depth: int) -> Floats:
    after = np.ones(depth + 1)
    after[np.asarray(blocks) + 1] = keep_L
    return np.asarray(np.cumprod(after)[:-1], dtype=np.float64)


def _share_by_keep(keep_L: Floats, blocks: Sequence[int], depth: int) -> Floats:
    entering = _entering_shares(keep_L, blocks, depth)
    behind = np.array([entering[block + 1 :].sum() for block in blocks])
    return np.asarray(behind / keep_L / depth)


def _crossing(rising: Callable[[float], float], low: float, high: float) -> float:
    """Where the rising function crosses zero."""
    from scipy.optimize import brentq  # takes a while to import, and a plain network needs none of this

    # A dozen questions where halving would need sixty, in every training step.
    return float(brentq(rising, low, high, xtol=1e-13, rtol=1e-14))
