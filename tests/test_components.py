"""Connected components: every backend gives exactly Algorithm 1's partition, labelled by smallest index."""

import inspect

import numpy as np
import pytest
import torch
from graphs import features_of, graphs, scipy_labels
from hypothesis import given, settings
from numpy.typing import NDArray

from asc.grouping.components import BACKENDS, algorithm_1, components, get_backend
from asc.kernels import union_find


def label(links: NDArray[np.bool_], backend: str) -> NDArray[np.int64]:
    features, theta = features_of(links)
    borders = torch.tensor([0, len(links)], dtype=torch.int32)
    return components(features, borders, torch.tensor(theta), backend=backend).numpy()


@settings(max_examples=1000, deadline=None)
@given(graphs())
def test_every_backend_gives_the_partition_of_algorithm_1(links: NDArray[np.bool_]) -> None:
    expected = algorithm_1(links)
    assert np.array_equal(expected, scipy_labels(links))
    for backend in BACKENDS:
        assert np.array_equal(label(links, backend), expected), backend


@settings(max_examples=200, deadline=None)
@given(graphs(largest=80))
def test_every_backend_joins_only_listed_pairs(links: NDArray[np.bool_]) -> None:
    features, theta = features_of(links)
    rng = np.random.default_rng(len(links))
    # Every pair may be similar, but only half of them are listed.
    listed = np.triu(rng.random(links.shape) < 0.5, 1)
    pairs = torch.from_numpy(np.stack(listed.nonzero()))
    borders = torch.tensor([0, len(links)], dtype=torch.int32)
    expected = scipy_labels((links & listed) | (links & listed).T)
    for backend in BACKENDS:
        found = components(features, borders, torch.tensor(theta), pairs, backend).numpy()
        assert np.array_equal(found, expected), backend


@pytest.mark.parametrize("backend", BACKENDS)
def test_images_of_a_batch_are_labelled_as_if_alone(backend: str) -> None:
    torch.manual_seed(0)
    lengths = [1, 300, 7, 64, 257, 2]
    # Unaligned rows (5 channels) and random similarities: nothing but equal arithmetic makes these agree.
    features = torch.nn.functional.normalize(torch.randn(sum(lengths), 5), dim=1)
    borders = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    theta = torch.tensor(0.97)
    together = components(features, borders, theta, backend=backend)
    for first, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        alone = components(
            features[first:end], torch.tensor([0, end - first], dtype=torch.int32), theta, backend=backend
        )
        assert torch.equal(together[first:end] - first, alone)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_chain_of_20000_tokens_is_one_component(backend: str) -> None:
    count = 20_000
    # Sinusoids of many wavelengths: only successive tokens have a cosine above 0.9.
    phase = torch.arange(count)[:, None] * torch.logspace(0, -4, 16, dtype=torch.float64)
    features = (torch.cat([phase.cos(), phase.sin()], dim=1) / 4).float()
    similarity = features[:50] @ features.T
    offset = torch.arange(count) - torch.arange(50)[:, None]
    assert (similarity[offset.abs() == 1] > 0.9).all() and (similarity[offset.abs() > 1] < 0.9).all()
    shuffled = features[torch.randperm(count, generator=torch.Generator().manual_seed(0))]
    borders = torch.tensor([0, count], dtype=torch.int32)
    labels = components(shuffled, borders, torch.tensor(0.9), backend=backend)
    assert (labels == 0).all()
    # One token missing in the middle cuts the chain.
    cut = components(features[torch.arange(count) != 9_000], borders.clamp(max=count - 1), torch.tensor(0.9))
    assert (cut[:9_000] == 0).all() and (cut[9_000:] == 9_000).all()


def test_unknown_backend_is_named() -> None:
    with pytest.raises(ValueError, match="unknown components backend 'quick'"):
        get_backend("quick", torch.device("cpu"))


def test_the_cpu_compares_fp64_as_it_is() -> None:
    # 65 tokens: more than are compared pair by pair. Those of a pair differ by less than fp32 can tell.
    angle = torch.arange(33, dtype=torch.float64).repeat_interleave(2)[:65] + torch.arange(65) % 2 * 2e-5
    features = torch.stack([angle.cos(), angle.sin()], dim=1)
    for count in (20, 65):
        borders = torch.tensor([0, count])
        for theta, expected in ((1 - 1.9e-10, np.arange(count)), (1 - 2.1e-10, np.arange(count) // 2 * 2)):
            limit = torch.tensor(theta, dtype=torch.float64)
            assert np.array_equal(components(features[:count], borders, limit, backend="cpu").numpy(), expected)
            pairs = torch.triu_indices(count, count, 1).T.contiguous().T
            found = components(features[:count], borders, limit, pairs, backend="cpu")
            assert np.array_equal(found.numpy(), expected)


def test_where_compiled_code_cannot_be_kept_it_is_made_anew() -> None:
    source = inspect.getsource(union_find)
    # No such file, so nothing can be kept beside it; nor in the home folder, for the same reason.
    with pytest.warns(RuntimeWarning, match="set NUMBA_CACHE_DIR"):
        exec(compile(source, "nowhere.py", "exec"), made := {"__name__": "nowhere"})
    parent = np.array([0, 0, 1, 3, 2])
    made["flatten"](parent)
    assert parent.tolist() == [0, 0, 0, 3, 0]
