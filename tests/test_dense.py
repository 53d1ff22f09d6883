"""Dense features from ragged tokens, inference at any size, and images augmented together with their truth."""

from collections.abc import Callable
from dataclasses import replace

import dense_runs
import numpy as np
import pytest
import torch
from torch import Tensor, nn

from asc.data import Scene, SceneConfig
from asc.data.images import normalise
from asc.data.keyed import Key
from asc.tasks.dense import (
    DenseModel,
    InferenceConfig,
    Sizes,
    cross_attention,
    level_blocks,
    mean_over_patches,
    padded_prediction,
    position_codes,
    predict,
    predict_scaled,
    starts,
)
from asc.tasks.depth.heads import DepthHead, DepthHeadConfig
from asc.tasks.images import MEAN_COLOUR, JointConfig, Pair, PairDataset, Pairs, augmented, cut_side, read_ahead
from asc.tasks.segment.heads import SegmentHeadConfig, make_head, upsampling
from asc.tokens import Tokens, groups_from_labels

# One small image of noise may well keep all its tokens in a block.
pytestmark = pytest.mark.filterwarnings("ignore:block . merged nothing")

HEADS: dict[str, Callable[[int], nn.Module]] = {
    "mlp": lambda width: make_head(SegmentHeadConfig("mlp", channels=16, finest=2), width, 4, classes=5),
    "fpn": lambda width: make_head(SegmentHeadConfig("fpn", channels=16, finest=2), width, 4, classes=5),
    "depth": lambda width: DepthHead(DepthHeadConfig(channels=16, heads=2), width, 4, (32, 32), far=10.0),
}


def dense_model(head: str, **settings: object) -> DenseModel:
    encoder = dense_runs.tiny_encoder(**settings)
    return DenseModel(encoder, HEADS[head](encoder.config.width)).eval()


def test_levels_are_those_of_the_paper_and_in_proportion_of_other_depths() -> None:
    assert level_blocks(12) == (3, 6, 9, 12)
    assert level_blocks(24) == (6, 12, 18, 24)
    assert level_blocks(4) == (1, 2, 3, 4)
    assert level_blocks(2) == (1, 1, 2, 2)
    assert level_blocks(12, (1, 4, 8, 11)) == (1, 4, 8, 11)
    for wrong in ((1, 2, 3), (0, 2, 3, 4), (1, 2, 3, 13), (4, 3, 2, 1)):
        with pytest.raises(ValueError, match=r"head\.blocks must be 4 blocks from 1 to 12"):
            level_blocks(12, wrong)


@pytest.mark.parametrize(
    ("patch", "finest", "factors"),
    [(4, 4, [1, 1, 1, 1]), (8, 4, [1, 1, 1, 2]), (16, 4, [1, 1, 2, 4]), (14, 4, [1, 1, 2, 4]), (16, 1, [2, 4, 8, 16])],
)
def test_large_patches_are_halved_on_the_way_up(patch: int, finest: int, factors: list[int]) -> None:
    assert upsampling(patch, finest) == factors


@pytest.mark.parametrize("head", HEADS)
def test_gradients_reach_the_patches_through_merged_tokens(head: str) -> None:
    model = dense_model(head).train()
    images = dense_runs.scenes(2).requires_grad_()
    levels = model.levels(images)
    assert all(tokens.values_TC.shape[0] < 2 * 64 for tokens in levels), "something must be merged"
    model(images).square().sum().backward()
    assert model.encoder.patch_embed.weight.grad.abs().sum() > 0
    # Every patch is part of some token that the head sees.
    assert (images.grad.unflatten(2, (8, 4)).unflatten(4, (8, 4)).abs().sum((1, 3, 5)) > 0).all()


def test_a_frozen_encoder_gets_no_gradient_and_stays_in_evaluation_mode() -> None:
    encoder = dense_runs.tiny_encoder()
    model = DenseModel(encoder, HEADS["fpn"](64), frozen=True).train()
    model(dense_runs.scenes(2)).sum().backward()
    assert not encoder.training and model.head.training
    assert all(parameter.grad is None for parameter in encoder.parameters())


