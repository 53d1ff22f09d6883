"""Depth: scores and losses by hand, a head that learns, runs, and NYU Depth v2 in both of its forms."""

import json
import re
from pathlib import Path

import dense_runs
import h5py
import numpy as np
import pretrain_runs
import pytest
import torch
from PIL import Image
from scipy.io import savemat

from asc.data.scenes import Scene, SceneConfig
from asc.tasks.dense import DenseModel, InferenceConfig
from asc.tasks.depth.data import DepthDataConfig, open_depth_data
from asc.tasks.depth.heads import STRIDES, DepthHead, DepthHeadConfig
from asc.tasks.depth.losses import DepthLossConfig, depth_loss, edge_aware, l1, scale_invariant
from asc.tasks.depth.metrics import DepthRange, DepthScores
from asc.tasks.depth.pictures import paint_depth
from asc.tasks.depth.run import DepthEvaluateSettings, DepthPredictSettings, evaluate, open_model, predict, train
from asc.tasks.depth.task import DepthConfig, mean_depth
from asc.train import TrainingStoppedError

ALL = DepthRange(crop="none")

# --- Scores -----------------------------------------------------------------------------------------------


def test_scores_by_hand_over_all_pixels_of_all_images() -> None:
    scores = DepthScores(ALL)
    # Ratios 1, 1.2, 1.5 and 2; the last two pixels are invalid: unknown, and beyond the range.
    own = scores.add(torch.tensor([[2.0, 2.4, 3.0, 4.0, 1.0, 5.0]]), torch.tensor([[2.0, 2.0, 2.0, 2.0, 0.0, 10.0]]))
    assert own == {
        "d1": pytest.approx(2 / 4),
        "d2": pytest.approx(3 / 4),
        "d3": pytest.approx(3 / 4),
        "rms": pytest.approx(((0.4**2 + 1 + 4) / 4) ** 0.5),
        "rel": pytest.approx((0.2 + 0.5 + 1.0) / 4),
    }
    # Too near by half: relative to the truth, not to the prediction.
    assert scores.add(torch.tensor([[2.0]]), torch.tensor([[4.0]]))["rel"] == pytest.approx(0.5)
    assert scores.values() == {
        "d1": pytest.approx(2 / 5),
        "d2": pytest.approx(3 / 5),
        "d3": pytest.approx(3 / 5),
        "rms": pytest.approx(((0.4**2 + 1 + 4 + 4) / 5) ** 0.5),
        "rel": pytest.approx((0.2 + 0.5 + 1.0 + 0.5) / 5),
    }


def test_the_bounds_of_delta_are_strict_and_predictions_are_brought_into_the_range() -> None:
    truth = torch.tensor([[4.0, 4.0, 9.0]])
    values = DepthScores(ALL).add(torch.tensor([[5.0, 4.99, 99.0]]), truth)
    assert values["d1"] == pytest.approx(2 / 3)  # 5 / 4 is not below 1.25; 99 becomes 10
    assert values["rel"] == pytest.approx((0.25 + 0.99 / 4 + 1 / 9) / 3)


def test_only_the_usual_part_of_an_image_is_judged() -> None:
    truth = torch.ones(480, 640)
    inside = DepthRange().judged(truth)
    rows, columns = inside.any(1).nonzero()[:, 0], inside.any(0).nonzero()[:, 0]
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (45, 470, 41, 600)
    assert inside.sum() == 426 * 560
    half = DepthRange().judged(torch.ones(240, 320))
    rows, columns = half.any(1).nonzero()[:, 0], half.any(0).nonzero()[:, 0]
    assert (rows[0], rows[-1], columns[0], columns[-1]) == (22, 235, 20, 299)
    truth[100, 100] = 0.0
    assert DepthRange().judged(truth).sum() == 426 * 560 - 1


# --- Losses -----------------------------------------------------------------------------------------------


def test_losses_by_hand() -> None:
    depth = torch.tensor([[[2.0, 4.0]], [[1.0, 7.0]]])
    truth = torch.tensor([[[1.0, 1.0]], [[3.0, 0.0]]])
    valid = truth > 0
    assert l1(depth, truth, valid).item() == pytest.approx((1 + 3 + 2) / 3)
    one, two, three = np.log(2), np.log(4), -np.log(3)
    by_image = [(one**2 + two**2) / 2 - 0.5 * ((one + two) / 2) ** 2, three**2 - 0.5 * three**2]
    assert scale_invariant(depth, truth, valid, 0.5).item() == pytest.approx(np.mean(by_image), rel=1e-6)


