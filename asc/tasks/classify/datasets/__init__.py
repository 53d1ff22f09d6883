"""The thirteen classification datasets of the paper, the embedded scenes, and any folder of class folders.

Files, in reading order
    parts.py      the interface: one part of a dataset, a dataset that was opened
    folders.py    plain folders of class folders; the share kept for validation
    official.py   readers of the official layouts
    registry.py   what is known of every dataset
    opening.py    :func:`open_dataset`
    overlap.py    evaluation images that may have been seen in pre-training
"""

from asc.tasks.classify.datasets.opening import open_dataset
from asc.tasks.classify.datasets.overlap import Overlap, overlap
from asc.tasks.classify.datasets.parts import Dataset, ImageSet, Metric
from asc.tasks.classify.datasets.registry import DATASETS, Entry

__all__ = ["DATASETS", "Dataset", "Entry", "ImageSet", "Metric", "Overlap", "open_dataset", "overlap"]
