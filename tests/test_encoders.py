"""Encoders by one string: our runs, timm's models, untrained weights; wrong strings are named."""

from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import timm
import torch

import asc
from asc.data.images import DEVIATION, MEAN
from asc.tasks.encoders import open_encoder


def saved(folder: Path, superpixels: bool = True) -> asc.AscViT:
    """A small encoder, calibrated and written to a folder."""
    config = asc.VitConfig(
        width=32, depth=2, heads=2, patch_size=8, image_size=32, superpixels=asc.SuperpixelConfig(budget=0.7)
    )
    torch.manual_seed(3)
    model = asc.AscViT(config if superpixels else replace(config, superpixels=None)).eval()
    if superpixels:
        model.calibrate(torch.randn(4, 3, 32, 32))
    asc.save(model, folder)
    return model


@pytest.mark.parametrize("path", ["run", "run/encoder", "run/encoder/encoder.safetensors"])
def test_a_run_its_folder_and_its_file_are_the_same_encoder(tmp_path: Path, path: str) -> None:
    model = saved(tmp_path / "run" / "encoder")
    encoder = open_encoder(tmp_path / path)
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(encoder.module(images), model(images))
    assert encoder.vit is encoder.module and not encoder.module.training
    assert (encoder.num_features, encoder.image_size) == (32, 32)
    assert (encoder.mean, encoder.deviation) == (MEAN, DEVIATION)
    assert encoder.identity == open_encoder(tmp_path / "run").identity
    assert encoder.name == "run"
    assert "superpixel ViT" in encoder.description and "patches of 8" in encoder.description


def test_the_identity_follows_weights_and_shape_alone(tmp_path: Path) -> None:
    model = saved(tmp_path / "one")
    first = open_encoder(tmp_path / "one").identity
    asc.save(model, tmp_path / "two")
    assert open_encoder(tmp_path / "two").identity == first
    with torch.no_grad():
        model.norm.bias[0] += 1e-6
    asc.save(model, tmp_path / "two")
    assert open_encoder(tmp_path / "two").identity != first
    state = model.state_dict()
    other = asc.AscViT(replace(model.config, pool="size"))
    other.load_state_dict(state)
    asc.save(other, tmp_path / "three")
    assert open_encoder(tmp_path / "three").identity != open_encoder(tmp_path / "two").identity


def test_another_image_size_must_fit_the_patches(tmp_path: Path) -> None:
    saved(tmp_path / "run", superpixels=False)
    encoder = open_encoder(tmp_path / "run", image_size=48)
    assert encoder.image_size == 48 and "made for 32 px" in encoder.description
    assert encoder.module(torch.randn(1, 3, 48, 48)).shape == (1, 32)
    for source in (str(tmp_path / "run"), f"random:{tmp_path / 'run'}", "random:asc_vit_tiny_patch8"):
        message = r"image_size 50 is no multiple of the encoder's patch size 8; give --image-size 48$"
        with pytest.raises(ValueError, match=message):
            open_encoder(source, image_size=50)
    message = r"augment\.size 41 and 3 is no multiple of .* patch size 8; give --augment\.size 40 8$"
    with pytest.raises(ValueError, match=message):
        open_encoder(tmp_path / "run", (41, 3), "augment.size")
    with pytest.raises(ValueError, match=r"augment\.size 36 is no multiple of .*; give --augment\.size 48 32$"):
        open_encoder(tmp_path / "run", (48, 36), "augment.size")
    assert open_encoder(tmp_path / "run", (48, 32)).image_size == 32


def test_untrained_weights_by_shape_and_seed(tmp_path: Path) -> None:
    trained = saved(tmp_path / "run" / "encoder")
    one, same, other = (open_encoder(f"random:{tmp_path / 'run'}{seed}") for seed in ("", "@0", "@1"))
    assert one.identity == same.identity != other.identity
    assert one.vit is not None and one.vit.config == trained.config
    assert one.description.endswith("untrained, seed 0")
    assert [encoder.name for encoder in (one, same, other)] == ["random-run", "random-run-0", "random-run-1"]
    # Set on scenes, so that the number of tokens is not arbitrary.
    assert all(bool(layer.threshold.calibrated) for layer in one.vit.superpixel_layers)
    plain = open_encoder("random:plain", image_size=32)
    assert plain.vit is not None and plain.vit.config.superpixels is None and plain.image_size == 32
    named = open_encoder("random:asc_vit_tiny_patch8", image_size=96)
    assert named.vit is not None and named.vit.config.patch_size == 8


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_timm_peers_with_their_own_weights_and_normalisation(tmp_path: Path, name: str) -> None:
    sized = {"img_size": 32} if "vit" in name else {}
    torch.manual_seed(1)
    theirs = timm.create_model(name, num_classes=7, **sized).eval()
    torch.save({"model": theirs.state_dict()}, tmp_path / "peer.pth")
    encoder = open_encoder(f"timm:{name}@{tmp_path / 'peer.pth'}", image_size=32)
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = theirs.forward_head(theirs.forward_features(images), pre_logits=True)
        torch.testing.assert_close(encoder.module(images), expected)
    assert encoder.num_features == expected.shape[1] and encoder.vit is None
    assert encoder.mean == tuple(theirs.pretrained_cfg["mean"])
    untrained = open_encoder(f"timm:{name}", image_size=32)
    assert untrained.identity == open_encoder(f"timm:{name}", image_size=32).identity != encoder.identity
    assert "untrained" in untrained.description and "untrained" in untrained.name


def test_a_file_of_a_plain_vision_transformer_needs_no_name(tmp_path: Path) -> None:
    theirs = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32).eval()
    safetensors.torch.save_file(theirs.state_dict(), tmp_path / "vit.safetensors")
    encoder = open_encoder(tmp_path / "vit.safetensors")
    images = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(encoder.module(images), theirs(images), atol=1e-5, rtol=1e-5)
    assert encoder.image_size == 32 and encoder.name == "vit"


def test_wrong_sources_are_named(tmp_path: Path) -> None:
    (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    torch.save({"conv.weight": torch.zeros(3)}, tmp_path / "strange.pth")
    vit = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32)
    safetensors.torch.save_file(vit.state_dict(), tmp_path / "vit.safetensors")
    for source, message in {
        str(tmp_path / "nowhere"): r"there is no encoder .*nowhere",
        str(tmp_path / "unfinished"): r"unfinished has no encoder yet: it is not finished",
        str(tmp_path / "empty"): r"empty holds no encoder",
        str(tmp_path / "strange.pth"): r"strange.pth is not a plain Vision Transformer",
        "timm:no_such_model": r"timm cannot make 'no_such_model'",
        f"timm:resnet18@{tmp_path / 'no.pth'}": r"there is no weights file .*no\.pth",
        f"timm:resnet18@{tmp_path / 'vit.safetensors'}": r"vit\.safetensors does not fit the model",
        "random:something": r"'something' is neither 'plain', nor a model",
        "random@x": r"stands a seed such as 1, not 'x'",
    }.items():
        with pytest.raises(ValueError, match=message):
            open_encoder(source)
    with pytest.raises(ValueError, match="image_size must be at least 1"):
        open_encoder("random", image_size=0)
