"""``asc.replayed``: an encoder in inference and in training. Shape letters: see ``asc.tokens``."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock

import torch
from torch import Tensor, nn

from asc.distributed import several_processes
from asc.kernels import interpreted, kernels_take
from asc.layer import LayerRecord
from asc.replay.graphs import OneStreamAfterAnother, WeightsInPlace, record_graph, rounding_anew, run_aside
from asc.replay.replayer import Recorded, Replayer, can_learn_replayed, is_worth_replaying, obstacle, with_memory
from asc.replay.rooms import rooms_given, superpixel_layers
from asc.replay.step import RecordedStep
from asc.tokens import Room
from asc.transfer import Transfer
from asc.vit import AscViT


class ReplayedEncoder:
    """An encoder that is recorded and replayed, in inference and in training. Made by ``asc.replayed``.

    What cannot be replayed, or would not gain by it, is run as ever: batches of another shape than the last ones, so
    many patches that the GPU is busy anyway, gradients in eval mode or of the images, CPUs, several processes in
    training. Threads and streams may share it; they take turns.
    """

    def __init__(self, encoder: nn.Module, first: int = 4) -> None:
        self.encoder = encoder
        self.inference = _Inference(self, first)
        self.training = _Training(self, first)
        self._lock = Lock()

    def __call__(self, images_B3HW: Tensor) -> Tensor:
        """Pooled features ``(B, C)``."""
        if not self._can_be_replayed(images_B3HW):
            return self.call(images_B3HW)
        learns = self.encoder.training
        with self._lock:
            if learns and self.training.takes(images_B3HW):
                return self.training.replay_or_run(images_B3HW)
            if not learns and self.inference.takes(images_B3HW):
                return self.inference.replay_or_run(images_B3HW)
        return self.call(images_B3HW)

    def _can_be_replayed(self, images_B3HW: Tensor) -> bool:
        return (
            # Learning with gradients, or else neither.
            self.encoder.training == torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and (images_B3HW.is_cuda or interpreted())
            and kernels_take(images_B3HW)
        )

    def call(self, images_B3HW: Tensor) -> Tensor:
        """Without any graph."""

        def run() -> Tensor:
            features_BC: Tensor = self.encoder(images_B3HW)
            return features_BC

        return with_memory(run, [self.inference, self.training])

    @property
    def is_settled(self) -> bool:
        """Whether the last passes, of the kind that the encoder is set to, were all replayed."""
        return self.training.is_settled if self.encoder.training else self.inference.is_settled


def replayed(encoder: AscViT) -> ReplayedEncoder:
    """The same encoder on a GPU, where small networks wait for the host: as CUDA graphs, for inference and training.

    Call it for pooled features of batches of one shape; a few are run as ever before one is recorded. In training
    mode gradients reach the encoder's parameters as they always do, one backward pass for every call; the loss, the
    optimiser and ``update_thresholds`` are yours as before. A graph keeps its memory, about that of one pass, as long
    as what this returns. Hooks of the encoder are not called where it is replayed.
    """
    if reason := obstacle(encoder):
        raise ValueError(f"this encoder cannot be replayed: {reason}; call it as it is")
    return ReplayedEncoder(encoder)


class _Inference(Replayer[Tensor]):
    """Features without gradients."""

    def __init__(self, owner: ReplayedEncoder, first: int) -> None:
        super().__init__([owner.encoder], first)
        self._owner = weakref.proxy(owner)

    def takes(self, images_B3HW: Tensor) -> bool:
        """Whether they can be replayed and gain by it."""
        images, size_hw = images_B3HW.shape[0], images_B3HW.shape[-2:]
        return self.possible and is_worth_replaying(self.encoders[0], images, size_hw, learns=False)

    def call(self, images: Tensor) -> Tensor:
        features_BC: Tensor = self._owner.call(images)
        return features_BC

    def record(self, images: Tensor) -> Recorded[Tensor]:
        return _RecordedPass(self.encoders[0], self.history.rooms(), images)


class _Training(_Inference):
    """Features from which gradients lead to the encoder's parameters."""

    def takes(self, images_B3HW: Tensor) -> bool:
        """Whether a step on them can be replayed and gains by it."""
        encoder = self.encoders[0]
        return (
            self.possible
            and can_learn_replayed(encoder)
            and not several_processes()
            and not images_B3HW.requires_grad
            and is_worth_replaying(encoder, images_B3HW.shape[0], images_B3HW.shape[-2:])
            and any(parameter.requires_grad for parameter in encoder.parameters())
            and not (isinstance(self.recorded, _RecordedFeatures) and self.recorded.is_awaited)
        )

    def record(self, images: Tensor) -> Recorded[Tensor]:
        return _RecordedFeatures(self.encoders[0], self.history.rooms(), images)


