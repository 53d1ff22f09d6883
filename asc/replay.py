"""Networks recorded once and replayed, so that the host has next to nothing to do: CUDA graphs.

A small network on small images keeps the host longer than the GPU: some hundred launches, and a wait for the number of
tokens in every superpixel layer. A graph has neither, but wants tensors of the same size every time. So every layer
gets room for as many tokens as it has had lately, and some more; rows that are not needed stay zero
(``Tokens.padded``). One transfer at the end tells the host how many tokens there really were. Did they not fit, or was
a key not finite, then the batch is run once more without the graph: the result is always that of the plain run.

Here is what inference needs, and what training steps (``asc.pretrain.replay``) share with it.
Shape letters: see ``asc.tokens``.
"""

from __future__ import annotations

import statistics
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock
from typing import NamedTuple

import torch
from torch import Tensor, nn

from asc.kernels import interpreted, kernels_take
from asc.layer import AdaptiveSuperpixelLayer, LayerRecord
from asc.tokens import Room
from asc.transfer import Transfer
from asc.vit import AscViT

# Passes that are remembered.
_REMEMBERED = 32
# Room beyond their mean: so many standard deviations, and at least this share. Recording takes as long as a dozen
# steps, a batch that does not fit as long as four: half the room was outgrown within 70 steps, which cost more than it
# would have saved in 1,500 (docs/results/performance.md).
_DEVIATIONS, _SPARE = 3.0, 0.12
# So many batches among those that did not fit are too many.
_TOO_OFTEN = 3
# Rooms are multiples of this, for the matrix products' sake; the longest image's, with this factor, of a tile.
_ROUND, _LONGEST_FACTOR, _LONGEST_ROUND = 256, 1.25, 64
# So many batches of another shape in a row are no longer the last ones of datasets.
_STRANGERS = 3
# So many passes in a row that were replayed are a good sign.
_SETTLED = 8


class ReplayedEncoder:
    """An encoder whose inference is recorded and replayed. Made by ``asc.replayed``.

    What cannot be replayed is run as ever: batches of another shape than the last ones, training mode, gradients, CPUs.
    Threads and streams may share it; they take turns.
    """

    def __init__(self, encoder: nn.Module, first: int = 4) -> None:
        self.encoder = encoder
        self._first = first
        self._possible = not obstacle(encoder)
        self._history = TokenHistory(superpixel_layers(encoder))
        self._kind: _Kind | None = None
        self._recorded: _Recorded | None = None
        self._strangers = 0
        self._replayed = 0
        self._lock = Lock()

    def __call__(self, images_B3HW: Tensor) -> Tensor:
        """Pooled features ``(B, C)``."""
        if not (self._possible and self._is_inference(images_B3HW)):
            return self._call(images_B3HW)
        with self._lock:
            return self._replay_or_run(images_B3HW)

    def _replay_or_run(self, images_B3HW: Tensor) -> Tensor:
        kind = _Kind.of(images_B3HW)
        if kind != self._kind:
            if self._recorded is not None and self._strangers < _STRANGERS:
                self._strangers += 1
                return self._call(images_B3HW)
            self._begin(kind)
        self._strangers = 0
        if self._recorded is None and (len(self._history) < self._first or not self._record(images_B3HW)):
            return self._run_plainly(images_B3HW)
        assert self._recorded is not None
        told = self._recorded.run(images_B3HW)
        if told is None:
            self._begin(kind)
            return self._run_plainly(images_B3HW)
        counts = self._history.read(told)
        if not self._history.add(counts, self._recorded.rooms):
            self._replayed = 0
            if self._history.outgrown:
                self._let_go()
            return self._run_plainly(images_B3HW)
        self._note(counts, images_B3HW)
        self._replayed += 1
        return self._recorded.features()

    @property
    def is_settled(self) -> bool:
        """Whether the last passes were all replayed."""
        return self._replayed >= _SETTLED

    def _is_inference(self, images_B3HW: Tensor) -> bool:
        return (
            not self.encoder.training
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and (images_B3HW.is_cuda or interpreted())
            and kernels_take(images_B3HW)
        )

    def _call(self, images_B3HW: Tensor) -> Tensor:
        try:
            features_BC: Tensor = self.encoder(images_B3HW)
            return features_BC
        except torch.OutOfMemoryError:
            if self._recorded is None:
                raise
        # The graph keeps its memory to itself: there is not always enough for both.
        self._let_go()
        return self._call(images_B3HW)

    def _begin(self, kind: _Kind) -> None:
        self._let_go()
        self._kind, self._replayed = kind, 0
        self._history.forget()

    def _let_go(self) -> None:
        self._recorded = None
        self._history.forget_misfits()

    def _run_plainly(self, images_B3HW: Tensor) -> Tensor:
        features_BC = self._call(images_B3HW)
        self._history.note_run()
        return features_BC

    def _record(self, images_B3HW: Tensor) -> bool:
        """Whether it could be done."""
        try:
            self._recorded = _Recorded(self.encoder, self._history, images_B3HW)
        except RuntimeError as error:
            self._possible = False
            reason = " ".join(str(error).split())[:200]
            warnings.warn(f"inference is not replayed, which makes it slower: {reason}", stacklevel=3)
            return False
        return True

    def _note(self, counts: Sequence[Count], images_B3HW: Tensor) -> None:
        assert self._recorded is not None
        if isinstance(self.encoder, AscViT):
            note_counts(self.encoder, self._recorded.records, counts, images_B3HW.shape)


