"""Steps that are replayed with fixed rooms against the same steps run plainly.

On a GPU they are replayed as graphs. Interpreted on the CPU a replay is a run with the same rooms, so everything but
the graph itself is tested there, in a process of its own (see ``test_kernels.py``).
"""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from bounds import watched
from interpreting import assert_passes_interpreted
from torch import Tensor

import asc
from asc.bench.contest import Inference, Shape, TrainStep, make_encoder
from asc.data.scenes import SceneConfig
from asc.grouping.graph import NonFiniteKeysError
from asc.kernels import interpreted
from asc.pretrain.replay import Replay
from asc.pretrain.siamese import Agreement, Siamese, SiameseConfig
from asc.replay import ReplayedEncoder
from asc.replay.replayer import is_worth_replaying
from asc.replay.rooms import Count, room_for
from asc.tasks.classify.datasets import open_dataset
from asc.tasks.classify.task import ClassifyConfig, ClassifyTask
from asc.tasks.classify.views import ViewConfig
from asc.tasks.encoders import open_encoder
from asc.tokens import Room, Tokens
from asc.train import TrainConfig

pytest.importorskip("triton")
ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
runs_kernels = pytest.mark.skipif(not ON_GPU and not interpreted(), reason="runs in a process of its own")
# So few tokens, and thresholds that nobody has calibrated: sometimes all are merged, sometimes none.
pytestmark = pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")


@pytest.mark.skipif(ON_GPU or interpreted(), reason="the kernels run in this process")
def test_all_replays_under_the_interpreter() -> None:
    assert_passes_interpreted(__file__)


