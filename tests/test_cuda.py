"""The same network on a GPU: only where there is one."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import asc
from asc.attention import Attention, ragged_attention
from asc.data import SceneConfig, SceneDataset, normalise
from asc.grouping.components import algorithm_1, components
from asc.tokens import Tokens

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def frames(count: int, size: int) -> torch.Tensor:
    scenes = SceneDataset(SceneConfig(size=size, seed=3), count)
    return normalise(np.stack([scenes[index].frame(0).image_HW3 for index in range(count)])).cuda()


def model(**settings: object) -> asc.AscViT:
    torch.manual_seed(0)
    made = asc.create_model("asc_vit_tiny_patch4", asc.SuperpixelConfig(**settings), image_size=64).cuda().eval()
    made.calibrate(frames(8, 64))
    return made


def test_components_equal_algorithm_1_on_the_graph_they_used() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    features = torch.nn.functional.normalize(torch.randn(900, 16, device="cuda", generator=generator), dim=1)
    borders = torch.tensor([0, 400, 401, 900], dtype=torch.int32, device="cuda")
    labels = components(features, borders, torch.tensor(0.75, device="cuda")).cpu()
    for first, end in ((0, 400), (400, 401), (401, 900)):
        own = features[first:end].clone()
        links = (own @ own.T > 0.75).cpu().numpy()
        assert np.array_equal(labels[first:end] - first, algorithm_1(links | links.T))


def in_bf16(tokens: Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """Queries, keys and values side by side, as the network makes them, and a gradient of the mixed values."""
    packed = torch.randn(tokens.values_TC.shape[0], 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    return packed, torch.randn_like(packed[:, 0])


def with_spare_rows(tokens: Tokens, spare: int) -> Tokens:
    values = F.pad(tokens.values_TC, (0, 0, 0, spare))
    return replace(tokens, values_TC=values, sizes_T=F.pad(tokens.sizes_T, (0, spare)), padded=True)


@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("width", [64, 40])
def test_varlen_attention_and_its_gradients_equal_masked(by_size: bool, width: int) -> None:
    tokens = model().forward_tokens(frames(6, 64))
    packed, upstream = in_bf16(tokens)
    # Our own kernel does not take heads of 40 channels; PyTorch's does.
    packed, upstream = packed[..., :width].contiguous(), upstream[..., :width].contiguous()
    own = packed.clone().requires_grad_()
    mixed = ragged_attention(*own.unbind(1), tokens, by_size)
    mixed.backward(upstream)
    exact = packed.float().requires_grad_()
    expected = ragged_attention(*exact.unbind(1), tokens, by_size)
    expected.backward(upstream.float())
    # There the sizes travel as a channel of logarithms, and so with the digits of bf16.
    digits = 4e-2 if by_size and width == 40 else 2e-2
    torch.testing.assert_close(mixed.float(), expected, atol=digits, rtol=digits)
    torch.testing.assert_close(own.grad.float(), exact.grad, atol=2 * digits, rtol=2 * digits)


@pytest.mark.parametrize("images", [1, 6])
@pytest.mark.parametrize("settings", [{}, {"qk_norm": True}, {"proportional": True}])
def test_attention_of_the_network_equals_fp32(settings: dict[str, bool], images: int) -> None:
    tokens = model().forward_tokens(frames(images, 64))
    torch.manual_seed(0)
    attention = Attention(192, 3, **settings).cuda()
    grads, mixed = [], []
    for half in (False, True):
        values = tokens.values_TC.detach().clone().requires_grad_()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=half):
            out, keys = attention(values, tokens)
            (out.float().square().sum() + keys.float().square().sum()).backward()
        mixed.append(out.float())
        grads.append(values.grad)
    torch.testing.assert_close(mixed[1], mixed[0], atol=2e-2, rtol=2e-2)
    assert (grads[1] - grads[0]).norm() < 3e-2 * grads[0].norm()


def test_gradients_of_attention_are_deterministic() -> None:
    tokens = model().forward_tokens(frames(6, 64))
    packed, upstream = in_bf16(tokens)
    grads = []
    for _ in range(2):
        own = packed.clone().requires_grad_()
        ragged_attention(*own.unbind(1), tokens).backward(upstream)
        grads.append(own.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("way", ["kernel", "flash", "masked"])
def test_attention_keeps_rows_of_no_image_out(way: str) -> None:
    tokens, spare = model().forward_tokens(frames(6, 64)), 50
    packed, upstream = in_bf16(tokens)
    if way == "flash":
        packed, upstream = packed[..., :40].contiguous(), upstream[..., :40].contiguous()
    if way == "masked":
        packed, upstream = packed.float(), upstream.float()
    results = []
    for batch, extra in ((tokens, 0), (with_spare_rows(tokens, spare), spare)):
        rows = (0, 0, 0, 0, 0, extra)
        own = F.pad(packed, (0, 0, *rows), value=float("nan")).requires_grad_()
        mixed = ragged_attention(*own.unbind(1), batch)
        mixed.backward(F.pad(upstream, rows, value=float("nan")))
        results.append((mixed.detach(), own.grad))
    # FlashAttention adds up the gradient of queries in any order.
    digits = 0.0 if way == "kernel" else 1e-5 if way == "masked" else 2e-2
    for plain, padded in zip(*results, strict=True):
        torch.testing.assert_close(padded[:-spare], plain, atol=digits, rtol=digits)
        assert not padded[-spare:].any()


@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
def test_fp32_groups_like_the_cpu(neighbourhood: str) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    on_gpu, images = model(neighbourhood=neighbourhood), frames(8, 64)
    gpu_labels = on_gpu.superpixels(images).cpu()
    on_cpu = on_gpu.cpu()
    for layer in on_cpu.superpixel_layers:
        object.__setattr__(layer.config, "backend", "torch")
    cpu_labels = on_cpu.superpixels(images.cpu())
    assert (gpu_labels[0] == cpu_labels[0]).float().mean() > 0.99


@pytest.mark.parametrize(
    "settings", [{}, {"neighbourhood": "spatial"}, {"merge": "max"}, {"merge": "attention"}, {"grouping": "bipartite"}]
)
def test_bf16_trains(settings: dict[str, object]) -> None:
    trained, images = model(**settings).train(), frames(8, 64)
    optimiser = torch.optim.AdamW(trained.parameters(), lr=1e-4)
    for _ in range(3):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = (trained(images) * torch.randn(8, 192, device="cuda")).sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        trained.update_thresholds()
    for name, parameter in trained.named_parameters():
        assert not parameter.requires_grad or torch.isfinite(parameter.grad).all(), name
    trained.forward_tokens(images).check()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one_groups_alike() -> None:
    images, found = frames(4, 64), []
    for device in ("cuda:0", "cuda:1"):
        there = model().to(device).train()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            there(images.to(device)).sum().backward()
        grads = {name: parameter.grad.cpu() for name, parameter in there.named_parameters() if parameter.requires_grad}
        found.append((there.superpixels(images.to(device)).cpu(), grads))
    assert torch.cuda.current_device() == 0
    # Two kinds of GPU may round their products differently.
    torch.testing.assert_close(*found, rtol=1e-2, atol=1e-3)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_keys_of_another_gpu_are_refused() -> None:
    layer = asc.AdaptiveSuperpixelLayer(64, asc.SuperpixelConfig(theta=0.5, threshold="fixed")).cuda(0)
    tokens = Tokens.from_dense(torch.randn(2, 32, 64, device="cuda:0"))
    with pytest.raises(ValueError, match=r"several devices \(.*cuda:1.*\)"):
        layer(tokens, torch.randn(64, 64, device="cuda:1"))


def test_nan_is_noticed() -> None:
    images = frames(2, 64)
    images[1, 0, 3, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite pixels"):
        model()(images)
