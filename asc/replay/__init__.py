"""Networks recorded once and replayed, so that the host has next to nothing to do: CUDA graphs.

A small network on small images keeps the host longer than the GPU: some hundred launches, and a wait for the number of
tokens in every superpixel layer. A graph has neither, but wants tensors of the same size every time. So every layer
gets room for as many tokens as it has had lately, and some more; rows that are not needed stay zero
(``Tokens.padded``). One transfer at the end tells the host how many tokens there really were. Did they not fit, or was
a key not finite, then the batch is run once more without the graph: the result is always that of the plain run.

    rooms.py      what layers found lately, and the room that follows from it
    graphs.py     recording and replaying, with what PyTorch wants to be told
    replayer.py   when to run plainly, record, replay and let go
    step.py       both ways of a training step
    encoder.py    ``asc.replayed``: an encoder in inference and in training

Pre-training replays both encoders, heads and loss together: ``asc.pretrain.replay``.
"""

from asc.replay.encoder import ReplayedEncoder, replayed

__all__ = ["ReplayedEncoder", "replayed"]
