"""The gradient of a grouping: against autograd of the plain formula, and against the loss it stands for."""

import pytest
import torch
from gradient_sign import agreement

from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens
from asc.grouping import gradient
from asc.grouping.gradient import Gate, _bottlenecks, attach_soft_gradient
from asc.grouping.graph import touching_pairs
from asc.tokens import Groups, groups_from_labels


def small_case(spatial: bool) -> tuple[Tokens, torch.Tensor, Groups, Gate]:
    """Two ragged images in fp64 with random features, groups and weights."""
    generator = torch.Generator().manual_seed(0)
    tokens = Tokens.from_dense(torch.randn(2, 20, 5, generator=generator, dtype=torch.float64), (4, 5))
    labels = torch.arange(40)
    labels[[3, 4, 9]] = 1
    tokens = tokens.merged(groups_from_labels(labels, tokens.cu_seqlens), tokens.values_TC[:37])
    labels = torch.arange(37)
    labels[[5, 8, 11]], labels[[20, 30]] = 2, 19
    groups = groups_from_labels(labels, tokens.cu_seqlens)
    features = torch.nn.functional.normalize(torch.randn(37, 4, generator=generator, dtype=torch.float64), dim=1)
    weights = tokens.sizes_T.double()
    pairs = touching_pairs(tokens) if spatial else None
    gate = Gate(tokens.values_TC, weights, torch.tensor(0.3, dtype=torch.float64), tokens.cu_seqlens, pairs)
    return tokens, features, groups, gate


def plain_formula(
    features: torch.Tensor, theta: torch.Tensor, groups: Groups, gate: Gate, tokens: Tokens
) -> tuple[torch.Tensor, torch.Tensor]:
    """Soft tokens and log-votes of the formula, with the whole matrix in memory, averaged over each group."""
    image = tokens.image_of_T()
    allowed = image[:, None] == image
    if gate.pairs_2E is not None:
        allowed = torch.zeros_like(allowed)
        allowed[gate.pairs_2E[0], gate.pairs_2E[1]] = True
        allowed |= allowed.T.clone()
    own = torch.eye(len(features), dtype=torch.bool)
    adjacency = torch.sigmoid((features @ features.T - theta) / gate.tau) * allowed
    adjacency = torch.where(own, torch.ones_like(adjacency), adjacency) * gate.weights_T
    soft = adjacency @ gate.values_TC / adjacency.sum(1, keepdim=True)
    votes = -adjacency.sum(1).log()
    member = torch.nn.functional.one_hot(groups.group_of_T).T * gate.weights_T
    member = member / member.sum(1, keepdim=True)
    return member @ soft, member @ votes


@pytest.mark.parametrize("spatial", [False, True])
@pytest.mark.parametrize(("tile_entries", "short"), [(1 << 20, 0), (50, 0), (0, 128)])
def test_tiled_gradient_equals_autograd_of_the_formula(
    spatial: bool, tile_entries: int, short: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient, "_TILE_ENTRIES", tile_entries)
    monkeypatch.setattr(gradient, "_SHORT", short)
    tokens, features, groups, gate = small_case(spatial)
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(groups.num_groups, 5, generator=generator, dtype=torch.float64)
    vote_weight = torch.randn(groups.num_groups, generator=generator, dtype=torch.float64)
    ours, plain = (
        (features.clone().requires_grad_(), torch.tensor(0.4, dtype=torch.float64, requires_grad=True))
        for _ in range(2)
    )
    merged = torch.randn(groups.num_groups, 5, generator=generator, dtype=torch.float64)
    straight, votes = attach_soft_gradient("straight_through", merged, None, *ours, groups, gate)
    assert torch.equal(straight, merged) and not votes.any()
    ((straight * weight).sum() + votes @ vote_weight).backward()
    soft, soft_votes = plain_formula(*plain, groups, gate, tokens)
    ((soft * weight).sum() + soft_votes @ vote_weight).backward()
    for mine, autograd in zip(ours, plain, strict=True):
        assert autograd.grad.abs().max() > 1e-4
        torch.testing.assert_close(mine.grad, autograd.grad)


