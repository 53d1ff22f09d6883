"""timm's Vision Transformers: the same numbers in plain mode, superpixels without training in the other."""

from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch
from test_vit import frames
from timm.models.vision_transformer import ResPostBlock
from torch import nn

import asc


def randomised(model: nn.Module) -> nn.Module:
    """Weights far from their initial values, so that a mixed-up one shows."""
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.05)
        else:
            nn.init.normal_(parameter, mean=float(parameter.detach().mean()), std=0.1)
    return model.eval()


def timm_vit(name: str, **settings: object) -> nn.Module:
    return randomised(timm.create_model(name, num_classes=0, dynamic_img_size=True, **settings))


CASES = {
    "tiny/16": ("vit_tiny_patch16_224", {}),
    "small/16": ("vit_small_patch16_224", {}),
    "without class token": ("vit_tiny_patch16_224", {"class_token": False, "global_pool": "avg"}),
    "norm after pooling": ("vit_tiny_patch16_224", {"global_pool": "avg"}),
    "mean beside a class token": ("vit_tiny_patch16_224", {"img_size": 64, "global_pool": "avg", "fc_norm": False}),
    "layer scale": ("vit_small_patch14_dinov2", {"img_size": 70}),
    "registers": ("vit_small_patch14_reg4_dinov2", {"img_size": 70}),
    "clip": ("vit_base_patch16_clip_quickgelu_224", {"img_size": 64, "depth": 3}),
    "normed queries and keys": ("vit_tiny_patch16_224", {"img_size": 64, "qk_norm": True}),
    # 4 × 6 patches and a class token are 25 positions, a square that is none.
    "not square": ("vit_tiny_patch16_224", {"img_size": (64, 96)}),
}


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_plain_mode_equals_timm_at_two_image_sizes(case: str) -> None:
    name, settings = CASES[case]
    theirs = timm_vit(name, **settings)
    ours = asc.from_timm(theirs, superpixels=None)
    height, width = theirs.patch_embed.img_size
    patch = theirs.patch_embed.patch_size[0]
    for size in ((height, width), (height + 2 * patch, width - patch)):
        images = torch.randn(2, 3, *size)
        tokens = ours.forward_tokens(images)
        expected = theirs.forward_features(images)
        torch.testing.assert_close(tokens.values_TC.view(expected.shape), expected, atol=1e-5, rtol=1e-6)
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-6)
        _, maps = ours.forward_intermediates(images, [1, -1])
        expected_maps = theirs.forward_intermediates(images, indices=[1, len(ours.blocks) - 1], intermediates_only=True)
        for mine, timms in zip(maps, expected_maps, strict=True):
            # Not normed yet, so of any magnitude.
            torch.testing.assert_close(mine / timms.abs().max(), timms / timms.abs().max(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("case", ["tiny/16", "registers"])
@torch.no_grad()
def test_superpixels_are_given_to_trained_weights_by_calibration_alone(case: str) -> None:
    name, settings = CASES[case]
    model = asc.from_timm(timm_vit(name, **settings))
    size = model.config.image_hw[0]
    images = torch.nn.functional.interpolate(frames(4, 64), size=(size, size), mode="bilinear")
    model.calibrate(images)
    tokens = model.forward_tokens(images).check()
    assert tokens.num_prefix == model.config.num_prefix
    counts = model.superpixels(images).flatten(2).amax(2) + 1
    patches = (size // model.config.patch_size) ** 2
    share = (patches + counts[:-1].double().mean(1).sum()) / patches / model.config.depth
    assert share == pytest.approx(0.4, abs=0.06)


@torch.no_grad()
def test_weights_files_of_both_kinds_load(tmp_path: Path) -> None:
    theirs = timm_vit("vit_tiny_patch16_224", img_size=64)
    with_head = theirs.state_dict() | {"head.weight": torch.zeros(10, 192), "head.bias": torch.zeros(10)}
    safetensors.torch.save_file(with_head, tmp_path / "vit.safetensors")
    torch.save({"model": with_head}, tmp_path / "vit.pth")
    images = torch.randn(2, 3, 64, 64)
    for file in ("vit.safetensors", "vit.pth"):
        ours = asc.from_timm(tmp_path / file, superpixels=None)
        torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=1e-6)


def test_other_architectures_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="ResNet is not one of timm's plain Vision Transformers"):
        asc.from_timm(timm.create_model("resnet18"))
    safetensors.torch.save_file(timm.create_model("resnet18").state_dict(), tmp_path / "resnet.safetensors")
    with pytest.raises(ValueError, match=r"resnet.safetensors is not a plain Vision Transformer of timm's: it holds "):
        asc.from_timm(tmp_path / "resnet.safetensors")
    state = timm.create_model("vit_tiny_patch16_224", img_size=64).state_dict()
    state["blocks.3.attn.proj.weight"] = torch.zeros(7, 7)
    with pytest.raises(ValueError, match=r"blocks.3.attn.proj.weight has the shape \(7, 7\)"):
        asc.from_timm(state)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"act_layer": "silu"}, r"an MLP with SiLU\(\)"),
        ({"act_layer": "gelu_tanh"}, r"an MLP with GELUTanh\(\)"),
        ({"block_fn": ResPostBlock}, "ResPostBlock is not what we have"),
        ({"global_pool": "max"}, "in a way that we do not: give pool='size'"),
        ({"global_pool": "map"}, "in a way that we do not: give pool='size'"),
        ({"global_pool": "avg", "pool_include_prefix": True}, "a mean that includes prefix tokens"),
    ],
)
def test_what_would_compute_something_else_is_refused(settings: dict[str, object], message: str) -> None:
    theirs = timm_vit("vit_tiny_patch16_224", img_size=64, depth=2, **settings)
    with pytest.raises(ValueError, match=message):
        asc.from_timm(theirs)
    if settings.get("global_pool") == "map":
        with pytest.raises(ValueError, match="in a way that we do not"):
            asc.from_timm(theirs.state_dict())
        assert asc.from_timm(theirs, superpixels=None, pool="size").config.pool == "size"


def test_a_size_that_the_positions_are_not_for_is_refused() -> None:
    state = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2).state_dict()
    assert asc.from_timm(state, superpixels=None, image_size=[32, 128]).config.image_hw == (32, 128)
    with pytest.raises(ValueError, match=r"image_size \(96, 96\) has 36 patches, the weights have 17 positions"):
        asc.from_timm(state, image_size=96)


@torch.no_grad()
def test_saved_models_come_back_with_their_thresholds(tmp_path: Path) -> None:
    model = asc.from_timm(
        timm_vit("vit_tiny_patch16_224", img_size=64), asc.SuperpixelConfig(blocks=(1, 4, 7), budget=0.7)
    )
    images = frames(4, 64)
    model.calibrate(images)
    asc.save(model, tmp_path / "run")
    loaded = asc.load(tmp_path / "run")
    assert loaded.config == model.config
    assert torch.equal(loaded.superpixels(images), model.superpixels(images))
    assert torch.equal(loaded(images), model(images))
