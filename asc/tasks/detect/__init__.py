"""Detection: which objects are where, as boxes.

Files, in reading order
    data.py        images and their boxes: PASCAL VOC, the embedded scenes
    augment.py     flip, scale jitter and colour; every image on a canvas of one size
    metrics.py     average precision as the VOC protocol says
    head.py        what both heads take and give
    fasterrcnn.py  head: torchvision's Faster R-CNN parts on an adapter and a feature pyramid
    detr.py        head: queries that attend to superpixels; matching.py and losses.py belong to it
    task.py        encoder and head as one detector, and its training on the one loop
    run.py         the commands: train, evaluate, predict
    pictures.py    boxes drawn on images, and the page

Shape letters (suffixes of names) beside those of ``asc.tokens``
    S  side of the canvas in pixels      K  boxes of an image        Q  queries of an image
    H, W  rows and columns of an image   4  x0, y0, x1, y1, half-open pixels unless said otherwise
"""
