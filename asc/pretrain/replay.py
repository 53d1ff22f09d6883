"""Steps of pre-training recorded once and replayed: both encoders, heads and loss. See ``asc.replay``.

The backward pass follows the forward pass without waiting until the host has seen how many tokens there really were.

Shape letters: see ``asc.pretrain.siamese``.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from asc.distributed import several_processes
from asc.kernels import interpreted, kernels_take
from asc.pretrain.siamese import Agreement, Siamese
from asc.replay.replayer import Recorded, Replayer, can_learn_replayed, is_worth_replaying, with_memory
from asc.replay.step import RecordedStep
from asc.transfer import Transfer


class Replay(Replayer[Agreement]):
    """Calls a ``Siamese`` module, from a graph where that is possible.

    Args:
        siamese: What is trained. One process on one GPU replays; anything else is run as it is.
        first: Steps that are run plainly before one is recorded; they show how the number of tokens varies.
    """

    def __init__(self, siamese: Siamese, first: int = 8) -> None:
        self.siamese = siamese
        super().__init__([each for each in (siamese.encoder, siamese.target_encoder) if each is not None], first)

    def __call__(self, images_VB3HW: Tensor, meanwhile: Callable[[], None] | None = None) -> Agreement:
        """Loss and features of a batch, as ``Siamese.forward`` gives them.

        ``meanwhile`` is what the host may do while it would wait for the device.
        """
        if not (self.possible and self._is_training_step(images_VB3HW)):
            return self.call(images_VB3HW)
        return self.replay_or_run(images_VB3HW, meanwhile)

    def _is_training_step(self, images_VB3HW: Tensor) -> bool:
        on_device = images_VB3HW.is_cuda or interpreted()
        return (
            self.siamese.training
            and torch.is_grad_enabled()
            and on_device
            and not several_processes()
            and kernels_take(images_VB3HW)
            and can_learn_replayed(self.siamese.encoder)
            and is_worth_replaying(self.siamese.encoder, images_VB3HW.shape[:2].numel(), images_VB3HW.shape[-2:])
        )

    def call(self, images: Tensor) -> Agreement:
        """Without a graph."""

        def run() -> Agreement:
            agreement: Agreement = self.siamese(images)
            return agreement

        return with_memory(run, [self])

    def record(self, images: Tensor) -> Recorded[Agreement]:
        """Both ways of the step."""
        return _RecordedAgreement(self.siamese, self.encoders, self.history.rooms(), images)


class _RecordedAgreement(RecordedStep[Agreement]):
    """Both ways of a step, replayed one after the other at once."""

    def run(self, images: Tensor, meanwhile: Callable[[], None] | None) -> list[float]:
        """Replay both passes.

        The backward pass, for the last step's gradient of the loss, is begun before it is known whether it will be
        wanted: the device would otherwise do nothing until the host has seen the numbers and got ready.
        """
        self._keep_gradients()
        self._images.copy_(images)
        self._play_forward()
        numbers = Transfer(self._told)
        self._play_backward()
        if meanwhile is not None:
            meanwhile()
        told: list[float] = numbers.wait().tolist()
        return told

    def result(self) -> Agreement:
        """The loss, from which gradients lead to the parameters, and what was found beside it."""
        _, features_BC, projections_BZ = self._outputs
        return Agreement(self.output(), features_BC, projections_BZ)

    def gradients(self, ticket: object, grad: Tensor) -> list[Tensor | None]:
        """The parameters' gradients, for the loss's as it is in this step."""
        assert self._grad_of_output is not None
        torch._foreach_mul_([mine for mine in self._grads if mine is not None], grad / self._grad_of_output)
        self._grad_of_output.copy_(grad)
        return [None if mine is None else mine.detach() for mine in self._grads]

    def _keep_gradients(self) -> None:
        """Gradients of an earlier micro-batch lie where this pass will write: move them out of the way."""
        for parameter, mine in zip(self.parameters, self._grads, strict=False):
            if parameter.grad is not None and mine is not None and parameter.grad.data_ptr() == mine.data_ptr():
                parameter.grad = parameter.grad.clone()
