"""The adaptive superpixel layer: similar tokens become the connected components of a graph, and one token.

It fits into any transformer: give it tokens and keys, take back fewer tokens. Shape letters: see
``asc.tokens``.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, NamedTuple, get_args

import torch
from torch import Tensor, nn

from asc.distributed import summed_over_processes
from asc.grouping.bipartite import bipartite, bipartite_regular, tokens_kept
from asc.grouping.budget import Control
from asc.grouping.components import BACKENDS, components
from asc.grouping.gradient import Gate, GradientKind, attach_soft_gradient, scaled_gradient
from asc.grouping.graph import (
    SMALLEST_NORM,
    Similarity,
    SizeWeight,
    check_finite,
    non_finite_keys,
    similarity_features,
    touching_pairs,
)
from asc.grouping.links import Links, linked_components
from asc.grouping.threshold import Threshold, ThresholdKind
from asc.kernels import kernels_take
from asc.merging import Fusion, Merge, token_weights
from asc.tokens import Groups, Room, Tokens, groups_from_labels

if TYPE_CHECKING:
    from asc.kernels.features import Comparison

Grouping = Literal["components", "bipartite"]
Neighbourhood = Literal["global", "spatial"]
Source = Literal["keys", "tokens", "projection"]
Weight = Literal["token", "size"]

# Halvings of the range of u when calibrating, at most: 1e-4 in u moves hardly any token.
_CALIBRATION_STEPS = 18
# Share that a layer keeps of which nothing is said.
_KEEP = 0.8
# A share of tokens this close to the wanted one is close enough.
_CALIBRATION_TOLERANCE = 5e-4
# A superpixel that covers more of the image than this, on average, is a giant component.
_GIANT = 0.9
# No image has more patches; so far below 1 the threshold can go where sizes count.
_MOST_PATCHES = 1 << 20


class SuperpixelWarning(UserWarning):
    """The grouping does not do what it is for; training on would be a waste."""


@dataclass(frozen=True)
class SuperpixelConfig:
    """How tokens are grouped and merged. The defaults are the ones measured in ``docs/decisions.md``."""

    grouping: Grouping = "components"
    """``components`` of the similarity graph, or ``bipartite``: ToMe-style pairs, a fixed share of them."""
    neighbourhood: Neighbourhood = "global"
    """Which tokens may be joined: ``global`` any two of an image, ``spatial`` only those whose regions touch."""
    links: Links = "all"
    """Which pairs above θ are linked: ``all``, or only the ``best``: those that are the most similar pair of at least
    one of their two tokens (among equals the one with the smaller partner), a step of Borůvka's algorithm. A layer
    then cannot keep fewer than about a quarter of its tokens."""
    size_weight: float = 0.0
    """How much the sizes a and b of two tokens, in patches, count: 1 - (1 - S) · (2ab / (a + b))^size_weight is
    compared with θ. 0: not at all; 1: as in Ward's clustering, which keeps large superpixels from growing (cosine
    only)."""
    similarity: Similarity = "cosine"
    """``cosine`` of the keys or ``dot``, their scaled dot product."""
    source: Source = "keys"
    """What is compared: the attention's head-mean ``keys``, the ``tokens`` after attention, or a separate
    learned ``projection`` of them."""
    center: bool = False
    """Whether each image's mean key is taken away before the comparison, which spreads the similarities."""
    threshold: ThresholdKind = "budget"
    """``budget``: a controller holds every block to its share of tokens; ``learnable``: by gradient alone;
    ``fixed``: never moves."""
    theta: float = 0.9
    """Threshold to start from; with ``budget`` it only matters until ``calibrate``. Cosine: in [-1, 1)."""
    budget: float = 0.4
    """Mean share of the original tokens that enters a block, over all blocks."""
    keep: float | None = None
    """Share of its tokens that every layer keeps, in place of a budget for the network."""
    control: Control = "block"
    """What holds the budget: a controller in each ``block`` that has a superpixel layer, or one for the ``total``,
    under which deep layers can collapse while early ones make up the count."""
    learn_allocation: bool = True
    """Whether the shares of the blocks under the budget are learned (``threshold=budget`` only)."""
    floor: float = 0.5
    """Smallest share a block can be given by learning, as a fraction of the equal share."""
    tau: float = 0.2
    """Softness τ of the gate σ((S - θ) / τ) that the gradient sees."""
    tau_relative: bool = True
    """Whether τ is in units of 1 - θ (dot: sqrt(1 + θ²)); a fixed τ makes the gate flat when θ is near 1."""
    gradient: GradientKind = "straight_through"
    """How θ and the keys learn from the grouping: ``straight_through`` the soft twin of all pairs,
    ``bottleneck`` a twin on spanning-tree paths (small images only), or ``none``."""
    key_gradient: float = 0.0
    """Weight of the grouping's gradient on the keys, S measured in units of τ; 0: keys learn from attention alone."""
    merge: Fusion = "mean"
    """How a group becomes a token: ``mean``, ``max`` or ``attention``."""
    weight: Weight = "token"
    """What counts once in a merge: a ``token`` (the paper), or a patch (``size``)."""
    proportional_attention: bool = True
    """Whether attention counts a token as often as it holds patches, as if its patches were still there, or as often
    as any other (the paper)."""
    blocks: Literal["early", "all"] | tuple[int, ...] = "early"
    """Blocks that hold a superpixel layer: the ``early`` third of them, ``all`` as in the paper, or a list counted
    from 0. Under one budget the early third leaves four times as many tokens at the end."""
    backend: str = "auto"
    """Components backend: ``auto``, ``reference``, ``cpu``, ``torch`` or ``triton``."""

    def __post_init__(self) -> None:
        _check_choice("grouping", self.grouping, get_args(Grouping))
        _check_choice("neighbourhood", self.neighbourhood, get_args(Neighbourhood))
        _check_choice("links", self.links, get_args(Links))
        _check_choice("similarity", self.similarity, get_args(Similarity))
        _check_choice("source", self.source, get_args(Source))
        _check_choice("threshold", self.threshold, get_args(ThresholdKind))
        _check_choice("control", self.control, get_args(Control))
        _check_choice("gradient", self.gradient, get_args(GradientKind))
        _check_choice("merge", self.merge, get_args(Fusion))
        _check_choice("weight", self.weight, get_args(Weight))
        _check_choice("backend", self.backend, ("auto", *BACKENDS))
        if isinstance(self.blocks, str):
            _check_choice("blocks", self.blocks, ("early", "all"))
        if not self.tau > 0:
            raise ValueError(f"tau must be positive, got {self.tau}")
        if not self.key_gradient >= 0:
            raise ValueError(f"key_gradient must be at least 0, got {self.key_gradient}")
        if self.source == "projection" and not self.key_gradient:
            raise ValueError("source='projection' learns by the grouping alone: set key_gradient to 1, say")
        learns = self.grouping == "components" and self.gradient != "none"
        if not learns and (self.source == "projection" or self.threshold == "learnable"):
            what = "source='projection'" if self.source == "projection" else "threshold='learnable'"
            raise ValueError(f"{what} needs grouping='components' and a gradient, or it would never learn")
        if self.keep is not None and not 0 < self.keep <= 1:
            raise ValueError(f"keep must lie in (0, 1], got {self.keep}")
        if self.grouping == "bipartite" and self.neighbourhood == "spatial":
            raise ValueError("neighbourhood='spatial' needs grouping='components'; bipartite grouping is global")
        if not 0 <= self.size_weight <= 1:
            raise ValueError(f"size_weight must lie in [0, 1], got {self.size_weight}")
        if self.size_weight and self.similarity != "cosine":
            raise ValueError(
                "size_weight weighs the distance 1 - S of a cosine; set similarity='cosine', or leave it 0"
            )
        if self.grouping == "bipartite" and self.chooses_links:
            raise ValueError(
                "links='best' and size_weight need grouping='components'; bipartite grouping has its own pairs"
            )

    @property
    def chooses_links(self) -> bool:
        """Whether a similarity above θ is not all that a link needs."""
        return self.links != "all" or self.size_weight > 0