def replayed(encoder: AscViT) -> ReplayedEncoder:
    """The same encoder for inference on a GPU, where small networks wait for the host: as a CUDA graph.

    Call it for pooled features of batches of one shape, in eval mode and without gradients; a few batches are run as
    ever before one is recorded. The graph keeps its memory, about that of one pass, as long as what this returns. Hooks
    of the encoder are not called where it is replayed.
    """
    if encoder.training:
        raise ValueError("the encoder is in training mode, which is not replayed: call model.eval() first")
    if reason := obstacle(encoder):
        raise ValueError(f"this encoder cannot be replayed: {reason}; call it as it is")
    return ReplayedEncoder(encoder)


class _Kind(NamedTuple):
    """Batches of one kind can be replayed by the same graph."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    precision: torch.dtype | None

    @staticmethod
    def of(images_B3HW: Tensor) -> _Kind:
        device = images_B3HW.device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        return _Kind(images_B3HW.shape, images_B3HW.dtype, images_B3HW.device, precision)


class _Recorded:
    """One pass with fixed rooms. Images and features have their places in memory."""

    def __init__(self, encoder: nn.Module, history: TokenHistory, images_B3HW: Tensor) -> None:
        self._encoder, self._layers, self.rooms = encoder, history.layers, history.rooms()
        self._stream: torch.cuda.Stream | None = None
        # Held on to, so that the graph never reads memory that is somebody else's by now.
        self._weights = [tensor.detach() for tensor in _weights_of(encoder)]
        with _outside_of_inference_mode(images_B3HW):
            self._images_B3HW = images_B3HW.clone()
            run_aside(self._run, images_B3HW.is_cuda)
            # Kernels that are interpreted cannot be recorded: there every replay is a run.
            self._play = record_graph(self._run).replay if images_B3HW.is_cuda else self._run

    def run(self, images_B3HW: Tensor) -> list[float] | None:
        """Replay the pass; returns what the layers found, three numbers each.

        None where weights have been put elsewhere since, and the graph has read them where they were. It takes the host
        a while to look at all of them, which it does while the device is busy.
        """
        with _outside_of_inference_mode(images_B3HW):
            self._wait_for_the_last_stream()
            self._images_B3HW.copy_(images_B3HW)
            self._play()
            numbers = Transfer(self._told)
            moved = self._weights_have_moved()
            told: list[float] = numbers.wait().tolist()
        return None if moved else told

    def _wait_for_the_last_stream(self) -> None:
        """The features of the last call may still be on their way out of the graph's memory, on a stream of its own."""
        if self._images_B3HW.is_cuda:
            current = torch.cuda.current_stream()
            if self._stream is not None and self._stream != current:
                current.wait_stream(self._stream)
            self._stream = current

    def _weights_have_moved(self) -> bool:
        mine, theirs = self._weights, _weights_of(self._encoder)
        return [tensor.data_ptr() for tensor in mine] != [tensor.data_ptr() for tensor in theirs]

    def features(self) -> Tensor:
        """A copy: the next replay writes into the same place."""
        copied_BC: Tensor = self._features_BC.clone()
        return copied_BC

    def _run(self) -> None:
        with rooms_given(self._layers, self.rooms), rounding_anew(self._images_B3HW.device.type):
            self._features_BC = self._encoder(self._images_B3HW)
        self.records = [layer.record for layer in self._layers if layer.record is not None]
        summaries = [record.summary for record in self.records if record.summary is not None]
        self._told = torch.cat(summaries) if summaries else torch.empty(0)


@contextmanager
def _outside_of_inference_mode(images_B3HW: Tensor) -> Iterator[None]:
    """Tensors of that mode may not be written to outside of it. Graphs belong to the device of the images."""
    with torch.inference_mode(False), torch.no_grad(), torch.cuda.device_of(images_B3HW):
        yield


def _weights_of(encoder: nn.Module) -> list[Tensor]:
    return [*encoder.parameters(), *encoder.buffers()]


# --- What can be replayed ---------------------------------------------------------------------------------


