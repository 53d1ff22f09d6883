"""Does training suffer where θ's gradient comes from an eighth of the rows alone?

    python benchmarks/theta_training.py --data SHARDS --images DIR --seeds 0 1 2 --folds 5 --out runs/sampled

Takes the options of ``asc ablate layer`` and makes its runs of superpixels at equal steps, with one difference: rows
are sampled at every length, where the kernel samples them beyond 1,024 tokens alone. To be compared with
the same runs of ``asc ablate layer``. Needs a GPU: other backends never sample.
"""

from __future__ import annotations

import sys

from asc.ablate.run import main
from asc.kernels import gradient

if __name__ == "__main__":
    gradient._ALL_ROWS = 0
    # One worker: another process would not know of the change.
    sys.exit(main(["layer", *sys.argv[1:], "--only", "superpixels-steps-*", "--workers", "1"]))
