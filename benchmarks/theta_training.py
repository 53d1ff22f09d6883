"""Does training suffer where θ's gradient comes from an eighth of the rows alone?

    python benchmarks/theta_training.py --data SHARDS --images DIR --seeds 0 1 2 --folds 5 --out runs/sampled

Takes the options of ``asc ablate grouping`` and makes its runs of components at equal steps (``--only
superpixels-steps-*`` or ``spatial-steps-*`` for one of the two kinds), with one difference: rows are drawn at every
length, where the kernels draw them beyond 1,024 tokens alone. To be compared with the same runs of ``asc ablate
grouping``. Needs a GPU: other backends never sample.
"""

from __future__ import annotations

import sys

from asc.ablate.run import main
from asc.kernels import gradient

if __name__ == "__main__":
    gradient._ALL_ROWS = 0
    only = [] if "--only" in sys.argv else ["--only", "superpixels-steps-*", "spatial-steps-*"]
    # One worker: another process would not know of the change.
    sys.exit(main(["grouping", *sys.argv[1:], *only, "--workers", "1"]))