def test_a_common_factor_is_forgiven_as_far_as_asked() -> None:
    truth = 1 + torch.rand(2, 5, 6, generator=torch.Generator().manual_seed(0))
    valid = torch.ones_like(truth, dtype=torch.bool)
    assert scale_invariant(3 * truth, truth, valid, 1.0).item() == pytest.approx(0, abs=1e-6)
    assert scale_invariant(3 * truth, truth, valid, 0.0).item() == pytest.approx(np.log(3) ** 2, rel=1e-5)
    assert scale_invariant(truth, truth, valid, 0.5).item() == 0


def test_steps_in_depth_cost_less_where_the_image_has_an_edge() -> None:
    depth = torch.tensor([[[1.0, 1.0, 3.0], [1.0, 1.0, 3.0]]])
    images = torch.zeros(1, 3, 2, 3)
    inside = torch.ones(1, 2, 3, dtype=torch.bool)
    # Four pairs side by side and three above each other; two of them have a step of 2 metres.
    assert edge_aware(depth, images, inside).item() == pytest.approx(2 * 2 / 7)
    images[..., 2] = 1.5
    assert edge_aware(depth, images, inside).item() == pytest.approx(2 * 2 * np.exp(-1.5) / 7)
    assert edge_aware(torch.full_like(depth, 2.0), images, inside).item() == 0
    inside[..., 2] = False  # padding
    assert edge_aware(depth, images, inside).item() == 0


def test_invalid_pixels_do_not_count_and_leave_the_gradient_finite() -> None:
    generator = torch.Generator().manual_seed(0)
    depth = (1 + torch.rand(2, 4, 4, generator=generator)).requires_grad_()
    truth = 1 + torch.rand(2, 4, 4, generator=generator)
    images = torch.rand(2, 3, 4, 4, generator=generator)
    truth[0] = 0.0
    config = DepthLossConfig(edges=0.0)
    loss = depth_loss(depth, truth, ALL.valid(truth), images, config)
    torch.testing.assert_close(loss, depth_loss(depth[1:], truth[1:], ALL.valid(truth[1:]), images[1:], config))
    loss.backward()
    assert depth.grad.isfinite().all() and (depth.grad[0] == 0).all() and (depth.grad[1] != 0).all()
    nothing = depth_loss(depth, torch.zeros_like(truth), torch.zeros_like(truth, dtype=torch.bool), images, config)
    assert nothing.item() == 0


def test_weights_of_the_losses() -> None:
    generator = torch.Generator().manual_seed(0)
    depth, truth = (1 + torch.rand(1, 4, 4, generator=generator) for _ in range(2))
    images, valid = torch.rand(1, 3, 4, 4, generator=generator), torch.ones(1, 4, 4, dtype=torch.bool)
    whole = depth_loss(depth, truth, valid, images, DepthLossConfig())
    parts = l1(depth, truth, valid), scale_invariant(depth, truth, valid, 0.5), edge_aware(depth, images, valid)
    torch.testing.assert_close(whole, 0.5 * parts[0] + parts[1] + 0.5 * parts[2])
    with pytest.raises(ValueError, match=r"loss\.l1, loss\.scale_invariant and loss\.edges"):
        DepthLossConfig(0.0, 0.0, 0.5)


# --- The head ---------------------------------------------------------------------------------------------


