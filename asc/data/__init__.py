"""Data: pixels as the network wants them, and moving scenes with exact labels, masks, boxes and depth."""

from asc.data.images import normalise
from asc.data.scenes import CLASSES, Frame, Scene, SceneConfig, SceneDataset

__all__ = ["CLASSES", "Frame", "Scene", "SceneConfig", "SceneDataset", "normalise"]
