"""Random graphs as keys: any graph can be the graph of similarities above a threshold."""

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import connected_components

KINDS = ("random", "chain", "clique", "empty", "two giants", "cliques", "star", "tree")


def make_graph(kind: str, count: int, seed: int) -> NDArray[np.bool_]:
    """A symmetric adjacency matrix of that kind with shuffled nodes."""
    rng = np.random.default_rng(seed)
    links = np.zeros((count, count), dtype=bool)
    nodes = np.arange(count)
    half = count // 2
    if kind == "random":
        # Around one link a node, where components change from dust to a giant.
        links = rng.random((count, count)) < rng.choice([0.3, 1.0, 3.0]) / count
    elif kind == "chain":
        links[nodes[:-1], nodes[1:]] = True
    elif kind == "clique":
        links[:] = True
    elif kind == "two giants":
        links[:half, :half] = links[half:, half:] = True
        if count > 1:
            links[rng.integers(half), half + rng.integers(count - half)] = rng.random() < 0.8
    elif kind == "cliques":
        club = rng.integers(0, 1 + count // 8, count)
        links = club[:, None] == club
    elif kind == "star":
        links[0] = True
    elif kind == "tree":
        links[nodes[1:], [rng.integers(node) for node in range(1, count)]] = True
    order = rng.permutation(count)
    links = (links | links.T)[np.ix_(order, order)]
    np.fill_diagonal(links, False)
    return links


def features_of(links: NDArray[np.bool_]) -> tuple[torch.Tensor, float]:
    """Unit features and a threshold whose graph is exactly ``links``.

    ``A + λ I`` is positive definite for λ above the largest degree; the rows of its Cholesky factor all
    have the norm sqrt(λ), and their inner products are the entries of A.
    """
    shift = links.sum(1).max(initial=0) + 1.0
    factor = np.linalg.cholesky(links + shift * np.eye(len(links)))
    return torch.from_numpy((factor / np.sqrt(shift)).astype(np.float32)), 0.5 / shift


def scipy_labels(links: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Smallest node of each node's component, by an independent implementation."""
    _, component = connected_components(csr_matrix(links), directed=False)
    _, first = np.unique(component, return_index=True)
    return first[component].astype(np.int64)


@st.composite
def graphs(draw: st.DrawFn, largest: int = 512) -> NDArray[np.bool_]:
    """Graphs of all kinds, many small and some large."""
    count = draw(st.one_of(st.integers(1, 40), st.integers(1, largest)))
    return make_graph(draw(st.sampled_from(KINDS)), count, draw(st.integers(0, 2**32 - 1)))
