"""Short moving scenes drawn by our own code, with the exact truth for every frame.

A scene is a textured background plane and a few textured objects at different depths, seen by a camera
that pans, zooms and rolls. The class of an object is its shape; texture, colour, pose and motion are drawn
independently of it. The splits "train" and "test" use disjoint textures, hues and random streams, so a test
asks for generalisation to surfaces that were never seen.

The random draws do not depend on ``size`` or ``frames``: the same index shows the same scene at every
resolution, and a longer clip begins with the shorter one.

Files, in reading order
    scene.py     the interface: settings, a scene, a dataset of scenes
    layout.py    draws at random what is in a scene and how it moves; keeps the main object in view
    motion.py    where camera and objects are at a moment: waves, the camera, poses
    shapes.py    the ten classes, as outlines
    surfaces.py  draws at random how things look, and makes the texels that are looked up in every frame
    textures.py  the patterns of both splits
    colours.py   the hues of both splits, palettes, haze
    render.py    draws one frame: pixels, masks, depth and boxes
    common.py    types and small functions on arrays

Coordinates
    screen   x to the right and y down, the image spans [-1, 1] on both axes
    local    u, v of one object; every shape lies inside the unit disk
    depth    metres from the camera

Shape letters (suffixes of array names)
    T  frames                   H, W  rows and columns of the image, or of a window of it
    K  visible objects          P     all pixels of the image, flattened
    G  knots of a lattice       M     any second axis
    N  a selection of pixels    S     side of a square texture, in texels
    C  colours of a palette     3     red, green, blue (first axis while drawing, last in results)
"""

from asc.data.scenes.colours import HUES
from asc.data.scenes.common import Split
from asc.data.scenes.layout import MIN_MAIN_COVER, MIN_MAIN_VISIBLE
from asc.data.scenes.render import Frame
from asc.data.scenes.scene import MAX_KEY, MAX_OBJECTS, MIN_SIZE, Scene, SceneConfig, SceneDataset
from asc.data.scenes.shapes import CLASSES
from asc.data.scenes.textures import BACKGROUND_TEXTURES, OBJECT_TEXTURES

__all__ = [
    "BACKGROUND_TEXTURES",
    "CLASSES",
    "HUES",
    "MAX_KEY",
    "MAX_OBJECTS",
    "MIN_MAIN_COVER",
    "MIN_MAIN_VISIBLE",
    "MIN_SIZE",
    "OBJECT_TEXTURES",
    "Frame",
    "Scene",
    "SceneConfig",
    "SceneDataset",
    "Split",
]
