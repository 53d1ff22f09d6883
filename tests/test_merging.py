"""Groups become tokens: what is conserved, and the three fusions against loops over the groups."""

import pytest
import torch
from test_tokens import random_merge

from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens
from asc.merging import Merge, token_weights
from asc.tokens import Groups, groups_from_labels


def random_groups(tokens: Tokens, seed: int = 0) -> Groups:
    merged, group_of = random_merge(tokens, seed)
    return Groups(group_of, torch.bincount(group_of), merged.cu_seqlens)


def ragged_tokens(dtype: torch.dtype = torch.float32) -> Tokens:
    torch.manual_seed(0)
    tokens, _ = random_merge(Tokens.from_dense(torch.randn(3, 20, 6), (4, 5)), seed=9)
    return tokens.with_values(torch.randn(tokens.values_TC.shape, dtype=dtype))


@pytest.mark.parametrize("fusion", ["mean", "max", "attention"])
@pytest.mark.parametrize("by_size", [False, True])
def test_fusion_equals_a_loop_over_the_groups(fusion: str, by_size: bool) -> None:
    tokens = ragged_tokens()
    groups = random_groups(tokens)
    merge = Merge(fusion, 6)
    if merge.score is not None:
        torch.nn.init.normal_(merge.score.weight)
    weights = token_weights(tokens, by_size)
    merged = merge(tokens.values_TC, weights, groups)
    for group in range(groups.num_groups):
        members = tokens.values_TC[groups.group_of_T == group]
        weight = weights[groups.group_of_T == group]
        if fusion == "max":
            expected = members.max(dim=0).values
        else:
            score = torch.zeros(len(members)) if merge.score is None else merge.score(members)[:, 0]
            share = torch.softmax(score + weight.log(), dim=0)
            expected = (members * share[:, None]).sum(0)
        torch.testing.assert_close(merged[group], expected)


def test_attention_fusion_starts_as_the_mean() -> None:
    tokens = ragged_tokens()
    groups, weights = random_groups(tokens), token_weights(tokens, by_size=False)
    values = tokens.values_TC
    torch.testing.assert_close(
        Merge("attention", 6)(values, weights, groups), Merge("mean", 6)(values, weights, groups)
    )


@pytest.mark.parametrize("fusion", ["mean", "max", "attention"])
def test_gradient_of_the_fusion_equals_finite_differences(fusion: str) -> None:
    tokens = ragged_tokens(torch.float64)
    groups, weights = random_groups(tokens), token_weights(tokens, by_size=True)
    merge = Merge(fusion, 6).double()
    values = tokens.values_TC.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: merge(x, weights, groups), values)


def test_the_gradient_of_a_maximum_is_shared_by_those_that_have_it() -> None:
    values = torch.tensor([[0.0, 1.0], [0.0, 2.0], [-1.0, 2.0], [-3.0, 0.0]], requires_grad=True)
    groups = Groups(torch.tensor([0, 0, 0, 1]), torch.tensor([3, 1]), torch.tensor([0, 2], dtype=torch.int32))
    merged = Merge("max", 2)(values, torch.ones(4), groups)
    assert merged.tolist() == [[0.0, 2.0], [-3.0, 0.0]]
    (merged * torch.tensor([[6.0, 8.0], [10.0, 12.0]])).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[3.0, 0.0], [3.0, 4.0], [0.0, 4.0], [10.0, 12.0]]


@pytest.mark.parametrize("grouping", ["components", "bipartite"])
@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
def test_merging_conserves_the_mean_over_joined_tokens(grouping: str, neighbourhood: str) -> None:
    if grouping == "bipartite" and neighbourhood == "spatial":
        pytest.skip("bipartite grouping is global")
    torch.manual_seed(0)
    tokens = Tokens.from_dense(torch.randn(4, 49, 8), (7, 7))
    for _ in range(4):
        layer = AdaptiveSuperpixelLayer(8, SuperpixelConfig(grouping=grouping, neighbourhood=neighbourhood), keep=0.7)
        keys = torch.randn(tokens.values_TC.shape[0], 8)
        layer.calibrate(tokens, keys, 0.7)
        merged = layer(tokens, keys).check()
        record = layer.record
        assert record is not None and merged.values_TC.shape[0] < tokens.values_TC.shape[0]
        before = torch.stack([part.mean(0) for part in tokens.values_TC.split(tokens.lengths_B().tolist())])
        joined = merged.values_TC * record.members_G[:, None]
        after = torch.stack([part.sum(0) for part in joined.split(merged.lengths_B().tolist())])
        torch.testing.assert_close(after / tokens.lengths_B()[:, None], before, atol=1e-6, rtol=1e-5)
        tokens = merged


def test_weight_size_conserves_the_patch_mean_through_all_layers() -> None:
    torch.manual_seed(0)
    tokens = Tokens.from_dense(torch.randn(3, 64, 8), (8, 8))
    patch_mean = tokens.mean_BC(by_size=True)
    for _ in range(6):
        layer = AdaptiveSuperpixelLayer(8, SuperpixelConfig(weight="size"))
        keys = torch.randn(tokens.values_TC.shape[0], 8)
        layer.calibrate(tokens, keys, 0.7)
        tokens = layer(tokens, keys)
    assert tokens.values_TC.shape[0] < 3 * 16
    torch.testing.assert_close(tokens.mean_BC(by_size=True), patch_mean, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
def test_permuting_a_batch_permutes_the_results(neighbourhood: str) -> None:
    torch.manual_seed(0)
    values, keys, order = torch.randn(5, 36, 8), torch.randn(5, 36, 8), torch.tensor([3, 0, 4, 1, 2])
    layer = AdaptiveSuperpixelLayer(8, SuperpixelConfig(neighbourhood=neighbourhood))
    layer.calibrate(Tokens.from_dense(values, (6, 6)), keys.flatten(0, 1), 0.7)
    straight = layer(Tokens.from_dense(values, (6, 6)), keys.flatten(0, 1))
    permuted = layer(Tokens.from_dense(values[order], (6, 6)), keys[order].flatten(0, 1))
    assert torch.equal(permuted.label_map_BHW(), straight.label_map_BHW()[order])
    parts = straight.values_TC.split(straight.lengths_B().tolist())
    assert torch.equal(permuted.values_TC, torch.cat([parts[image] for image in order]))


def test_groups_are_numbered_by_their_first_members() -> None:
    groups = groups_from_labels(torch.tensor([0, 1, 0, 1, 4, 5, 5]), torch.tensor([0, 4, 7], dtype=torch.int32))
    assert groups.group_of_T.tolist() == [0, 1, 0, 1, 2, 3, 3]
    assert groups.members_G.tolist() == [2, 2, 1, 2]
    assert groups.cu_seqlens.tolist() == [0, 2, 4]
