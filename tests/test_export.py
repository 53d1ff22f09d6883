"""Encoders in other programs: timm and ONNX Runtime must see in images what we see."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from torch import Tensor

import asc
from asc.cli import main
from asc.export.onnx import check_onnx, write_onnx
from asc.export.regular import RegularEncoder
from asc.export.timm import timm_settings, to_timm, write_timm
from asc.weights import without_superpixels

# Thresholds between tokens that are almost alike: rounding alone could join or part them, so fp64.
pytestmark = pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
PREFIX: dict[str, Any] = {"class_token": True, "registers": 2}


def pictures(count: int, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """Squares of a few colours with some noise, so that there is something to join."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, 3, height // 8, width // 8, generator=generator)
    images = coarse.repeat_interleave(8, 2).repeat_interleave(8, 3)
    return images + 0.05 * torch.randn(images.shape, generator=generator)


def encoder(superpixels: dict[str, Any] | None, **settings: Any) -> asc.AscViT:
    torch.manual_seed(0)
    grouping = None if superpixels is None else asc.SuperpixelConfig(**({"budget": 0.6} | superpixels))
    shape = {"width": 32, "depth": 3, "heads": 2, "patch_size": 4, "image_size": 32, "mlp_ratio": 2} | settings
    model = asc.AscViT(asc.VitConfig(superpixels=grouping, **shape)).eval()
    for layer in model.superpixel_layers:
        layer.threshold.calibrated.fill_(True)
    return model


# --- timm -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"image_size": (32, 48), "registers": 1},
        {**PREFIX, "prefix_position": True, "pool": "class"},
        {"class_token": True, "pool": "size", "norm_after_pool": True},
        {"quick_gelu": True, "qk_norm": True, "layer_scale": 0.3, "qkv_bias": False},
        {"norm_before": True},
    ],
    ids=str,
)
@torch.no_grad()
def test_timm_reads_a_network_with_the_same_features(settings: dict[str, Any], tmp_path: Path) -> None:
    model = encoder(None, **settings)
    if "norm_before" in settings:
        model.patch_embed.bias.zero_()
    images = torch.randn(2, 3, *model.config.image_hw)
    write_timm(model, tmp_path)
    read = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    torch.testing.assert_close(read(images), model(images), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(to_timm(model)(images), read(images))
    torch.testing.assert_close(asc.from_timm(read, None)(images), model(images))


@torch.no_grad()
def test_superpixels_are_left_out_and_the_weights_stay() -> None:
    model = encoder(
        {"merge": "attention", "source": "projection", "key_gradient": 1.0, "blocks": "all"}, pool="grouped"
    )
    network, images = to_timm(model), torch.randn(2, 3, 32, 32)
    plain = without_superpixels(model)
    torch.testing.assert_close(network(images), plain(images), rtol=1e-4, atol=1e-5)


def test_what_timm_has_no_place_for_is_refused() -> None:
    with pytest.raises(ValueError, match="norm_eps is 1e-05"):
        timm_settings(encoder(None, norm_eps=1e-5).config)
    model = encoder(None, norm_before=True)
    torch.nn.init.ones_(model.patch_embed.bias)
    with pytest.raises(ValueError, match="no bias of patches"):
        to_timm(model)


# --- Regular tensors, ONNX --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("superpixels", "settings"),
    [
        ({}, {}),
        ({"neighbourhood": "spatial", "blocks": "all"}, {"layer_scale": 0.5}),
        ({"size_weight": 1.0, "center": False, "weight": "size"}, {"pool": "size", "norm_before": True}),
        ({"similarity": "dot", "source": "tokens"}, {"norm_after_pool": True, "quick_gelu": True}),
        ({"source": "projection", "key_gradient": 1.0, "proportional_attention": False}, {"qk_norm": True}),
        ({"blocks": (0, 2)}, {"pool": "grouped"}),
        ({}, {**PREFIX, "pool": "class"}),
        ({"neighbourhood": "spatial"}, {**PREFIX, "prefix_position": True}),
        (None, {}),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(32, 32), (24, 40)], ids=str)
@torch.no_grad()
def test_regular_tensors_give_the_same_superpixels_and_features(
    superpixels: dict[str, Any] | None, settings: dict[str, Any], size: tuple[int, int]
) -> None:
    model, images = encoder(superpixels, **settings).double(), pictures(4, *size).double()
    if model.budget is not None:
        model.calibrate(images)
    features, labels = RegularEncoder(model, size).double()(images)
    torch.testing.assert_close(features, model(images))
    expected = model.superpixels(images)[-1]
    assert torch.equal(labels, expected)
    if superpixels is not None:
        assert 1 < expected.amax((1, 2)).double().mean() + 1 < 0.9 * expected[0].numel()


