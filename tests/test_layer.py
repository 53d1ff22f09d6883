"""The layer on its own: diagnostics, warnings, the alternative grouping, use in a foreign transformer."""

import warnings

import pytest
import torch
from test_vit import calibrated, frames, small

from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, SuperpixelWarning, Tokens
from asc.grouping.bipartite import bipartite, bipartite_regular, tokens_kept
from asc.grouping.graph import similarity_features, touching_pairs


def fixed(theta: float, **settings: object) -> AdaptiveSuperpixelLayer:
    return AdaptiveSuperpixelLayer(4, SuperpixelConfig(threshold="fixed", theta=theta, center=False, **settings))


# Two directions: tokens 0, 1, 3 point one way, 2 and 4 the other, 5 between them.
KEYS = torch.tensor([[1.0, 0], [2, 0], [0, 1], [1, 0.01], [0, 3], [1, 1]])


def test_hand_computed_case() -> None:
    values = torch.arange(24.0).view(1, 6, 4)
    layer = fixed(0.9)
    merged = layer(Tokens.from_dense(values, (2, 3)), KEYS).check()
    assert merged.label_map_BHW().tolist() == [[[0, 0, 1], [0, 1, 2]]]
    expected = torch.stack([values[0, [0, 1, 3]].mean(0), values[0, [2, 4]].mean(0), values[0, 5]])
    torch.testing.assert_close(merged.values_TC, expected)
    assert merged.sizes_T.tolist() == [3, 2, 1]
    stats = layer.stats()
    assert (stats.tokens_mean, stats.tokens_min, stats.tokens_max) == (3, 3, 3)
    assert stats.kept_share == 0.5
    assert stats.largest_share == 0.5
    assert stats.single_share == pytest.approx(1 / 6)
    assert stats.theta == pytest.approx(0.9)


def test_spatial_neighbourhood_joins_only_what_touches() -> None:
    # In one row of six, token 3 does not touch 0 and 1, and 4 does not touch 2.
    merged = fixed(0.9, neighbourhood="spatial")(Tokens.from_dense(torch.randn(1, 6, 4), (1, 6)), KEYS)
    assert merged.label_map_BHW().tolist() == [[[0, 0, 1, 2, 3, 4]]]


def test_touching_pairs_equal_a_loop_over_all_patches() -> None:
    torch.manual_seed(0)
    layer = fixed(0.9)
    tokens = layer(Tokens.from_dense(torch.randn(2, 30, 4), (5, 6)), torch.randn(60, 4))
    assert 10 < tokens.values_TC.shape[0] < 60
    expected = set()
    for image in range(2):
        grid = tokens.patch_to_token_BN[image].view(5, 6).tolist()
        for row in range(5):
            for column in range(6):
                for other_row in range(max(0, row - 1), min(5, row + 2)):
                    for other_column in range(max(0, column - 1), min(6, column + 2)):
                        a, b = grid[row][column], grid[other_row][other_column]
                        expected |= {(min(a, b), max(a, b))} if a != b else set()
    assert sorted(expected) == [tuple(pair) for pair in touching_pairs(tokens).T.tolist()]


def test_similarities() -> None:
    keys = torch.randn(10, 8, generator=torch.Generator().manual_seed(0))
    image_of = torch.tensor([0] * 6 + [1] * 4)
    cosine = similarity_features(keys, image_of, 2, "cosine", center=False)
    expected = torch.nn.functional.cosine_similarity(keys[:, None], keys, dim=2)
    torch.testing.assert_close(cosine @ cosine.T, expected)
    dot = similarity_features(keys, image_of, 2, "dot", center=False)
    torch.testing.assert_close(dot @ dot.T, keys @ keys.T / 8**0.5)
    centred = similarity_features(keys, image_of, 2, "dot", center=True)
    own = torch.cat([keys[:6] - keys[:6].mean(0), keys[6:] - keys[6:].mean(0)])
    torch.testing.assert_close(centred @ centred.T, own @ own.T / 8**0.5)


def test_each_warning_comes_once_and_in_plain_words() -> None:
    tokens, keys = Tokens.from_dense(torch.randn(2, 6, 4), (2, 3)), KEYS.repeat(2, 1)
    for theta, message in ((-1.0, "joined all tokens of every image into one component"), (0.99999, "merged nothing")):
        layer = fixed(theta)
        keys_used = keys if theta < 0 else torch.randn(12, 4)
        with pytest.warns(SuperpixelWarning, match=message):
            layer(tokens, keys_used)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            layer(tokens, keys_used)


def test_a_giant_component_is_reported_although_dust_remains() -> None:
    torch.manual_seed(0)
    keys = torch.ones(64, 4) + 0.01 * torch.randn(64, 4)
    keys[:2] = torch.tensor([[1.0, -1, 0, 0], [0, 0, 1, -1]])
    layer = fixed(0.9)
    layer(Tokens.from_dense(torch.randn(1, 64, 4), (8, 8)), keys)
    with pytest.warns(SuperpixelWarning, match="giant component: one superpixel covers 97% of an image"):
        stats = layer.stats()
    assert stats.tokens_mean == 3 and stats.largest_share == pytest.approx(62 / 64)


def test_an_uncalibrated_model_says_so_once() -> None:
    model = small(SuperpixelConfig())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(frames(4, 32))
        model(frames(4, 32))
    assert sum("have not been calibrated" in str(warning.message) for warning in caught) == 1
    model = small(SuperpixelConfig())
    model.calibrate(frames(4, 32))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(frames(4, 32))


