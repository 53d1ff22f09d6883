"""A Vision Transformer whose tokens are superpixels: pre-norm blocks with a superpixel layer after attention.

    patches ─▶ [ attention ─▶ superpixel layer ─▶ MLP ] × depth ─▶ norm ─▶ tokens ─▶ pool | dense map

Shape letters: see ``asc.tokens``.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Literal, TypeGuard, TypeVar, get_args, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from asc.attention import Attention
from asc.grouping.budget import TokenBudget
from asc.grouping.graph import NonFiniteKeysError
from asc.kernels import interpreted, triton_is_installed
from asc.layer import AdaptiveSuperpixelLayer, LayerStats, SuperpixelConfig, SuperpixelWarning
from asc.tokens import Tokens
from asc.transfer import Transfer

Pool = Literal["superpixel", "size", "class", "grouped"]
Positions = Literal["random", "sincos"]
Result = TypeVar("Result")

# Width and heads of the usual sizes; depth is 12 except for large.
_SIZES = {"tiny": (192, 3, 12), "small": (384, 6, 12), "base": (768, 12, 12), "large": (1024, 16, 24)}
_PATCHES = (4, 8, 16)
MODEL_NAMES = tuple(f"asc_vit_{size}_patch{patch}" for size in _SIZES for patch in _PATCHES)


@dataclass(frozen=True)
class VitConfig:
    """Shape of the network."""

    width: int = 192
    """Channels of a token."""
    depth: int = 12
    """Number of blocks."""
    heads: int = 3
    """Attention heads; divides the width."""
    patch_size: int = 4
    """Side of a patch in pixels."""
    image_size: int | tuple[int, int] = 224
    """Size the position embedding is made for; other sizes interpolate it."""
    positions: Positions = "random"
    """How the learned position embedding starts: ``random`` and small, or ``sincos``: sines and cosines as strong as
    the patches, from which short trainings learn where things are much sooner."""
    mlp_ratio: float = 4.0
    """Hidden width of the MLP as a multiple of the width."""
    superpixels: SuperpixelConfig | None = SuperpixelConfig()
    """How tokens are grouped; None: a plain Vision Transformer."""
    pool: Pool = "superpixel"
    """The feature of an image: mean over tokens with one vote for each ``superpixel`` or one for each patch
    (``size``), or the first prefix token (``class``). ``grouped``: the superpixel layer of the last block merges
    nothing, but groups the last tokens by their similarity for this mean alone, one vote a group."""
    class_token: bool = False
    """Whether there is a class token."""
    registers: int = 0
    """Number of register tokens behind the class token."""
    prefix_position: bool = False
    """Whether prefix tokens have a position embedding of their own."""
    qkv_bias: bool = True
    """Whether queries, keys and values have a bias."""
    qk_norm: bool = False
    """Whether queries and keys are layer-normed."""
    layer_scale: float | None = None
    """Starting value of a learned scale of every residual branch; None: no such scale."""
    norm_eps: float = 1e-6
    """Added to the variance in every layer norm."""
    norm_before: bool = False
    """Whether the embedded tokens are layer-normed before the first block (CLIP)."""
    norm_after_pool: bool = False
    """Whether the final norm comes after pooling instead of before (timm's ``fc_norm``)."""
    quick_gelu: bool = False
    """Whether the MLP uses x·σ(1.702x) (OpenAI's CLIP) instead of the exact GELU."""
    checkpoint_gradients: bool = False
    """Whether attention and MLP are run again in the backward pass to save memory. Groupings are kept, never
    run again."""

    def __post_init__(self) -> None:
        for name in ("width", "depth", "heads", "patch_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.positions not in get_args(Positions):
            raise ValueError(f"unknown positions {self.positions!r}; choose from {', '.join(get_args(Positions))}")
        if self.positions == "sincos" and self.width % 4:
            raise ValueError(f"positions='sincos' needs a width divisible by 4, got {self.width}")
        if self.pool not in get_args(Pool):
            raise ValueError(f"unknown pool {self.pool!r}; choose from {', '.join(get_args(Pool))}")
        if self.pool == "class" and not self.class_token:
            raise ValueError("pool='class' needs class_token=True")
        if self.superpixels is not None and not isinstance(self.superpixels.blocks, str):
            _check_blocks(self.superpixels.blocks, self.depth)
        if self.pool == "grouped":
            self._check_grouped_pool()
        self.grid_of(self.image_hw)

    def _check_grouped_pool(self) -> None:
        last = self.depth - 1
        if self.superpixels is None or last not in self.superpixel_blocks:
            raise ValueError(f"pool='grouped' needs superpixels whose blocks include the last one, {last}")
        if self.superpixel_blocks == (last,) and self.superpixels.keep is None:
            raise ValueError(f"pool='grouped' with blocks=({last},) alone merges nothing: give a keep, not a budget")

    def merges_in(self, block: int) -> bool:
        """Whether tokens become fewer in a block."""
        for_pool_alone = self.pool == "grouped" and block == self.depth - 1
        return block in self.superpixel_blocks and not for_pool_alone

    @property
    def image_hw(self) -> tuple[int, int]:
        """Height and width the position embedding is made for."""
        size = self.image_size
        return (size, size) if isinstance(size, int) else size

    @property
    def num_prefix(self) -> int:
        """Number of prefix tokens."""
        return int(self.class_token) + self.registers

    @property
    def superpixel_blocks(self) -> tuple[int, ...]:
        """Blocks that hold a superpixel layer."""
        if self.superpixels is None:
            return ()
        blocks = self.superpixels.blocks
        if blocks == "early":
            return tuple(range(-(-self.depth // 3)))
        return tuple(range(self.depth)) if blocks == "all" else tuple(sorted(blocks))

    def grid_of(self, image_hw: tuple[int, int]) -> tuple[int, int]:
        """Rows and columns of patches of an image."""
        for name, pixels in zip(("height", "width"), image_hw, strict=True):
            if pixels < 1 or pixels % self.patch_size:
                raise ValueError(
                    f"image {name} {pixels} is not divisible by the patch size {self.patch_size}; "
                    f"resize or pad the images to a multiple of {self.patch_size}"
                )
        return image_hw[0] // self.patch_size, image_hw[1] // self.patch_size


def _check_blocks(blocks: Sequence[int], depth: int) -> None:
    if not blocks or len(set(blocks)) != len(blocks) or not all(0 <= block < depth for block in blocks):
        raise ValueError(f"blocks must name different blocks from 0 to {depth - 1}, got {tuple(blocks)}")


# Asked here, since the compiler cannot look for modules, nor at the environment.
_KERNELS, _INTERPRETED = triton_is_installed(), interpreted()


def _half_precision_for_kernels(x: Tensor) -> torch.dtype | None:
    """What a linear layer multiplies in, if that is half precision and where kernels run."""
    if not _KERNELS or not (x.is_cuda or _INTERPRETED):
        return None
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return dtype if dtype in (torch.float16, torch.bfloat16) else None


def _only_multiplies(layer: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether the layer is no more than its weight and bias; an adapter in its place, or one with hooks, is called."""
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return type(layer) is nn.Linear and layer.bias is not None and not any(hooks)


def _linear(values_TC: Tensor, layer: nn.Module) -> Tensor:
    """What the layer gives. Compiled, its bias's gradient is summed up by a kernel."""
    half = _half_precision_for_kernels(values_TC)
    if half is None or not torch.compiler.is_compiling() or not _only_multiplies(layer):
        result_TF: Tensor = layer(values_TC)
        return result_TF
    from asc.kernels.feed_forward import linear

    return linear(values_TC.to(half), layer.weight, layer.bias)


class LayerScale(nn.Module):
    """A learned factor for every channel of a residual branch."""

    def __init__(self, channels: int, start: float) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.full((channels,), start))

    def forward(self, values_TC: Tensor) -> Tensor:
        """Scaled values."""
        return values_TC * self.gamma


class Mlp(nn.Module):
    """Two linear layers with a GELU between them."""

    def __init__(self, channels: int, hidden: int, quick_gelu: bool) -> None:
        super().__init__()
        self.fc1 = nn.Linear(channels, hidden)
        self.fc2 = nn.Linear(hidden, channels)
        self.quick_gelu = quick_gelu

    def forward(self, values_TC: Tensor) -> Tensor:
        """New values, token by token."""
        half = _half_precision_for_kernels(values_TC)
        if half is not None and not self.quick_gelu and _only_multiplies(self.fc1) and _only_multiplies(self.fc2):
            from asc.kernels.feed_forward import gelu_linear

            # The kernel adds the bias, since it makes its gradient.
            hidden_TH = F.linear(values_TC, self.fc1.weight)
            return gelu_linear(hidden_TH, self.fc1.bias, self.fc2.weight, self.fc2.bias)
        hidden_TC: Tensor = self.fc1(values_TC)
        if not (torch.compiler.is_compiling() and torch.is_grad_enabled()):
            return self._finish(hidden_TC)
        # Where no kernel of ours does it, the compiler makes the GELU's values again on the way back, too: they would
        # take up a quarter of a block's memory.
        finished_TC: Tensor = checkpoint(self._finish, hidden_TC, use_reentrant=False, preserve_rng_state=False)
        return finished_TC

    def _finish(self, hidden_TC: Tensor) -> Tensor:
        hidden_TC = hidden_TC * torch.sigmoid(1.702 * hidden_TC) if self.quick_gelu else F.gelu(hidden_TC)
        values_TC: Tensor = self.fc2(hidden_TC)
        return values_TC


def patches_of(images_B3HW: Tensor, rows: int, columns: int) -> Tensor:
    """The pixels of every patch in a row, as the embedding takes them."""
    pixels = images_B3HW.unflatten(2, (rows, -1)).unflatten(4, (columns, -1))
    patches_BNF: Tensor = pixels.permute(0, 2, 4, 1, 3, 5).flatten(1, 2).flatten(2)
    return patches_BNF


# What is done token by token; functions of their modules, so that one compilation serves all blocks.


def _embedded(patches_BNF: Tensor, project: nn.Module, position_1NC: Tensor) -> Tensor:
    values_BNC: Tensor = project(patches_BNF) + position_1NC
    return values_BNC


def _normed(values_TC: Tensor, norm: nn.Module) -> Tensor:
    normed_TC: Tensor = norm(values_TC)
    return normed_TC


def _into_attention(values_TC: Tensor, norm: nn.Module, qkv: nn.Module) -> Tensor:
    return _linear(norm(values_TC), qkv)


def _out_of_attention(values_TC: Tensor, mixed_TC: Tensor, proj: nn.Module, scale: nn.Module) -> Tensor:
    summed_TC: Tensor = values_TC + scale(_linear(mixed_TC, proj))
    return summed_TC


def _feed_forward(
    values_TC: Tensor, norm: nn.Module, mlp: nn.Module, scale: nn.Module, *following: nn.Module
) -> tuple[Tensor, Tensor | None]:
    """Also what the ``following`` block's attention begins with, if there is one: compiled together they read the
    tokens once less, and nobody need add up the gradients of two uses."""
    values_TC = values_TC + scale(mlp(norm(values_TC)))
    return values_TC, _into_attention(values_TC, *following) if following else None


def _after_attention(
    values_TC: Tensor, mixed_TC: Tensor, proj: nn.Module, scale: nn.Module, *rest: nn.Module
) -> tuple[Tensor, Tensor | None]:
    """Both of the above where nothing is merged between them."""
    return _feed_forward(_out_of_attention(values_TC, mixed_TC, proj, scale), *rest)


def _no_view(values_TC: Tensor) -> Tensor:
    # The compiler makes other code for views of each kind of tensor; nobody changes these in place.
    if not values_TC._is_view():
        return values_TC
    whole_TC: Tensor = torch.ops.aten._unsafe_view(values_TC, values_TC.shape)
    return whole_TC


# With gradients or without, while a graph is recorded or not, rounded or not, with a block behind or not: each is
# compiled by itself. The compiler's own limit is 8, behind which it runs the rest uncompiled.
_KINDS = 64


@cache
def _compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _KINDS)
    return torch.compile(function, dynamic=True)


def _run(compiled: bool, function: Callable[..., Result], *inputs: Tensor | nn.Module) -> Result:
    if not compiled:
        return function(*inputs)
    result: Result = _compiled(function)(*(_no_view(x) if isinstance(x, Tensor) else x for x in inputs))
    return result


class Block(nn.Module):
    """Attention, superpixel layer, MLP; each usable by itself, because calibration steps between them."""

    def __init__(self, config: VitConfig, index: int, keep: float) -> None:
        super().__init__()
        width, superpixels = config.width, config.superpixels
        proportional = superpixels is not None and superpixels.proportional_attention
        self.checkpoint_gradients = config.checkpoint_gradients
        self.compiled = False
        self.merges = config.merges_in(index)
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attn = Attention(width, config.heads, config.qkv_bias, config.qk_norm, proportional, config.norm_eps)
        self.ls1 = nn.Identity() if config.layer_scale is None else LayerScale(width, config.layer_scale)
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), config.quick_gelu)
        self.ls2 = nn.Identity() if config.layer_scale is None else LayerScale(width, config.layer_scale)
        self.superpixels: AdaptiveSuperpixelLayer | None = None
        if superpixels is not None and index in config.superpixel_blocks:
            self.superpixels = AdaptiveSuperpixelLayer(width, superpixels, keep, name=f"block {index}")

    def forward(
        self,
        tokens: Tokens,
        target: Tensor | None = None,
        qkv_TF: Tensor | None = None,
        following: Block | None = None,
    ) -> tuple[Tokens, Tensor | None]:
        """The tokens for the next block, and what that one's attention begins with where both are compiled as one.

        Args:
            tokens: Of the block before.
            target: See ``AdaptiveSuperpixelLayer.forward``.
            qkv_TF: Queries, keys and values of the tokens, if the block before has made them.
            following: The next block.
        """
        if not self.compiled or self.checkpoint_gradients:
            tokens, keys_THD = self.attend(tokens)
            tokens = self._merged(tokens, keys_THD, target)
            # Keys hold on to queries and values, which would lie beside the MLP's hidden values.
            del keys_THD
            return self.feed_forward(tokens), None
        values_TC = tokens.values_TC
        if qkv_TF is None:
            qkv_TF = _run(True, _into_attention, values_TC, self.norm1, self.attn.qkv)
        mixed_TC, keys_THD = self.attn.mix(qkv_TF, tokens)
        rest = [self.norm2, self.mlp, self.ls2]
        if following is not None:
            rest += [following.norm1, following.attn.qkv]
        if self.merges:
            values_TC = _run(True, _out_of_attention, values_TC, mixed_TC, self.attn.proj, self.ls1)
            tokens = self._merged(tokens.with_values(values_TC), keys_THD, target)
            del values_TC, mixed_TC, qkv_TF, keys_THD
            values_TC, next_TF = _run(True, _feed_forward, tokens.values_TC, *rest)
        else:
            values_TC, next_TF = _run(True, _after_attention, values_TC, mixed_TC, self.attn.proj, self.ls1, *rest)
        return tokens.with_values(values_TC), next_TF

    def attend(self, tokens: Tokens) -> tuple[Tokens, Tensor]:
        """Tokens after the residual sum of attention, and the attention's keys."""

        def run(values_TC: Tensor) -> tuple[Tensor, Tensor]:
            qkv_TF = _run(self.compiled, _into_attention, values_TC, self.norm1, self.attn.qkv)
            mixed_TC, keys_THD = self.attn.mix(qkv_TF, tokens)
            parts = self.attn.proj, self.ls1
            return _run(self.compiled, _out_of_attention, values_TC, mixed_TC, *parts), keys_THD

        values_TC, keys_THD = self._maybe_checkpointed(run, tokens.values_TC)
        return tokens.with_values(values_TC), keys_THD

    def _merged(self, tokens: Tokens, keys_THD: Tensor, target: Tensor | None) -> Tokens:
        if not self.merges:
            return tokens
        assert self.superpixels is not None
        merged: Tokens = self.superpixels(tokens, keys_THD, target)
        return merged

    def feed_forward(self, tokens: Tokens) -> Tokens:
        """Tokens after the residual sum of the MLP."""

        def run(values_TC: Tensor) -> Tensor:
            return _run(self.compiled, _feed_forward, values_TC, self.norm2, self.mlp, self.ls2)[0]

        return tokens.with_values(self._maybe_checkpointed(run, tokens.values_TC))

    def _maybe_checkpointed(self, function: Callable[[Tensor], Result], values_TC: Tensor) -> Result:
        # The superpixel layer stays outside: run twice, rounding could group differently the second time.
        if self.checkpoint_gradients and self.training and torch.is_grad_enabled():
            result: Result = checkpoint(function, values_TC, use_reentrant=False)
            return result
        return function(values_TC)


class AscViT(nn.Module):
    """Vision Transformer on superpixel tokens. Made by ``asc.create_model`` or from a ``VitConfig``.

    Call it for pooled features ``(B, C)``; see ``forward_tokens``, ``forward_intermediates`` and
    ``superpixels`` for what lies below. With a token budget, ``calibrate`` it on a few images before use,
    and call ``update_thresholds`` after every optimiser step when training.
    """

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        width, patch = config.width, config.patch_size
        rows, columns = config.grid_of(config.image_hw)
        self.patch_embed = nn.Linear(3 * patch * patch, width)
        positions = rows * columns + (config.num_prefix if config.prefix_position else 0)
        self.pos_embed = nn.Parameter(torch.empty(1, positions, width))
        self.prefix_tokens = nn.Parameter(torch.empty(1, config.num_prefix, width)) if config.num_prefix else None
        self.norm_pre = nn.LayerNorm(width, eps=config.norm_eps) if config.norm_before else nn.Identity()
        self.budget = _make_budget(config)
        keeps = dict.fromkeys(range(config.depth), 0.8)
        if self.budget is not None:
            keeps |= dict(zip(config.superpixel_blocks, self.budget.first_targets, strict=True))
        self.blocks = nn.ModuleList(Block(config, index, keeps[index]) for index in range(config.depth))
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)
        self.compiled = False
        self._warned_uncalibrated = False
        self.init_weights()

    def init_weights(self) -> None:
        """Truncated normal weights of deviation 0.02, zero biases, as is usual for Vision Transformers."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for layer in self.superpixel_layers:
            if layer.merge.score is not None:
                nn.init.zeros_(layer.merge.score.weight)
        # Patches are few numbers: the fan-in scale keeps their embedding as strong as the positions.
        nn.init.trunc_normal_(self.patch_embed.weight, std=self.patch_embed.in_features**-0.5)
        nn.init.trunc_normal_(self.pos_embed, std=0.02)
        if self.config.positions == "sincos":
            grid = self.config.grid_of(self.config.image_hw)
            with torch.no_grad():
                self.pos_embed[0, -grid[0] * grid[1] :] = _sines_and_cosines(grid, self.config.width)
        if self.prefix_tokens is not None:
            nn.init.normal_(self.prefix_tokens, std=1e-6)

    @property
    def superpixel_layers(self) -> list[AdaptiveSuperpixelLayer]:
        """All superpixel layers, in order."""
        return [block.superpixels for block in self._blocks() if block.superpixels is not None]

    @property
    def num_features(self) -> int:
        """Width of the pooled features."""
        return self.config.width

    def compile(self, *_: object, **__: object) -> None:
        """From now on run compiled all that works token by token; attention and grouping are kernels already.

        The code is compiled once for all blocks alike, and for any number of tokens.
        """
        self.compiled = True
        for block in self._blocks():
            block.compiled = True

    def _blocks(self) -> Iterator[Block]:
        for block in self.blocks:
            assert isinstance(block, Block)
            yield block

    def forward(self, images_B3HW: Tensor) -> Tensor:
        """Pooled features ``(B, C)``."""
        return self.pool(self.forward_tokens(images_B3HW))

    def forward_tokens(self, images_B3HW: Tensor) -> Tokens:
        """The tokens after the last block and the final norm."""
        for tokens in self._run(images_B3HW):
            last = tokens  # the others are let go of as soon as the next block has run
        return self._finished(last)

    def _finished(self, tokens: Tokens) -> Tokens:
        return tokens if self.config.norm_after_pool else self._normed(tokens)

    def _normed(self, tokens: Tokens) -> Tokens:
        return tokens.with_values(_run(self.compiled, _normed, tokens.values_TC, self.norm))

    def pool(self, tokens: Tokens) -> Tensor:
        """One feature for each image from the tokens of ``forward_tokens``."""
        if self.config.pool == "grouped":
            tokens = self.superpixel_layers[-1](tokens, tokens.values_TC)
        if self.config.pool == "class":
            pooled_BC = tokens.prefix_BPC()[:, 0]
        else:
            pooled_BC = tokens.mean_BC(by_size=self.config.pool == "size")
        return self.norm(pooled_BC) if self.config.norm_after_pool else pooled_BC

    @overload
    def forward_intermediates(
        self,
        images_B3HW: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        intermediates_only: Literal[False] = False,
    ) -> tuple[Tokens, list[Tensor]]: ...

    @overload
    def forward_intermediates(
        self,
        images_B3HW: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        *,
        intermediates_only: Literal[True],
    ) -> list[Tensor]: ...

    def forward_intermediates(
        self,
        images_B3HW: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        intermediates_only: bool = False,
    ) -> tuple[Tokens, list[Tensor]] | list[Tensor]:
        """Dense maps ``(B, C, H/p, W/p)`` after chosen blocks; each patch takes its token's value.

        Args:
            images_B3HW: A batch of images.
            indices: Blocks, negative ones from the end; a number n: the last n blocks; None: all.
            norm: Whether the final norm is applied to the maps.
            intermediates_only: Whether to leave out the final tokens.

        Returns:
            The final tokens (as of ``forward_tokens``) and the list of maps, like timm's function of this name.
        """
        chosen = _chosen_blocks(indices, self.config.depth)
        after_block = list(self._run(images_B3HW))
        maps = [(self._normed(after_block[i]) if norm else after_block[i]).dense_BCHW() for i in chosen]
        if intermediates_only:
            return maps
        return self._finished(after_block[-1]), maps

    def forward_blocks(self, images_B3HW: Tensor, indices: int | Sequence[int] | None = None) -> list[Tokens]:
        """The ragged tokens after chosen blocks, for heads that attend to superpixels themselves."""
        after_block = list(self._run(images_B3HW))
        return [after_block[index] for index in _chosen_blocks(indices, self.config.depth)]

    @torch.no_grad()
    def superpixels(self, images_B3HW: Tensor) -> Tensor:
        """Label maps ``(depth, B, H/p, W/p)``: the superpixel of every patch after every block.

        Looking does not count: in training, too, thresholds are not moved by these images.
        """
        with self._in_eval_mode():
            return torch.stack([tokens.label_map_BHW() for tokens in self._run(images_B3HW)])

    @contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        were_training = {module: module.training for module in self.modules()}
        self.eval()
        try:
            yield
        finally:
            for module, was_training in were_training.items():
                module.training = was_training

    def diagnostics(self) -> dict[int, LayerStats]:
        """Numbers on the grouping of the last forward pass, by block."""
        return self.diagnosing()()

    def diagnosing(self) -> Callable[[], dict[int, LayerStats]]:
        """The same without waiting for the device: what this returns fetches the numbers when it is called."""
        layers = zip(self.config.superpixel_blocks, self.superpixel_layers, strict=True)
        # A layer that groups for the pool alone has nothing to tell where nothing is pooled.
        needed = self.config.pool != "grouped"
        telling = {block: layer for block, layer in layers if needed or layer.record is not None}
        if not telling:
            return dict
        numbers = Transfer(torch.stack([layer.measured() for layer in telling.values()]))

        def fetch() -> dict[int, LayerStats]:
            rows = numbers.wait().tolist()
            return {block: layer.told(row) for (block, layer), row in zip(telling.items(), rows, strict=True)}

        return fetch

    @torch.no_grad()
    def calibrate(self, images_B3HW: Tensor) -> None:
        """Set every threshold so that, on these images, each block keeps its share of the budget.

        A few dozen typical images are enough. Images of all processes count together, so that every
        process gets the same thresholds.
        """
        if self.budget is None:
            raise ValueError("this is a plain Vision Transformer (superpixels=None): nothing to calibrate")
        self.budget.forget()
        with self._in_eval_mode():
            self._calibrate(images_B3HW, self.budget.targets_L.tolist())

    def _calibrate(self, images_B3HW: Tensor, targets_L: list[float]) -> None:
        tokens = self._embed(images_B3HW)
        original, wanted = tokens.patch_to_token_BN.numel(), 1.0
        targets = dict(zip(self.config.superpixel_blocks, targets_L, strict=True))
        for index, block in enumerate(self._blocks()):
            tokens, keys_THD = block.attend(tokens)
            if block.merges:
                assert block.superpixels is not None
                wanted *= targets[index]
                now = tokens.values_TC.shape[0] - tokens.batch * tokens.num_prefix
                with _explaining(images_B3HW, index):
                    block.superpixels.calibrate(tokens, keys_THD, min(1.0, wanted * original / now))
                    tokens = block.superpixels(tokens, keys_THD)
            tokens = block.feed_forward(tokens)
        if self.config.pool == "grouped":
            tokens = self._finished(tokens)
            self.superpixel_layers[-1].calibrate(tokens, tokens.values_TC, targets[self.config.depth - 1])

    def update_thresholds(self) -> None:
        """One step of the threshold controllers; call once after every optimiser step, in every process."""
        if self.budget is not None:
            self.budget.update([layer.threshold for layer in self.superpixel_layers])

    def _run(self, images_B3HW: Tensor) -> Iterator[Tokens]:
        """The tokens after every block, one after another."""
        self._warn_if_uncalibrated()
        self._tell_budget()
        tokens, qkv_TF = self._embed(images_B3HW), None
        targets, blocks = self._differentiable_targets(), list(self._blocks())
        for index, (block, following) in enumerate(zip(blocks, [*blocks[1:], None], strict=True)):
            with _explaining(images_B3HW, index):
                tokens, qkv_TF = block(tokens, targets.get(index), qkv_TF, following)
            yield tokens

    def _tell_budget(self) -> None:
        """Let the host know early what it will need after this training step."""
        layers = self.superpixel_layers
        if self.budget is not None and self.training and layers[0].room is None:
            self.budget.tell(self.budget.known([layer.threshold for layer in layers]))

    def _differentiable_targets(self) -> dict[int, Tensor]:
        if self.budget is None or not self.budget.allocation.requires_grad or not torch.is_grad_enabled():
            return {}
        return dict(zip(self.config.superpixel_blocks, self.budget.targets().unbind(), strict=True))

    def _embed(self, images_B3HW: Tensor) -> Tokens:
        rows, columns = self._checked_grid(images_B3HW)
        patches_BNF = patches_of(images_B3HW, rows, columns)
        count = self.config.num_prefix
        position_PC = self._position(rows, columns)
        values_BNC = _run(self.compiled, _embedded, patches_BNF, self.patch_embed, position_PC[:, -rows * columns :])
        if self.prefix_tokens is not None:
            own_position: Tensor | float = position_PC[:, :count] if self.config.prefix_position else 0.0
            prefix_1PC = (self.prefix_tokens + own_position).to(values_BNC.dtype)
            values_BNC = torch.cat([prefix_1PC.expand(images_B3HW.shape[0], -1, -1), values_BNC], dim=1)
        return Tokens.from_dense(self.norm_pre(values_BNC), (rows, columns), num_prefix=count)

    def _checked_grid(self, images_B3HW: Tensor) -> tuple[int, int]:
        if images_B3HW.ndim != 4 or images_B3HW.shape[1] != 3:
            raise ValueError(f"images must have the shape (batch, 3, height, width), got {tuple(images_B3HW.shape)}")
        if images_B3HW.shape[0] == 0:
            raise ValueError("the batch is empty; give at least one image")
        if not images_B3HW.is_floating_point():
            raise ValueError(
                f"images must be normalised floating-point numbers, got {images_B3HW.dtype}; see asc.data.normalise"
            )
        return self.config.grid_of((images_B3HW.shape[2], images_B3HW.shape[3]))

    def _position(self, rows: int, columns: int) -> Tensor:
        """Position embedding for a grid, interpolated if it was made for another."""
        made = self.config.grid_of(self.config.image_hw)
        if made == (rows, columns):
            return self.pos_embed
        count = self.config.num_prefix if self.config.prefix_position else 0
        prefix_1PC, grid_1NC = self.pos_embed[:, :count], self.pos_embed[:, count:]
        grid_1CHW = grid_1NC.unflatten(1, made).permute(0, 3, 1, 2)
        # Bicubic with antialias in fp32, as timm does, so that loaded weights act alike at any size.
        resized_1CHW = F.interpolate(
            grid_1CHW.float(), size=(rows, columns), mode="bicubic", antialias=True, align_corners=False
        ).to(grid_1NC.dtype)
        return torch.cat([prefix_1PC, resized_1CHW.flatten(2).transpose(1, 2)], dim=1)

    def _warn_if_uncalibrated(self) -> None:
        if self._warned_uncalibrated or all(bool(layer.threshold.calibrated) for layer in self.superpixel_layers):
            # Asked once only: reading the flags waits for the device.
            self._warned_uncalibrated = True
            return
        self._warned_uncalibrated = True
        if self.config.superpixels is not None and self.config.superpixels.grouping == "components":
            warnings.warn(
                "the thresholds have not been calibrated, so the number of tokens is arbitrary: call "
                "model.calibrate(images) with a few typical images first, or load a trained model",
                SuperpixelWarning,
                stacklevel=4,
            )


def _sines_and_cosines(grid: tuple[int, int], width: int) -> Tensor:
    """A position embedding (rows · columns, width): waves of many lengths along both sides of the grid."""
    rates_Q = 100.0 ** -(torch.arange(width // 4) / (width // 4))
    rows_N, columns_N = torch.meshgrid(*(torch.arange(float(side)) for side in grid), indexing="ij")
    angles_NQ = [place_N.flatten()[:, None] * rates_Q for place_N in (rows_N, columns_N)]
    return torch.cat([wave(angle_NQ) for angle_NQ in angles_NQ for wave in (torch.sin, torch.cos)], dim=1)


@contextmanager
def _explaining(images_B3HW: Tensor, block: int) -> Iterator[None]:
    try:
        yield
    except NonFiniteKeysError as error:
        raise _explained(error, images_B3HW, block) from error


def _explained(error: NonFiniteKeysError, images_B3HW: Tensor, block: int) -> NonFiniteKeysError:
    """Say whether the pixels or the weights are to blame; looked up only once it has happened."""
    bad_B = ~torch.isfinite(images_B3HW).flatten(1).all(dim=1)
    if bad_B.any():
        which = ", ".join(map(str, bad_B.nonzero()[:, 0].tolist()[:8]))
        return NonFiniteKeysError(f"the images hold NaN or infinite pixels (images {which} of the batch)")
    return NonFiniteKeysError(f"in block {block}, though all pixels are finite, {error}")


def _make_budget(config: VitConfig) -> TokenBudget | None:
    superpixels = config.superpixels
    if superpixels is None:
        return None
    learn = (
        superpixels.learn_allocation
        and superpixels.threshold == "budget"
        and superpixels.grouping == "components"
        and superpixels.gradient != "none"
        and superpixels.keep is None
        and superpixels.control == "block"  # the total says nothing of how it is spent
    )
    return TokenBudget(
        superpixels.budget,
        config.superpixel_blocks,
        config.depth,
        superpixels.floor,
        learn,
        superpixels.keep,
        superpixels.control,
    )


def _chosen_blocks(indices: int | Sequence[int] | None, depth: int) -> list[int]:
    if indices is None:
        indices = depth
    if isinstance(indices, int | np.integer):
        last = int(indices)
        if not 1 <= last <= depth:
            raise ValueError(f"indices={last} asks for that many last blocks, but there are {depth}")
        return list(range(depth - last, depth))
    if not all(-depth <= index < depth for index in indices):
        raise ValueError(f"indices must name blocks from {-depth} to {depth - 1}, got {list(indices)}")
    return [index % depth for index in indices]


def create_model(name: str, superpixels: SuperpixelConfig | None = VitConfig.superpixels, **settings: object) -> AscViT:
    """A model by name: ``asc_vit_{tiny,small,base,large}_patch{4,8,16}``, freshly initialised.

    Args:
        name: The model's name.
        superpixels: How tokens are grouped; None gives the plain Vision Transformer.
        **settings: Any other field of ``VitConfig``, such as ``image_size=96``.
    """
    found = re.fullmatch(r"asc_vit_(\w+)_patch(\d+)", name)
    if found is None or name not in MODEL_NAMES:
        raise ValueError(f"unknown model {name!r}; choose from {', '.join(MODEL_NAMES)}")
    known = {field.name for field in fields(VitConfig)}
    if unknown := sorted(set(settings) - known):
        raise ValueError(f"unknown setting {', '.join(unknown)}; choose from {', '.join(sorted(known))}")
    width, heads, depth = _SIZES[found[1]]
    config = VitConfig(width, depth, heads, int(found[2]), superpixels=superpixels)
    return AscViT(replace(config, **settings))  # type: ignore[arg-type]
