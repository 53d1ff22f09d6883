"""Ragged attention: every path gives what attention over each image alone gives."""

import pytest
import torch
from test_merging import ragged_tokens

from asc.attention import Attention, _padded, ragged_attention
from asc.tokens import Tokens


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Softmax attention of one image from its definition, in fp64."""
    query, key, value, bias = (x.double() for x in (query, key, value, bias))
    scores = torch.einsum("qhd,khd->hqk", query, key) / query.shape[2] ** 0.5 + bias
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=2), value).float()


@pytest.mark.parametrize("regular", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_attention_equals_its_definition(regular: bool, biased: bool) -> None:
    torch.manual_seed(0)
    tokens = Tokens.from_dense(torch.randn(3, 10, 6)) if regular else ragged_tokens()
    total = tokens.values_TC.shape[0]
    query, key, value = torch.randn(3, total, 2, 12).unbind()
    bias = torch.randn(total) if biased else torch.zeros(total)
    mixed = ragged_attention(query, key, value, tokens, bias if biased else None)
    padded = None if biased else _padded(query, key, value, tokens)
    for first, end in zip(tokens.cu_seqlens[:-1].tolist(), tokens.cu_seqlens[1:].tolist(), strict=True):
        own = slice(first, end)
        expected = reference(query[own], key[own], value[own], bias[own])
        torch.testing.assert_close(mixed[own], expected, atol=1e-5, rtol=1e-5)
        if padded is not None:
            torch.testing.assert_close(padded[own], expected, atol=1e-5, rtol=1e-5)


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