def test_query_grids_fit_images_of_other_sizes() -> None:
    encoder = dense_runs.tiny_encoder()
    head = DepthHead(DepthHeadConfig(channels=16, heads=2), 64, 4, (32, 32), far=10.0)
    grids = [tuple(part.queries.shape[2:]) for part in head.reassemblies]  # type: ignore[union-attr]
    assert grids == [(32 // stride, 32 // stride) for stride in STRIDES]
    model = DenseModel(encoder, head).eval()
    with torch.no_grad():
        for height, width in ((32, 32), (24, 44), (64, 32)):
            depth = model(dense_runs.scenes(2, 64)[..., :height, :width])
            assert depth.shape == (2, 1, height, width) and (depth > 0).all() and (depth < 10).all()


@pytest.mark.parametrize("skip", [False, True])
def test_queries_begin_by_looking_around_themselves(skip: bool) -> None:
    # A small change of one patch moves the cells around it most, before anything is learned.
    model = DenseModel(dense_runs.tiny_encoder(budget=None), torch.nn.Identity())
    tokens = model.levels(dense_runs.scenes(1))[0]
    torch.manual_seed(0)
    head = DepthHead(DepthHeadConfig(channels=64, heads=2, skip=skip), 64, 4, (32, 32), far=10.0)
    reassemble = head.reassemblies[0]
    for row, column in ((0, 0), (3, 5), (7, 2)):
        changed = tokens.values_TC.clone()
        changed[8 * row + column] += 1e-3 * torch.randn(64)
        with torch.no_grad():
            before, after = (reassemble(tokens.with_values(x), (32, 32), 4) for x in (tokens.values_TC, changed))
        moved = (after - before).norm(dim=1)[0]
        assert divmod(int(moved.argmax()), 8) == (row, column)
        assert moved[row, column] > 3 * moved.mean()


@pytest.mark.parametrize(("channels", "heads"), [(30, 2), (64, 7), (64, 0)])
def test_bad_shapes_of_the_head_are_named(channels: int, heads: int) -> None:
    with pytest.raises(ValueError, match=r"head\.channels must be divisible by 4 and by head\.heads"):
        DepthHeadConfig(channels=channels, heads=heads)


# --- Runs -------------------------------------------------------------------------------------------------


def learning(out: Path, encoder: str, scenes: int = 4, size: int = 32, steps: int = 100) -> DepthConfig:
    """A run that sees the scenes it is judged by, to learn them by heart."""
    return DepthConfig(
        out=out,
        encoder=encoder,
        augment=dense_runs.unchanged(size),
        range=DepthRange(far=30.0, crop="none"),
        images=DepthDataConfig(
            scenes=scenes, scenes_judged=scenes, scenes_unseen=False, scene=SceneConfig(size=size, frames=8)
        ),
        head=DepthHeadConfig(channels=64, heads=4),
        watch=dense_runs.WATCH,
        train=dense_runs.quick_training(steps, scenes, 3e-3),
        machine=dense_runs.MACHINE,
    )


def result_of(out: Path) -> dict[str, dict[str, float]]:
    return json.loads((out / "result.json").read_text())


def test_the_head_learns_a_few_scenes_and_leaves_everything_a_user_needs(tmp_path: Path) -> None:
    config = learning(tmp_path / "run", dense_runs.encoder_folder(tmp_path / "encoder"))
    train(config)
    result = result_of(config.out)
    assert result["last"]["d1"] >= 0.7 and result["last"]["rel"] < 0.65 * result["trivial"]["rel"]
    page = (config.out / "index.html").read_text()
    assert all(word in page for word in ("The worst cases", "after block 1", "prediction", "truth"))
    # Each card tells the relative error of its image; the worst comes first.
    cards = [
        (int(name), float(rel)) for name, rel in re.findall(r"<h3>scene (\d) \(train\): rel (\d+\.\d{3})</h3>", page)
    ]
    viewer = open_model(config.out / "last", InferenceConfig(), "cpu")
    pairs = open_depth_data("scenes", config.images).val
    maps = dict(viewer.predictions((number, pairs.read(number).image_HW3) for number in range(4)))
    errors = {}
    for number, maps_KHW in maps.items():
        truth_HW = pairs.read(number).truth_HW
        valid_HW = (truth_HW > 1e-3) & (truth_HW < 30)
        errors[number] = float((np.abs(maps_KHW[0].numpy() - truth_HW) / truth_HW)[valid_HW].mean())
    assert cards[0][0] == max(errors, key=errors.__getitem__) and len(cards) == 2
    assert all(rel == pytest.approx(errors[number], abs=6e-4) for number, rel in cards)
    judged = DepthEvaluateSettings(config.out, tmp_path / "judged", images=config.images, accelerator="cpu")
    found = json.loads(evaluate(judged).read_text())
    assert found["scores"]["d1"] == pytest.approx(result["best"]["d1"], abs=1e-9)


@pytest.mark.slow
def test_the_head_learns_eight_scenes_by_heart(tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", image_size=64)
    train(learning(tmp_path / "run", encoder, scenes=8, size=64, steps=450))
    assert result_of(tmp_path / "run")["last"]["d1"] >= 0.95


def short(out: Path, folder: str, **settings: object) -> DepthConfig:
    config = dense_runs.changed(
        learning(out, folder),
        train={"steps": 6},
        augment={"scale": (0.5, 2.0), "flip_probability": 0.5, "jitter_probability": 0.5},
        watch={"every": 2},
        head={"channels": 16, "heads": 2},
        images={"scenes_unseen": True},
    )
    return dense_runs.changed(config, **settings)


def test_a_stopped_run_continues_to_the_same_weights(tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "whole", encoder))
    for _ in range(2):
        with pytest.raises(TrainingStoppedError, match="the same command continues"):
            train(short(tmp_path / "stopped", encoder, machine={"stop_after": 2}))
    train(short(tmp_path / "stopped", encoder))
    for part in ("best", "last"):
        for file in ("head.safetensors", "head.json", "encoder/encoder.safetensors"):
            whole, stopped = ((tmp_path / name / part / file).read_bytes() for name in ("whole", "stopped"))
            assert whole == stopped, (part, file)
    assert result_of(tmp_path / "whole")["last"] == result_of(tmp_path / "stopped")["last"]
    assert pretrain_runs.newest_state(tmp_path / "stopped")["state"]["step"] == 6


def test_a_folder_of_images_is_predicted(tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    train(short(tmp_path / "run", encoder, train={"steps": 2}))
    (tmp_path / "images").mkdir()
    Image.fromarray(Scene(SceneConfig(size=64), 0).frame(0).image_HW3[:45]).save(tmp_path / "images" / "a.jpg")
    out = predict(DepthPredictSettings(tmp_path / "run", tmp_path / "images", tmp_path / "out", accelerator="cpu"))
    depth = np.load(out / "arrays" / "a.jpg.npy")
    assert depth.shape == (45, 64) and depth.dtype == np.float32 and (depth > 0).all() and (depth < 30).all()
    assert np.asarray(Image.open(out / "pictures" / "a.jpg.png")).shape == (45, 64, 3)


def test_pictures_are_bright_near_by_and_grey_where_nothing_is_known() -> None:
    painted = paint_depth(np.array([[0.5, 5.0, 9.5, 0.0, np.nan]]), far=10.0).astype(int).sum(2)[0]
    assert painted[0] > painted[1] > painted[2]
    assert painted[3] == painted[4] == 3 * 128


# --- NYU Depth v2 -----------------------------------------------------------------------------------------


def metres(index: int) -> np.ndarray:
    """A depth that differs at every pixel of 30 x 40."""
    return 1 + index + np.arange(1200, dtype=np.float32).reshape(30, 40) / 1000


def pixels(index: int) -> np.ndarray:
    return np.random.default_rng(index).integers(0, 255, (30, 40, 3), dtype=np.uint8)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Three images to learn from and two to be judged by, as files."""
    for part, indices in (("train", (0, 1, 2)), ("test", (3, 4))):
        for kind in ("rgb", "depth"):
            (tmp_path / "nyu" / part / kind).mkdir(parents=True)
        for index in indices:
            Image.fromarray(pixels(index)).save(tmp_path / "nyu" / part / "rgb" / f"{index:04d}.png")
            millimetres = np.rint(1000 * metres(index)).astype(np.uint16)
            Image.fromarray(millimetres).save(tmp_path / "nyu" / part / "depth" / f"{index:04d}.png")
    return tmp_path / "nyu"


@pytest.fixture
def mat(tmp_path: Path) -> Path:
    """The same in the form of the official file, whose arrays count columns before rows."""
    with h5py.File(tmp_path / "nyu_depth_v2_labeled.mat", "w") as file:
        file["images"] = np.stack([pixels(index).transpose(2, 1, 0) for index in range(5)])
        file["depths"] = np.stack([metres(index).T for index in range(5)])
        file["rawDepths"] = np.stack([np.where(metres(index).T > 1.5, metres(index).T, 0) for index in range(5)])
    parts = {"trainNdxs": np.array([[1], [2], [3]]), "testNdxs": np.array([[4], [5]])}
    savemat(tmp_path / "splits.mat", parts)
    return tmp_path


def test_folder_and_official_file_give_the_same_images(folder: Path, mat: Path) -> None:
    one, other = (open_depth_data(str(path), DepthDataConfig()) for path in (folder, mat))
    for name in ("train", "val"):
        files, arrays = getattr(one, name), getattr(other, name)
        assert len(files) == len(arrays) == (3 if name == "train" else 2)
        for index in range(len(files)):
            read = files.read(index), arrays.read(index)
            assert np.array_equal(read[0].image_HW3, read[1].image_HW3)
            np.testing.assert_allclose(read[0].truth_HW, read[1].truth_HW, atol=6e-4)
            assert read[0].truth_HW.dtype == read[1].truth_HW.dtype == np.float32
    assert np.array_equal(one.val.read(1).image_HW3, pixels(4))
    by_file = open_depth_data(str(mat / "nyu_depth_v2_labeled.mat"), DepthDataConfig(most=2, raw=True))
    assert len(by_file.train) == 2
    assert (by_file.train.read(0).truth_HW == np.where(metres(0) > 1.5, metres(0), 0)).all()


def test_mean_depth_is_that_of_the_valid_pixels(folder: Path) -> None:
    data = open_depth_data(str(folder), DepthDataConfig())
    assert mean_depth(data.train, ALL) == pytest.approx(np.mean([metres(index) for index in range(3)]), abs=1e-3)
    with pytest.raises(ValueError, match=r"has no depth between 0\.001 and 0\.5 metres"):
        mean_depth(data.train, DepthRange(far=0.5))


def test_nyu_can_be_trained_on(folder: Path, mat: Path, tmp_path: Path) -> None:
    encoder = dense_runs.encoder_folder(tmp_path / "encoder", width=32)
    for name, data in (("files", folder), ("mat", mat)):
        augment = {"size": (24, 32), "base": (30, 40), "scale": (1.0, 1.0)}
        config = short(tmp_path / name, encoder, data=str(data), train={"steps": 2, "batch": 2}, augment=augment)
        train(dense_runs.changed(config, range=DepthRange()))
        assert set(result_of(tmp_path / name)["last"]) == {"d1", "d2", "d3", "rms", "rel"}


def spoil(folder: Path, content: object) -> None:
    file = folder / "train" / "depth" / "0000.png"
    if content is None:
        file.unlink()
    elif isinstance(content, bytes):
        file.write_bytes(content)
    else:
        Image.fromarray(content).save(file)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, r"0000\.png: not a depth file that can be read"),
        (b"no picture", r"0000\.png: not a depth file that can be read"),
        (np.zeros((30, 40), np.uint16), r"0000\.png holds no valid depth at all"),
        (np.ones((30, 41), np.uint16), r"0000\.png has 41 x 30 pixels but its image .*0000\.png has 40 x 30"),
        (np.ones((30, 40), np.uint8), r"0000\.png is no 16-bit depth in millimetres: its mode is L"),
    ],
)
def test_bad_depth_files_are_named(folder: Path, content: object, message: str) -> None:
    spoil(folder, content)
    with pytest.raises(ValueError, match=message):
        open_depth_data(str(folder), DepthDataConfig()).train.read(0)


def test_other_bad_data_are_named(folder: Path, mat: Path) -> None:
    with pytest.raises(ValueError, match="is no NYU Depth v2"):
        open_depth_data(str(folder / "train"), DepthDataConfig())
    for file in (folder / "test" / "rgb").iterdir():
        file.unlink()
    with pytest.raises(ValueError, match="rgb holds no image"):
        open_depth_data(str(folder), DepthDataConfig())
    savemat(mat / "splits.mat", {"trainNdxs": np.array([[1]]), "testNdxs": np.array([[6]])})
    with pytest.raises(ValueError, match=r"splits\.mat does not fit .*which holds the images 1 to 5"):
        open_depth_data(str(mat), DepthDataConfig())
    savemat(mat / "splits.mat", {"other": np.array([[1]])})
    with pytest.raises(ValueError, match=r"splits\.mat does not name the parts"):
        open_depth_data(str(mat), DepthDataConfig())
    (mat / "splits.mat").unlink()
    with pytest.raises(ValueError, match=r"there is no .*splits\.mat"):
        open_depth_data(str(mat), DepthDataConfig())


def test_a_spoiled_official_file_is_named(mat: Path) -> None:
    (mat / "nyu_depth_v2_labeled.mat").write_bytes(b"no file")
    with pytest.raises(ValueError, match="is not the labelled file of NYU Depth v2"):
        open_depth_data(str(mat), DepthDataConfig())
    with h5py.File(mat / "nyu_depth_v2_labeled.mat", "w") as file:
        file["images"] = np.zeros((5, 3, 4, 4), np.uint8)
    with pytest.raises(ValueError, match="is not the labelled file of NYU Depth v2"):
        open_depth_data(str(mat), DepthDataConfig())


def test_what_is_enlarged_comes_nearer() -> None:
    data = open_depth_data("scenes", DepthDataConfig()).train
    truth = np.array([[4.0, 0.0, -1.0]], np.float32)
    assert data.zoomed(truth, 2.0).tolist() == [[2.0, 0.0, -1.0]]


def test_bad_ranges_are_named() -> None:
    with pytest.raises(ValueError, match=r"range\.near and range\.far must be metres"):
        DepthRange(near=2.0, far=1.0)
    with pytest.raises(ValueError, match=r"unknown range\.crop 'middle'"):
        DepthRange(crop="middle")  # type: ignore[arg-type]