def frames(clips: int, seed: int, blocks: int = 4) -> Tensor:
    """Two frames of each clip: squares of a few colours with some noise, so that there is something to join."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(2, clips, 3, blocks, blocks, generator=generator)
    images = coarse.repeat_interleave(16 // blocks, 3).repeat_interleave(16 // blocks, 4)
    return (images + 0.05 * torch.randn(images.shape, generator=generator)).to(DEVICE)


PREFIX = {"class_token": True, "registers": 2, "pool": "class"}


def siamese(**settings: object) -> Siamese:
    torch.manual_seed(0)
    shape = {name: settings.pop(name) for name in PREFIX if name in settings}
    superpixels = asc.SuperpixelConfig(blocks=(0, 1), budget=0.6, **settings)
    config = asc.VitConfig(width=32, depth=3, heads=2, image_size=16, superpixels=superpixels, mlp_ratio=2, **shape)
    encoder = asc.AscViT(config).to(DEVICE)
    for layer in encoder.superpixel_layers:
        layer.threshold.set_theta(0.9)
    return Siamese(encoder, SiameseConfig(hidden=32, projection=16, momentum=0.9)).to(DEVICE).train()


def trained(module: Siamese, call: object, batches: list[list[Tensor]]) -> list[float]:
    """Losses of a few steps, each of one or more micro-batches."""
    optimiser = torch.optim.SGD(module.parameters(), lr=0.05)
    losses = []
    for micro_batches in batches:
        for images in micro_batches:
            agreement: Agreement = call(images)  # type: ignore[operator]
            (agreement.loss / len(micro_batches)).backward()
            losses.append(float(agreement.loss.detach()))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        module.encoder.update_thresholds()
        module.follow(0.5)
    return losses


def gradients(module: Siamese, agreement: Agreement) -> dict[str, Tensor]:
    agreement.loss.backward()
    found = {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}
    module.zero_grad(set_to_none=True)
    return found


def in_half_precision(call: Callable[[Tensor], Agreement]) -> Callable[[Tensor], Agreement]:
    def agree(images: Tensor) -> Agreement:
        # Anew in every step, as training does it: autocast keeps rounded weights until it ends.
        with torch.autocast("cuda", torch.bfloat16):
            return call(images)

    return agree


def assert_same_weights(one: Siamese, other: Siamese) -> None:
    theirs = dict(other.named_parameters())
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(
            parameter, theirs[name], atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}"
        )


@runs_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"neighbourhood": "spatial"},
        {"key_gradient": 1.0},
        {"grouping": "bipartite"},
        {"merge": "max"},
        {"merge": "attention"},
        {"links": "best", "size_weight": 1.0, "proportional_attention": True},
        PREFIX,
    ],
    ids=str,
)
def test_a_replayed_training_equals_a_plain_one(settings: dict[str, object]) -> None:
    plain = siamese(**settings)
    ours = copy.deepcopy(plain)
    replay = Replay(ours, first=1)
    # Few, since a training magnifies rounding: with weights moved by 1e-7 one differs by 1e-3 after eight steps.
    batches = [[frames(2, seed)] for seed in range(5 if ON_GPU else 3)]
    expected = trained(plain, plain, batches)
    assert trained(ours, replay, batches) == pytest.approx(expected, rel=1e-4)
    assert replay.recorded is not None and replay.replays == len(batches) - 1
    assert_same_weights(ours, plain)
    for mine, theirs in zip(ours.encoder.superpixel_layers, plain.encoder.superpixel_layers, strict=True):
        assert asdict(mine.stats()) == pytest.approx(asdict(theirs.stats()), rel=1e-4)


@runs_kernels
def test_micro_batches_add_up() -> None:
    """Each counts for its share, which the backward pass learns only after it was replayed."""
    plain = siamese()
    ours = copy.deepcopy(plain)
    replay = Replay(ours, first=1)
    batches = [[frames(2, 0)], [frames(2, 1), frames(2, 2)]]
    expected = trained(plain, plain, batches)
    assert trained(ours, replay, batches) == pytest.approx(expected, rel=1e-4)
    assert replay.replays == 2
    assert_same_weights(ours, plain)


@runs_kernels
def test_a_batch_that_does_not_fit_is_run_plainly() -> None:
    ours = siamese()
    replay = Replay(ours, first=1)
    few, many = frames(2, 0, blocks=2), torch.randn_like(frames(2, 1))
    replay(few)
    replay(few)
    assert replay.recorded is not None
    rooms = replay.recorded.rooms
    rooms[0] = rooms[0]._replace(tokens=min(rooms[0].tokens, 20))
    expected = ours(many)
    expected_grads = gradients(ours, expected)
    for number in range(3):
        agreement = replay(many)
        torch.testing.assert_close(agreement.loss, expected.loss)
        # Those of the pass that was replayed in vain are in nobody's way.
        torch.testing.assert_close(gradients(ours, agreement), expected_grads)
        # Three times are too often.
        assert (replay.recorded is None) == (number == 2)
    assert not replay.is_settled
    # From what was found meanwhile it is known how many there are now.
    loss = replay(many).loss
    assert replay.recorded is not None and replay.replays == 1
    torch.testing.assert_close(loss, expected.loss, rtol=1e-4, atol=1e-5)


@runs_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"neighbourhood": "spatial"},
        {"merge": "max"},
        {"merge": "attention"},
        {"links": "best", "size_weight": 1.0, "proportional_attention": True},
        PREFIX,
    ],
    ids=str,
)
def test_rooms_that_are_too_small_harm_nobody(settings: dict[str, object]) -> None:
    """Whatever the numbers are, nothing outside of a tensor is touched, and the truth is told."""
    encoder = siamese(**settings).encoder
    images = frames(2, 5).flatten(0, 1)
    images[0] = images[0].mean()  # one token
    encoder(images)
    record = encoder.superpixel_layers[0].record
    assert record is not None
    plain = int(record.borders_out[-1])
    for first, second in (((7, 16), (64, 16)), ((64, 3), (5, 2)), ((20, 16), (1, 1)), ((1, 1), (64, 16))):
        for layer, room in zip(encoder.superpixel_layers, (first, second), strict=True):
            layer.room = Room(*room)
        with nullcontext() if ON_GPU else watched() as watch:
            encoder(images).square().sum().backward()
        record = encoder.superpixel_layers[0].record
        assert record is not None and record.summary is not None
        assert int(record.summary[0]) == plain
        assert int(record.borders_out[-1]) <= first[0] and int(record.borders_out.diff().max()) <= first[1]
        assert watch is None or watch.accesses > 100


@runs_kernels
@pytest.mark.skipif(ON_GPU, reason="only the interpreter can be watched")
def test_the_watch_sees_a_kernel_that_leaves_its_tensors() -> None:
    from asc.kernels.spare import clear_spare

    rows = torch.zeros(8, 4)
    borders = torch.tensor([0, 3], dtype=torch.int32)
    with watched():
        clear_spare(rows, borders)
        # Borders that lie: the rows would begin before the tensor does.
        with pytest.raises(Exception, match="_clear writes outside"):
            clear_spare(rows, torch.tensor([0, -3], dtype=torch.int32))


@runs_kernels
def test_rows_behind_the_last_image_stay_out_of_everything() -> None:
    """Merged tokens with room: the same tokens, then zeros; the same gradients, then zeros."""
    encoder = siamese().encoder
    layer = encoder.superpixel_layers[0]
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 16, 32, generator=generator).to(DEVICE)
    keys = (values[..., :16] + 2.0).flatten(0, 1)[:, None]
    found = []
    for room in (None, Room(30, 16)):
        layer.room = room
        own = values.clone().requires_grad_()
        tokens = layer(Tokens.from_dense(own, (4, 4)), keys)
        pooled = tokens.mean_BC()
        pooled.square().sum().backward()
        found.append((tokens, pooled.detach(), own.grad))
    (plain, pooled, grad), (padded, padded_pooled, padded_grad) = found
    count = plain.values_TC.shape[0]
    assert 2 < count < 30 and padded.values_TC.shape[0] == 30 and padded.padded and not padded.is_regular
    torch.testing.assert_close(padded.values_TC[:count], plain.values_TC)
    assert not padded.values_TC[count:].any() and not padded.sizes_T[count:].any()
    assert torch.equal(padded.patch_to_token_BN, plain.patch_to_token_BN)
    torch.testing.assert_close(padded_pooled, pooled)
    torch.testing.assert_close(padded_grad, grad)


@runs_kernels
def test_what_cannot_be_recorded_is_trained_without() -> None:
    ours = siamese()
    replay = Replay(ours, first=1)
    images = frames(2, 0)
    replay(images)

    class Stubborn(torch.nn.Module):
        def forward(self, rows: Tensor) -> Tensor:
            if ours.encoder.superpixel_layers[0].room is not None:
                raise RuntimeError("there is no way to record this")
            return rows

    ours.projector.append(Stubborn())
    with pytest.warns(UserWarning, match="not replayed.*no way to record"):
        agreement = replay(images)
    torch.testing.assert_close(agreement.loss, ours(images).loss)
    assert ours.encoder.superpixel_layers[0].room is None
    replay(images)  # and nothing is said of it again


@runs_kernels
def test_broken_pixels_are_named_as_ever() -> None:
    ours = siamese()
    replay = Replay(ours, first=1)
    good = frames(2, 0)
    replay(good)
    replay(good)
    bad = good.clone()
    bad[0, 1, 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteKeysError, match="pixels"):
        replay(bad)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("settings", [{}, {"neighbourhood": "spatial"}, {"threshold": "learnable"}, PREFIX], ids=str)
def test_in_half_precision_as_well(settings: dict[str, object]) -> None:
    plain = siamese(**settings)
    ours = copy.deepcopy(plain)
    replay = Replay(ours, first=2)
    batches = [[frames(8, seed)] for seed in range(12)]
    expected = trained(plain, in_half_precision(plain), batches)
    found = trained(ours, in_half_precision(replay), batches)
    torch.cuda.synchronize()
    assert replay.replays >= 6
    # Roundings differ, and now and then one of them a grouping.
    assert found == pytest.approx(expected, rel=0.1)
    assert found[:4] == pytest.approx(expected[:4], rel=0.02)


def test_rooms_follow_what_was_found() -> None:
    found = [Count(1000 + 10 * (i % 3 - 1), 40, 0) for i in range(30)]
    room = room_for(found)
    assert 1000 * 1.12 <= room.tokens <= 1000 * 1.12 + 257
    assert 50 <= room.longest <= 128
    wild = room_for([Count(1000 + 300 * (i % 3 - 1), 40, 0) for i in range(30)])
    assert wild.tokens >= 1000 + 3 * 240
    assert room_for([Count(5000, 7, 0)]).tokens >= 5000


@runs_kernels
def test_a_graph_is_kept_as_long_as_its_rooms_are_not_far_too_large() -> None:
    ours = siamese()
    replay = Replay(ours, first=1)
    images = frames(2, 0)
    replay(images)
    for steps, factor, kept in ((31, 1.0, True), (63, 1.1, True), (127, 1.2, False)):
        replay(images)
        assert replay.recorded is not None
        wanted = replay.history.rooms()
        replay.recorded.rooms = [Room(int(factor * room.tokens), room.longest) for room in wanted]
        replay.replays, replay._next_look = steps, steps + 1
        replay(images)
        assert (replay.recorded is not None) == kept


@runs_kernels
def test_the_host_has_something_to_do_while_it_would_wait() -> None:
    ours = siamese()
    replay = Replay(ours, first=2)
    images, done = frames(2, 0), []
    for step in range(5):
        replay(images, lambda step=step: done.append(step))
    assert done == [2, 3, 4]  # the first two were run plainly


def test_large_networks_are_not_replayed() -> None:
    tiny, base = (asc.create_model(f"asc_vit_{size}_patch4", image_size=64) for size in ("tiny", "base"))
    assert is_worth_replaying(tiny, 512, (64, 64)) and is_worth_replaying(tiny, 128, (224, 224))
    assert is_worth_replaying(base, 32, (224, 224))
    assert not is_worth_replaying(base, 64, (224, 224)) and not is_worth_replaying(tiny, 1024, (224, 224))
    base_16 = asc.create_model("asc_vit_base_patch16", image_size=224)
    for images, gains in ((128, True), (512, False)):
        assert is_worth_replaying(base_16, images, (224, 224), learns=False) == gains
        assert is_worth_replaying(base_16, images, (224, 224))


def test_without_kernels_nothing_is_replayed() -> None:
    if ON_GPU or interpreted():
        pytest.skip("kernels run here")
    ours = siamese()
    replay = Replay(ours)
    images = frames(2, 0)
    for _ in range(12):
        loss = replay(images).loss
    assert replay.recorded is None
    torch.testing.assert_close(loss, ours(images).loss)


# --- Inference --------------------------------------------------------------------------------------------


def encoder_of(**settings: object) -> asc.AscViT:
    return siamese(**settings).encoder.eval()


def pictures(images: int, seed: int, blocks: int = 4) -> Tensor:
    return frames(images, seed, blocks)[0]


@runs_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"neighbourhood": "spatial"},
        {"grouping": "bipartite"},
        {"merge": "max"},
        {"merge": "attention"},
        {"links": "best", "size_weight": 1.0, "proportional_attention": True},
        PREFIX,
        PREFIX | {"neighbourhood": "spatial", "pool": "superpixel"},
        PREFIX | {"grouping": "bipartite"},
    ],
    ids=str,
)
@torch.no_grad()
def test_replayed_features_are_those_of_the_plain_run(settings: dict[str, object]) -> None:
    plain = encoder_of(**settings)
    ours = ReplayedEncoder(copy.deepcopy(plain), first=1)
    batches = [pictures(4, seed) for seed in range(4)]
    found = [ours(images) for images in batches]
    # Compared when all are there: a replay must not write into what an earlier one gave.
    for features, images in zip(found, batches, strict=True):
        torch.testing.assert_close(features, plain(images), rtol=1e-4, atol=1e-5)
    assert ours.inference.replays == 3
    for mine, theirs in zip(ours.encoder.superpixel_layers, plain.superpixel_layers, strict=True):
        assert asdict(mine.stats()) == pytest.approx(asdict(theirs.stats()), rel=1e-4)


@runs_kernels
@torch.no_grad()
def test_images_whose_tokens_do_not_fit_have_their_features_all_the_same() -> None:
    encoder = encoder_of()
    ours = ReplayedEncoder(encoder, first=1)
    few, many = pictures(4, 0, blocks=2), torch.randn_like(pictures(4, 1))
    ours(few)
    ours(few)
    assert ours.inference.recorded is not None
    ours.inference.recorded.rooms[0] = ours.inference.recorded.rooms[0]._replace(tokens=20)
    for number in range(3):
        torch.testing.assert_close(ours(many), encoder(many))
        assert (ours.inference.recorded is None) == (number == 2)
    torch.testing.assert_close(ours(many), encoder(many), rtol=1e-4, atol=1e-5)
    assert ours.inference.recorded is not None and ours.inference.replays == 1


@runs_kernels
@torch.no_grad()
def test_other_shapes_are_run_plainly_until_they_are_the_rule() -> None:
    encoder = encoder_of()
    ours = ReplayedEncoder(encoder, first=1)
    usual, last = pictures(4, 0), pictures(3, 1)
    for _ in range(2):
        ours(usual)
    graph = ours.inference.recorded
    torch.testing.assert_close(ours(last), encoder(last))
    assert ours.inference.recorded is graph and graph is not None
    ours(usual)
    assert ours.inference.recorded is graph and ours.inference.replays == 2
    for _ in range(5):
        features = ours(last)
    torch.testing.assert_close(features, encoder(last), rtol=1e-4, atol=1e-5)
    assert ours.inference.recorded not in (None, graph) and ours.inference.replays == 1


@runs_kernels
@torch.no_grad()
def test_weights_may_change_and_move() -> None:
    encoder, images = encoder_of(), pictures(4, 0)
    ours = ReplayedEncoder(encoder, first=1)
    ours(images)
    ours(images)
    graph = ours.inference.recorded
    encoder.norm.weight.mul_(2)  # in place: the graph reads them there
    torch.testing.assert_close(ours(images), encoder(images), rtol=1e-4, atol=1e-5)
    assert ours.inference.recorded is graph and graph is not None
    encoder.norm.weight = torch.nn.Parameter(3 * encoder.norm.weight)
    for _ in range(2):
        torch.testing.assert_close(ours(images), encoder(images), rtol=1e-4, atol=1e-5)
    assert ours.inference.recorded not in (None, graph)


@runs_kernels
def test_what_is_neither_training_nor_inference_is_not_replayed() -> None:
    encoder, images = encoder_of(), pictures(4, 0)
    ours = ReplayedEncoder(encoder, first=1)
    for _ in range(3):
        features = ours(images)
    assert ours.inference.recorded is None and features.requires_grad
    with torch.inference_mode():
        for _ in range(3):
            inferred = ours(images)
    assert ours.inference.replays == 2
    with torch.no_grad():  # outside of the mode in which it was recorded
        torch.testing.assert_close(ours(images), inferred)
    assert ours.inference.replays == 3
    encoder.train()
    with torch.no_grad():
        ours(images)
    for _ in range(2):  # of the images nothing is learned as a rule
        wished = images.clone().requires_grad_()
        ours(wished).sum().backward()
        assert wished.grad is not None
    assert ours.inference.replays == 3 and ours.training.recorded is None


@runs_kernels
@torch.no_grad()
def test_broken_pixels_are_named_in_inference_too() -> None:
    ours, good = ReplayedEncoder(encoder_of(), first=1), pictures(4, 0)
    ours(good)
    ours(good)
    bad = good.clone()
    bad[2, 0, 0, 0] = float("inf")
    with pytest.raises(NonFiniteKeysError, match="images 2 of the batch"):
        ours(bad)
    torch.testing.assert_close(ours(good), ours.encoder(good), rtol=1e-4, atol=1e-5)


@runs_kernels
@torch.no_grad()
def test_threads_take_turns() -> None:
    encoder = encoder_of()
    ours = ReplayedEncoder(encoder, first=1)
    batches = [pictures(4, seed) for seed in range(3)]
    expected = [encoder(images) for images in batches]
    ours(batches[0])

    def work(number: int) -> list[Tensor]:
        with torch.no_grad():  # each thread has its own mode
            return [ours(batches[number]) for _ in range(3)]

    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(work, range(3)))
    for features, wanted in zip(found, expected, strict=True):
        for one in features:
            torch.testing.assert_close(one, wanted, rtol=1e-4, atol=1e-5)
    assert ours.inference.replays == 9


@runs_kernels
@torch.no_grad()
def test_a_plain_network_is_replayed_as_well() -> None:
    torch.manual_seed(0)
    encoder = asc.AscViT(asc.VitConfig(width=32, depth=2, heads=2, image_size=16, superpixels=None)).to(DEVICE).eval()
    ours = asc.replayed(encoder)
    images = pictures(4, 0)
    for _ in range(6):
        features = ours(images)
    torch.testing.assert_close(features, encoder(images), rtol=1e-4, atol=1e-5)
    assert ours.inference.replays == 2


@runs_kernels
@torch.no_grad()
def test_inference_that_cannot_be_recorded_goes_on_without() -> None:
    encoder, images = encoder_of(), pictures(4, 0)
    ours = ReplayedEncoder(encoder, first=1)
    ours(images)

    def refuse(*_: object) -> None:
        if encoder.superpixel_layers[0].room is not None:
            raise RuntimeError("there is no way to record this")

    encoder.norm.register_forward_pre_hook(refuse)
    with pytest.warns(UserWarning, match="not replayed.*no way to record"):
        features = ours(images)
    torch.testing.assert_close(features, encoder(images))
    assert encoder.superpixel_layers[0].room is None
    ours(images)  # and nothing is said of it again


@runs_kernels
@pytest.mark.parametrize("name", ["superpixels", "plain ViT", "timm", "Token Merging"])
@pytest.mark.parametrize("work", [Inference, TrainStep])
def test_the_benchmark_replays(work: type[Inference | TrainStep], name: str) -> None:
    shape = Shape("nano", 4, 16, most=4)
    job = work(make_encoder(name, shape), torch.device(DEVICE))
    for layer in job.encoder.superpixel_layers:
        layer.threshold.set_theta(0.9)
    job.replay(first=1)
    for _ in range(9):
        assert not job.is_settled
        job(pictures(4, 0))
    assert job.is_settled


# --- Training an encoder ----------------------------------------------------------------------------------


def learner(**settings: object) -> asc.AscViT:
    return siamese(**settings).encoder.train()


def learned(
    encoder: asc.AscViT, call: Callable[[Tensor], Tensor], batches: list[list[Tensor]], half: bool = False
) -> list[float]:
    """Losses of steps whose loss is no part of what is replayed, each of one or more micro-batches."""
    optimiser = torch.optim.SGD(encoder.parameters(), lr=0.05)
    wanted_C = torch.randn(encoder.num_features, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    losses = []
    for micro_batches in batches:
        for images in micro_batches:
            with torch.autocast("cuda", torch.bfloat16) if half else nullcontext():
                features = call(images)
            loss = (features.float() - wanted_C).square().mean()
            (loss / len(micro_batches)).backward()
            losses.append(float(loss.detach()))
        optimiser.step()
        optimiser.zero_grad(set_to_none=True)
        encoder.update_thresholds()
    return losses


def gradients_of(encoder: asc.AscViT, loss: Tensor) -> dict[str, Tensor]:
    loss.backward()
    found = {name: parameter.grad for name, parameter in encoder.named_parameters() if parameter.grad is not None}
    encoder.zero_grad(set_to_none=True)
    return found


def assert_same_encoders(one: asc.AscViT, other: asc.AscViT) -> None:
    theirs = other.state_dict()
    for name, tensor in one.state_dict().items():
        torch.testing.assert_close(tensor, theirs[name], atol=2e-5, rtol=1e-4, msg=lambda text, n=name: f"{n}: {text}")


@runs_kernels
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"neighbourhood": "spatial"},
        {"key_gradient": 1.0},
        {"threshold": "learnable"},
        {"grouping": "bipartite"},
        {"merge": "attention"},
        {"links": "best", "size_weight": 1.0, "proportional_attention": True},
        PREFIX,
    ],
    ids=str,
)
def test_an_encoder_learns_replayed_as_it_does_plainly(settings: dict[str, object]) -> None:
    plain = learner(**settings)
    ours = copy.deepcopy(plain)
    call = ReplayedEncoder(ours, first=1)
    batches = [[pictures(4, 0)], [pictures(4, 1), pictures(4, 2)], [pictures(4, 3)]]
    expected = learned(plain, plain, batches)
    assert learned(ours, call, batches) == pytest.approx(expected, rel=1e-4)
    assert call.training.replays == 3
    assert_same_encoders(ours, plain)
    for mine, theirs in zip(ours.superpixel_layers, plain.superpixel_layers, strict=True):
        assert asdict(mine.stats()) == pytest.approx(asdict(theirs.stats()), rel=1e-4)


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("settings", [{}, {"neighbourhood": "spatial"}, {"threshold": "learnable"}, PREFIX], ids=str)
def test_an_encoder_learns_in_half_precision_as_well(settings: dict[str, object], compiled: bool) -> None:
    plain = learner(**settings)
    ours = copy.deepcopy(plain)
    if compiled:
        ours.compile()
    call = ReplayedEncoder(ours, first=2)
    batches = [[pictures(16, seed)] for seed in range(12)]
    expected = learned(plain, plain, batches, half=True)
    found = learned(ours, call, batches, half=True)
    torch.cuda.synchronize()
    assert call.training.replays >= 6
    # Roundings differ, and now and then one of them a grouping.
    assert found == pytest.approx(expected, rel=0.1)
    assert found[:4] == pytest.approx(expected[:4], rel=0.02)


@runs_kernels
def test_several_calls_may_share_a_way_back() -> None:
    """The graph has room for one of them: the others are run plainly, and none writes over what it needs."""
    encoder = learner()
    call = ReplayedEncoder(encoder, first=1)
    one, other = pictures(4, 0), pictures(4, 1)
    call(one).sum().backward()
    encoder.zero_grad(set_to_none=True)
    expected = gradients_of(encoder, (encoder(one) * encoder(other)).sum())
    for _ in range(2):
        found = gradients_of(encoder, (call(one) * call(other)).sum())
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
    assert call.training.replays == 2
    # A loss that is thrown away holds nobody up.
    loss = call(one).sum()
    del loss
    call(one)
    assert call.training.replays == 4


@runs_kernels
def test_a_second_way_back_is_refused() -> None:
    """It would find nothing of what it needs; then all goes on as if it had not been asked for."""
    encoder, images = learner(), pictures(4, 0)
    call = ReplayedEncoder(encoder, first=1)
    call(images).sum().backward()
    features = call(images)
    assert call.training.replays == 1
    features.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once for every call"):
        features.square().sum().backward()
    encoder.zero_grad(set_to_none=True)
    expected = gradients_of(encoder, encoder(images).sum())
    torch.testing.assert_close(gradients_of(encoder, call(images).sum()), expected, rtol=1e-3, atol=1e-5)
    assert call.training.replays == 2


@runs_kernels
def test_gradients_are_not_written_over() -> None:
    encoder = learner()
    call = ReplayedEncoder(encoder, first=1)
    weights = [parameter for parameter in encoder.parameters() if parameter.requires_grad]
    call(pictures(4, 0)).sum().backward()
    held = torch.autograd.grad(call(pictures(4, 0)).sum(), weights, allow_unused=True)
    before = [None if each is None else each.clone() for each in held]
    call(pictures(4, 1)).square().sum().backward()
    assert call.training.replays == 2
    for now, then in zip(held, before, strict=True):
        assert now is None if then is None else torch.equal(now, then)


@runs_kernels
def test_a_batch_that_does_not_fit_is_learned_from_all_the_same() -> None:
    encoder = learner()
    call = ReplayedEncoder(encoder, first=1)
    few, many = pictures(4, 0, blocks=2), torch.randn_like(pictures(4, 1))
    call(few).sum().backward()
    call(few).sum().backward()
    assert call.training.recorded is not None
    rooms = call.training.recorded.rooms
    rooms[0] = rooms[0]._replace(tokens=min(rooms[0].tokens, 20))
    encoder.zero_grad(set_to_none=True)
    expected = gradients_of(encoder, encoder(many).square().sum())
    for number in range(3):
        torch.testing.assert_close(gradients_of(encoder, call(many).square().sum()), expected)
        assert (call.training.recorded is None) == (number == 2)


@runs_kernels
def test_what_learns_may_change() -> None:
    encoder, images = learner(), pictures(4, 0)
    call = ReplayedEncoder(encoder, first=1)
    for _ in range(2):
        call(images).sum().backward()
    graph = call.training.recorded
    encoder.blocks[0].requires_grad_(False)
    encoder.zero_grad(set_to_none=True)
    expected = gradients_of(encoder, encoder(images).sum())
    assert not any(name.startswith("blocks.0.") for name in expected)
    for _ in range(2):
        torch.testing.assert_close(gradients_of(encoder, call(images).sum()), expected, rtol=1e-3, atol=1e-5)
    assert call.training.recorded not in (None, graph)
    encoder.requires_grad_(False)
    assert not call(images).requires_grad


@runs_kernels
def test_training_and_inference_have_graphs_of_their_own() -> None:
    encoder, images = learner(), pictures(4, 0)
    call = ReplayedEncoder(encoder, first=1)
    for _ in range(3):
        encoder.train()
        call(images).sum().backward()
        encoder.eval()
        with torch.no_grad():
            torch.testing.assert_close(call(images), encoder(images), rtol=1e-4, atol=1e-5)
    assert call.training.replays == call.inference.replays == 2


@runs_kernels
def test_gradients_that_are_checkpointed_are_not_replayed() -> None:
    config = asc.VitConfig(width=32, depth=2, heads=2, image_size=16, superpixels=None, checkpoint_gradients=True)
    encoder = asc.AscViT(config).to(DEVICE).train()
    call = ReplayedEncoder(encoder, first=1)
    for _ in range(3):
        call(pictures(4, 0)).sum().backward()
    assert call.training.recorded is None and encoder.norm.weight.grad is not None


@runs_kernels
@pytest.mark.parametrize("frozen", [False, True])
def test_a_classifier_learns_replayed_as_it_does_plainly(tmp_path: Path, frozen: bool) -> None:
    asc.save(learner(), tmp_path)
    dataset = open_dataset("scenes", scene=SceneConfig(size=16, frames=2), scene_counts=(24, 8, 8))
    settings = ClassifyConfig(frozen=frozen), ViewConfig(), TrainConfig(batch=4)
    found = []
    for replay in (False, True):
        task = ClassifyTask(open_encoder(tmp_path), dataset, *settings, replay=replay).to(DEVICE).train()
        optimiser = torch.optim.SGD((each for each in task.parameters() if each.requires_grad), lr=0.05)
        losses = []
        for first in range(0, 24, 4):
            batch = task.views[list(range(first, first + 4))]
            loss = task(task.prepare(batch, torch.device(DEVICE))).loss
            loss.backward()
            losses.append(float(loss.detach()))
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            task.after_step(0.5)
        found.append((losses, task))
    (plain, _), (ours, task) = found
    assert ours == pytest.approx(plain, rel=1e-3)
    assert task._replayed is not None
    assert (task._replayed.inference if frozen else task._replayed.training).replays == 2  # after the first four


def test_encoders_that_cannot_be_replayed_are_refused() -> None:
    with pytest.raises(ValueError, match="settings of its superpixels"):
        own = asc.SuperpixelConfig(source="projection", key_gradient=1.0)
        asc.replayed(asc.create_model("asc_vit_tiny_patch16", own, image_size=64).eval())


@torch.no_grad()
def test_without_kernels_inference_is_as_ever() -> None:
    if ON_GPU or interpreted():
        pytest.skip("kernels run here")
    encoder, images = encoder_of(), pictures(4, 0)
    ours = asc.replayed(encoder)
    for _ in range(6):
        features = ours(images)
    assert ours.inference.recorded is None
    torch.testing.assert_close(features, encoder(images))
