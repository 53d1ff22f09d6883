"""The loss of a set of queries, once it is known which object each is to find."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor
from torchvision.ops import generalized_box_iou_loss

from asc.distributed import several_processes, summed_over_processes
from asc.tasks.detect.matching import Match, corners


def set_losses(
    logits_BQC: Tensor,
    boxes_BQ4: Tensor,
    pairs: Match,
    label_K: Tensor,
    target_K4: Tensor,
    no_object: float,
    objects: Tensor | float,
) -> dict[str, Tensor]:
    """Losses of classes and boxes of one decoder layer, not yet weighted.

    Args:
        logits_BQC: Scores of the classes; the last one says that there is no object.
        boxes_BQ4: Boxes (centre x, centre y, width, height) in shares of the image.
        pairs: The chosen queries and their objects.
        label_K: Classes of the objects of the batch.
        target_K4: Their boxes.
        no_object: Weight of the queries that have no object to find.
        objects: What the sums over objects are divided by.
    """
    classes = logits_BQC.shape[2]
    wanted_BQ = torch.full(logits_BQC.shape[:2], classes - 1, device=logits_BQC.device)
    wanted_BQ[pairs.image_M, pairs.query_M] = label_K[pairs.object_M]
    weight_C = logits_BQC.new_ones(classes)
    weight_C[-1] = no_object
    found_M4, wanted_M4 = boxes_BQ4[pairs.image_M, pairs.query_M], target_K4[pairs.object_M]
    return {
        "class": F.cross_entropy(logits_BQC.flatten(0, 1), wanted_BQ.flatten(), weight_C),
        "l1": (found_M4 - wanted_M4).abs().sum() / objects,
        "giou": generalized_box_iou_loss(corners(found_M4), corners(wanted_M4), reduction="sum") / objects,
    }


def mean_objects(count: int, device: torch.device) -> Tensor:
    """Objects of a process, mean over all processes and at least 1: by this, every object counts alike."""
    total = summed_over_processes(torch.tensor(float(count), device=device))
    processes = torch.distributed.get_world_size() if several_processes() else 1
    return (total / processes).clamp(min=1)