def superpixel_layers(encoder: nn.Module) -> list[AdaptiveSuperpixelLayer]:
    """Those whose tokens need room; a peer's network has none."""
    return encoder.superpixel_layers if isinstance(encoder, AscViT) else []


def obstacle(encoder: nn.Module) -> str:
    """What in the network waits for the device, beside the number of tokens; nothing if nothing does."""
    layers = superpixel_layers(encoder)
    if not all(layer.can_go_unwatched for layer in layers):
        return "the settings of its superpixels are not those that one step of kernels is made for"
    if isinstance(encoder, AscViT) and layers and encoder.config.num_prefix:
        return "class and register tokens are set apart from superpixels on the host"
    return ""


# --- Room -------------------------------------------------------------------------------------------------


class Count(NamedTuple):
    """What one superpixel layer found in one pass."""

    tokens: int
    longest: int
    broken: int


class TokenHistory:
    """What superpixel layers found in the last passes, and the rooms that follow from it."""

    def __init__(self, layers: Sequence[AdaptiveSuperpixelLayer]) -> None:
        self.layers = list(layers)
        self._found: list[deque[Count]] = [deque(maxlen=_REMEMBERED) for _ in self.layers]
        self._fitted: deque[bool] = deque(maxlen=_REMEMBERED)
        self._passes = 0

    def __len__(self) -> int:
        """Passes that were noted."""
        return self._passes

    def forget(self) -> None:
        """Begin anew."""
        for found in self._found:
            found.clear()
        self._fitted.clear()
        self._passes = 0

    def forget_misfits(self) -> None:
        """Of batches that did not fit nothing is known any more."""
        self._fitted.clear()

    def note_run(self) -> None:
        """Of a plain pass; waits for the device."""
        self._passes += 1
        for layer, found in zip(self.layers, self._found, strict=True):
            assert layer.record is not None
            lengths_B = layer.record.borders_out.diff()
            tokens, longest = torch.stack([lengths_B.sum(), lengths_B.max()]).tolist()
            found.append(Count(tokens, longest, 0))

    def read(self, told: Sequence[float]) -> list[Count]:
        """What the summaries of a replayed pass say, three numbers a layer."""
        return [Count(*(int(number) for number in told[3 * i : 3 * i + 3])) for i in range(len(self.layers))]

    def add(self, counts: Sequence[Count], rooms: Sequence[Room]) -> bool:
        """Note a replayed pass, if its tokens fitted; returns whether they did."""
        fitted = not any(
            count.broken or count.tokens > room.tokens or count.longest > room.longest
            for count, room in zip(counts, rooms, strict=True)
        )
        self._fitted.append(fitted)
        if fitted:
            self._passes += 1
            for found, count in zip(self._found, counts, strict=True):
                found.append(count)
        return fitted

    @property
    def outgrown(self) -> bool:
        """Whether batches did not fit too often."""
        return self._fitted.count(False) >= _TOO_OFTEN

    def fitted_lately(self, passes: int) -> bool:
        """Whether none of the last replayed passes failed to fit."""
        return all(list(self._fitted)[-passes:])

    def rooms(self) -> list[Room]:
        """For the next passes."""
        return [room_for(found) for found in self._found]


def room_for(found: Sequence[Count]) -> Room:
    """Room that the next passes will seldom exceed, by what the last ones found."""
    tokens = [count.tokens for count in found]
    mean = statistics.fmean(tokens)
    spare = max(_DEVIATIONS * statistics.pstdev(tokens), _SPARE * mean)
    longest = _LONGEST_FACTOR * max(count.longest for count in found)
    return Room(_rounded(max(mean + spare, max(tokens)), _ROUND), _rounded(longest, _LONGEST_ROUND))


def _rounded(number: float, unit: int) -> int:
    return -(-int(number + 1) // unit) * unit


@contextmanager
def rooms_given(layers: Sequence[AdaptiveSuperpixelLayer], rooms: Sequence[Room]) -> Iterator[None]:
    """Within it, layers do not wait for the number of tokens."""
    for layer, room in zip(layers, rooms, strict=True):
        layer.room = room
    try:
        yield
    finally:
        for layer in layers:
            layer.room = None


def note_counts(
    encoder: AscViT, records: Sequence[LayerRecord], counts: Sequence[Count], shape_B3HW: Sequence[int]
) -> None:
    """Do on the host what the layers of an encoder do in a plain pass."""
    images = shape_B3HW[0]
    rows, columns = encoder.config.grid_of((shape_B3HW[-2], shape_B3HW[-1]))
    tokens_in = images * rows * columns
    for layer, record, count in zip(encoder.superpixel_layers, records, counts, strict=True):
        layer.record = record
        layer.note(tokens_in, count.tokens, images, record.theta)
        tokens_in = count.tokens


# --- Graphs -----------------------------------------------------------------------------------------------


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
