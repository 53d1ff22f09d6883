"""Ragged attention: every path gives what attention over each image alone gives."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_merging import ragged_tokens

from asc.attention import Attention, _masked, _one_by_one, ragged_attention
from asc.tokens import Tokens, groups_from_labels


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Softmax attention of one image from its definition, in fp64."""
    query, key, value, bias = (x.double() for x in (query, key, value, bias))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5 + bias
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), value).float()


@pytest.mark.parametrize("regular", [False, True])
@pytest.mark.parametrize("by_size", [False, True])
def test_attention_equals_its_definition(regular: bool, by_size: bool) -> None:
    torch.manual_seed(0)
    tokens = Tokens.from_dense(torch.randn(3, 10, 6)) if regular else ragged_tokens()
    total = tokens.values_TC.shape[0]
    query, key, value = torch.randn(3, total, 2, 12).unbind()
    tokens = replace(tokens, sizes_T=torch.randint(0, 9, (total,)))
    bias = tokens.sizes_T.clamp(min=1).log() if by_size else torch.zeros(total)
    mixed = ragged_attention(query, key, value, tokens, by_size)
    masked = None if by_size else _masked(query, key, value, tokens)
    for first, end in zip(tokens.cu_seqlens[:-1].tolist(), tokens.cu_seqlens[1:].tolist(), strict=True):
        own = slice(first, end)
        expected = reference(query[own], key[own], value[own], bias[own])
        torch.testing.assert_close(mixed[own], expected, atol=1e-5, rtol=1e-5)
        if masked is not None:
            torch.testing.assert_close(masked[own], expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("way", [_masked, _one_by_one])
def test_rows_of_no_image_stay_out_and_get_zeros(way: Callable[..., torch.Tensor]) -> None:
    torch.manual_seed(0)
    tokens = ragged_tokens()
    total, spare = tokens.values_TC.shape[0], 5
    packed, upstream = torch.randn(total, 3, 2, 12), torch.randn(total, 2, 12)
    own = packed.clone().requires_grad_()
    expected = way(*own.unbind(1), tokens)
    expected.backward(upstream)
    wider = replace(
        tokens,
        values_TC=F.pad(tokens.values_TC, (0, 0, 0, spare)),
        sizes_T=F.pad(tokens.sizes_T, (0, spare)),
        padded=True,
    )
    behind = (0, 0) * 3 + (0, spare)
    padded = F.pad(packed, behind, value=float("nan")).requires_grad_()
    mixed = way(*padded.unbind(1), wider)
    mixed.backward(F.pad(upstream, behind[2:], value=float("nan")))
    assert torch.equal(mixed, F.pad(expected, behind[2:]))
    assert torch.equal(padded.grad, F.pad(own.grad, behind))


def test_the_network_keeps_all_rows_where_some_belong_to_no_image() -> None:
    torch.manual_seed(0)
    attention, tokens = Attention(8, 2, proportional=True), ragged_tokens()
    values = torch.randn(tokens.values_TC.shape[0], 8)
    expected, expected_keys = attention(values, tokens)
    wider, sizes = F.pad(values, (0, 0, 0, 3)), F.pad(tokens.sizes_T, (0, 3))
    mixed, keys = attention(wider, replace(tokens, values_TC=wider, sizes_T=sizes, padded=True))
    assert len(mixed) == len(keys) == len(wider)
    torch.testing.assert_close(mixed[:-3], expected)
    torch.testing.assert_close(keys[:-3], expected_keys)
    torch.testing.assert_close(mixed[-3:], attention.proj.bias.expand(3, -1))


def test_proportional_attention_counts_a_token_as_often_as_it_holds_patches() -> None:
    torch.manual_seed(0)
    attention = Attention(8, 2, proportional=True)
    plain = Attention(8, 2)
    plain.load_state_dict(attention.state_dict())
    tokens = ragged_tokens()
    values = torch.randn(tokens.values_TC.shape[0], 8)
    merged, _ = attention(values, tokens)
    # The same image with every token repeated for each of its patches.
    length, sizes = int(tokens.lengths_B()[0]), tokens.sizes_T[: int(tokens.lengths_B()[0])]
    repeated = values[:length].repeat_interleave(sizes, dim=0)
    unmerged, _ = plain(repeated, Tokens.from_dense(repeated[None]))
    first_copy = sizes.cumsum(0) - sizes
    torch.testing.assert_close(merged[:length], unmerged[first_copy], atol=1e-5, rtol=1e-5)


def test_superpixels_of_one_image_are_of_one_length_by_chance_alone() -> None:
    def pairs_joined(images: int, prefix: int) -> Tokens:
        tokens = Tokens.from_dense(torch.randn(images, 8 + prefix, 4), num_prefix=prefix)
        labels_T = torch.arange(len(tokens.values_TC))
        for first in tokens.cu_seqlens[:-1].tolist():
            labels_T[first + prefix + 1] = first + prefix
        groups = groups_from_labels(labels_T, tokens.cu_seqlens)
        return tokens.merged(groups, torch.randn(len(labels_T) - images, 4), tokens.log_votes_T)

    for prefix in (0, 2):
        for images, steady in ((1, False), (3, True)):
            whole = Tokens.from_dense(torch.randn(images, 8 + prefix, 4), num_prefix=prefix)
            assert not whole.was_merged and whole.is_steady
            merged = pairs_joined(images, prefix)
            assert merged.was_merged and merged.is_regular and merged.is_steady == steady
    assert ragged_tokens().was_merged and not ragged_tokens().is_steady
