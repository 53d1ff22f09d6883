"""Bad input gets a ValueError that names the cause, and NaN never turns into a silent grouping."""

from pathlib import Path

import pytest
import safetensors.torch
import torch
from test_vit import calibrated, frames, small

import asc
from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens

PLAIN = pytest.mark.parametrize("neighbourhood", ["global", "spatial"])


@PLAIN
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_pixels_name_the_image(neighbourhood: str, bad: float) -> None:
    model, images = calibrated(SuperpixelConfig(neighbourhood=neighbourhood)), frames(3, 32)
    images[1, 0, 5, 5] = bad
    with pytest.raises(ValueError, match="NaN or infinite pixels \\(images 1 of the batch\\)"):
        model(images)


def test_a_calibration_that_fails_leaves_every_part_in_its_mode() -> None:
    model, images = small(SuperpixelConfig()).train(), frames(3, 32)
    model.blocks[0].eval()
    modes = [module.training for module in model.modules()]
    model.calibrate(images)
    assert [module.training for module in model.modules()] == modes
    images[2] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite pixels \\(images 2 of the batch\\)"):
        model.calibrate(images)
    assert [module.training for module in model.modules()] == modes


@PLAIN
def test_nan_weights_name_the_block(neighbourhood: str) -> None:
    model = calibrated(SuperpixelConfig(neighbourhood=neighbourhood, blocks="all"))
    model.blocks[2].attn.qkv.weight.data[48, 0] = float("nan")  # the first channel of the keys
    with pytest.raises(ValueError, match="in block 2, though all pixels are finite"):
        model(frames(2, 32))


@pytest.mark.parametrize("grouping", ["components", "bipartite"])
def test_nan_keys_are_refused_by_the_layer(grouping: str) -> None:
    keys = torch.randn(16, 4)
    keys[3, 1] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite"):
        AdaptiveSuperpixelLayer(4, SuperpixelConfig(grouping=grouping))(Tokens.from_dense(torch.randn(1, 16, 4)), keys)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (torch.randn(1, 3, 30, 32), "height 30 is not divisible by the patch size 4"),
        (torch.randn(1, 3, 32, 33), "width 33 is not divisible by the patch size 4"),
        (torch.randn(0, 3, 32, 32), "the batch is empty"),
        (torch.randn(1, 1, 32, 32), r"\(batch, 3, height, width\)"),
        (torch.randn(3, 32, 32), r"\(batch, 3, height, width\)"),
        (torch.zeros(1, 3, 32, 32, dtype=torch.uint8), "asc.data.normalise"),
    ],
)
def test_unfit_images(images: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        calibrated(SuperpixelConfig())(images)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"theta": 1.0}, r"theta must lie in \[-1, 1\)"),
        ({"theta": -1.5}, r"theta must lie in \[-1, 1\)"),
        ({"theta": float("nan")}, "theta"),
        ({"theta": float("inf"), "similarity": "dot"}, "theta must be finite"),
        ({"similarity": "euclid"}, "unknown similarity 'euclid'"),
        ({"neighbourhood": "near"}, "unknown neighbourhood 'near'"),
        ({"threshold": "soft"}, "unknown threshold 'soft'"),
        ({"grouping": "kmeans"}, "unknown grouping 'kmeans'"),
        ({"merge": "median"}, "unknown merge 'median'"),
        ({"source": "values"}, "unknown source 'values'"),
        ({"weight": "area"}, "unknown weight 'area'"),
        ({"gradient": "yes"}, "unknown gradient 'yes'"),
        ({"backend": "gpu"}, "unknown backend 'gpu'"),
        ({"tau": 0.0}, "tau must be positive"),
        ({"floor": 1.0}, "floor must lie in"),
        ({"budget": 0.05}, "budget must lie in"),
        ({"budget": 1.0}, "budget must lie in"),
        ({"keep": 0.0}, "keep must lie in"),
        ({"keep": 1.5}, r"keep must lie in \(0, 1\], got 1.5"),
        ({"threshold": "learnable", "gradient": "none"}, "threshold='learnable' needs .* a gradient"),
        ({"threshold": "learnable", "grouping": "bipartite"}, "'learnable' needs grouping='components'"),
        ({"source": "projection", "key_gradient": 1.0, "grouping": "bipartite"}, "'projection' needs grouping"),
        ({"blocks": (0, 9)}, "blocks must name different blocks from 0 to 3"),
        ({"blocks": ()}, "blocks must name different blocks"),
        ({"grouping": "bipartite", "neighbourhood": "spatial"}, "bipartite grouping is global"),
    ],
)
def test_unfit_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        small(SuperpixelConfig(**settings))