def test_bottleneck_is_the_weakest_link_of_the_best_path() -> None:
    generator = torch.Generator().manual_seed(0)
    similarity = torch.rand(15, 15, generator=generator)
    similarity = (similarity + similarity.T) / 2
    best = similarity.clone().fill_diagonal_(torch.inf)
    for middle in range(15):  # Floyd and Warshall, for widest paths
        best = torch.maximum(best, torch.minimum(best[:, middle, None], best[middle]))
    assert torch.equal(_bottlenecks(similarity, None), best)


@pytest.mark.parametrize("kind", ["straight_through", "bottleneck"])
@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
def test_threshold_and_keys_learn_even_when_nothing_merges(kind: str, neighbourhood: str) -> None:
    torch.manual_seed(0)
    config = SuperpixelConfig(
        threshold="learnable",
        theta=0.999,
        gradient=kind,
        neighbourhood=neighbourhood,
        tau=0.5,
        tau_relative=False,
        key_gradient=1.0,
    )
    layer = AdaptiveSuperpixelLayer(8, config)
    keys = torch.randn(2 * 30, 8, requires_grad=True)
    with pytest.warns(UserWarning, match="merged nothing"):
        merged = layer(Tokens.from_dense(torch.randn(2, 30, 8), (5, 6)), keys)
    assert merged.values_TC.shape[0] == 60
    (merged.values_TC * torch.randn(60, 8)).sum().backward()
    assert layer.threshold.u.grad.abs() > 1e-6
    assert (keys.grad.norm(dim=1) > 1e-6).all()


@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
def test_the_weight_of_the_keys_gradient_leaves_that_of_theta_alone(neighbourhood: str) -> None:
    torch.manual_seed(0)
    dense, keys = torch.randn(2, 30, 8), torch.randn(2 * 30, 8)
    found = {}
    for weight in (0.0, 1.0, 3.0):
        config = SuperpixelConfig(
            threshold="learnable", theta=0.5, neighbourhood=neighbourhood, tau=0.5, key_gradient=weight
        )
        layer, own = AdaptiveSuperpixelLayer(8, config), keys.clone().requires_grad_()
        merged = layer(Tokens.from_dense(dense, (5, 6)), own)
        merged.values_TC.square().sum().backward()
        found[weight] = own.grad, layer.threshold.u.grad
    assert found[0.0][0] is None
    torch.testing.assert_close(found[3.0][0], 3 * found[1.0][0])
    for weight in (1.0, 3.0):
        torch.testing.assert_close(found[weight][1], found[0.0][1])
    assert found[1.0][0].norm() > 1e-3


def test_values_get_the_gradient_of_the_hard_mean_alone() -> None:
    torch.manual_seed(0)
    values, keys = torch.randn(1, 12, 4, requires_grad=True), torch.randn(12, 4)
    layer = AdaptiveSuperpixelLayer(4, SuperpixelConfig(threshold="learnable", theta=0.7))
    merged = layer(Tokens.from_dense(values), keys)
    weight = torch.randn_like(merged.values_TC)
    (merged.values_TC * weight).sum().backward()
    group_of = merged.patch_to_token_BN[0]
    expected = weight[group_of] / layer.record.members_G[group_of][:, None]
    torch.testing.assert_close(values.grad[0], expected)


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
def test_sign_agrees_with_a_smoothed_finite_difference(neighbourhood: str) -> None:
    found = agreement(seeds=16, neighbourhood=neighbourhood)
    assert found.cases == 64
    assert 0.3 < found.rising < 0.7, "the true sign must vary, or a constant guess would pass"
    assert found.theta >= 0.7, found
    assert found.keys >= 0.7, found


def test_a_sharp_gate_leaves_no_nan_where_images_differ_in_length() -> None:
    # So sharp that the gate of unlike tokens is exactly zero, also for the fillers beside a short image.
    features = torch.nn.functional.normalize(torch.randn(9, 4, generator=torch.Generator().manual_seed(0)), dim=1)
    borders = torch.tensor([0, 2, 9], dtype=torch.int32)
    gate = Gate(torch.randn(9, 3), torch.ones(9), torch.tensor(1e-4), borders, None)
    large = 1e4 * torch.randn(9, 3)
    grads = gradient.soft_gradient_everywhere(large, torch.randn(9), features, torch.tensor(0.9999), gate)
    assert all(bool(torch.isfinite(grad).all()) for grad in grads)
