"""The ragged batch: its invariants, its views, and merges of it."""

import pytest
import torch

from asc import Tokens
from asc.tokens import groups_from_labels


def random_merge(tokens: Tokens, seed: int) -> tuple[Tokens, torch.Tensor]:
    """Merge random pairs of neighbouring tokens of each image; also returns each token's group."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(tokens.values_TC.shape[0])
    for first, end in zip(tokens.cu_seqlens[:-1].tolist(), tokens.cu_seqlens[1:].tolist(), strict=True):
        first += tokens.num_prefix
        for row in range(first + 1, end):
            if torch.rand(1, generator=generator) < 0.4:
                labels[row] = labels[first + int(torch.randint(0, row - first, (1,), generator=generator))]
    groups = groups_from_labels(labels, tokens.cu_seqlens)
    values = torch.randn(groups.num_groups, tokens.values_TC.shape[1], generator=generator)
    return tokens.merged(groups, values), groups.group_of_T


@pytest.mark.parametrize("num_prefix", [0, 1, 5])
def test_invariants_hold_from_the_start_and_after_merges(num_prefix: int) -> None:
    tokens = Tokens.from_dense(torch.randn(3, num_prefix + 12, 4), (3, 4), num_prefix).check()
    for seed in range(4):
        tokens, _ = random_merge(tokens, seed)
        tokens.check()
    assert tokens.values_TC.shape[0] < 3 * 12


def test_map_after_merges_is_the_composition_of_the_groupings() -> None:
    tokens = Tokens.from_dense(torch.randn(2, 30, 4), (5, 6))
    composed = tokens.patch_to_token_BN
    for seed in range(4):
        tokens, group_of = random_merge(tokens, seed)
        composed = torch.tensor([[int(group_of[token]) for token in row] for row in composed.tolist()])
    assert torch.equal(tokens.patch_to_token_BN, composed)


@pytest.mark.parametrize("breakage", ["size", "map", "image", "border"])
def test_check_finds_broken_batches(breakage: str) -> None:
    tokens = Tokens.from_dense(torch.randn(2, 6, 4), (2, 3))
    if breakage == "size":
        tokens.sizes_T[2] = 2
    elif breakage == "map":
        tokens.patch_to_token_BN[0, 3] = 0
    elif breakage == "image":
        tokens.patch_to_token_BN[[0, 1], [0, 0]] = tokens.patch_to_token_BN[[1, 0], [0, 0]].clone()
    else:
        tokens.cu_seqlens[1] = 0
    with pytest.raises(AssertionError):
        tokens.check()


def test_dense_map_and_labels_hold_each_patchs_token() -> None:
    tokens, _ = random_merge(Tokens.from_dense(torch.randn(2, 13, 4), (3, 4), num_prefix=1), seed=3)
    dense, labels = tokens.dense_BCHW(), tokens.label_map_BHW()
    for image in range(2):
        first = int(tokens.cu_seqlens[image]) + 1
        assert labels[image].unique().tolist() == list(range(int(tokens.lengths_B()[image]) - 1))
        for row in range(3):
            for column in range(4):
                value = tokens.values_TC[first + labels[image, row, column]]
                assert torch.equal(dense[image, :, row, column], value)


def test_prefix_can_be_taken_off_and_put_back() -> None:
    tokens, _ = random_merge(Tokens.from_dense(torch.randn(3, 14, 4), (3, 4), num_prefix=2), seed=1)
    patches, rows = tokens.without_prefix()
    patches.check()
    assert torch.equal(patches.values_TC, tokens.values_TC[rows])
    back = patches.with_prefix(tokens.prefix_BPC()).check()
    assert torch.equal(back.values_TC, tokens.values_TC)
    assert torch.equal(back.patch_to_token_BN, tokens.patch_to_token_BN)
    assert torch.equal(back.cu_seqlens, tokens.cu_seqlens)


def test_mean_gives_each_superpixel_one_vote_or_each_patch_one() -> None:
    tokens = Tokens.from_dense(torch.zeros(1, 5, 1), (1, 4), num_prefix=1)
    # The prefix token, and superpixels of 3 and 1 patches with the values 2 and 6.
    groups = groups_from_labels(torch.tensor([0, 1, 1, 1, 4]), tokens.cu_seqlens)
    merged = tokens.merged(groups, torch.tensor([[100.0], [2.0], [6.0]]))
    assert merged.mean_BC().item() == pytest.approx((2 + 6) / 2)
    assert merged.mean_BC(by_size=True).item() == pytest.approx((3 * 2 + 6) / 4)


def test_wrong_shapes_are_named() -> None:
    with pytest.raises(ValueError, match=r"grid \(2, 3\) does not hold the 5 patch tokens"):
        Tokens.from_dense(torch.randn(1, 5, 2), (2, 3))
    with pytest.raises(ValueError, match="non-empty"):
        Tokens.from_dense(torch.randn(0, 5, 2))