def test_unknown_names() -> None:
    with pytest.raises(ValueError, match="unknown model 'asc_vit_huge_patch4'; choose from asc_vit_tiny_patch4"):
        asc.create_model("asc_vit_huge_patch4")
    with pytest.raises(ValueError, match="unknown setting dept; choose from"):
        asc.create_model("asc_vit_tiny_patch4", dept=3)
    with pytest.raises(ValueError, match="unknown pool 'median'"):
        asc.create_model("asc_vit_tiny_patch4", pool="median")
    with pytest.raises(ValueError, match="pool='class' needs class_token=True"):
        asc.create_model("asc_vit_tiny_patch4", pool="class")
    with pytest.raises(ValueError, match="blocks from -4 to 3"):
        calibrated(None).forward_intermediates(frames(1, 32), [4])
    with pytest.raises(ValueError, match="nothing to calibrate"):
        calibrated(None).calibrate(frames(1, 32))


def test_saved_models_of_another_shape_are_refused(tmp_path: Path) -> None:
    asc.save(calibrated(SuperpixelConfig()), tmp_path)
    state = safetensors.torch.load_file(tmp_path / "encoder.safetensors")
    state["blocks.1.mlp.fc1.weight"] = torch.zeros(5, 48)
    del state["norm.bias"]
    safetensors.torch.save_file(state, tmp_path / "encoder.safetensors")
    with pytest.raises(
        ValueError, match=r"encoder.safetensors does not fit the model: norm.bias is missing; .*\(5, 48\)"
    ):
        asc.load(tmp_path)


def test_files_that_are_no_weights_are_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"has no config\.json"):
        asc.load(tmp_path)
    for name in ("broken.safetensors", "broken.pth"):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(ValueError, match=f"{name} cannot be read as weights"):
            asc.from_timm(tmp_path / name)
    with pytest.raises(ValueError, match="there is no weights file"):
        asc.from_timm(tmp_path / "absent.pth")


def test_wrong_number_of_keys() -> None:
    with pytest.raises(ValueError, match="got 15 keys for 16 tokens"):
        AdaptiveSuperpixelLayer(4)(Tokens.from_dense(torch.randn(1, 16, 4)), torch.randn(15, 4))
    # Keys of the patches alone, and of too many.
    tokens = Tokens.from_dense(torch.randn(2, 10, 4), num_prefix=1)
    for count in (18, 50):
        with pytest.raises(ValueError, match=f"got {count} keys for 20 tokens"):
            AdaptiveSuperpixelLayer(4)(tokens, torch.randn(count, 4))
        with pytest.raises(ValueError, match=f"got {count} keys for 20 tokens"):
            AdaptiveSuperpixelLayer(4).calibrate(tokens, torch.randn(count, 4), keep=0.5)


@pytest.mark.parametrize("shape", [(16,), (16, 0), (16, 0, 4), (16, 2, 0), (16, 2, 2, 4)])
def test_keys_of_another_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"\(tokens, channels\) or \(tokens, heads, channels\), got \(16,"):
        AdaptiveSuperpixelLayer(4)(Tokens.from_dense(torch.randn(1, 16, 4)), torch.randn(shape))
