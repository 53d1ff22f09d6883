"""The Triton kernels against scipy, Algorithm 1, autograd and plain loops: on a GPU, or interpreted on the CPU.

Triton decides when it is imported whether it interprets, so without a GPU these tests run themselves once more
in a process of their own, with the switch set (``test_all_kernels_under_the_interpreter``).
"""

import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
from interpreting import assert_passes_interpreted
from torch import Tensor

from asc.grouping.graph import SizeWeight
from asc.kernels import interpreted

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
runs_kernels = pytest.mark.skipif(not ON_GPU and not interpreted(), reason="runs in a process of its own")


@pytest.mark.skipif(ON_GPU or interpreted(), reason="the kernels run in this process")
def test_all_kernels_under_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def ragged(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=DEVICE)


def fresh_generator() -> torch.Generator:
    """On a GPU other random numbers at every run; interpreted the same, so that a failure can be repeated."""
    generator = torch.Generator()
    seed = int.from_bytes(os.urandom(4)) if ON_GPU else 0
    print("seed", seed)
    return generator.manual_seed(seed)


def unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.double(), dim=1).float()


def keys_of(kind: str, count: int, width: int, generator: torch.Generator) -> tuple[Tensor, float]:
    """Unit features of a kind, and a threshold near the point where their graph changes."""
    noise = torch.randn(count, width, generator=generator)
    if kind == "random":
        return unit(noise), 3.2 / width**0.5
    if kind == "clustered":
        centres = torch.randn(1 + count // 12, width, generator=generator)
        chosen = torch.randint(0, len(centres), (count,), generator=generator)
        return unit(centres[chosen] + 0.25 * noise), 0.9
    # A walk on the sphere: only successive tokens are linked, and their order in the image is random.
    phase = torch.arange(count)[:, None] * torch.logspace(0, -4, width // 2, dtype=torch.float64)
    walk = torch.cat([phase.cos(), phase.sin()], dim=1)
    return unit(walk[torch.randperm(count, generator=generator)]), 0.9


def labels_between(features: Tensor, borders: Tensor, theta: float, labels: Tensor, margin: float) -> None:
    """Assert that ``labels`` lie between the exact partitions at θ ± margin, in fp64, by scipy."""
    from scipy.sparse import csr_matrix
    from scipy.sparse.csgraph import connected_components

    features, labels = features.double().cpu(), labels.cpu().numpy()
    for first, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        gram = (features[first:end] @ features[first:end].T).numpy()
        own = labels[first:end] - first
        assert (own[own] == own).all() and (own <= np.arange(end - first)).all(), "labels are smallest members"
        surely = connected_components(csr_matrix(gram > theta + margin), directed=False)[1]
        maybe = connected_components(csr_matrix(gram > theta - margin), directed=False)[1]
        assert len({*zip(surely, own, strict=True)}) == len({*surely}), "a certain edge was not joined"
        assert len({*zip(own, maybe, strict=True)}) == len({*own}), "tokens were joined without any edge"


def best_links_between(
    features: Tensor, borders: Tensor, theta: float, by_size: SizeWeight | None, labels: Tensor, margin: float
) -> None:
    """Assert that ``labels`` join all best links that rounding cannot change, and no others than it can, in fp64."""
    from scipy.sparse.csgraph import connected_components

    features, labels = features.double().cpu(), labels.cpu().numpy()
    for first, end in zip(borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        image = slice(first, end)
        gram = (features[image] @ features[image].T).numpy()
        if by_size is not None:
            sizes = by_size.sizes_T[image].double().cpu().numpy()
            product, total = np.multiply.outer(sizes, sizes), np.add.outer(sizes, sizes)
            gram = 1 - (1 - gram) * (2 * product / total) ** by_size.power
        np.fill_diagonal(gram, -np.inf)
        own = labels[image] - first
        # A row's best may be any that is as good but for rounding; it surely is the one if no other comes near.
        near = gram >= gram.max(1, keepdims=True) - margin
        maybe = connected_components(near & (gram > theta - margin), directed=False)[1]
        surely = near & (near.sum(1, keepdims=True) == 1) & (gram > theta + margin)
        surely = connected_components(surely, directed=False)[1]
        assert len({*zip(surely, own, strict=True)}) == len({*surely}), "a certain link was not joined"
        assert len({*zip(own, maybe, strict=True)}) == len({*own}), "tokens were joined without any best link"


@runs_kernels
@pytest.mark.parametrize("kind", ["random", "clustered", "chain"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [48, 64, 200] if ON_GPU else [48, 100])
def test_components_of_a_ragged_batch(kind: str, dtype: torch.dtype, width: int) -> None:
    from asc.kernels.components import everywhere

    generator = fresh_generator()
    lengths = [1, 130, 2, 1, 64, 31] if not ON_GPU else [1, 3136, 2, 1, 257, 20, 1025, 128, 576]
    parts = [keys_of(kind, length, width, generator) for length in lengths]
    exact, theta = torch.cat([features for features, _ in parts]), parts[0][1]
    features, borders = exact.to(DEVICE, dtype), ragged(lengths)
    labels = everywhere(features, borders, torch.tensor(theta, device=DEVICE), max(lengths))
    # On the numbers the kernel was given only the order of the sums can differ; on the exact ones fp16 does too.
    labels_between(features, borders, theta, labels, 1e-5)
    labels_between(exact, borders, theta, labels, 1e-3)
    if ON_GPU or width == 48:
        loose_bound = everywhere(features, borders, torch.tensor(theta, device=DEVICE), max(lengths) + 500)
        assert torch.equal(labels, loose_bound)


@runs_kernels
@pytest.mark.parametrize("kind", ["random", "chain", "clique", "two giants", "cliques", "star", "tree"])
def test_components_equal_algorithm_1_on_any_graph(kind: str) -> None:
    graphs = pytest.importorskip("graphs")
    from asc.grouping.components import algorithm_1
    from asc.kernels.components import Tiling, among_pairs, everywhere

    # With 300 nodes a program that has a row of tiles for itself must look up the roots of its rows anew.
    more = (300, 700) if ON_GPU else (300,) if kind in ("random", "chain") else ()
    for count in (2, 61, *more):
        links = graphs.make_graph(kind, count, seed=count)
        features, theta = graphs.features_of(links)
        features, theta_there = features.to(DEVICE), torch.tensor(theta, device=DEVICE)
        expected = algorithm_1(links)
        tiling = Tiling(splits=1 if count == 300 else 2)
        found = everywhere(features, ragged([count]), theta_there, count, tiling)
        assert np.array_equal(found.cpu().numpy(), expected)
        pairs = torch.from_numpy(np.stack(np.triu(np.ones_like(links), 1).nonzero())).to(DEVICE)
        assert np.array_equal(among_pairs(features, pairs, theta_there).cpu().numpy(), expected)


@runs_kernels
@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("width", [20, 64, 100])
def test_best_links_equal_the_plain_ones(power: float, dtype: torch.dtype, width: int) -> None:
    from asc.kernels.best import best_components

    generator, lengths = fresh_generator(), [1, 2, 64, 65, 150] if not ON_GPU else [1, 2, 64, 65, 150, 1500]
    total, borders = sum(lengths), ragged(lengths)
    features = unit(torch.randn(total, 6, generator=generator) @ torch.randn(6, width, generator=generator))
    features = features.to(DEVICE, dtype)
    by_size = SizeWeight(torch.randint(1, 9, (total,), generator=generator).to(DEVICE), power) if power else None
    for quantile in (0.3, 0.7, 0.95):
        similarity = features[3:67].float() @ features[3:67].float().T
        theta = similarity.flatten().quantile(quantile)
        labels = best_components(features, borders, theta, max(lengths), by_size)
        best_links_between(features, borders, float(theta), by_size, labels, 1e-5)
        assert 0 < int((labels != torch.arange(total, device=DEVICE)).sum()) < total - len(lengths)


@runs_kernels
@pytest.mark.parametrize("by_size", [False, True])
def test_best_links_equal_the_plain_ones_where_nothing_is_rounded(by_size: bool) -> None:
    from asc.grouping.links import linked_components
    from asc.kernels.best import best_components

    # Products and sums of such numbers are exact, many pairs are equally similar, and no θ is a possible similarity.
    generator, lengths = fresh_generator(), [1, 2, 64, 65, 150] if not ON_GPU else [1, 2, 64, 65, 150, 1500]
    total, borders = sum(lengths), ragged(lengths)
    features = (torch.randint(-4, 5, (total, 20), generator=generator) / 16).to(DEVICE, torch.float16)
    sizes = SizeWeight(torch.full((total,), 4, device=DEVICE), 1.0) if by_size else None
    for similarity in (0.251, 0.126, -1.0):
        there = torch.tensor(1 - 4 * (1 - similarity) if by_size else similarity, device=DEVICE)
        # Double precision goes the plain way.
        expected = linked_components(features.double(), borders, there.double(), None, "best", sizes)
        assert torch.equal(best_components(features, borders, there, max(lengths), sizes), expected)
        assert int((expected != torch.arange(total, device=DEVICE)).sum()) > 0


@runs_kernels
def test_among_equally_similar_partners_the_first_is_the_best() -> None:
    from asc.kernels.best import best_components

    # The first four are alike: each asks for the first other one. The last two are as similar to all of them.
    features = torch.tensor([[1.0, 0, 0]] * 4 + [[0.5, 0.75**0.5, 0], [0.5, 0, 0.75**0.5]]).to(DEVICE)
    features = torch.nn.functional.pad(features, (0, 13))
    labels = best_components(features, ragged([6]), torch.tensor(0.6, device=DEVICE), 6, None)
    assert labels.tolist() == [0, 0, 0, 0, 4, 5]
    labels = best_components(features, ragged([6]), torch.tensor(0.4, device=DEVICE), 6, None)
    assert labels.tolist() == [0] * 6
    labels = best_components(features, ragged([2, 4]), torch.tensor(0.4, device=DEVICE), 4, None)
    assert labels.tolist() == [0, 0, 2, 2, 2, 2]


@runs_kernels
def test_a_threshold_below_all_similarities_joins_each_image_alone() -> None:
    from asc.kernels.components import everywhere

    borders = ragged([5, 1, 140])
    features = unit(torch.randn(146, 20)).to(DEVICE, torch.float16)
    labels = everywhere(features, borders, torch.tensor(-2.0, device=DEVICE), 140)
    assert labels.tolist() == [0] * 5 + [5] + [6] * 140


@pytest.mark.skipif(not ON_GPU, reason="races need a GPU")
@pytest.mark.parametrize("kind", ["random", "clustered", "chain"])
def test_a_thousand_repeats_give_identical_labels(kind: str) -> None:
    from asc.kernels.components import everywhere

    generator = fresh_generator()
    parts = [keys_of(kind, 1500, 64, generator) for _ in range(8)]
    features = torch.cat([features for features, _ in parts]).to(DEVICE, torch.float16)
    theta, borders = torch.tensor(parts[0][1], device=DEVICE), ragged([1500] * 8)
    first = everywhere(features, borders, theta, 1500)
    wrong = torch.zeros((), dtype=torch.int64, device=DEVICE)
    for _ in range(1000):
        wrong += (everywhere(features, borders, theta, 1500) != first).sum()
    assert int(wrong) == 0


@pytest.mark.skipif(not ON_GPU, reason="too long interpreted")
def test_a_chain_of_20000_tokens_beside_a_single_one() -> None:
    from asc.kernels.components import everywhere

    features, theta = keys_of("chain", 20_000, 64, fresh_generator())
    features = torch.cat([features[:1], features]).to(DEVICE)
    labels = everywhere(features, ragged([1, 20_000]), torch.tensor(theta, device=DEVICE), 20_000)
    assert int(labels[0]) == 0 and (labels[1:] == 1).all()


def random_labels(lengths: list[int], generator: torch.Generator) -> Tensor:
    labels, first = [], 0
    for length in lengths:
        club = torch.randint(0, 1 + length // 2, (length,), generator=generator)
        _, index = np.unique(club.numpy(), return_inverse=True)
        smallest = torch.full((length,), length).scatter_reduce(
            0, torch.from_numpy(index), torch.arange(length), "amin"
        )
        labels.append(smallest[index] + first)
        first += length
    return torch.cat(labels)


@runs_kernels
def test_groups_are_numbered_and_sorted() -> None:
    from asc.kernels.numbering import number_groups
    from asc.tokens import groups_from_labels

    lengths = [1, 300, 2, 129]
    labels, borders = random_labels(lengths, fresh_generator()), ragged(lengths)
    expected = groups_from_labels(labels, borders.cpu())
    found = number_groups(labels.to(DEVICE), borders, 300, torch.ones((), dtype=torch.int32, device=DEVICE))
    count = expected.num_groups
    assert found.summary.tolist() == [count, int(expected.cu_seqlens.diff().max()), 1]
    assert torch.equal(found.group_of_T.cpu(), expected.group_of_T)
    assert torch.equal(found.members_G[:count].cpu(), expected.members_G)
    assert torch.equal(found.cu_seqlens.cpu(), expected.cu_seqlens)
    order = expected.group_of_T.argsort(stable=True)
    assert torch.equal(found.order_T.cpu().long(), order)
    assert torch.equal(found.starts_G[:count].cpu().long(), expected.members_G.cumsum(0) - expected.members_G)


@runs_kernels
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("channels", [5, 48, 300])
@pytest.mark.parametrize("fusion", ["mean", "max", "attention"])
def test_fusions_and_their_gradients_equal_the_plain_ones(fusion: Any, dtype: torch.dtype, channels: int) -> None:
    from asc.merging import Merge
    from asc.tokens import groups_from_labels

    generator = fresh_generator()
    lengths = [1, 90, 40]
    labels, borders = random_labels(lengths, generator).to(DEVICE), ragged(lengths)
    labels[60:91] = labels[50]  # one group of many members, to the end of the image: no root of others is lost
    plain, sorted_ = groups_from_labels(labels, borders), groups_from_labels(labels, borders, 90)
    assert plain.order_T is None and sorted_.order_T is not None
    # In steps, so that some members share a maximum.
    values = ((8 * torch.randn(131, channels, generator=generator)).round() / 8).to(DEVICE, dtype)
    weights, upstream = torch.rand(131, device=DEVICE) + 0.5, torch.randn(plain.num_groups, channels, device=DEVICE)
    # Scores so large that their exponentials would not be finite, but whose differences are not.
    values[:, 0] = 1
    scores = torch.randn(1, channels, generator=generator).to(DEVICE) / channels**0.5
    scores[:, 0] = 200
    results = []
    for groups, kind in ((plain, torch.float64), (sorted_, dtype)):
        own, finer = values.to(kind).requires_grad_(), torch.promote_types(kind, torch.float32)
        merge = Merge(fusion, channels).to(DEVICE, finer)
        if merge.score is not None:
            merge.score.weight.data.copy_(scores)
        merged = merge(own, weights.to(finer), groups)
        (merged * upstream.to(kind)).sum().backward()
        assert groups is plain or torch.equal(merge(own, weights.to(finer), groups), merged), "not deterministic"
        of_scores = [] if merge.score is None else [merge.score.weight.grad.double()]
        results.append([merged.detach().double(), own.grad.double(), *of_scores])
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-4 if fusion == "attention" else 1e-5
    for exact, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, exact, atol=tolerance * float(exact.abs().max()), rtol=tolerance)


@runs_kernels
def test_a_maximum_that_is_no_number_is_not_hidden() -> None:
    from asc.merging import Merge
    from asc.tokens import groups_from_labels

    values = torch.randn(40, 3)
    values[[2, 25], [0, 1]] = torch.nan
    labels = torch.tensor([0, 1, 1, *[3] * 37])  # few members, and many
    groups = groups_from_labels(labels.to(DEVICE), ragged([40]), 40)
    is_nan = Merge("max", 3)(values.to(DEVICE), torch.ones(40, device=DEVICE), groups).isnan().cpu()
    assert is_nan.tolist() == [[False] * 3, [True, False, False], [False, True, False]]


@runs_kernels
@pytest.mark.parametrize("similarity", ["cosine", "dot"])
@pytest.mark.parametrize("center", [False, True])
@pytest.mark.parametrize("heads", [1, 3])
def test_features_and_their_gradient_equal_the_plain_ones(similarity: str, center: bool, heads: int) -> None:
    from asc.grouping.graph import similarity_features
    from asc.kernels.features import compared

    generator = fresh_generator()
    lengths, width = [2, 600, 37], 20
    image_of = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(DEVICE)
    # Keys as attention gives them: a part of a wider matrix.
    wide = torch.randn(639, 3, heads, width, generator=generator).to(DEVICE)
    upstream = torch.randn(639, width, generator=generator).to(DEVICE)
    plain, ours = (wide[:, 1].detach().to(kind).requires_grad_() for kind in (torch.float64, torch.float32))
    expected = similarity_features(plain.mean(1), image_of, 3, similarity, center)
    found = compared(ours, ragged(lengths), 600, center, None if similarity == "cosine" else width**-0.25, 1e-6)
    (expected * upstream).sum().backward()
    (found.features_TD * upstream).sum().backward()
    torch.testing.assert_close(found.features_TD.double(), expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(found.half_TD.double(), expected, atol=2e-4, rtol=1e-3)
    # Two centred keys are opposite; their direction hangs on rounding, and so does nothing else.
    torch.testing.assert_close(ours.grad.double()[2:], plain.grad[2:], atol=2e-5, rtol=1e-4)
    assert int(found.broken) == 0
    for bad in (float("nan"), float("inf")):
        broken = wide[:, 1].clone()
        broken[100, 0, 3] = bad
        assert int(compared(broken, ragged(lengths), 600, center, None, 1e-6).broken) == 1


def plain_twin(
    features: Tensor, theta: Tensor, tau: Tensor, values: Tensor, weights: Tensor, image_of: Tensor
) -> tuple[Tensor, Tensor]:
    """Soft tokens and log-votes of every token by the formula, with the whole matrix in memory."""
    gates = torch.sigmoid((features @ features.T - theta) / tau) * (image_of[:, None] == image_of)
    gates = torch.where(torch.eye(len(features), dtype=torch.bool, device=features.device), 1.0, gates) * weights
    return gates @ values / gates.sum(1, keepdim=True), -gates.sum(1).log()


@runs_kernels
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize(("width", "channels"), [(20, 40), (80, 16)])
def test_soft_gradient_equals_autograd_of_the_formula(half: bool, width: int, channels: int) -> None:
    from asc.kernels.gradient import Spread, soft_gradient, threshold_gradient
    from asc.tokens import groups_from_labels

    generator = fresh_generator()
    lengths = [1, 40, 70]
    image_of = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths)).to(DEVICE)
    groups = groups_from_labels(random_labels(lengths, generator).to(DEVICE), ragged(lengths))
    features = unit(torch.randn(111, width, generator=generator)).to(DEVICE, torch.float16 if half else torch.float32)
    values = torch.randn(111, channels, generator=generator).to(DEVICE)
    weights = (torch.rand(111, generator=generator) + 0.5).to(DEVICE)
    grad = torch.randn(groups.num_groups, channels, generator=generator).to(DEVICE)
    grad_votes = torch.randn(groups.num_groups, generator=generator).to(DEVICE)
    totals = torch.zeros(groups.num_groups, device=DEVICE).index_add(0, groups.group_of_T, weights)
    theta, tau = torch.tensor(0.2, device=DEVICE), torch.tensor(0.1, device=DEVICE)
    spread = Spread(grad, grad_votes, groups.group_of_T, totals, weights)
    twin = features, values, theta, tau, ragged(lengths), 70
    grad_features, grad_theta, votes = soft_gradient(spread, *twin)
    alone = threshold_gradient(spread, *twin, scale=torch.tensor(0.5, device=DEVICE), sign=-1.0)
    exact, theta64 = features.double().requires_grad_(), theta.double().requires_grad_()
    soft, log_votes = plain_twin(exact, theta64, tau.double(), values.double(), weights.double(), image_of)
    share = (weights / totals[groups.group_of_T]).double()
    pulls = (soft * grad[groups.group_of_T].double()).sum(1) + log_votes * grad_votes[groups.group_of_T].double()
    (pulls * share).sum().backward()
    tolerance = 1e-2 if half else 1e-5
    # θ's gradient is a sum in which much cancels: what is rounded are the slopes, which the features' show.
    scale = exact.grad.norm() + theta64.grad.abs()
    assert (grad_features.double() - exact.grad).norm() < tolerance * exact.grad.norm()
    assert (grad_theta.double() - theta64.grad).abs() < tolerance * scale
    assert (alone.grad.double() + 0.5 * theta64.grad).abs() < tolerance * scale
    for found in (votes, alone.grad_votes_T):
        torch.testing.assert_close(found.double(), grad_votes[groups.group_of_T].double() * share, atol=1e-6, rtol=1e-5)
    hard = grad[groups.group_of_T].double() * share[:, None]
    torch.testing.assert_close(alone.grad_TC.double(), hard, atol=1e-6, rtol=1e-5)


@runs_kernels
@pytest.mark.parametrize("spatial", [False, True])
def test_rows_that_are_drawn_by_their_gradients_speak_for_all(spatial: bool) -> None:
    """On average over their places in the batch, and with less noise than as many at equal distances."""
    from asc.kernels.gradient import Spread, heard_rows, threshold_gradient
    from asc.kernels.touching import touching_threshold_gradient

    generator, length, copies, every = fresh_generator(), 150, 64 if ON_GPU else 24, 8
    features = unit(torch.randn(length, 16, generator=generator)).to(DEVICE)
    values, grad = (torch.randn(length, 8, generator=generator).to(DEVICE) for _ in range(2))
    # Some say much, most little, and some nothing at all.
    grad *= torch.randn(length, 1, generator=generator).exp().to(DEVICE) ** 2
    grad[::10] = 0
    ones = torch.ones(length, device=DEVICE)
    theta, tau, one = (torch.tensor(number, device=DEVICE) for number in (0.2, 0.1, 1.0))
    # Every token holds two patches, so that touching pairs are met several times.
    patch_to_token = torch.arange(2 * length, device=DEVICE) // 2

    def spread_of(copies: int, heard: Tensor = ones) -> Spread:
        own = torch.arange(copies * length, device=DEVICE)
        grads = (grad * heard[:, None]).repeat(copies, 1)
        return Spread(grads, 0 * own.float(), own, ones.repeat(copies), ones.repeat(copies))

    def slope(copies: int, every: int, heard: Tensor = ones) -> float:
        twin = spread_of(copies, heard), features.repeat(copies, 1), values.repeat(copies, 1), theta, tau
        place = ragged([length] * copies), length, one, 1.0, every
        if not spatial:
            return float(threshold_gradient(*twin, *place).grad)
        map_BN = patch_to_token + length * torch.arange(copies, device=DEVICE)[:, None]
        return float(touching_threshold_gradient(*twin, map_BN, (15, 20), *place).grad)

    exact = slope(1, 1)
    regular = [every * slope(1, 1, (torch.arange(length, device=DEVICE) % every == n).float()) for n in range(every)]
    assert sum(regular) / every == pytest.approx(exact, rel=1e-3)
    noise = (sum((found - exact) ** 2 for found in regular) / every) ** 0.5
    assert abs(slope(copies, every) / copies - exact) < noise / 8
    # Alone it says what those rows say that were drawn, each as often as it counts.
    drawn = heard_rows(spread_of(1), values, ragged([length]), length, every)
    # Empty places hold the row behind the last.
    counts = torch.zeros(length + 1, device=DEVICE).index_add(0, drawn.rows_BK[0], drawn.counts_BK[0])[:length]
    assert slope(1, every) == pytest.approx(slope(1, 1, counts), rel=1e-3, abs=1e-4 * noise)


@runs_kernels
def test_every_row_is_drawn_as_often_as_its_gradient_is_long() -> None:
    from asc.kernels.gradient import _LEAST, _chosen_rows

    generator, lengths, every = fresh_generator(), [1, 7, 2000, 64], 8
    heavy = torch.rand(sum(lengths), generator=generator) ** 4
    heavy[100] = 200.0  # is drawn many times
    heavy[300], heavy[400] = torch.nan, torch.inf  # are taken for nothing, and harm nobody
    heavy[-64:] = 0.0  # an image that no gradient reaches
    borders, slots = ragged(lengths), 250
    rows_BK, counts_BK = (x.cpu() for x in _chosen_rows(heavy.to(DEVICE), borders, slots, every))
    for image, (first, end) in enumerate(itertools.pairwise(borders.tolist())):
        draws = -(-(end - first) // every)
        rows, counts = rows_BK[image, :draws], counts_BK[image, :draws]
        filled = rows < end
        assert torch.equal(filled, counts > 0) and (rows[filled] >= first).all()
        assert len(set(rows[filled].tolist())) == int(filled.sum()) > 0
        weight = heavy[first:end].double().nan_to_num(nan=0.0, posinf=0.0)
        weight = weight + (_LEAST * weight.mean() if weight.any() else 1.0)
        expected = draws * weight / weight.sum()
        # Either as often as is expected, rounded down, or once more.
        drawn = torch.zeros_like(weight)
        drawn[rows[filled].long() - first] = counts[filled].double() * expected[rows[filled].long() - first]
        torch.testing.assert_close(drawn, drawn.round(), atol=1e-3, rtol=0)
        assert drawn.round().sum() == draws and ((drawn.round() - expected).abs() < 1 + 1e-3).all()


@runs_kernels
@pytest.mark.parametrize("merged", [False, True])
def test_touching_gradient_of_theta_equals_autograd_of_the_formula(merged: bool) -> None:
    from asc.kernels.gradient import Spread
    from asc.kernels.touching import touching_threshold_gradient

    generator, (rows, columns), images = fresh_generator(), (5, 7), 2
    patches = torch.arange(rows * columns)
    # Merged, every token holds two patches, and most pairs are met several times.
    own = torch.div(patches, 2, rounding_mode="floor") if merged else patches
    length = int(own.max()) + 1
    total = images * length
    features = unit(torch.randn(total, 16, generator=generator)).to(DEVICE)
    values, grad = (torch.randn(total, 40, generator=generator).to(DEVICE) for _ in range(2))
    weights = (torch.rand(total, generator=generator) + 0.5).to(DEVICE)
    theta, tau = torch.tensor(0.2, device=DEVICE), torch.tensor(0.1, device=DEVICE)
    one = torch.tensor(1.0, device=DEVICE)
    spread = Spread(grad, 0 * weights, torch.arange(total, device=DEVICE), weights, weights)
    patch_to_token = (own + length * torch.arange(images)[:, None]).to(DEVICE)

    place = torch.stack([patches // columns, patches % columns], 1)
    near = (place[:, None] - place).abs().amax(-1) <= 1
    touch = torch.zeros(total, total, dtype=torch.bool)
    for tokens in patch_to_token.cpu():
        left, right = near.nonzero().unbind(1)
        touch[tokens[left], tokens[right]] = True
    theta64 = theta.double().requires_grad_()
    gates = torch.sigmoid((features.double() @ features.double().T - theta64) / tau) * touch.to(DEVICE)
    gates = torch.where(torch.eye(total, dtype=torch.bool, device=DEVICE), 1.0, gates) * weights.double()
    (gates @ values.double() / gates.sum(1, keepdim=True) * grad).sum().backward()
    # Tokens that could be far apart get longer numbers.
    for longest in (length, 2**28):
        found = touching_threshold_gradient(
            spread, features, values, theta, tau, patch_to_token, (rows, columns),
            ragged([length] * images), longest, one, 1.0, in_patch_order=not merged, every=1,
        )  # fmt: skip
        torch.testing.assert_close(found.grad.double(), theta64.grad, rtol=1e-4, atol=1e-5)


def with_scores(layer: Any) -> Any:
    """Scores that are learned start at zero, where they would say nothing."""
    if layer.merge.score is not None:
        torch.nn.init.normal_(layer.merge.score.weight, generator=torch.Generator().manual_seed(0))
    return layer


@runs_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"key_gradient": 0.0},
        {"similarity": "dot", "theta": 0.7},
        {"neighbourhood": "spatial"},
        {"neighbourhood": "spatial", "key_gradient": 0.0},
        {"merge": "max"},
        {"merge": "attention"},
        {"merge": "attention", "neighbourhood": "spatial"},
        {"merge": "max", "grouping": "bipartite", "key_gradient": 0.0, "threshold": "fixed"},
    ],
)
@pytest.mark.parametrize("num_prefix", [0, 1])
def test_the_layer_on_kernels_equals_the_plain_layer(
    settings: dict[str, object], num_prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asc.grouping.components
    import asc.grouping.gradient
    import asc.layer
    import asc.merging
    import asc.tokens
    from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens

    generator = fresh_generator()
    dense = torch.randn(3, num_prefix + 36, 16, generator=generator)
    centres = torch.randn(10, 2, 8, generator=generator)
    keys = centres[torch.randint(0, 10, (3 * (num_prefix + 36),), generator=generator)]
    keys = keys + 0.2 * torch.randn(keys.shape, generator=generator)
    common = {"threshold": "learnable", "theta": 0.8, "key_gradient": 1.0}
    config = SuperpixelConfig(backend="triton", **(common | settings))
    results = []
    for by_kernels in (False, True):
        layer = with_scores(AdaptiveSuperpixelLayer(16, config)).to(DEVICE)
        own, own_keys = (x.to(DEVICE).detach().clone().requires_grad_() for x in (dense, keys))
        with monkeypatch.context() as patch:
            if not by_kernels:
                for room in (asc.grouping.components, asc.grouping.gradient, asc.layer, asc.merging, asc.tokens):
                    patch.setattr(room, "kernels_take", lambda *tensors: False)
            tokens = Tokens.from_dense(own, (6, 6), num_prefix)
            first = layer(tokens, own_keys).check()
            second = layer(first, own_keys[: first.values_TC.shape[0]]).check()
            second.mean_BC().square().sum().backward()
        of_scores = None if layer.merge.score is None else layer.merge.score.weight.grad
        results.append((first, second, own.grad, own_keys.grad, layer.threshold.u.grad, of_scores))
    assert results[0][0].values_TC.shape[0] < 3 * (num_prefix + 30), "the case must merge something"
    assert (results[0][3] is None) == (config.key_gradient == 0)
    for plain, ours in zip(results[0], results[1], strict=True):
        if plain is None:
            assert ours is None
        elif isinstance(plain, Tokens):
            assert torch.equal(plain.label_map_BHW(), ours.label_map_BHW())
            torch.testing.assert_close(plain.values_TC, ours.values_TC)
        else:
            torch.testing.assert_close(ours, plain, atol=2e-5, rtol=1e-3)


@runs_kernels
def test_broken_keys_are_refused() -> None:
    from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens
    from asc.grouping.graph import NonFiniteKeysError

    keys = torch.randn(16, 4, device=DEVICE)
    keys[3, 1] = float("inf")
    layer = AdaptiveSuperpixelLayer(4, SuperpixelConfig(backend="triton")).to(DEVICE)
    with pytest.raises(NonFiniteKeysError):
        layer(Tokens.from_dense(torch.randn(1, 16, 4, device=DEVICE)), keys)


@runs_kernels
def test_what_kernels_cannot_take_goes_the_plain_way() -> None:
    from asc.grouping.components import components
    from asc.kernels import kernels_take

    features = unit(torch.randn(20, 6)).to(DEVICE)
    assert not kernels_take(features.double()) and not kernels_take(features[:0]) and kernels_take(features)
    theta, borders = torch.tensor(0.5, device=DEVICE), ragged([20])
    expected = components(features, borders, theta, backend="reference")
    for odd in (features.double(), features.repeat(1, 2)[:, :6], features.T.contiguous().T):
        assert torch.equal(components(odd, borders, theta, backend="triton"), expected)


@runs_kernels
@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
@pytest.mark.parametrize(
    "settings",
    [{}, {"gradient": "none"}, {"merge": "max"}, {"gradient": "bottleneck"}, {"backend": "torch"}],
    ids=str,
)
def test_second_derivatives_are_refused_where_they_would_be_wrong(settings: dict[str, Any]) -> None:
    from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens

    layer = AdaptiveSuperpixelLayer(4, SuperpixelConfig(theta=0.5, key_gradient=1.0, **settings)).to(DEVICE)
    dense, keys = (torch.randn(2, 16, 4, device=DEVICE, requires_grad=True) for _ in range(2))
    merged = layer(Tokens.from_dense(dense, (4, 4)), keys.flatten(0, 1))
    (first,) = torch.autograd.grad(merged.mean_BC().pow(3).sum(), dense, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.square().sum().backward()


@runs_kernels
@pytest.mark.parametrize("weight", ["token", "size"])
@pytest.mark.parametrize(
    ("gradient", "settings"),
    [
        ("straight_through", {}),
        ("straight_through", {"key_gradient": 2.0}),
        ("none", {}),
        ("straight_through", {"neighbourhood": "spatial"}),
        ("none", {"neighbourhood": "spatial"}),
        ("straight_through", {"links": "best"}),
        ("straight_through", {"links": "best", "size_weight": 1.0}),
        ("straight_through", {"links": "best", "size_weight": 0.3}),
        ("none", {"links": "best", "size_weight": 1.0}),
        ("straight_through", {"links": "best", "neighbourhood": "spatial"}),
        ("straight_through", {"links": "best", "size_weight": 1.0, "neighbourhood": "spatial"}),
        ("straight_through", {"merge": "max"}),
        ("straight_through", {"merge": "attention"}),
        ("straight_through", {"merge": "attention", "key_gradient": 2.0}),
        ("straight_through", {"merge": "max", "neighbourhood": "spatial"}),
        ("none", {"merge": "attention"}),
    ],
)
def test_the_layer_in_one_step_equals_its_parts(
    weight: str, gradient: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens

    generator = fresh_generator()
    dense = torch.randn(3, 49, 24, generator=generator).to(DEVICE)
    centres = torch.randn(12, 3, 16, generator=generator)
    keys = centres[torch.randint(0, 12, (147,), generator=generator)] + 0.2 * torch.randn(
        147, 3, 16, generator=generator
    )
    # Half-precision keys, as autocast makes them; the interpreter has no bf16.
    keys = keys.to(DEVICE, torch.bfloat16 if ON_GPU else torch.float16)
    config = SuperpixelConfig(
        theta=0.8,
        weight=weight,
        gradient=gradient,
        backend="triton",
        **settings,
    )
    results = []
    for in_one_step in (False, True):
        layer = with_scores(AdaptiveSuperpixelLayer(24, config)).to(DEVICE)
        assert layer.runs_in_one_step
        monkeypatch.setitem(vars(layer), "runs_in_one_step", in_one_step)
        own, own_keys = dense.clone().requires_grad_(), keys.clone().requires_grad_()
        target = torch.tensor(0.8, device=DEVICE, requires_grad=True)
        first = layer(Tokens.from_dense(own, (7, 7)), own_keys, target).check()
        second = layer(first, own_keys[: first.values_TC.shape[0]], target).check()
        second.mean_BC().square().sum().backward()
        record = layer.record
        assert record is not None
        of_scores = None if layer.merge.score is None else layer.merge.score.weight.grad
        results.append((second, record.members_G.long(), own.grad, own_keys.grad, target.grad, record.theta, of_scores))
    parts, whole = results
    assert torch.equal(parts[0].label_map_BHW(), whole[0].label_map_BHW())
    assert torch.equal(parts[0].sizes_T, whole[0].sizes_T) and torch.equal(parts[1], whole[1])
    assert (parts[4] is None) == (gradient == "none") == (whole[4] is None)
    assert (parts[6] is None) == (config.merge != "attention") == (whole[6] is None)
    for place, (plain, ours) in enumerate(zip(parts[2:], whole[2:], strict=True)):
        if plain is None or ours is None:
            continue
        # θ's gradient is a sum of both signs, and the parts work it out in fp32 where pairs touch or sizes count: by
        # those half a unit of half precision is multiplied. Over many draws fp16 is off by up to 2.3e-4, where the
        # gradient is 0.05, and bf16 has eight times the unit.
        of_theta = {"rtol": 1e-2, "atol": 8e-3 if "size_weight" in settings else 1e-4}
        exact = {"rtol": 1e-3, "atol": 1e-6}
        if ours.dtype == torch.bfloat16:
            # Keys, whose gradient is the sum of two uses, each of them rounded.
            exact = {"rtol": 2**-6, "atol": 2**-7 * float(plain.float().square().mean().sqrt())}
        torch.testing.assert_close(ours, plain, **(of_theta if place == 2 else exact))


@runs_kernels
@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
@pytest.mark.parametrize(
    ("settings", "in_half"),
    [({}, True), ({"links": "best"}, True), ({"neighbourhood": "spatial"}, False), ({"merge": "max"}, False)],
)
def test_a_layer_keeps_values_in_half_precision_where_it_reads_no_more(settings: dict[str, Any], in_half: bool) -> None:
    from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens

    half = torch.bfloat16 if ON_GPU else torch.float16
    generator = fresh_generator()
    dense = torch.randn(2, 49, 24, generator=generator).to(DEVICE).requires_grad_()
    keys = torch.randn(98, 3, 16, generator=generator).to(DEVICE, half)
    target = torch.tensor(0.8, device=DEVICE, requires_grad=True)
    layer = AdaptiveSuperpixelLayer(24, SuperpixelConfig(theta=0.6, backend="triton", **settings)).to(DEVICE)
    tokens, kept = Tokens.from_dense(dense, (7, 7)), []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        merged = layer(tokens, keys, target)
    values = [tensor for tensor in kept if tensor.shape == (98, 24)]
    assert [tensor.dtype for tensor in values] == [half if in_half else torch.float32]
    torch.testing.assert_close(
        values[0].float(), tokens.values_TC.detach(), atol=1e-6 if in_half else 0, rtol=4e-3 if in_half else 0
    )
    merged.mean_BC().square().sum().backward()
    assert dense.grad.dtype == torch.float32 and target.grad is not None


@pytest.mark.skipif(not ON_GPU, reason="the interpreter compiles nothing")
@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
@pytest.mark.parametrize("settings", [{}, {"key_gradient": 1.0}, {"merge": "max"}, {"merge": "attention"}], ids=str)
def test_other_numbers_of_tokens_compile_nothing_new(settings: dict[str, Any]) -> None:
    from asc import AdaptiveSuperpixelLayer, SuperpixelConfig, Tokens
    from asc.kernels import components, features, gradient, merging, numbering
    from asc.kernels.launch import _compiled

    kernels = (
        components._join_tiles,
        features._sum_keys,
        features._compare,
        features._sum_grads,
        features._grad_keys,
        numbering._place_members,
        numbering._write_groups,
        merging._fuse_few,
        merging._fuse_many,
        merging._spread,
        merging._weigh_by_score,
        merging._give_to_largest,
        gradient._pack_rows,
        gradient._row_sums,
        gradient._slopes,
        gradient._theta_slopes,
        gradient._choose_rows,
        gradient._add_parts,
    )

    def compiled() -> int:
        caches = [cache for kernel in kernels for caches in kernel.device_caches.values() for cache in caches[:1]]
        return len(_compiled) + sum(len(cache) for cache in caches)

    config = SuperpixelConfig(theta=0.5, threshold="learnable", **settings)
    layer = AdaptiveSuperpixelLayer(48, config).cuda()
    counts = []
    for batch, length in ((3, 64), (2, 1), (5, 37), (16, 100), (7, 49), (1, 33), (33, 48), (4, 1000)):
        dense = torch.randn(batch, length, 48, device="cuda", requires_grad=True)
        keys = torch.randn(batch * length, 3, 16, device="cuda").bfloat16().requires_grad_()
        merged = layer(Tokens.from_dense(dense), keys)
        merged = layer(merged, keys[: merged.values_TC.shape[0]])
        merged.mean_BC().sum().backward()
        counts.append(compiled())
    # The first case has compiled everything; one token alone leaves nothing to join.
    assert counts == counts[:1] * len(counts)


@pytest.mark.skipif(not ON_GPU, reason="addresses mean nothing to the interpreter")
def test_unaligned_addresses_get_the_same_answer() -> None:
    from asc.kernels.components import everywhere

    features, theta = keys_of("clustered", 300, 64, fresh_generator())
    room = torch.empty(300 * 64 + 1, device="cuda", dtype=torch.float16)
    shifted = room[1:].view(300, 64)
    shifted.copy_(features)
    assert shifted.data_ptr() % 16
    there = torch.tensor(theta, device="cuda")
    for _ in range(2):
        aligned = everywhere(shifted.clone(), ragged([300]), there, 300)
        assert torch.equal(everywhere(shifted, ragged([300]), there, 300), aligned)


@runs_kernels
@pytest.mark.parametrize("scale", [None, 0.37])
def test_finite_keys_raise_no_alarm(scale: float | None) -> None:
    from asc.kernels.features import compared

    # A product minus itself is the product's rounding error where the two become one operation.
    keys = torch.randn(700, 3, 20, generator=fresh_generator()).to(DEVICE) * 3.3
    for center in (False, True):
        assert int(compared(keys, ragged([100, 600]), 600, center, scale, 1e-6).broken) == 0


@runs_kernels
@pytest.mark.parametrize("by_size", [False, True])
@pytest.mark.parametrize("num_prefix", [0, 2])
def test_mean_of_an_image_and_its_gradient_equal_the_plain_ones(
    by_size: bool, num_prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    import asc.tokens
    from asc import Tokens
    from asc.tokens import groups_from_labels

    generator = fresh_generator()
    lengths = [30, 30, 30]
    groups = groups_from_labels(random_labels(lengths, generator).to(DEVICE), ragged(lengths))
    dense = torch.zeros(3, 30, 20, device=DEVICE)
    values = torch.randn(groups.num_groups, 20, generator=generator).to(DEVICE)
    votes = (0.3 * torch.randn(groups.num_groups, generator=generator)).to(DEVICE)
    prefix = torch.randn(3, num_prefix, 20, device=DEVICE)
    upstream = torch.randn(3, 20, generator=generator).to(DEVICE)
    results = []
    for by_kernels in (False, True):
        with monkeypatch.context() as patch:
            if not by_kernels:
                patch.setattr(asc.tokens, "kernels_take", lambda *tensors: False)
            own, own_votes = values.clone().requires_grad_(), votes.clone().requires_grad_()
            tokens = Tokens.from_dense(dense).merged(groups, own, own_votes).with_prefix(prefix)
            mean = tokens.mean_BC(by_size)
            (mean * upstream).sum().backward()
        results.append((mean.detach(), own.grad, own_votes.grad))
    assert (results[1][2] is None or not results[1][2].any()) == by_size
    for plain, ours in zip(results[0][:2], results[1][:2], strict=True):
        torch.testing.assert_close(ours, plain, atol=1e-6, rtol=1e-5)
    if not by_size:
        torch.testing.assert_close(results[1][2], results[0][2], atol=1e-6, rtol=1e-4)


def softmax_attention(qkv: Tensor, lengths: list[int], sizes: Tensor | None) -> Tensor:
    """From its definition, image by image; every token is there as often as its size says."""
    counts = torch.ones(len(qkv), dtype=torch.int64, device=qkv.device) if sizes is None else sizes.clamp(min=1)
    mixed = []
    for image, own_counts in zip(qkv.split(lengths), counts.split(lengths), strict=True):
        query, key, value = image.permute(1, 2, 0, 3)
        key, value = (x.repeat_interleave(own_counts, dim=1) for x in (key, value))
        scores = query @ key.mT * qkv.shape[3] ** -0.5
        mixed.append((scores.softmax(-1) @ value).transpose(0, 1))
    return torch.cat(mixed)


@runs_kernels
@pytest.mark.parametrize(
    ("width", "lengths", "dtype"),
    [
        (16, [1, 31, 32, 33, 2], torch.float32),
        (32, [63, 1, 64, 65], torch.float16),
        (64, [5, 70, 129, 1], torch.float32),
        (64, [300, 17], torch.float16),
        (128, [33, 1, 40], torch.float32),
    ],
)
@pytest.mark.parametrize("sized", [False, True])
def test_attention_and_its_gradient_equal_softmax_in_fp64(
    width: int, lengths: list[int], dtype: torch.dtype, sized: bool
) -> None:
    from asc.kernels.attention import AllTiles, Tiles, attention

    generator = fresh_generator()
    dtype = torch.bfloat16 if ON_GPU and dtype == torch.float32 else dtype
    # A part of a wider matrix: heads lie side by side, tokens further apart than their own channels.
    wide = torch.randn(sum(lengths), 3 * 2 * width + 16, generator=generator).to(DEVICE, dtype)
    qkv = wide[:, 16:].unflatten(1, (3, 2, width)).requires_grad_()
    upstream = torch.randn(sum(lengths), 2, width, generator=generator).to(DEVICE, dtype)
    tiles = None if ON_GPU else AllTiles(*[Tiles(32, 32, 4, 1)] * 3)
    sizes = torch.randint(0, 9, (sum(lengths),), generator=generator).to(DEVICE) if sized else None
    if sizes is not None:
        sizes[::7] *= 400
    mixed = attention(qkv, ragged(lengths), max(lengths), sizes_T=sizes, tiles=tiles)
    mixed.backward(upstream)
    exact = qkv.detach().double().requires_grad_()
    expected = softmax_attention(exact, lengths, sizes)
    expected.backward(upstream.double())
    assert qkv.stride(0) > 3 * 2 * width and qkv.grad.is_contiguous() and qkv.grad.dtype == dtype
    digits = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}[dtype]
    torch.testing.assert_close(mixed.double(), expected, atol=digits, rtol=digits)
    torch.testing.assert_close(qkv.grad.double(), exact.grad, atol=digits, rtol=digits)


@runs_kernels
@pytest.mark.parametrize("bound", [80, 400])
@pytest.mark.parametrize("sized", [False, True])
def test_attention_keeps_rows_of_no_image_out(bound: int, sized: bool) -> None:
    from asc.kernels.attention import AllTiles, Tiles, attention

    lengths, spare = [1, 64, 33, 70], 37
    total = sum(lengths)
    generator = fresh_generator()
    qkv = torch.randn(total + spare, 3, 2, 32, generator=generator).to(DEVICE, torch.float16)
    upstream = torch.randn(total + spare, 2, 32, generator=generator).to(DEVICE, torch.float16)
    qkv[total:], upstream[total:] = float("nan"), float("nan")
    tiles = None if ON_GPU else AllTiles(*[Tiles(32, 32, 4, 1)] * 3)
    results = []
    for rows, padded in ((total, False), (total + spare, True)):
        own = qkv[:rows].clone().requires_grad_()
        sizes = torch.arange(rows, device=DEVICE) % 7 if sized else None
        mixed = attention(own, ragged(lengths), bound, padded, sizes, tiles)
        mixed.backward(upstream[:rows])
        results.append((mixed.detach(), own.grad))
    for plain, ours in zip(*results, strict=True):
        assert torch.equal(ours[:total], plain) and not ours[total:].any()


@runs_kernels
def test_attention_takes_channels_that_lie_apart() -> None:
    from asc.kernels.attention import AllTiles, Tiles, attention

    qkv = torch.randn(40, 3, 2, 16, generator=fresh_generator()).to(DEVICE, torch.float16)
    apart = qkv.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0).requires_grad_()
    tiles = None if ON_GPU else AllTiles(*[Tiles(32, 32, 4, 1)] * 3)
    expected = attention(qkv, ragged([40]), 40, tiles=tiles)
    mixed = attention(apart, ragged([40]), 40, tiles=tiles)
    mixed.backward(expected)
    assert torch.equal(mixed, expected) and torch.isfinite(apart.grad).all()


def images_for_colours(count: int, size: int, generator: torch.Generator) -> Tensor:
    """Noise on blocks of colour; each has rows of black, white, grey, a full colour and a mixture of two."""
    coarse = torch.rand(count, 3, 4, 4, generator=generator)
    images = torch.nn.functional.interpolate(coarse, (size, size)) * 0.8
    images += 0.2 * torch.rand(images.shape, generator=generator)
    for row, colour in enumerate([(0, 0, 0), (1, 1, 1), (0.3, 0.3, 0.3), (1, 0, 0), (0, 0.5, 0.5)]):
        images[:, :, row] = torch.tensor(colour)[:, None]
    return images


@runs_kernels
@pytest.mark.parametrize("size", [12, 33, 64])
@pytest.mark.parametrize("blur_probability", [0.0, 0.5, 1.0])
def test_colours_equal_the_plain_operations_in_fp64(size: int, blur_probability: float) -> None:
    from asc.pretrain.augment import AugmentConfig, _changed, draw

    config = AugmentConfig(
        jitter_probability=0.8, grey_probability=0.3, blur_probability=blur_probability, hue=0.5, blur_sigma=(0.3, 1.5)
    )
    keys = [(size, 0, sample, 0) for sample in range(24 if not ON_GPU else 300)]
    draws = draw(config, keys)
    images = images_for_colours(len(keys), size, fresh_generator())
    expected = _changed(images.double(), draws, config)
    found = _changed(images.to(DEVICE), draws, config)
    assert {*draws.jitter_B.tolist()} == {*draws.grey_B.tolist()} == {False, True}
    assert expected.dtype == torch.float64 and found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=0)


@runs_kernels
@pytest.mark.parametrize("factors", [(0.0, 0.0, 0.0), (1.0, 1.0, 1.0), (1.8, 1.5, 2.0), (0.6, 1.4, 0.7)])
def test_colours_in_every_order_with_turns_to_the_limits(factors: tuple[float, float, float]) -> None:
    from itertools import permutations

    from asc.pretrain.augment import AugmentConfig, _changed, draw

    config = AugmentConfig(blur_probability=0, grey_probability=0)
    draws = draw(config, [(0, 0, sample, 0) for sample in range(24)])
    # Half a turn of a full colour lies just between two roundings.
    turns = torch.tensor([-0.5, 0.5, 0.0, 1 / 6, -1 / 3, 0.25]).repeat(4)[:, None]
    draws = draws._replace(
        order_B4=torch.tensor([*permutations(range(4))]),
        factors_B4=torch.cat([torch.tensor(factors).expand(24, 3), turns], dim=1),
    )
    images = images_for_colours(24, 12, fresh_generator())
    images[3], images[10], images[17] = 0, 1, 0.5
    expected = _changed(images.double(), draws, config)
    found = _changed(images.to(DEVICE), draws, config)
    torch.testing.assert_close(found.cpu().double(), expected, atol=1e-5, rtol=0)


@runs_kernels
@pytest.mark.skipif(ON_GPU, reason="only the interpreter can be watched")
@pytest.mark.parametrize("size", [1, 32, 33])
def test_the_colours_kernel_stays_in_its_images(size: int) -> None:
    from bounds import watched

    from asc.kernels.colours import packed, recolour
    from asc.pretrain.augment import AugmentConfig, draw

    draws = draw(AugmentConfig(jitter_probability=0.5), [(0, 0, sample, 0) for sample in range(4)])
    assert {*draws.jitter_B.tolist()} == {False, True}
    with watched() as watch:
        recolour(torch.rand(4, 3, size, size, generator=fresh_generator()), packed(draws))
    assert watch.accesses > 0