@pytest.mark.parametrize("head", HEADS)
def test_a_prediction_does_not_depend_on_its_batch_mates(head: str) -> None:
    model = dense_model(head)
    images = dense_runs.scenes(4)
    with torch.no_grad():
        together = model(images)
        alone = torch.cat([model(image[None]) for image in images])
    assert together.shape[0] == 4 and together.shape[2:] == (32, 32)
    torch.testing.assert_close(together, alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("head", HEADS)
def test_images_of_any_size_and_number_are_predicted_in_their_own_size(head: str) -> None:
    model = dense_model(head)
    whole = [Scene(SceneConfig(size=64), index).frame(0).image_HW3 for index in range(4)]
    sides = ((30, 41), (64, 32), (30, 41), (9, 13))
    images = [image[:height, :width] for image, (height, width) in zip(whole, sides, strict=True)]
    sizes = Sizes(base=(32, 32), window=(32, 32))
    together = dict(predict(model, enumerate(images), sizes, InferenceConfig(batch=3)))
    assert sorted(together) == [0, 1, 2, 3]
    for number, image in enumerate(images):
        assert together[number].shape[1:] == image.shape[:2]
        ((_, alone),) = predict(model, [(0, image)], sizes, InferenceConfig(batch=1))
        torch.testing.assert_close(together[number], alone, rtol=1e-5, atol=1e-5)


def test_padding_is_the_mean_colour_and_is_cut_off_again() -> None:
    model = dense_model("fpn")
    images = dense_runs.scenes(1)[..., :30, :27]
    by_hand = torch.zeros(1, 3, 32, 28)
    by_hand[..., :30, :27] = images
    with torch.no_grad():
        assert torch.equal(padded_prediction(model, images), model(by_hand)[..., :30, :27])


class _Echo(DenseModel):
    """Predicts the pixels themselves, so that windows must put the image together again."""

    def forward(self, images_B3HW: Tensor) -> Tensor:
        return images_B3HW


@pytest.mark.parametrize("size", [(32, 32), (33, 75), (100, 41)])
def test_sliding_windows_cover_every_pixel_and_are_averaged(size: tuple[int, int]) -> None:
    model = _Echo(dense_runs.tiny_encoder(), nn.Identity())
    images = torch.rand(2, 3, *size)
    for overlap in (0.0, 1 / 3, 0.9):
        slid = predict_scaled(model, images, (32, 32), InferenceConfig("slide", overlap))
        torch.testing.assert_close(slid, images)


def test_windows_are_spread_evenly_from_border_to_border() -> None:
    assert starts(32, 32, 0.5) == [0] and starts(20, 32, 0.5) == [0]
    assert starts(64, 32, 0.0) == [0, 32]
    assert starts(65, 32, 0.5) == [0, 11, 22, 33]


def ragged(seed: int = 0, channels: int = 8) -> Tokens:
    """Tokens of three images of 4 x 4 patches: one has merged its rows, one a few patches, one nothing."""
    patches = Tokens.from_dense(torch.randn(3, 16, channels, generator=torch.Generator().manual_seed(seed)), (4, 4))
    labels = torch.arange(48)
    labels[:16] = labels[:16] // 4 * 4
    labels[[17, 21, 30]] = 17
    groups = groups_from_labels(labels, patches.cu_seqlens)
    values = torch.randn(groups.num_groups, channels, generator=torch.Generator().manual_seed(seed + 1))
    return patches.merged(groups, values)


def test_a_token_has_the_mean_position_of_its_patches() -> None:
    tokens = ragged()
    codes = position_codes(torch.arange(4.0), torch.arange(4.0), 8)
    means = mean_over_patches(tokens, codes)
    assert tokens.sizes_T.max() > 1
    for token in range(len(means)):
        members = (tokens.patch_to_token_BN == token).nonzero()[:, 1]
        torch.testing.assert_close(means[token], codes[members].mean(0))


def test_position_codes_are_waves_along_both_sides() -> None:
    codes = position_codes(torch.tensor([0.0, 2.0]), torch.tensor([0.0, 1.0, 3.0]), 8)
    assert codes.shape == (6, 8)
    rates = torch.tensor([1.0, 0.1])
    row, column = 2.0, 3.0
    by_hand = torch.cat([(row * rates).sin(), (row * rates).cos(), (column * rates).sin(), (column * rates).cos()])
    torch.testing.assert_close(codes[5], by_hand)


def test_queries_attend_to_the_tokens_of_their_own_image() -> None:
    tokens = ragged()
    assert not tokens.is_regular
    generator = torch.Generator().manual_seed(1)
    query = torch.randn(3, 5, 2, 4, generator=generator, dtype=torch.float64)
    key, value = (torch.randn(len(tokens.sizes_T), 2, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    mixed = cross_attention(query, key, value, tokens)
    borders = tokens.cu_seqlens.tolist()
    for image in range(3):
        own = slice(borders[image], borders[image + 1])
        for head in range(2):
            scores = query[image, :, head] @ key[own, head].T / 4**0.5
            torch.testing.assert_close(mixed[image, :, head], scores.softmax(1) @ value[own, head])


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_half_precision_attention_on_a_gpu_equals_that_in_fp32() -> None:
    tokens = ragged()
    tokens = replace(tokens, cu_seqlens=tokens.cu_seqlens.cuda(), values_TC=tokens.values_TC.cuda())
    generator = torch.Generator().manual_seed(1)
    shapes = ((3, 40, 2, 32), (len(tokens.sizes_T), 2, 32), (len(tokens.sizes_T), 2, 32))
    mixed, gradients = [], []
    values = [torch.randn(shape, generator=generator).cuda() for shape in shapes]
    for dtype in (torch.float32, torch.bfloat16):
        inputs = [value.to(dtype, copy=True).requires_grad_() for value in values]
        mixed.append(cross_attention(*inputs, tokens).float())
        mixed[-1].square().sum().backward()
        gradients.append([x.grad.float() for x in inputs])
    torch.testing.assert_close(mixed[0], mixed[1], rtol=0.05, atol=0.03)
    for one, other in zip(*gradients, strict=True):
        assert (one - other).norm() < 0.05 * one.norm()


@needs_gpu
@pytest.mark.parametrize("head", HEADS)
def test_heads_learn_on_a_gpu_in_mixed_precision(head: str) -> None:
    model = dense_model(head).cuda().train()
    with torch.autocast("cuda", torch.bfloat16):
        maps = model(dense_runs.scenes(4).cuda())
    assert maps.dtype == torch.float32
    maps.square().mean().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model.encoder.patch_embed.weight.grad.abs().sum() > 0


# --- Images and their truth -------------------------------------------------------------------------------


class _Blocks(Pairs):
    """Images of large blocks, each as bright as its class, so that truth and image can be compared."""

    name, padding = "blocks", 255.0

    def __init__(self, count: int, height: int = 48, width: int = 64) -> None:
        self.count, self.size = count, (height, width)

    def __len__(self) -> int:
        return self.count

    def read(self, index: int) -> Pair:
        coarse = np.random.default_rng(index).integers(1, 120, (self.size[0] // 16, self.size[1] // 16), dtype=np.uint8)
        truth = coarse.repeat(16, 0).repeat(16, 1)
        return Pair((2 * truth)[..., None].repeat(3, 2), truth)

    def source(self, index: int) -> str:
        return f"block image {index}"

    def key(self, index: int) -> str:
        return f"{self.size} {index}"


def test_image_and_truth_are_moved_alike() -> None:
    pairs = _Blocks(1)
    config = JointConfig(size=(40, 36), base=(48, 64), jitter_probability=0.0)
    unflipped = replace(config, flip_probability=0.0)
    seen_void = seen_flip = 0
    for epoch in range(60):
        image, truth = augmented(pairs.read(0), config, Key(0, epoch, 0, 0), pairs)
        assert image.shape == (3, 40, 36) and truth.shape == (40, 36)
        void = truth == 255
        seen_void += bool(void.any())
        assert (image.permute(1, 2, 0)[void] == torch.tensor(MEAN_COLOUR, dtype=torch.uint8)).all()
        # Bilinear pixels mix at the borders of blocks; inside, image and truth must say the same.
        same = (image[0].int() - 2 * truth.int()).abs() <= 2
        assert same[~void].float().mean() > 0.7
        plain, _ = augmented(pairs.read(0), unflipped, Key(0, epoch, 0, 0), pairs)
        flipped = torch.equal(image, plain.flip(-1))
        assert flipped or torch.equal(image, plain)
        seen_flip += flipped
    assert 5 < seen_void < 55 and 15 < seen_flip < 45


def test_colours_change_but_not_the_truth() -> None:
    pairs = _Blocks(1)
    calm = JointConfig(size=(32, 32), jitter_probability=0.0)
    wild = JointConfig(size=(32, 32), jitter_probability=1.0)
    for epoch in range(8):
        key = Key(0, epoch, 0, 0)
        one, other = (augmented(pairs.read(0), config, key, pairs) for config in (calm, wild))
        assert torch.equal(one[1], other[1]) and not torch.equal(one[0], other[0])


def test_crops_depend_on_their_sample_alone_and_not_on_the_batch() -> None:
    dataset = PairDataset(_Blocks(5), JointConfig(size=(32, 32)), seed=3)
    together = dataset[list(range(20))]
    for position in range(20):
        alone = dataset[[position]]
        assert torch.equal(together.images_B3SR[position], alone.images_B3SR[0])
        assert torch.equal(together.truth_BSR[position], alone.truth_BSR[0])
    assert sorted(dataset.sources(range(5))) == [f"block image {index}" for index in range(5)]
    # The same sample looks different in the next epoch.
    first = {dataset.order.place(position).sample: position for position in range(5)}
    again = {dataset.order.place(position).sample: position for position in range(5, 10)}
    same = [torch.equal(together.images_B3SR[first[s]], together.images_B3SR[again[s]]) for s in range(5)]
    assert not any(same)


def test_crops_lie_between_the_borders() -> None:
    assert cut_side(100, 1.0, 40, 0.0) == ((0.0, 40.0), (0, 40))
    assert cut_side(100, 1.0, 40, 0.999999) == ((60.0, 100.0), (0, 40))
    assert cut_side(100, 2.0, 40, 0.5) == ((40.0, 60.0), (0, 40))
    assert cut_side(100, 0.2, 40, 0.5) == ((0.0, 100.0), (10, 30))
    assert cut_side(40, 1.0, 40, 0.7) == ((0.0, 40.0), (0, 40))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"size": (0, 32)}, r"augment\.size must be \(height, width\)"),
        ({"scale": (2.0, 1.0)}, r"augment\.scale must be"),
        ({"flip_probability": 1.5}, r"augment\.flip_probability must lie between"),
        ({"hue": 0.6}, r"augment\.hue must lie between"),
    ],
)
def test_bad_augmentation_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        JointConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"mode": "tiles"}, "unknown inference.mode"), ({"overlap": 1.0}, "overlap"), ({"batch": 0}, "batch")],
)
def test_bad_inference_is_named(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InferenceConfig(**settings)  # type: ignore[arg-type]


def test_an_empty_list_cannot_be_learned_from() -> None:
    with pytest.raises(ValueError, match="blocks names no image to learn from"):
        PairDataset(_Blocks(0), JointConfig(), seed=0)


def test_normalised_mean_colour_is_nearly_zero() -> None:
    colour = torch.tensor(MEAN_COLOUR, dtype=torch.uint8).view(1, 1, 1, 3)
    assert normalise(colour).abs().max() < 0.02


def test_reading_ahead_keeps_the_order_and_holds_few_at_a_time() -> None:
    begun: list[int] = []

    def read(number: int) -> int:
        begun.append(number)
        if number == 30:
            raise ValueError("number 30 cannot be read")
        return number * number

    coming = read_ahead(read, 40, ahead=4)
    for number in range(30):
        assert next(coming) == number * number
        assert len(begun) <= number + 1 + 4
    with pytest.raises(ValueError, match="number 30"):
        next(coming)
    assert list(read_ahead(abs, 2, ahead=4)) == [0, 1] and list(read_ahead(abs, 0, ahead=4)) == []