class _Entrance:
    """Where a graph reads its images, and what must be as it was when the encoder was recorded."""

    def __init__(self, encoder: nn.Module, images_B3HW: Tensor) -> None:
        self.images_B3HW = images_B3HW
        self._weights, self._streams = WeightsInPlace(encoder), OneStreamAfterAnother()

    def run(self, images_B3HW: Tensor, play: Callable[[], None], told: Callable[[], Tensor]) -> list[float] | None:
        """Replay a pass; returns what it tells, None where weights have changed.

        It takes the host a while to look at all of them, which it does while the device is busy.
        """
        self._streams.wait(images_B3HW.device)
        self.images_B3HW.copy_(images_B3HW)
        play()
        numbers = Transfer(told())
        changed = self._weights.have_changed()
        found: list[float] = numbers.wait().tolist()
        return None if changed else found


class _RecordedPass(Recorded[Tensor]):
    """One pass without gradients."""

    def __init__(self, encoder: nn.Module, rooms: Sequence[Room], images_B3HW: Tensor) -> None:
        self._encoder, self._layers, self.rooms = encoder, superpixel_layers(encoder), list(rooms)
        with _outside_of_inference_mode(images_B3HW):
            self._images_B3HW = images_B3HW.clone()
            self._entrance = _Entrance(encoder, self._images_B3HW)
            run_aside(self._run, images_B3HW.is_cuda)
            # Kernels that are interpreted cannot be recorded: there every replay is a run.
            self._play = record_graph(self._run).replay if images_B3HW.is_cuda else self._run

    def run(self, images: Tensor, meanwhile: Callable[[], None] | None) -> list[float] | None:
        """Replay the pass."""
        with _outside_of_inference_mode(images):
            return self._entrance.run(images, self._play, lambda: self._told)

    def result(self) -> Tensor:
        """A copy: the next replay writes into the same place."""
        copied_BC: Tensor = self._features_BC.clone()
        return copied_BC

    def _run(self) -> None:
        with rooms_given(self._layers, self.rooms), rounding_anew(self._images_B3HW.device.type):
            self._features_BC = self._encoder(self._images_B3HW)
        self.records: list[LayerRecord] = [layer.record for layer in self._layers if layer.record is not None]
        summaries = [record.summary for record in self.records if record.summary is not None]
        self._told = torch.cat(summaries) if summaries else torch.empty(0)


class _Ticket:
    """Belongs to features that were handed out, and dies with the last loss that depends on them."""

    used = False


class _RecordedFeatures(RecordedStep[Tensor]):
    """Both ways of an encoder: the way back is replayed when the gradient of the features is there."""

    def __init__(self, encoder: nn.Module, rooms: Sequence[Room], images_B3HW: Tensor) -> None:
        self._last: weakref.ref[_Ticket] | None = None
        with torch.cuda.device_of(images_B3HW):
            super().__init__(encoder, [encoder], rooms, images_B3HW)
        self._entrance = _Entrance(encoder, self._images)

    @property
    def is_awaited(self) -> bool:
        """Whether a way back may still come, for which everything must stay as it is."""
        last = self._last() if self._last is not None else None
        return last is not None and not last.used

    def run(self, images: Tensor, meanwhile: Callable[[], None] | None) -> list[float] | None:
        """Replay the way forward."""
        with torch.cuda.device_of(images):
            return self._entrance.run(images, self._play_forward, lambda: self._told)

    def result(self) -> Tensor:
        """The features."""
        return self.output()

    def ticket(self) -> object:
        """Whoever holds it may come back with a gradient."""
        ticket = _Ticket()
        self._last = weakref.ref(ticket)
        return ticket

    def gradients(self, ticket: object, grad: Tensor) -> list[Tensor | None]:
        """Replay the way back; returns copies, which the next replay leaves alone."""
        assert isinstance(ticket, _Ticket) and self._grad_of_output is not None
        if ticket.used:
            # The way back writes over what it has read.
            raise RuntimeError(
                "a replayed encoder goes back once for every call; where a loss is to be differentiated twice, or two "
                "losses one after the other, call the encoder itself"
            )
        ticket.used = True
        self._grad_of_output.copy_(grad)
        self._play_backward()
        copies = iter(torch._foreach_mul([mine for mine in self._grads if mine is not None], 1.0))
        return [None if mine is None else next(copies) for mine in self._grads]


@contextmanager
def _outside_of_inference_mode(images_B3HW: Tensor) -> Iterator[None]:
    """Tensors of that mode may not be written to outside of it. Graphs belong to the device of the images."""
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device_of(images_B3HW):
        yield