def _check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"unknown {setting} {value!r}; choose from {', '.join(choices)}")


def _check_keys(keys: Tensor, tokens: Tokens) -> None:
    if keys.ndim not in (2, 3) or 0 in keys.shape[1:]:
        raise ValueError(f"keys must be (tokens, channels) or (tokens, heads, channels), got {tuple(keys.shape)}")
    if keys.shape[0] != tokens.values_TC.shape[0]:
        raise ValueError(f"got {keys.shape[0]} keys for {tokens.values_TC.shape[0]} tokens; each needs one")


class LayerRecord(NamedTuple):
    """What the last forward pass of a layer did; read by ``AdaptiveSuperpixelLayer.stats``."""

    sizes_G: Tensor
    members_G: Tensor
    borders_in: Tensor
    borders_out: Tensor
    theta: Tensor
    summary: Tensor | None = None
    """What the host has not been told yet: see ``asc.kernels.layer.Joined``."""


class Features(NamedTuple):
    """What tokens are compared by."""

    features_TD: Tensor
    """fp32 (fp64 stays), with gradient."""
    half_TD: Tensor | None = None
    """The same in fp16, for kernels, where the keys are no finer themselves."""
    broken: Tensor | None = None
    """On the device: not 0 if a feature is not finite. None: all were found to be finite."""


