"""The augmentation of frames: its pixels and its distributions are torchvision's, its random numbers the key's."""

import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torch.utils.data import default_collate
from torchvision import transforms as v1
from torchvision.transforms.v2 import functional as tv

from asc.data.images import DEVIATION, MEAN, normalise
from asc.data.keyed import Key
from asc.pretrain.augment import AugmentConfig, Draws, _cropped, _cropped_together, apply, crop_boxes, draw

# All random changes but the crop off; tests turn on what they look at.
PLAIN = {"flip_probability": 0, "jitter_probability": 0, "grey_probability": 0, "blur_probability": 0}
ADJUSTMENTS = (tv.adjust_brightness, tv.adjust_contrast, tv.adjust_saturation, tv.adjust_hue)
# Of each distribution test. The seeds are fixed, so a pass stays a pass.
LEVEL = 0.001


def keys(count: int, seed: int = 0, view: int = 0) -> list[Key]:
    return [Key(seed, 0, sample, view) for sample in range(count)]


def frame(height: int, width: int, seed: int = 0) -> Tensor:
    """Noise on smooth colours, with a black, a white and a grey part."""
    generator = torch.Generator().manual_seed(seed)
    smooth = torch.nn.functional.interpolate(torch.rand(1, 3, 3, 3, generator=generator), (height, width))[0]
    image = (smooth * 200 + torch.rand(3, height, width, generator=generator) * 55).byte()
    image[:, : height // 8], image[:, height // 8 : height // 4], image[:, -height // 8 :] = 0, 255, 77
    return image


def pixels(images: Tensor | list[Tensor], draws: Draws, config: AugmentConfig) -> Tensor:
    """What ``apply`` gives, before it was normalised."""
    return tv.normalize(
        apply(images, draws, config), [-m / d for m, d in zip(MEAN, DEVIATION, strict=True)], [1 / d for d in DEVIATION]
    )


def by_torchvision(image: Tensor, row: int, draws: Draws, config: AugmentConfig) -> Tensor:
    """One image at a time, operation after operation."""
    box = crop_boxes(draws, torch.tensor([image.shape[1:]] * len(draws.flip_B)), config)[row].tolist()
    out = tv.resized_crop(image.float() / 255, *box, [config.size, config.size], antialias=True)
    out = tv.horizontal_flip(out) if draws.flip_B[row] else out
    for operation in draws.order_B4[row].tolist() if draws.jitter_B[row] else []:
        out = ADJUSTMENTS[operation](out, draws.factors_B4[row, operation].item())
    out = tv.rgb_to_grayscale(out, 3) if draws.grey_B[row] else out
    return tv.gaussian_blur(out, config.blur_kernel, [draws.sigma_B[row].item()]) if draws.blur_B[row] else out


@pytest.mark.parametrize("shape", [(60, 80), (40, 160), (160, 40), (5, 7), (1, 1), (1, 9), (32, 32)])
def test_crops_equal_torchvision(shape: tuple[int, int]) -> None:
    config = AugmentConfig(size=32, **PLAIN)
    draws = draw(config, keys(8))
    image = frame(*shape)
    expected = torch.stack([by_torchvision(image, row, draws, config) for row in range(8)])
    torch.testing.assert_close(pixels(image.expand(8, -1, -1, -1), draws, config), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("operation", range(4), ids=["brightness", "contrast", "saturation", "hue"])
def test_colours_equal_torchvision(operation: int) -> None:
    config = AugmentConfig(size=24, **{**PLAIN, "jitter_probability": 1})
    factors = [-0.5, -0.31, -0.1, 0.0, 0.07, 0.5] if operation == 3 else [0.0, 0.3, 0.6, 1.0, 1.4, 3.0]
    neutral = torch.tensor([1.0, 1.0, 1.0, 0.0]).repeat(len(factors), 1)
    neutral[:, operation] = torch.tensor(factors)
    draws = draw(config, keys(len(factors)))._replace(factors_B4=neutral)
    image = frame(24, 24)
    plain = draws._replace(jitter_B=torch.zeros_like(draws.jitter_B))
    before = [by_torchvision(image, row, plain, config) for row in range(len(factors))]
    expected = torch.stack([ADJUSTMENTS[operation](own, factor) for own, factor in zip(before, factors, strict=True)])
    torch.testing.assert_close(pixels([image] * len(factors), draws, config), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("size,kernel,sigma", [(40, 23, (0.5, 0.5)), (12, 23, (0.05, 2.0)), (40, 5, (3.0, 9.0))])
def test_blur_equals_torchvision_with_each_images_own_sigma(size: int, kernel: int, sigma: tuple[float, float]) -> None:
    config = AugmentConfig(size=size, blur_kernel=kernel, blur_sigma=sigma, **{**PLAIN, "blur_probability": 1})
    draws = draw(config, keys(6))
    images = [frame(48, 50, seed) for seed in range(6)]
    expected = torch.stack([by_torchvision(image, row, draws, config) for row, image in enumerate(images)])
    torch.testing.assert_close(pixels(images, draws, config), expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("probability", [0.5, 1.0])
def test_the_whole_chain_equals_torchvision_on_frames_of_different_sizes(probability: float) -> None:
    config = AugmentConfig(
        size=32,
        jitter_probability=probability,
        grey_probability=0.5,
        blur_probability=probability,
        blur_sigma=(0.1, 2.0),
    )
    draws = draw(config, keys(40))
    images = [frame(24 + 3 * row, 90 - 2 * row, row) for row in range(40)]
    expected = torch.stack([by_torchvision(image, row, draws, config) for row, image in enumerate(images)])
    torch.testing.assert_close(pixels(images, draws, config), expected, atol=1e-5, rtol=0)


def test_without_changes_the_result_is_the_normalised_frame() -> None:
    config = AugmentConfig(size=20, crop_scale=(1, 1), crop_ratio=(1, 1), **PLAIN)
    images = torch.stack([frame(20, 20, seed) for seed in range(3)])
    out = apply(images, draw(config, keys(3)), config)
    assert out.dtype == torch.float32 and out.shape == (3, 3, 20, 20)
    torch.testing.assert_close(out, normalise(images.permute(0, 2, 3, 1)), atol=1e-5, rtol=0)


def test_the_frames_given_stay_as_they_were() -> None:
    config = AugmentConfig(size=32)
    images = frame(32, 32).expand(4, -1, -1, -1).contiguous()
    before = images.clone()
    apply(images, draw(config, keys(4)), config)
    assert torch.equal(images, before)


# 9 x 7: rounding shows. 40 x 160: most tries fail, and the central crop is common.
@pytest.mark.parametrize("shape", [(144, 192), (9, 7), (40, 160), (200, 50)])
def test_crops_are_distributed_as_torchvisions(shape: tuple[int, int]) -> None:
    config = AugmentConfig()
    count = 3000
    ours = crop_boxes(draw(config, keys(count)), torch.tensor([shape] * count), config).double()
    torch.manual_seed(0)
    blank = torch.empty(3, *shape)
    params = v1.RandomResizedCrop.get_params
    theirs = torch.tensor([params(blank, [0.2, 1.0], [3 / 4, 4 / 3]) for _ in range(count)]).double()
    for name, column in (("top", 0), ("left", 1), ("height", 2), ("width", 3)):
        assert stats.ks_2samp(ours[:, column], theirs[:, column]).pvalue > LEVEL, name
    for name, of in (("area", lambda box: box[:, 2] * box[:, 3]), ("ratio", lambda box: box[:, 3] / box[:, 2])):
        assert stats.ks_2samp(of(ours), of(theirs)).pvalue > LEVEL, name


@pytest.mark.parametrize("shape", [(40, 160), (160, 40), (2, 9), (9, 2)])
def test_frames_that_no_try_fits_get_torchvisions_central_crop(shape: tuple[int, int]) -> None:
    config = AugmentConfig(crop_scale=(0.95, 1.0))
    boxes = crop_boxes(draw(config, keys(50)), torch.tensor([shape] * 50), config)
    central = v1.RandomResizedCrop.get_params(torch.empty(3, *shape), [0.95, 1.0], [3 / 4, 4 / 3])
    assert boxes.tolist() == [list(central)] * 50


def test_a_crop_is_the_first_of_ten_tries_that_fits() -> None:
    config = AugmentConfig()
    draws = draw(config, keys(400))
    assert draws.crop_share_BK.shape == (400, 10)
    boxes = crop_boxes(draws, torch.tensor([(30, 90)] * 400), config).tolist()
    tries_used = set()
    for row, (_, _, height, width) in enumerate(boxes):
        for attempt in range(10):
            share, ratio = draws.crop_share_BK[row, attempt].item(), draws.crop_ratio_BK[row, attempt].item()
            w, h = round(math.sqrt(2700 * share * ratio)), round(math.sqrt(2700 * share / ratio))
            if w <= 90 and h <= 30:
                assert (height, width) == (h, w)
                tries_used.add(attempt)
                break
        else:
            assert (height, width) == (30, 40)
            tries_used.add(10)
    assert {0, 1, 2, 10} <= tries_used


def test_every_box_lies_in_its_frame_even_for_places_at_the_border() -> None:
    config = AugmentConfig()
    sizes = torch.tensor([(h, w) for h in (1, 2, 3, 17, 100) for w in (1, 2, 5, 40, 333)])
    for place in (0.0, 0.5, 1 - 2.0**-53):
        draws = draw(config, keys(len(sizes)))
        boxes = crop_boxes(draws._replace(place_B2=torch.full_like(draws.place_B2, place)), sizes, config)
        assert (boxes[:, :2] >= 0).all() and (boxes[:, 2:] >= 1).all()
        assert (boxes[:, :2] + boxes[:, 2:] <= sizes).all()


def test_single_parameters_have_the_distributions_of_their_settings() -> None:
    config = AugmentConfig(blur_sigma=(0.1, 2.0), blur_probability=0.3, jitter_probability=0.8)
    draws = draw(config, keys(4000))
    shares, ratios = draws.crop_share_BK.flatten(), draws.crop_ratio_BK.flatten()
    assert stats.kstest(shares, stats.uniform(0.2, 0.8).cdf).pvalue > LEVEL
    assert stats.kstest(ratios, stats.loguniform(3 / 4, 4 / 3).cdf).pvalue > LEVEL
    # The same test tells the nearest wrong distribution, a ratio that is itself uniform.
    assert stats.kstest(ratios, stats.uniform(3 / 4, 4 / 3 - 3 / 4).cdf).pvalue < 1e-6
    assert stats.kstest(draws.sigma_B, stats.uniform(0.1, 1.9).cdf).pvalue > LEVEL
    assert stats.kstest(draws.place_B2.flatten(), "uniform").pvalue > LEVEL
    for chosen, probability in ((draws.flip_B, 0.5), (draws.jitter_B, 0.8), (draws.grey_B, 0.2), (draws.blur_B, 0.3)):
        assert stats.binomtest(int(chosen.sum()), 4000, probability).pvalue > LEVEL


def test_parameters_of_an_image_its_partner_and_its_neighbour_are_uncorrelated() -> None:
    config = AugmentConfig(blur_sigma=(0.1, 2.0))
    views = [
        torch.cat([values[:, None] if values.ndim == 1 else values for values in draw(config, own)], dim=1)
        for own in (keys(4000), keys(4000, view=1))
    ]
    varied = [view[:, view.std(0) > 0] for view in views]
    table = torch.cat([*varied, varied[0].roll(1, 0)], dim=1)
    correlation = np.abs(np.corrcoef(table.T))
    # The four places of one order exclude one another; nothing else in the table hangs together.
    width = varied[0].shape[1]
    start = 10 + 10 + 2 + 1
    for first in range(start, 3 * width, width):
        correlation[first : first + 4, first : first + 4] = 0
    np.fill_diagonal(correlation, 0)
    # 5.5 standard errors.
    assert correlation.max() < 5.5 / math.sqrt(4000)


@pytest.mark.parametrize("spreads", [(0.4, 0.4, 0.4, 0.1), (1.5, 0.8, 0.2, 0.5)])
def test_jitter_is_distributed_as_torchvisions(spreads: tuple[float, float, float, float]) -> None:
    brightness, contrast, saturation, hue = spreads
    draws = draw(AugmentConfig(brightness=brightness, contrast=contrast, saturation=saturation, hue=hue), keys(4000))
    jitter = v1.ColorJitter(*spreads)
    torch.manual_seed(0)
    params = jitter.get_params
    theirs = [params(jitter.brightness, jitter.contrast, jitter.saturation, jitter.hue) for _ in range(4000)]
    factors = torch.tensor([own[1:] for own in theirs])
    for operation in range(4):
        pvalue = stats.ks_2samp(draws.factors_B4[:, operation], factors[:, operation]).pvalue
        assert pvalue > LEVEL, ADJUSTMENTS[operation].__name__
    code = torch.tensor([64, 16, 4, 1])
    counts = torch.stack(
        [
            torch.bincount((orders * code).sum(1), minlength=256)
            for orders in (draws.order_B4, torch.stack([own[0] for own in theirs]))
        ]
    )
    seen = counts[:, counts.sum(0) > 0]
    assert seen.shape == (2, 24)
    assert stats.chi2_contingency(seen.numpy()).pvalue > LEVEL


def test_random_numbers_are_those_of_numpys_philox() -> None:
    key = np.array([2**64 - 1, 7], dtype=np.uint64)
    counter = np.array([0, 0, 2**63 + 1, 1], dtype=np.uint64)
    uniform = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(32)
    draws = draw(AugmentConfig(blur_sigma=(1.0, 2.0)), [(2**64 - 1, 7, 2**63 + 1, 1)])
    assert draws.crop_share_BK[0].tolist() == pytest.approx(0.2 + 0.8 * uniform[:10])
    assert draws.place_B2[0].tolist() == uniform[20:22].tolist()
    assert draws.sigma_B.item() == pytest.approx(1 + uniform[31])


def test_random_numbers_never_change() -> None:
    draws = draw(AugmentConfig(), [(1, 2, 3, 4)])
    assert draws.place_B2.tolist() == [[0.05550758426193858, 0.04101370375001934]]
    assert draws.order_B4.tolist() == [[2, 1, 0, 3]]


def test_draws_are_the_keys_alone_whatever_the_batch() -> None:
    config = AugmentConfig(blur_sigma=(0.1, 2.0))
    together = draw(config, keys(20))
    order = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    shuffled = draw(config, [keys(20)[index] for index in order])
    single = [Draws(*(values[0] for values in draw(config, [key]))) for key in keys(20)]
    # As worker processes hand samples over: pickled, then collated.
    collated = default_collate(pickle.loads(pickle.dumps(single)))
    for field in Draws._fields:
        assert torch.equal(getattr(shuffled, field), getattr(together, field)[order]), field
        assert torch.equal(getattr(collated, field), getattr(together, field)), field


def test_pixels_do_not_depend_on_the_rest_of_the_batch() -> None:
    config = AugmentConfig(size=32, jitter_probability=0.7, blur_probability=0.7, blur_sigma=(0.1, 2.0))
    images = torch.stack([frame(40, 50, seed) for seed in range(12)])
    together = apply(images, draw(config, keys(12)), config)
    backwards = apply(images.flip(0), draw(config, keys(12)[::-1]), config)
    single = torch.cat([apply(images[row : row + 1], draw(config, [key]), config) for row, key in enumerate(keys(12))])
    torch.testing.assert_close(backwards.flip(0), together, atol=1e-6, rtol=0)
    torch.testing.assert_close(single, together, atol=1e-6, rtol=0)


@pytest.mark.parametrize("field", Key._fields)
@pytest.mark.parametrize("value", [0, 1, 2**63, 2**64 - 2])
def test_every_number_of_the_key_counts(field: str, value: int) -> None:
    config = AugmentConfig(size=32)
    one, other = (Key(3, 3, 3, 3)._replace(**{field: number}) for number in (value, value + 1))
    draws = draw(config, [one, other, one])
    assert not (draws.crop_share_BK[0] == draws.crop_share_BK[1]).any()
    assert torch.equal(draws.crop_share_BK[0], draws.crop_share_BK[2])
    # Three equal images in one batch: each is changed by its own parameters.
    out = apply([frame(40, 40)] * 3, draws, config)
    assert (out[0] - out[1]).abs().mean() > 0.05
    torch.testing.assert_close(out[0], out[2], atol=1e-6, rtol=0)


def test_numbers_of_the_key_are_not_interchangeable() -> None:
    places = draw(AugmentConfig(), [(1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 0, 0)]).place_B2
    assert len(set(places[:, 0].tolist())) == 5


def test_a_changed_setting_leaves_the_other_parameters_alone() -> None:
    draws = draw(AugmentConfig(), keys(30))
    other = draw(AugmentConfig(jitter_probability=0.0, hue=0.0, flip_probability=0.1, crop_scale=(0.5, 0.9)), keys(30))
    for field in ("crop_ratio_BK", "place_B2", "order_B4", "grey_B", "sigma_B"):
        assert torch.equal(getattr(draws, field), getattr(other, field)), field
    assert torch.equal(draws.factors_B4[:, :3], other.factors_B4[:, :3]) and not other.factors_B4[:, 3].any()
    assert not other.jitter_B.any() and draws.jitter_B.all()
    # Fewer flips, but among the same images.
    assert (other.flip_B <= draws.flip_B).all()


@pytest.mark.parametrize(
    "setting,value",
    [
        ("size", 0),
        ("crop_scale", (0.0, 1.0)),
        ("crop_scale", (0.5, 0.2)),
        ("crop_scale", (0.2, 1.1)),
        ("crop_ratio", (2.0, 1.0)),
        ("crop_ratio", (1.0, math.inf)),
        ("crop_ratio", (1.0,)),
        ("flip_probability", 1.5),
        ("jitter_probability", -0.1),
        ("grey_probability", math.nan),
        ("blur_probability", 2),
        ("brightness", -0.4),
        ("contrast", math.inf),
        ("saturation", math.nan),
        ("hue", 0.6),
        ("blur_kernel", 22),
        ("blur_kernel", -1),
        ("blur_kernel", 449),
        ("blur_sigma", (0.0, 1.0)),
        ("blur_sigma", (2.0, 1.0)),
    ],
)
def test_bad_settings_are_named(setting: str, value: object) -> None:
    with pytest.raises(ValueError, match=setting):
        AugmentConfig(**{setting: value})


def test_a_kernel_must_fit_the_size_only_if_there_is_blur() -> None:
    AugmentConfig(size=12)
    with pytest.raises(ValueError, match=r"blur_kernel 23 .* at most 21"):
        AugmentConfig(size=11)
    assert AugmentConfig(size=11, blur_probability=0).size == 11


@pytest.mark.parametrize("key", [(0, 0, -1, 0), (2**64, 0, 0, 0), (0, 0, 0)])
def test_bad_keys_are_refused(key: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="seed, epoch, sample, view"):
        draw(AugmentConfig(), [key])


def test_bad_images_are_refused() -> None:
    config = AugmentConfig(size=32)
    draws = draw(config, keys(2))
    with pytest.raises(ValueError, match="own row of draws, got 3 images and 2 rows"):
        apply([frame(8, 8)] * 3, draws, config)
    for bad in (torch.rand(2, 3, 8, 8), torch.zeros(2, 8, 8, 3, dtype=torch.uint8), [frame(8, 8), frame(8, 8)[:, :0]]):
        with pytest.raises(ValueError, match="images must be bytes"):
            apply(bad, draws, config)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_gives_the_same_pixels() -> None:
    config = AugmentConfig(size=64, jitter_probability=0.8, blur_sigma=(0.1, 2.0))
    draws = draw(config, keys(64))
    images = torch.stack([frame(144, 192, seed) for seed in range(64)])
    frames = images.cuda()
    torch.cuda.set_sync_debug_mode("error")  # the host never waits for the GPU
    try:
        out = apply(frames, draws, config)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert out.is_cuda
    torch.testing.assert_close(out.cpu(), apply(images, draws, config), atol=1e-4, rtol=0)


@pytest.mark.parametrize("shape", [(40, 40), (96, 64), (20, 50)])
def test_crops_of_a_whole_batch_equal_those_one_by_one(shape: tuple[int, int]) -> None:
    config = AugmentConfig(size=32)
    images = torch.stack([frame(*shape, seed=seed) for seed in range(16)])
    boxes = crop_boxes(draw(config, keys(16)), torch.tensor([shape] * 16), config)
    torch.testing.assert_close(
        _cropped_together(images, boxes, 32), _cropped(list(images), boxes, 32), rtol=0, atol=1e-5
    )


def test_crops_of_a_whole_batch_are_flipped_where_drawn() -> None:
    config = AugmentConfig(size=32)
    images = torch.stack([frame(40, 56, seed=seed) for seed in range(16)])
    draws = draw(config, keys(16))
    boxes = crop_boxes(draws, torch.tensor([(40, 56)] * 16), config)
    assert {*draws.flip_B.tolist()} == {False, True}
    plain = _cropped(list(images), boxes, 32)
    expected = torch.stack([own.flip(-1) if flip else own for own, flip in zip(plain, draws.flip_B, strict=True)])
    torch.testing.assert_close(_cropped_together(images, boxes, 32, draws.flip_B), expected, rtol=0, atol=1e-5)
