"""Training steps recorded once and replayed: both ways of a step as CUDA graphs. See ``asc.replay``.

The backward pass follows the forward pass without waiting until the host has seen how many tokens there really were.
Where tokens do not fit too often, or there is too much room, the step is recorded anew.

Shape letters: see ``asc.pretrain.siamese``.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from asc.distributed import several_processes
from asc.kernels import interpreted, kernels_take
from asc.pretrain.siamese import Agreement, Siamese
from asc.replay import (
    Count,
    TokenHistory,
    note_counts,
    obstacle,
    record_graph,
    rooms_given,
    rounding_anew,
    run_aside,
    superpixel_layers,
)
from asc.transfer import Transfer
from asc.vit import AscViT

# A graph whose rooms are this much larger than they need be is recorded anew; looked at after so many steps, and then
# always after twice as many, since the number of tokens varies most in the beginning.
_TOO_LARGE, _FIRST_LOOK = 1.15, 32
# Multiplications that one matrix of width x width needs for all patches of a step; with more of them the GPU is busy
# for longer than the host, and room for tokens that are not there would be a loss. Measured with tiny at 64 and 224
# pixels and base at 224: 5e9, 1.5e10 and 6e10, all of which gain (docs/results/performance.md).
_MOST_WORK = 1e11
# So many steps in a row that were replayed are a good sign.
_SETTLED = 8


class Replay:
    """Calls a ``Siamese`` module, from a graph where that is possible.

    Args:
        siamese: What is trained. One process on one GPU replays; anything else is run as it is.
        first: Steps that are run plainly before one is recorded; they show how the number of tokens varies.
    """

    def __init__(self, siamese: Siamese, first: int = 8) -> None:
        self.siamese = siamese
        encoders = [siamese.encoder, siamese.target_encoder]
        self._encoders = [encoder for encoder in encoders if encoder is not None]
        self._possible = all(_can_replay(encoder) for encoder in self._encoders)
        self._history = TokenHistory([layer for encoder in self._encoders for layer in superpixel_layers(encoder)])
        self._recorded: _Recorded | None = None
        self._plain_left = first
        self._since_recorded = 0
        self._next_look = _FIRST_LOOK

    def __call__(self, images_VB3HW: Tensor, meanwhile: Callable[[], None] | None = None) -> Agreement:
        """Loss and features of a batch, as ``Siamese.forward`` gives them.

        ``meanwhile`` is what the host may do while it would wait for the device.
        """
        if not (self._possible and self._is_training_step(images_VB3HW)):
            return self._call(images_VB3HW)
        if self._recorded is not None and not self._recorded.takes(images_VB3HW):
            self._let_go()
        if self._recorded is None and (self._plain_left > 0 or not self._record(images_VB3HW)):
            return self._run_plainly(images_VB3HW)
        assert self._recorded is not None
        told = self._recorded.run(images_VB3HW, meanwhile)
        counts = self._history.read(told)
        if not self._history.add(counts, self._recorded.rooms):
            return self._run_in_spite_of_the_graph(images_VB3HW)
        self._note(counts, told[3 * len(counts) :], images_VB3HW.flatten(0, 1).shape)
        agreement = self._recorded.agreement()
        self._since_recorded += 1
        if self._since_recorded == self._next_look:
            self._shrink_if_too_large()
        return agreement

    def _is_training_step(self, images_VB3HW: Tensor) -> bool:
        on_device = images_VB3HW.is_cuda or interpreted()
        return (
            self.siamese.training
            and torch.is_grad_enabled()
            and on_device
            and not several_processes()
            and kernels_take(images_VB3HW)
            and is_worth_replaying(self.siamese.encoder, images_VB3HW.shape[:2].numel(), images_VB3HW.shape[-2:])
        )

    def _call(self, images_VB3HW: Tensor) -> Agreement:
        agreement: Agreement = self.siamese(images_VB3HW)
        return agreement

    def _run_plainly(self, images_VB3HW: Tensor) -> Agreement:
        self._plain_left -= 1
        agreement = self._call(images_VB3HW)
        self._history.note_run()
        return agreement

    def _run_in_spite_of_the_graph(self, images_VB3HW: Tensor) -> Agreement:
        if self._history.outgrown:
            self._next_look = _FIRST_LOOK
            self._let_go()
        try:
            return self._run_plainly(images_VB3HW)
        except torch.OutOfMemoryError:
            if self._recorded is None:
                raise
        # The graph keeps its memory to itself: there is not always enough for both.
        self._let_go()
        return self._run_plainly(images_VB3HW)

    @property
    def is_settled(self) -> bool:
        """Whether the last steps were all replayed."""
        return self._since_recorded >= _SETTLED and self._history.fitted_lately(_SETTLED)

    # --- The graph ----------------------------------------------------------------------------------------

    def _record(self, images_VB3HW: Tensor) -> bool:
        """Whether it could be done."""
        try:
            self._recorded = _Recorded(self.siamese, self._history, images_VB3HW)
        except RuntimeError as error:
            # Training comes first: it goes on as it would without graphs.
            self._possible = False
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"training steps are not replayed, which makes them slower: {reason}", stacklevel=4)
            return False
        self._since_recorded = 0
        return True

    def _let_go(self) -> None:
        self._recorded = None
        self._history.forget_misfits()

    def _note(self, counts: Sequence[Count], known: Sequence[float], shape_M3HW: Sequence[int]) -> None:
        """Do on the host what layers do in a plain run."""
        assert self._recorded is not None
        first = 0
        for encoder in self._encoders:
            own = slice(first, first + len(superpixel_layers(encoder)))
            if isinstance(encoder, AscViT):
                note_counts(encoder, self._recorded.records[own], counts[own], shape_M3HW)
            first = own.stop
        told = torch.tensor(known, dtype=torch.float32)
        budgets = [encoder.budget for encoder in self._encoders if encoder.budget is not None]
        for budget, numbers_K in zip(budgets, told.chunk(max(1, len(budgets))), strict=False):
            budget.tell(numbers_K)

    def _shrink_if_too_large(self) -> None:
        assert self._recorded is not None
        self._next_look *= 2
        pairs = zip(self._recorded.rooms, self._history.rooms(), strict=True)
        if any(room.tokens > _TOO_LARGE * wanted.tokens for room, wanted in pairs):
            self._let_go()


def _can_replay(encoder: AscViT) -> bool:
    # A peer's network has no such settings.
    return not obstacle(encoder) and not (isinstance(encoder, AscViT) and encoder.config.checkpoint_gradients)


def is_worth_replaying(encoder: AscViT, images: int, size_hw: Sequence[int]) -> bool:
    """Whether so many images of such a size leave the GPU waiting for the host."""
    if not isinstance(encoder, AscViT):
        return True
    rows, columns = encoder.config.grid_of((size_hw[0], size_hw[1]))
    return images * rows * columns * encoder.config.width**2 <= _MOST_WORK


class _Recorded:
    """Both ways of one training step with fixed rooms. Inputs and results have their places in memory."""

    def __init__(self, siamese: Siamese, history: TokenHistory, images_VB3HW: Tensor) -> None:
        self._siamese, self._layers, self.rooms = siamese, history.layers, history.rooms()
        self._images_VB3HW = images_VB3HW.clone()
        self._learned = {name: parameter for name, parameter in siamese.named_parameters() if parameter.requires_grad}
        self._parameters = list(self._learned.values())
        self._twins = self._make_twins()
        self._grad_of_loss = torch.ones((), device=images_VB3HW.device)
        self._loss = self._grad_of_loss
        self._grads: list[Tensor | None] = []
        self._play_forward: Callable[[], None] = self._run_forward
        self._play_backward: Callable[[], None] = self._run_backward
        run_aside(self._run_both_ways, images_VB3HW.is_cuda)
        # Or recording would need the memory of two steps' gradients, and find the stream of the first.
        self._grads, self._twins = [], self._make_twins()
        # Kernels that are interpreted cannot be recorded: there every replay is a run.
        if images_VB3HW.is_cuda:
            self._record()

    def _make_twins(self) -> dict[str, Tensor]:
        """The parameters' numbers under other names: autograd may still hold their own from an earlier step, and with
        them the stream of that step, on which nothing can be recorded."""
        return {name: nn.Parameter(parameter.detach()) for name, parameter in self._learned.items()}

    def takes(self, images_VB3HW: Tensor) -> bool:
        """Whether the batch is of the kind that was recorded."""
        mine_VB3HW = self._images_VB3HW
        return images_VB3HW.dtype == mine_VB3HW.dtype and images_VB3HW.shape == mine_VB3HW.shape

    def run(self, images_VB3HW: Tensor, meanwhile: Callable[[], None] | None) -> list[float]:
        """Replay both passes; returns what the layers found, three numbers each, and what the budgets want.

        The backward pass, for the last step's gradient of the loss, is begun before it is known whether it will be
        wanted: the device would otherwise do nothing until the host has seen the numbers and got ready.
        """
        self._keep_gradients()
        self._images_VB3HW.copy_(images_VB3HW)
        self._play_forward()
        numbers = Transfer(self._told)
        self._play_backward()
        if meanwhile is not None:
            meanwhile()
        told: list[float] = numbers.wait().tolist()
        return told

    def agreement(self) -> Agreement:
        """The results, from which gradients lead to the parameters."""
        loss = _Replayed.apply(self, *self._parameters)
        return Agreement(loss, self._features_BC, self._projections_BZ)

    def loss(self) -> Tensor:
        """A copy: the next replay writes into the same place."""
        copied: Tensor = self._loss.detach().clone()
        return copied

    def gradients(self, grad: Tensor) -> list[Tensor | None]:
        """The parameters' gradients, for the loss's as it is in this step."""
        torch._foreach_mul_([mine for mine in self._grads if mine is not None], grad / self._grad_of_loss)
        self._grad_of_loss.copy_(grad)
        return [None if mine is None else mine.detach() for mine in self._grads]

    def _keep_gradients(self) -> None:
        """Gradients of an earlier micro-batch lie where this pass will write: move them out of the way."""
        for parameter, mine in zip(self._parameters, self._grads, strict=False):
            if parameter.grad is not None and mine is not None and parameter.grad.data_ptr() == mine.data_ptr():
                parameter.grad = parameter.grad.clone()

    def _record(self) -> None:
        forward = record_graph(self._run_forward)
        backward = record_graph(self._run_backward, beside=forward)
        self._loss = self._loss.detach()  # lets go of autograd's own record
        self._play_forward, self._play_backward = forward.replay, backward.replay

    def _run_both_ways(self) -> None:
        self._run_forward()
        self._run_backward()

    def _run_forward(self) -> None:
        with rooms_given(self._layers, self.rooms), rounding_anew(self._images_VB3HW.device.type):
            agreement = functional_call(self._siamese, self._twins, self._images_VB3HW)
        self._loss, self._features_BC, self._projections_BZ = agreement
        self.records = [layer.record for layer in self._layers if layer.record is not None]
        self._told = self._to_tell()

    def _to_tell(self) -> Tensor:
        numbers = [record.summary for record in self.records if record.summary is not None]
        for encoder in (self._siamese.encoder, self._siamese.target_encoder):
            if encoder is not None and encoder.budget is not None:
                numbers.append(encoder.budget.known([layer.threshold for layer in encoder.superpixel_layers]))
        return torch.cat([number.double() for number in numbers]) if numbers else torch.empty(0)

    def _run_backward(self) -> None:
        # As it is in a plain run, where the backward pass comes after autocast has ended.
        with torch.autocast(self._images_VB3HW.device.type, enabled=False):
            twins = list(self._twins.values())
            grads = torch.autograd.grad(self._loss, twins, self._grad_of_loss, allow_unused=True)
        self._grads = list(grads)


class _Replayed(torch.autograd.Function):
    """The loss of a replayed step, and the gradients that were replayed with it."""

    @staticmethod
    def forward(ctx: Any, recorded: _Recorded, *parameters: Tensor) -> Tensor:
        ctx.recorded = recorded
        return recorded.loss()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.recorded.gradients(grad)
