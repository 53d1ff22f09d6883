"""Both ways of a training step, recorded. Shape letters: see ``asc.tokens``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from asc.layer import LayerRecord
from asc.replay.graphs import record_graph, rounding_anew, run_aside
from asc.replay.replayer import Recorded, Result
from asc.replay.rooms import rooms_given, superpixel_layers
from asc.tokens import Room
from asc.vit import AscViT


class RecordedStep(Recorded[Result]):
    """A module's way from images to its first output and back to its parameters, with fixed rooms."""

    def __init__(self, module: nn.Module, encoders: Sequence[nn.Module], rooms: Sequence[Room], images: Tensor) -> None:
        self._module, self._encoders, self.rooms = module, encoders, list(rooms)
        self._layers = [layer for encoder in encoders for layer in superpixel_layers(encoder)]
        self._images = images.clone()
        self._learned = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
        self.parameters = list(self._learned.values())
        self._twins = self._make_twins()
        self._outputs: tuple[Tensor, ...] = ()
        self._grad_of_output: Tensor | None = None
        self._grads: list[Tensor | None] = []
        self._told = torch.empty(0)
        self._play_forward: Callable[[], None] = self._run_forward
        self._play_backward: Callable[[], None] = self._run_backward
        run_aside(self._run_both_ways, images.is_cuda)
        # Or recording would need the memory of two steps' gradients, and find the stream of the first.
        self._grads, self._twins = [], self._make_twins()
        # Kernels that are interpreted cannot be recorded: there every replay is a run.
        if images.is_cuda:
            self._record()

    def _make_twins(self) -> dict[str, Tensor]:
        """The parameters' numbers under other names: autograd may still hold their own from an earlier step, and with
        them the stream of that step, on which nothing can be recorded."""
        return {name: nn.Parameter(parameter.detach()) for name, parameter in self._learned.items()}

    def _record(self) -> None:
        forward = record_graph(self._run_forward)
        backward = record_graph(self._run_backward, beside=forward)
        self._outputs = tuple(output.detach() for output in self._outputs)  # lets go of autograd's own record
        self._play_forward, self._play_backward = forward.replay, backward.replay

    def _run_both_ways(self) -> None:
        self._run_forward()
        self._run_backward()

    def _run_forward(self) -> None:
        with rooms_given(self._layers, self.rooms), rounding_anew(self._images.device.type):
            outputs = functional_call(self._module, self._twins, self._images)
        self._outputs = (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)
        self.records: list[LayerRecord] = [layer.record for layer in self._layers if layer.record is not None]
        self._told = self._to_tell()

    def _to_tell(self) -> Tensor:
        numbers = [record.summary for record in self.records if record.summary is not None]
        for encoder in self._encoders:
            if isinstance(encoder, AscViT) and encoder.budget is not None:
                numbers.append(encoder.budget.known([layer.threshold for layer in encoder.superpixel_layers]))
        return torch.cat([number.double() for number in numbers]) if numbers else torch.empty(0)

    def _run_backward(self) -> None:
        if self._grad_of_output is None:
            self._grad_of_output = torch.ones_like(self._outputs[0])
        # As it is in a plain run, where the backward pass comes after autocast has ended.
        with torch.autocast(self._images.device.type, enabled=False):
            twins = list(self._twins.values())
            grads = torch.autograd.grad(self._outputs[0], twins, self._grad_of_output, allow_unused=True)
        self._grads = list(grads)

    def output(self) -> Tensor:
        """The first output, a copy from which gradients lead to the parameters."""
        copied: Tensor = _Replayed.apply(self, *self.parameters)
        return copied

    def copy_of_output(self) -> Tensor:
        """The same without gradients; the next replay writes into the place of the original."""
        return self._outputs[0].detach().clone()

    @abstractmethod
    def gradients(self, ticket: object, grad: Tensor) -> list[Tensor | None]:
        """The parameters' gradients for that of the output; ``ticket`` belongs to the output."""

    def ticket(self) -> object:
        """For the output that is handed out now."""
        return None


class _Replayed(torch.autograd.Function):
    """The output of a replayed step, and the gradients that are replayed with it."""

    @staticmethod
    def forward(ctx: Any, recorded: RecordedStep[Any], *parameters: Tensor) -> Tensor:
        ctx.recorded, ctx.ticket = recorded, recorded.ticket()
        return recorded.copy_of_output()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.recorded.gradients(ctx.ticket, grad)