def test_diagnostics_agree_with_the_label_maps() -> None:
    model, images = calibrated(SuperpixelConfig()), frames(6, 32)
    labels = model.superpixels(images)
    for block, stats in model.diagnostics().items():
        counts = [labels[block, image].unique().numel() for image in range(6)]
        largest = [labels[block, image].unique(return_counts=True)[1].max().item() / 64 for image in range(6)]
        assert (stats.tokens_min, stats.tokens_max) == (min(counts), max(counts))
        assert stats.tokens_mean == pytest.approx(sum(counts) / 6)
        assert stats.largest_share == pytest.approx(sum(largest) / 6)


def tome_reference(features: torch.Tensor, keep: float) -> list[set[int]]:
    """Token Merging's soft matching as its paper describes it, for one image, by loops."""
    count = len(features)
    edges = []
    for token in range(0, count, 2):
        scores = [float(features[token] @ features[other]) for other in range(1, count, 2)]
        best = max(range(len(scores)), key=scores.__getitem__)
        edges.append((scores[best], token, 2 * best + 1))
    groups = {token: {token} for token in range(count)}
    for _, token, receiver in sorted(edges, reverse=True)[: count - round(keep * count)]:
        groups[receiver] |= groups.pop(token)
    return sorted(groups.values(), key=min)


@pytest.mark.parametrize("keep", [0.9, 0.7, 0.5])
def test_bipartite_grouping_equals_token_merging(keep: float) -> None:
    torch.manual_seed(0)
    lengths = [20, 7, 33]
    features = torch.nn.functional.normalize(torch.randn(60, 6), dim=1)
    borders = torch.tensor([0, 20, 27, 60], dtype=torch.int32)
    labels = bipartite(features, borders, max(lengths), keep)
    for first, end in zip([0, 20, 27], [20, 27, 60], strict=True):
        own = (labels[first:end] - first).tolist()
        found = [
            {token for token, label in enumerate(own) if label == first_member} for first_member in sorted(set(own))
        ]
        assert found == tome_reference(features[first:end], keep)


@pytest.mark.parametrize("keep", [1.0, 0.9, 0.7, 0.3])
@pytest.mark.parametrize("count", [1, 2, 7, 20, 33])
def test_images_of_equal_length_are_paired_in_the_same_way(count: int, keep: float) -> None:
    features = torch.nn.functional.normalize(
        torch.randn(3 * count, 6, generator=torch.Generator().manual_seed(1)), dim=1
    )
    borders = torch.arange(4, dtype=torch.int32) * count
    labels = bipartite_regular(features, 3, keep)
    assert torch.equal(labels, bipartite(features, borders, count, keep))
    assert len(labels.unique()) == 3 * tokens_kept(count, keep)


def test_the_layer_trains_inside_a_foreign_transformer() -> None:
    torch.manual_seed(0)
    encoder = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    layer = AdaptiveSuperpixelLayer(16, SuperpixelConfig(), keep=0.6)
    values = encoder(torch.randn(4, 50, 16))
    tokens = Tokens.from_dense(values)
    layer.calibrate(tokens, tokens.values_TC.detach(), 0.6)
    for _ in range(60):
        merged = layer(tokens, tokens.values_TC)
        layer.update_threshold()
    assert merged.values_TC.shape[0] / 200 == pytest.approx(0.6, abs=0.05)
    merged.mean_BC().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
@pytest.mark.parametrize("center", [False, True])
def test_the_same_keys_give_exactly_the_same_partition_alone_and_in_a_batch(neighbourhood: str, center: bool) -> None:
    torch.manual_seed(0)
    values, keys = torch.randn(12, 64, 5), torch.randn(12, 64, 3, 5)
    layer = AdaptiveSuperpixelLayer(5, SuperpixelConfig(neighbourhood=neighbourhood, center=center))
    layer.calibrate(Tokens.from_dense(values, (8, 8)), keys.flatten(0, 1), 0.7)
    together = layer(Tokens.from_dense(values, (8, 8)), keys.flatten(0, 1)).label_map_BHW()
    for image in range(12):
        alone = layer(Tokens.from_dense(values[image : image + 1], (8, 8)), keys[image]).label_map_BHW()
        assert torch.equal(alone[0], together[image])


def test_alone_it_keeps_the_share_of_its_settings() -> None:
    config = SuperpixelConfig(grouping="bipartite", keep=0.6)
    tokens = Tokens.from_dense(torch.randn(2, 64, 4))
    merged = AdaptiveSuperpixelLayer(4, config)(tokens, torch.randn(128, 4))
    assert merged.values_TC.shape[0] == pytest.approx(0.6 * 128, abs=2)
    for given, kept in ((None, 0.6), (0.7, 0.7)):
        assert float(AdaptiveSuperpixelLayer(4, config, given).threshold.target) == pytest.approx(kept)
    assert float(AdaptiveSuperpixelLayer(4).threshold.target) == pytest.approx(0.8)


def test_its_projection_takes_tokens_in_half_precision() -> None:
    layer = AdaptiveSuperpixelLayer(4, SuperpixelConfig(source="projection", key_gradient=1.0, theta=0.5))
    values = torch.randn(1, 16, 4).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        merged = layer(Tokens.from_dense(values), values[0]).check()
    expected = layer(Tokens.from_dense(values.float()), values[0].float())
    assert torch.equal(merged.sizes_T, expected.sizes_T) and merged.values_TC.dtype == torch.bfloat16
