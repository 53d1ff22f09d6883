"""The network's contract: shapes, gradients, sizes, batch-mates, checkpointing."""

import copy
import dataclasses
import functools
import itertools
import shutil
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import asc
import asc.vit
from asc.attention import Attention
from asc.data import SceneConfig, SceneDataset, normalise

SETTINGS = {
    "default": asc.SuperpixelConfig(),
    "spatial": asc.SuperpixelConfig(neighbourhood="spatial"),
    "dot": asc.SuperpixelConfig(similarity="dot"),
    "tokens": asc.SuperpixelConfig(source="tokens"),
    "projection": asc.SuperpixelConfig(source="projection", key_gradient=1.0),
    "not centred": asc.SuperpixelConfig(center=False),
    "learnable": asc.SuperpixelConfig(threshold="learnable"),
    "fixed": asc.SuperpixelConfig(threshold="fixed"),
    "max": asc.SuperpixelConfig(merge="max"),
    "attention": asc.SuperpixelConfig(merge="attention"),
    "size": asc.SuperpixelConfig(weight="size"),
    "proportional": asc.SuperpixelConfig(proportional_attention=True),
    "bipartite": asc.SuperpixelConfig(grouping="bipartite"),
    "bottleneck": asc.SuperpixelConfig(gradient="bottleneck"),
    "two blocks": asc.SuperpixelConfig(blocks=(0, 2)),
    "keep": asc.SuperpixelConfig(blocks=(3,), keep=0.3),
    "plain": None,
}


def frames(count: int, size: int) -> torch.Tensor:
    scenes = SceneDataset(SceneConfig(size=size, seed=3), count)
    return normalise(np.stack([scenes[index].frame(0).image_HW3 for index in range(count)]))


def small(superpixels: asc.SuperpixelConfig | None, **settings: object) -> asc.AscViT:
    torch.manual_seed(0)
    if superpixels is not None and superpixels.budget == 0.4:
        # Four blocks of 64 patches: the default budget would leave two tokens of an image.
        superpixels = dataclasses.replace(superpixels, budget=0.6)
    config = asc.VitConfig(width=48, depth=4, heads=3, patch_size=4, image_size=32, superpixels=superpixels)
    return asc.AscViT(dataclasses.replace(config, **settings))


def calibrated(superpixels: asc.SuperpixelConfig | None, **settings: object) -> asc.AscViT:
    model = small(superpixels, **settings)
    if superpixels is not None:
        model.calibrate(frames(8, 32))
    return model


@pytest.mark.parametrize("name", SETTINGS)
def test_contract(name: str) -> None:
    model, images = calibrated(SETTINGS[name]), frames(4, 32)
    tokens = model.forward_tokens(images).check()
    assert model(images).shape == (4, 48)
    assert model.superpixels(images).shape == (4, 4, 8, 8)
    final, maps = model.forward_intermediates(images, [1, -1])
    assert [tuple(dense.shape) for dense in maps] == [(4, 48, 8, 8)] * 2
    torch.testing.assert_close(final.values_TC, tokens.values_TC)
    merges = SETTINGS[name] is not None
    assert (tokens.values_TC.shape[0] < 4 * 64) == merges
    (model(images) * torch.randn(4, 48)).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and torch.isfinite(parameter.grad).all(), parameter_name
            assert parameter.grad.abs().max() > 0, parameter_name


def test_every_name_makes_a_model_of_its_size() -> None:
    millions = {"tiny": 5.4, "small": 21.4, "base": 85.3, "large": 302.7}  # ViT without head, class token, positions
    for name in asc.MODEL_NAMES:
        if "large" in name and "patch16" not in name:
            continue  # the same blocks again; spares 4 GB
        model = asc.create_model(name, image_size=64)
        parameters = sum(p.numel() for block in model.blocks for p in block.parameters()) / 1e6
        assert parameters == pytest.approx(millions[name.split("_")[2]], rel=0.02)
        assert model.config.patch_size == int(name.split("patch")[1])
        assert len(model.superpixel_layers) == model.config.depth / 3