def test_groupings_that_need_ragged_tensors_are_refused() -> None:
    for name, value in (("grouping", "bipartite"), ("links", "best"), ("merge", "max")):
        with pytest.raises(ValueError, match=f"{name} is '{value}', which only works for"):
            RegularEncoder(encoder({name: value}), (32, 32))


@pytest.mark.parametrize("superpixels", [{}, {"neighbourhood": "spatial"}, None], ids=str)
@torch.no_grad()
def test_onnx_runtime_gives_the_same_for_any_number_of_images(
    superpixels: dict[str, Any] | None, tmp_path: Path
) -> None:
    model, file = encoder(superpixels), tmp_path / "encoder.onnx"
    if model.budget is not None:
        model.calibrate(pictures(4))
    write_onnx(model, file, (32, 32), {"mean": "[0.5, 0.5, 0.5]"})
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["mean"] == "[0.5, 0.5, 0.5]"
    assert [output.name for output in session.get_outputs()] == ["features", "superpixels"][: 2 - (superpixels is None)]
    for count in (1, 3):
        images = pictures(count, seed=count)
        found = session.run(None, {"images": images.numpy()})
        np.testing.assert_allclose(found[0], model(images), rtol=1e-3, atol=1e-4)
        if superpixels is not None:
            assert np.array_equal(found[1], model.superpixels(images)[-1])
    check = check_onnx(model, file, pictures(3))
    assert check is not None and check[1:] == (0, 0, 3) and check.largest_difference < 1e-4
    # Another encoder's file is noticed.
    model.norm.weight.mul_(1.1)
    assert check_onnx(model, file, pictures(3)).images_that_differ == 3  # type: ignore[union-attr]


# --- The command ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "file"), [("timm", "model.safetensors"), ("onnx", "encoder.onnx")])
def test_an_export_killed_at_the_worst_moment_is_made_by_the_same_command(
    kind: str, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asc.save(encoder(None), tmp_path / "mine")
    words = ["export", "--encoder", str(tmp_path / "mine"), "--out", str(tmp_path / "out"), "--format", kind]

    def killed(*_: object) -> None:
        raise SystemExit("killed")

    with monkeypatch.context() as patched, pytest.raises(SystemExit):
        patched.setattr("asc.export.run.difference_to_timm", killed)
        patched.setattr("asc.export.run.check_onnx", killed)
        main(words)
    assert (tmp_path / "out" / file).is_file()
    assert not json.loads((tmp_path / "out" / "export.json").read_text())["compared"]
    assert main(words) == 0
    assert json.loads((tmp_path / "out" / "export.json").read_text())["compared"]


def test_an_encoder_is_exported_and_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = encoder({})
    model.calibrate(pictures(4))
    asc.save(model, tmp_path / "mine")
    words = ["export", "--encoder", str(tmp_path / "mine")]
    for kind, said in (("timm", "superpixels are left out"), ("onnx", "of 8 images 0 differ by more than rounding")):
        out = tmp_path / kind
        for _ in range(2):  # the same once more does no harm
            assert main([*words, "--out", str(out), "--format", kind]) == 0
        assert said in capsys.readouterr().out
        record = json.loads((out / "export.json").read_text())
        assert record["format"] == kind and record["encoder"] == str(tmp_path / "mine") and record["compared"]
    assert timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).num_features == 32
    assert "hf-hub:" in (tmp_path / "timm" / "README.md").read_text()

    model.norm.weight.data.mul_(2)
    asc.save(model, tmp_path / "other")
    mine, other, new = (str(tmp_path / name) for name in ("mine", "other", "new"))
    for wrong, message in (
        ([other, "--out", str(tmp_path / "timm")], "holds the export of"),
        ([mine, "--out", mine], "holds other files"),
        ([mine, "--out", str(tmp_path / "timm"), "--format", "onnx"], "as timm; give a folder of its own"),
        (["timm:resnet10t", "--out", new], "is no network of ours"),
        ([mine, "--out", new, "--image-size", "48"], "is for onnx"),
    ):
        assert main(["export", "--encoder", *wrong]) == 2
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
