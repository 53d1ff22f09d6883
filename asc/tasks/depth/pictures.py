"""Pictures of depth."""

from __future__ import annotations

import matplotlib
import numpy as np

from asc.tasks.images import Pixels, Truth


def paint_depth(depth_HW: Truth, far: float) -> Pixels:
    """A picture (H, W, 3) from bright = near to dark = ``far`` metres; grey where there is no depth."""
    shares_HW = np.clip(np.nan_to_num(depth_HW) / far, 0.0, 1.0)
    painted_HW3 = (255 * matplotlib.colormaps["magma_r"](shares_HW)[..., :3]).astype(np.uint8)
    painted_HW3[~(depth_HW > 0)] = 128
    return painted_HW3
