"""The same network on a GPU: only where there is one."""

import numpy as np
import pytest
import torch

import asc
from asc.attention import _padded, ragged_attention
from asc.data import SceneConfig, SceneDataset, normalise
from asc.grouping.components import algorithm_1, components

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


def test_varlen_attention_equals_padded() -> None:
    tokens = model().forward_tokens(frames(6, 64))
    query, key, value = torch.randn(3, tokens.values_TC.shape[0], 3, 64, device="cuda", dtype=torch.bfloat16).unbind()
    bias = torch.randn(tokens.values_TC.shape[0], device="cuda", dtype=torch.bfloat16)
    torch.testing.assert_close(
        ragged_attention(query, key, value, tokens), _padded(query, key, value, tokens), atol=2e-2, rtol=2e-2
    )
    assert ragged_attention(query, key, value, tokens, bias).shape == query.shape


def test_gradients_of_varlen_attention_equal_padded() -> None:
    tokens = model().forward_tokens(frames(6, 64))
    # Queries, keys and values lie side by side, as the network makes them.
    packed = torch.randn(tokens.values_TC.shape[0], 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    upstream = torch.randn_like(packed[:, 0])
    grads = []
    for attention in (ragged_attention, _padded):
        own = packed.clone().requires_grad_()
        attention(*own.unbind(1), tokens).backward(upstream)
        grads.append(own.grad)
    torch.testing.assert_close(grads[0], grads[1], atol=4e-2, rtol=4e-2)


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
    "settings", [{}, {"neighbourhood": "spatial"}, {"merge": "attention"}, {"grouping": "bipartite"}]
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


def test_nan_is_noticed() -> None:
    images = frames(2, 64)
    images[1, 0, 3, 3] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinite pixels"):
        model()(images)