def test_dense_maps_hold_each_patchs_token_at_each_block() -> None:
    model, images = calibrated(asc.SuperpixelConfig()), frames(3, 32)
    labels = model.superpixels(images)
    _, maps = model.forward_intermediates(images)
    blocks = model.forward_blocks(images)
    for block, (tokens, dense) in enumerate(zip(blocks, maps, strict=True)):
        tokens.check()
        for image in range(3):
            first = int(tokens.cu_seqlens[image])
            patch_values = dense[image].flatten(1).T
            assert torch.equal(patch_values, tokens.values_TC[first + labels[block, image].flatten()])


def test_later_superpixels_are_unions_of_earlier_ones() -> None:
    labels = calibrated(asc.SuperpixelConfig()).superpixels(frames(4, 32))
    for before, after in itertools.pairwise(labels):
        for image in range(4):
            pairs = torch.stack([before[image].flatten(), after[image].flatten()]).unique(dim=1)
            assert pairs.shape[1] == before[image].unique().numel()


@pytest.mark.parametrize("size", [(32, 32), (48, 24), (20, 64)])
def test_any_size_divisible_by_the_patch_works(size: tuple[int, int]) -> None:
    model = calibrated(asc.SuperpixelConfig())
    labels = model.superpixels(frames(2, 64)[:, :, : size[0], : size[1]])
    assert labels.shape == (4, 2, size[0] // 4, size[1] // 4)


def test_token_counts_differ_between_images() -> None:
    model = calibrated(asc.SuperpixelConfig())
    assert model.forward_tokens(frames(8, 32)).lengths_B().unique().numel() > 2


@pytest.mark.parametrize("name", ["default", "spatial", "attention"])
def test_gradient_checkpointing_changes_nothing_but_memory(name: str) -> None:
    images, weight = frames(4, 32), torch.randn(4, 48, generator=torch.Generator().manual_seed(0))
    results = []
    for checkpoint_gradients in (False, True):
        model = calibrated(SETTINGS[name], checkpoint_gradients=checkpoint_gradients).train()
        (model(images) * weight).sum().backward()
        counts = [(layer.threshold.tokens_in, layer.threshold.tokens_out) for layer in model.superpixel_layers]
        results.append((counts, [p.grad for p in model.parameters()]))
    # Counted once: the controllers must not see the second pass of the checkpoint.
    assert results[0][0] == results[1][0]
    for without, with_checkpoint in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(without, with_checkpoint)


def test_calibration_meets_the_budget_at_every_block() -> None:
    torch.manual_seed(0)
    # Shares s with the mean 0.4 of what enters the 12 blocks: 1, s, s², … as far as there are layers.
    every = {"all": [0.8078] * 12, "early": [0.7224] * 4 + [1.0] * 8}
    for neighbourhood, blocks in itertools.product(("global", "spatial"), every):
        config = asc.VitConfig(width=48, heads=3, image_size=64)
        superpixels = asc.SuperpixelConfig(neighbourhood=neighbourhood, blocks=blocks)
        config = dataclasses.replace(config, superpixels=superpixels)
        model, images = asc.AscViT(config).eval(), frames(8, 64)
        model.calibrate(images)
        counts = torch.cat([torch.full((1, 8), 256), model.superpixels(images).flatten(2).amax(2) + 1]).double()
        assert counts[:-1].mean() / 256 == pytest.approx(0.4, rel=0.02)
        kept = counts.sum(1)[1:] / counts.sum(1)[:-1]
        assert kept.tolist() == pytest.approx(every[blocks], abs=0.02)


def grouped_alike(alone: torch.Tensor, batched: torch.Tensor) -> float:
    """Share of patches that have exactly the same companions in both label maps."""
    alone, batched = alone.flatten(), batched.flatten()
    same = (alone[:, None] == alone) == (batched[:, None] == batched)
    return float(same.all(dim=1).double().mean())


@torch.no_grad()
def smallest_margins(model: asc.AscViT, images: torch.Tensor) -> torch.Tensor:
    """For each image, how close any similarity comes to its threshold in any block."""
    margins = torch.full((len(images),), torch.inf)
    for index, image in enumerate(images):
        tokens = model._embed(image[None])
        for block in model.blocks:
            tokens, keys = block.attend(tokens)
            layer = block.superpixels
            features = layer._features(tokens, keys)
            similarity = features @ features.T
            pairs = layer._pairs(tokens)
            chosen = similarity.triu(1) if pairs is None else similarity[pairs[0], pairs[1]]
            chosen = chosen[chosen != 0]
            if chosen.numel():
                margin = (chosen - layer.threshold.theta()).abs().min()
                margins[index] = torch.minimum(margins[index], margin)
            tokens = block.feed_forward(layer(tokens, keys))
    return margins


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
@torch.no_grad()
def test_an_image_does_not_depend_on_its_batch_mates(neighbourhood: str) -> None:
    # Centred keys, whose similarities do not crowd: the margins must be larger than rounding.
    model = calibrated(asc.SuperpixelConfig(neighbourhood=neighbourhood, center=True, blocks="all")).eval()
    generator = torch.Generator().manual_seed(0)
    images = frames(200, 32) + 0.1 * torch.randn(200, 3, 32, 32, generator=generator)
    batched = torch.cat([model(images[first : first + 40]) for first in range(0, 200, 40)])
    batched_labels = torch.cat([model.superpixels(images[first : first + 40]) for first in range(0, 200, 40)], dim=1)
    margins = smallest_margins(model, images)
    alike = []
    for index in range(200):
        alone = model(images[index : index + 1])[0]
        alone_labels = model.superpixels(images[index : index + 1])[:, 0]
        alike += [grouped_alike(a, b) for a, b in zip(alone_labels, batched_labels[:, index], strict=True)]
        if margins[index] > 1e-4:
            torch.testing.assert_close(alone, batched[index], atol=1e-5, rtol=0)
    assert (margins > 1e-4).sum() >= 20
    assert sum(alike) / len(alike) >= 0.99


def test_prefix_tokens_are_kept_and_never_merged() -> None:
    model = calibrated(asc.SuperpixelConfig(), class_token=True, registers=3, pool="class")
    tokens = model.forward_tokens(frames(3, 32)).check()
    assert tokens.num_prefix == 4 and tokens.prefix_BPC().shape == (3, 4, 48)
    # What the class token says reaches it through attention to the merged tokens.
    assert model(frames(3, 32)).unique(dim=0).shape[0] == 3


@torch.no_grad()
def test_attention_fusion_starts_as_the_mean_in_the_network_too() -> None:
    images = frames(4, 32)
    mean, attention = (calibrated(asc.SuperpixelConfig(merge=merge)).eval() for merge in ("mean", "attention"))
    missing, unexpected = attention.load_state_dict(mean.state_dict(), strict=False)
    assert all(name.endswith("merge.score.weight") for name in missing) and not unexpected
    torch.testing.assert_close(attention(images), mean(images))


def test_timm_like_indices() -> None:
    model, images = calibrated(None), frames(1, 32)
    maps = model.forward_intermediates(images, intermediates_only=True)
    assert len(maps) == 4
    last_two = model.forward_intermediates(images, 2, intermediates_only=True)
    assert torch.equal(last_two[0], maps[2]) and torch.equal(last_two[1], maps[3])
    assert len(model.forward_intermediates(images, np.int64(2), intermediates_only=True)) == 2
    normed = model.forward_intermediates(images, [-1], norm=True, intermediates_only=True)[0]
    torch.testing.assert_close(normed, model.forward_tokens(images).dense_BCHW())


@pytest.mark.skipif(shutil.which("g++") is None, reason="code for a CPU is compiled by g++")
def test_compiled_it_is_the_same_network() -> None:
    """One block that merges, one in the middle and a last one: all that is compiled differently."""
    plain = calibrated(asc.SuperpixelConfig(blocks=(0,)), depth=3)
    images = frames(3, 32)
    compiled = copy.deepcopy(plain)
    compiled.compile()
    found = []
    for model in (plain, compiled):
        pooled = model(images)
        pooled.square().sum().backward()
        with torch.no_grad():
            middle = model.forward_intermediates(images, indices=3, intermediates_only=True)
        found.append((pooled.detach(), middle, {name: p.grad for name, p in model.named_parameters()}))
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


def test_compiled_it_keeps_hidden_values_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GELU's values are made again on the way back."""
    partitioned = functools.partial(torch.compile, backend="aot_eager_decomp_partition")
    monkeypatch.setattr(torch, "compile", partitioned)
    asc.vit._compiled.cache_clear()
    model, images = calibrated(None, depth=2), frames(1, 32)
    kept: list[dict[int, torch.Tensor]] = []
    try:
        for _ in range(2):
            found: dict[int, torch.Tensor] = {}

            def note(tensor: torch.Tensor, found: dict[int, torch.Tensor] = found) -> torch.Tensor:
                if tensor.shape[:1] == (64,) and tensor.numel() == 64 * 192:
                    found[tensor.data_ptr()] = tensor
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
                model(images).sum().backward()
            kept.append(found)
            model.compile()
    finally:
        asc.vit._compiled.cache_clear()
        torch._dynamo.reset()
    assert [len(found) for found in kept] == [2 * 2, 2]


@pytest.mark.parametrize("superpixels", [None, asc.SuperpixelConfig(), asc.SuperpixelConfig(neighbourhood="spatial")])
def test_a_compiled_network_around_it_computes_the_same(superpixels: asc.SuperpixelConfig | None) -> None:
    """Who calls ``torch.compile`` themselves, on the whole network, with batches of several sizes."""
    torch.manual_seed(0)
    network = torch.nn.Sequential(calibrated(superpixels, depth=3), torch.nn.Linear(48, 5))
    found = []
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for caller in (network, torch.compile(network, backend="aot_eager")):
                results = [caller(frames(count, 32)) for count in (3, 2, 3, 4)]
                network.zero_grad()
                torch.cat(results).square().sum().backward()
                grads = {name: p.grad.clone() for name, p in network.named_parameters() if p.grad is not None}
                found.append((results, grads))
    finally:
        torch._dynamo.reset()
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("superpixels", [None, asc.SuperpixelConfig()])
def test_keys_are_let_go_before_the_mlp(
    superpixels: asc.SuperpixelConfig | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are a view of queries, keys and values, which at inference nobody needs any more."""
    model, keys, alive = calibrated(superpixels, depth=3), [], []
    mix = Attention.mix

    def noted(self: Attention, *inputs: object) -> tuple[torch.Tensor, torch.Tensor]:
        mixed_TC, key_THD = mix(self, *inputs)
        keys.append(weakref.ref(key_THD))
        return mixed_TC, key_THD

    monkeypatch.setattr(Attention, "mix", noted)
    for block in model.blocks:
        block.mlp.register_forward_pre_hook(lambda *_: alive.append(keys[-1]() is not None))
    with torch.no_grad():
        model(frames(2, 32))
    assert len(keys) == 3 and alive == [False] * 3


def test_whatever_it_is_called_for_it_runs_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond some number of kinds of calls the compiler gives up without an error, and all runs slowly."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    asc.vit._compiled.cache_clear()
    model, images = calibrated(asc.SuperpixelConfig(blocks=(0,)), depth=3), frames(2, 32)
    model.compile()
    try:
        with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
            for grad, half, kept, train in itertools.product((True, False), repeat=4):
                model.train(train)
                with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.float16, half, kept):
                    assert model(images).shape == (2, 48)
    finally:
        asc.vit._compiled.cache_clear()
        torch._dynamo.reset()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_in_half_precision_thresholds_stay_what_they_are(dtype: torch.dtype) -> None:
    model, images = small(asc.SuperpixelConfig()), frames(8, 32)
    for block in model.blocks:
        # Keys that share a large part, as those of trained networks do: their cosines lie just below 1.
        block.attn.qkv.bias.data[48:96] = 2 * torch.randn(48, generator=torch.Generator().manual_seed(0))
    model.calibrate(images)
    thetas = [layer.threshold.theta() for layer in model.superpixel_layers]
    assert all(0.9961 < theta < 1 for theta in thetas), "bf16 has a number there"
    model(images)
    tokens = [stats.tokens_mean for stats in model.diagnostics().values()]
    model.to(dtype)
    assert [layer.threshold.theta() for layer in model.superpixel_layers] == thetas
    model(images.to(dtype))
    rounded = [stats.tokens_mean for stats in model.diagnostics().values()]
    assert rounded == pytest.approx(tokens, rel=0.1)
    assert model.blocks[0].mlp.fc1.weight.dtype == dtype and model.budget.targets_L.dtype == torch.float32

    model.train()(images.to(dtype)).float().square().sum().backward()
    model.update_thresholds()
    assert all(torch.isfinite(layer.threshold.u) for layer in model.superpixel_layers)


@pytest.mark.skipif(shutil.which("g++") is None, reason="code for a CPU is compiled by g++")
def test_a_network_that_was_wrapped_by_the_compiler_is_saved_as_itself(tmp_path: Path) -> None:
    model = calibrated(asc.SuperpixelConfig())
    asc.save(torch.compile(model), tmp_path)
    images = frames(2, 32)
    assert torch.equal(asc.load(tmp_path)(images), model.eval()(images))
    with pytest.raises(ValueError, match="takes an AscViT, got Sequential"):
        asc.save(torch.nn.Sequential(model), tmp_path)


def test_looking_at_superpixels_moves_no_threshold() -> None:
    model, images = calibrated(asc.SuperpixelConfig()).train(), frames(2, 32)
    model.superpixels(images)
    assert model.training and all(layer.training for layer in model.superpixel_layers)
    assert not any(layer.threshold.tokens_in for layer in model.superpixel_layers)
    model(images)
    assert all(layer.threshold.tokens_in for layer in model.superpixel_layers)


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")  # so few tokens
@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"class_token": True, "registers": 2, "pool": "class"},
        {"superpixels": None},
        {"superpixels": asc.SuperpixelConfig(threshold="learnable", merge="attention")},
        {"superpixels": asc.SuperpixelConfig(learn_allocation=False, control="total")},
    ],
    ids=str,
)
def test_a_network_can_be_made_before_its_weights_are_there(settings: dict[str, Any], assign: bool) -> None:
    """As large ones are: without memory first, then with the weights of a file."""
    torch.manual_seed(0)
    shape = {"width": 24, "depth": 3, "heads": 2, "image_size": 32, "patch_size": 8}
    config = asc.VitConfig(**shape, **settings)
    images = torch.randn(2, 3, 32, 32)
    plain = asc.AscViT(config)
    if config.superpixels is not None:
        plain.calibrate(images)
    with torch.device("meta"):
        model = asc.AscViT(config)
    assert {tensor.device.type for tensor in model.state_dict().values()} == {"meta"}
    if not assign:
        model.to_empty(device="cpu")
    model.load_state_dict(copy.deepcopy(plain.state_dict()), assign=assign)
    assert torch.equal(model.eval()(images), plain.eval()(images))
    for each in (model.train(), plain.train()):
        each(images).sum().backward()
        each.update_thresholds()
    assert all(torch.equal(one, plain.state_dict()[name]) for name, one in model.state_dict().items())