@dataclass(frozen=True)
class LayerStats:
    """Plain numbers on the last forward pass of a layer. Prefix tokens are not counted."""

    tokens_mean: float
    """Mean number of superpixels of an image."""
    tokens_min: int
    """Number of superpixels of the image that has fewest."""
    tokens_max: int
    """Number of superpixels of the image that has most."""
    kept_share: float
    """Share of its input tokens that the layer kept."""
    largest_share: float
    """Share of the image that its largest superpixel covers, mean over the images."""
    single_share: float
    """Share of the input tokens that were joined with no other."""
    theta: float
    """The threshold."""


class AdaptiveSuperpixelLayer(nn.Module):
    """Join similar tokens into superpixels.

    Args:
        channels: Width of the tokens.
        config: How to group and merge.
        keep: Share of its input tokens that the layer is to keep (``threshold=budget`` or bipartite); if not given,
            the ``keep`` of its settings, or 0.8.
        name: How warnings call this layer.

    Alone, train it with ``update_threshold()`` after every optimiser step. In a network of ours
    ``AscViT.update_thresholds()`` does that for all blocks under one budget.
    """

    def __init__(
        self,
        channels: int,
        config: SuperpixelConfig | None = None,
        keep: float | None = None,
        name: str = "the layer",
    ) -> None:
        super().__init__()
        self.config = config = SuperpixelConfig() if config is None else config
        self.name = name
        if keep is None:
            keep = _KEEP if config.keep is None else config.keep
        largest = 2.0 * _MOST_PATCHES**config.size_weight
        self.threshold = Threshold(config.threshold, config.similarity, config.theta, keep, largest)
        self.merge = Merge(config.merge, channels)
        self.projection: nn.Linear | None = None
        if config.source == "projection":
            self.projection = nn.Linear(channels, min(channels, 64), bias=False)
        self.record: LayerRecord | None = None
        self.room: Room | None = None
        """Where it is set, the host does not wait for the number of tokens: see ``asc.replay``."""
        self._kept_share = keep
        self._warned: set[str] = set()
        self._made_comparison: tuple[int, Comparison] | None = None

    # Kernels and questions of the host: whoever compiles a network around the layer leaves it as it is.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(self, tokens: Tokens, keys: Tensor, target: Tensor | None = None) -> Tokens:
        """Merge ``tokens`` by the similarity of their ``keys``, ``(T, D)`` or ``(T, H, D)``.

        ``target`` is the differentiable share that receives the gradient of θ (see ``Threshold.theta``).
        """
        if self.runs_in_one_step and tokens.num_prefix == 0 and kernels_take(tokens.values_TC, keys):
            return self._merge_in_one_step(tokens, keys, target)
        # Similarities lie so close together that half precision would link other tokens than fp32 does.
        with torch.autocast(tokens.device.type, enabled=False):
            if tokens.num_prefix == 0:
                return self._merge_similar(tokens, keys, target)
            _check_keys(keys, tokens)
            patches, rows_T = tokens.without_prefix()
            return self._merge_similar(patches, keys.index_select(0, rows_T), target).with_prefix(tokens.prefix_BPC())

    def _merge_similar(self, tokens: Tokens, keys: Tensor, target: Tensor | None) -> Tokens:
        if self.runs_in_one_step and kernels_take(tokens.values_TC, keys):
            return self._merge_in_one_step(tokens, keys, target)
        features = self._comparable(tokens, keys)
        theta = self.threshold.theta(target)
        pairs_2E = self._pairs(tokens)
        groups = self._group(tokens, features, theta, pairs_2E)
        weights_T = token_weights(tokens, by_size=self.config.weight == "size")
        merged_GC = self.merge(tokens.values_TC, weights_T, groups)
        log_votes_G = None
        if self.config.grouping == "components":
            gate = Gate(
                tokens.values_TC.detach(),
                weights_T,
                self._tau(),
                tokens.cu_seqlens,
                pairs_2E,
                features.half_TD,
                tokens.max_len,
                self._by_size(tokens),
            )
            learning_TD = scaled_gradient(features.features_TD, self.config.key_gradient, gate.tau)
            merged_GC, log_votes_G = attach_soft_gradient(
                self.config.gradient, merged_GC, tokens.log_votes_T, learning_TD, theta, groups, gate
            )
        merged = tokens.merged(groups, merged_GC, log_votes_G)
        self._keep_record(tokens, merged, groups.members_G, theta.detach(), groups.summary)
        return merged

    @property
    def can_go_unwatched(self) -> bool:
        """Whether the host need not wait for the device, given room: see ``asc.replay``."""
        return self.runs_in_one_step or self.config.grouping == "bipartite"

    @cached_property
    def runs_in_one_step(self) -> bool:
        """Whether the settings are those that one step of kernels is made for."""
        config = self.config
        return (
            config.grouping == "components"
            and (not config.chooses_links or config.links == "best")
            and not (config.key_gradient and (config.chooses_links or config.neighbourhood == "spatial"))
            and config.source != "projection"  # a linear layer, which autocast would round
            and config.gradient != "bottleneck"
            and config.backend in ("auto", "triton")
        )

    def _merge_in_one_step(self, tokens: Tokens, keys: Tensor, target: Tensor | None) -> Tokens:
        from asc.kernels.layer import join_similar

        keys = self._source(tokens, keys)
        soft = self.config.gradient == "straight_through"
        comparison, spatial = self._comparison(keys.shape[-1]), self.config.neighbourhood == "spatial"
        fusion, scores_T = self.merge.fusion, self.merge.scores(tokens.values_TC)
        joined = join_similar(
            *(tokens, keys, self.threshold.u, target, comparison, soft, spatial, self.room, fusion, scores_T)
        )
        summary = None if self.room is None else joined.summary
        self._keep_record(tokens, joined.tokens, joined.members_G, joined.theta, summary)
        return joined.tokens

    def _comparison(self, width: int) -> Comparison:
        from asc.kernels.features import Comparison

        if self._made_comparison is None or self._made_comparison[0] != width:
            config = self.config
            cosine = config.similarity == "cosine"
            comparison = Comparison(
                config.center,
                None if cosine else float(width) ** -0.25,
                SMALLEST_NORM,
                config.tau,
                config.tau_relative,
                cosine,
                config.weight == "size",
                config.key_gradient,
                config.links == "best",
                config.size_weight,
            )
            self._made_comparison = width, comparison
        return self._made_comparison[1]

    def _comparable(self, tokens: Tokens, keys: Tensor) -> Features:
        if not kernels_take(keys):
            return Features(self._features(tokens, keys))
        from asc.kernels.features import compared

        keys = self._source(tokens, keys)
        unit = self.config.similarity == "cosine"
        scale = None if unit else float(keys.shape[-1]) ** -0.25
        features_TD, half_TD, broken = compared(
            keys, tokens.cu_seqlens, tokens.max_len, self.config.center, scale, SMALLEST_NORM
        )
        # Dot products have no bound that fp16 would be sure to hold.
        half = unit and keys.dtype in (torch.float16, torch.bfloat16)
        return Features(features_TD, half_TD if half else None, broken)

    def _features(self, tokens: Tokens, keys: Tensor) -> Tensor:
        keys = self._source(tokens, keys)
        keys = keys.to(torch.promote_types(keys.dtype, torch.float32))  # or their mean would be rounded once more
        keys_TD = keys.mean(dim=1) if keys.ndim == 3 else keys
        features_TD = similarity_features(
            keys_TD, tokens.image_of_T(), tokens.batch, self.config.similarity, self.config.center
        )
        check_finite(features_TD)
        return features_TD

    def _source(self, tokens: Tokens, keys: Tensor) -> Tensor:
        if self.projection is not None:
            keys = self.projection(tokens.values_TC.to(self.projection.weight.dtype))
        elif self.config.source == "tokens":
            keys = tokens.values_TC
        _check_keys(keys, tokens)
        return keys

    def _pairs(self, tokens: Tokens) -> Tensor | None:
        return touching_pairs(tokens) if self.config.neighbourhood == "spatial" else None

    def _group(self, tokens: Tokens, features: Features, theta: Tensor, pairs_2E: Tensor | None) -> Groups:
        features_TD = features.features_TD
        expected = None
        if self.config.grouping == "bipartite":
            labels_T, expected = self._pair(tokens, features_TD)
        else:
            if features.half_TD is not None and pairs_2E is None and self.config.backend in ("auto", "triton"):
                features_TD = features.half_TD
            labels_T = self._components(tokens, features_TD, theta, pairs_2E)
        groups = groups_from_labels(labels_T, tokens.cu_seqlens, tokens.max_len, features.broken, expected)
        if groups.flag:
            raise non_finite_keys()
        return groups

    def _components(self, tokens: Tokens, features_TD: Tensor, theta: Tensor, pairs_2E: Tensor | None) -> Tensor:
        borders, longest, config = tokens.cu_seqlens, tokens.max_len, self.config
        if not config.chooses_links:
            return components(features_TD, borders, theta, pairs_2E, config.backend, longest)
        by_size = self._by_size(tokens)
        return linked_components(features_TD, borders, theta, pairs_2E, config.links, by_size, config.backend, longest)

    def _pair(self, tokens: Tokens, features_TD: Tensor) -> tuple[Tensor, Room | None]:
        """Labels of ToMe-style groups; and how many there are, where the host is not to wait for that."""
        if self.room is None:
            self._kept_share = float(self.threshold.target)
        if not tokens.is_regular:
            return bipartite(features_TD, tokens.cu_seqlens, tokens.max_len, self._kept_share), None
        left = tokens_kept(tokens.max_len, self._kept_share)
        expected = None if self.room is None else Room(left * tokens.batch, left)
        return bipartite_regular(features_TD, tokens.batch, self._kept_share), expected

    def _by_size(self, tokens: Tokens) -> SizeWeight | None:
        return SizeWeight(tokens.sizes_T, self.config.size_weight) if self.config.size_weight else None

    def _tau(self) -> Tensor:
        width = self.threshold.width()
        return self.config.tau * (width if self.config.tau_relative else torch.ones_like(width))

    @torch.no_grad()
    def calibrate(self, tokens: Tokens, keys: Tensor, keep: float) -> None:
        """Set θ so that ``keep`` of the given tokens are kept, summed over all processes."""
        if self.config.grouping == "bipartite":
            return
        with torch.autocast(tokens.device.type, enabled=False):
            _check_keys(keys, tokens)
            patches, rows_T = tokens.without_prefix()
            self._bisect_threshold(patches, self._comparable(patches, keys[rows_T]), keep)
        self.threshold.calibrated.fill_(True)

    def _bisect_threshold(self, tokens: Tokens, features: Features, keep: float) -> None:
        pairs_2E = self._pairs(tokens)
        low, high = self.threshold.u_range
        for _ in range(_CALIBRATION_STEPS):
            middle = (low + high) / 2
            self.threshold.u.fill_(middle)
            groups = self._group(tokens, features, self.threshold.theta(), pairs_2E)
            counts = torch.tensor([groups.group_of_T.shape[0], groups.num_groups], dtype=torch.float64)
            total, kept = summed_over_processes(counts.to(tokens.device)).tolist()
            if abs(kept - keep * total) <= _CALIBRATION_TOLERANCE * total:
                return
            low, high = (middle, high) if kept > keep * total else (low, middle)
        # No θ keeps just that many: rather too many tokens than too few.
        self.threshold.u.fill_(low)

    @torch.no_grad()
    def update_threshold(self) -> None:
        """One step of the controller of a layer that stands alone; call after each optimiser step."""
        counts = torch.tensor([self.threshold.tokens_in, self.threshold.tokens_out], dtype=torch.float64)
        tokens_in, tokens_out = summed_over_processes(counts.to(self.threshold.u.device)).tolist()
        if tokens_in:
            self.threshold.control(tokens_out / tokens_in)
        self.threshold.reset_counts()

    def _keep_record(
        self, before: Tokens, after: Tokens, members_G: Tensor, theta: Tensor, summary: Tensor | None = None
    ) -> None:
        self.record = LayerRecord(after.sizes_T, members_G, before.cu_seqlens, after.cu_seqlens, theta, summary)
        if summary is None:
            self.note(before.values_TC.shape[0], after.values_TC.shape[0], before.batch, theta)

    def note(self, tokens_in: int, tokens_out: int, images: int, theta: Tensor) -> None:
        """Count the tokens of a forward pass, and warn if nothing or everything was merged."""
        if self.training:
            self.threshold.count(tokens_in, tokens_out)
        if tokens_in == images:
            return
        # The threshold is read from the device only for a warning that is really given.
        if tokens_out == images and "one" not in self._warned:
            self._warn(
                "one",
                f"{self.name} joined all tokens of every image into one component: its threshold "
                f"θ = {theta.item():.4g} is too low for these keys. Calibrate the model on a few images, or "
                f"use threshold='budget' in training, which holds the number of tokens.",
            )
        elif tokens_out == tokens_in and "none" not in self._warned:
            self._warn(
                "none",
                f"{self.name} merged nothing: no similarity exceeds its threshold θ = {theta.item():.4g}. "
                f"Lower the budget or theta, or calibrate the model on images like these.",
            )

    def stats(self) -> LayerStats:
        """Numbers on the last forward pass; warns of a giant component."""
        return self.told(self.measured().tolist())

    @torch.no_grad()
    def measured(self) -> Tensor:
        """The fields of ``LayerStats`` on the last forward pass, in their order, on the device: nobody waits for it."""
        if self.record is None:
            raise RuntimeError("no forward pass has been run yet, so there is nothing to report")
        sizes_G, members_G, borders_in, borders_out, theta, _ = self.record
        lengths_B = borders_out.diff()
        places_G = torch.arange(len(sizes_G), device=sizes_G.device, dtype=borders_out.dtype)
        # Rows behind the last image's are no tokens; they go to an image more, which does not count.
        image_of_G = torch.searchsorted(borders_out[1:], places_G, right=True)
        patches_B = sizes_G.new_zeros(len(lengths_B) + 1, dtype=torch.float32)
        largest_B = patches_B.scatter_reduce(0, image_of_G, sizes_G.float(), "amax")
        patches_B = patches_B.scatter_add(0, image_of_G, sizes_G.float())
        singles = ((members_G == 1) & (places_G < borders_out[-1])).sum()
        numbers = (
            lengths_B.float().mean(),
            lengths_B.min(),
            lengths_B.max(),
            borders_out[-1] / borders_in[-1],
            (largest_B / patches_B)[:-1].mean(),
            singles / borders_in[-1],
            theta,
        )
        return torch.stack([number.float() for number in numbers])

    def told(self, numbers: Sequence[float]) -> LayerStats:
        """What ``measured`` found, now on the host; warns of a giant component."""
        mean, least, most, *shares = numbers
        stats = LayerStats(mean, int(least), int(most), *shares)
        if stats.largest_share > _GIANT:
            self._warn(
                "giant",
                f"{self.name} has a giant component: one superpixel covers {stats.largest_share:.0%} of an "
                f"image on average. Raise the budget, or let only touching tokens join (neighbourhood='spatial').",
            )
        return stats

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, SuperpixelWarning, stacklevel=2)
