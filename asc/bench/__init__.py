"""How fast superpixels are, next to their peers: ``asc bench``.

Every *cell* measures one question, with all contestants taking turns in one process, and leaves one file. The report
is made from whatever files there are.

Files, in reading order
    run.py         the command: which cells, in which order, until when
    cells.py       a cell, how it is run, and its file
    measure.py     clocks, peak memory, and what is noted about the machine
    inputs.py      keys of several kinds, and frames of the embedded scenes
    components.py  connected components against torch, scipy, the bare product, and the arithmetic floor
    layer.py       one superpixel layer against the attention of its block
    peers.py       the other networks: timm's Vision Transformer and Token Merging
    contest.py     networks side by side, at one batch that suits all of them
    networks.py    training steps, pre-training steps, inference and memory of whole networks
    growth.py      how time and memory of components grow with tokens and with images
    cpu.py         components on the CPU against the bare product
    bars.py        what must be shown, and whether it is
    report.py      tables; plots.py: pictures
"""
