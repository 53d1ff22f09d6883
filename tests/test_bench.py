"""``asc bench``: cells that run alone, are kept and merged, and bars that are worked out from them."""

import importlib
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch.profiler import record_function
from where_time_goes import REST, part_of

import asc
from asc import VitConfig, kernels
from asc.bench import contest
from asc.bench.bars import BARS, verdicts
from asc.bench.cells import Cell, Setup, is_done, networks_of, read_cells, run_cell, take_over, write_cell
from asc.bench.components import MARGIN, exactness
from asc.bench.contest import ASC, COMPILED, EAGER, PLAIN, TIMM, TOME, Contest, Shape, fitting
from asc.bench.inputs import KINDS, Case, Source, case, network_keys, own_images
from asc.bench.measure import AttentionChoice, exponent, take_turns, warm_up
from asc.bench.peers import TimmEncoder, TokenMergingEncoder, attend, merge_most_similar
from asc.bench.report import write_report
from asc.bench.run import BenchSettings, all_cells, main, measure, run_bench
from asc.bench.together import measure_together
from asc.data import normalise
from asc.grouping.components import algorithm_1, components
from asc.settings import parse_command

CPU = torch.device("cpu")
SETUP = Setup(CPU, rounds=1, seconds=0.1, compiled=False)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("bench")
    run_bench(BenchSettings(out, quick=True))
    return out


# --- The whole command ------------------------------------------------------------------------------------


def test_quick_run_measures_every_group_on_a_cpu(quick: Path) -> None:
    cells = read_cells(quick)
    assert set(cells) == {cell.name for cell in all_cells(quick=True)}
    for cell in cells.values():
        if cell["group"] == "memory":
            assert (cell["status"], cell["reason"]) == ("skipped", "needs a GPU")
        else:
            assert cell["status"] == "measured", cell.get("traceback")
            assert not cell["results"].get("failed")
        assert cell["machine"]["versions"]["torch"] == torch.__version__
        assert (cell["machine"]["seed"], cell["machine"]["precision"]) == (0, "fp32")
    merged = json.loads((quick / "bench.json").read_text())
    assert {cell["name"]: cell for cell in merged["cells"]} == cells
    # Tiny sizes are other cells than those with bars.
    assert all(bar["passed"] is None for bar in merged["bars"])
    text = (quick / "bench.md").read_text()
    for title in (
        "Connected components",
        "One superpixel layer",
        "Training steps",
        "Inference",
        "Growth",
        "on the CPU",
    ):
        assert title in text
    with Image.open(quick / "bench.png") as picture:
        assert picture.width > 600 and len(picture.convert("L").getcolors()) > 10


def takes_its_turn(place: Path, name: str, setup: Setup) -> dict[str, float]:
    """Prepares for a while, and times for a while."""
    if name == "dies":
        os._exit(9)
    if name == "fails":
        raise ValueError("there is nothing to measure")
    time.sleep(0.3)
    prepared = time.time()
    setup.before_timing()
    begun = time.time()
    time.sleep(0.3)
    return {"prepared": prepared, "begun": begun, "ended": time.time()}


def test_cells_are_prepared_together_and_timed_one_after_another(tmp_path: Path) -> None:
    names = ["one", "dies", "two", "fails", "three"]
    cells = [Cell("step", name, {}, partial(takes_its_turn, tmp_path, name), needs_gpu=False) for name in names]
    codes = dict(measure_together([(cell, SETUP) for cell in cells], tmp_path))
    assert codes == {"one": 0, "dies": 9, "two": 0, "fails": 0, "three": 0}
    found = read_cells(tmp_path)
    assert set(found) == {"one", "two", "fails", "three"}
    assert (found["fails"]["status"], found["fails"]["reason"]) == ("failed", "there is nothing to measure")
    spans = sorted((found[name]["results"] for name in ("one", "two", "three")), key=lambda span: span["begun"])
    assert max(span["prepared"] for span in spans) <= spans[0]["begun"]
    assert all(one["ended"] <= other["begun"] for one, other in itertools.pairwise(spans))
    assert not multiprocessing.active_children()


def needs_all_the_room(name: str, setup: Setup) -> dict[str, float]:
    if multiprocessing.parent_process() is not None and name == "large":
        raise torch.OutOfMemoryError("the others take too much")
    return {}


def test_a_cell_that_finds_too_little_room_beside_others_is_measured_alone(tmp_path: Path) -> None:
    cells = [Cell("step", name, {}, partial(needs_all_the_room, name), needs_gpu=False) for name in ("small", "large")]
    assert list(measure([(cell, SETUP) for cell in cells], tmp_path)) == [("small", 0), ("large", 0)]
    assert {cell["status"] for cell in read_cells(tmp_path).values()} == {"measured"}


def test_rows_of_cells_are_prepared_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    settings = BenchSettings(tmp_path, only=("step", "inference", "memory", "growth"), quick=True, together=3)
    run_bench(settings)
    cells = read_cells(tmp_path)
    assert {name.split("-")[0] for name in cells} == {"step", "inference", "memory", "growth"}
    measured = {name: cell["status"] == "measured" for name, cell in cells.items()}
    assert [name for name, well in measured.items() if not well] == [name for name in cells if "memory" in name]
    assert "memory-nano-patch4-32px: skipped: needs a GPU" in capfd.readouterr().out
    with pytest.raises(ValueError, match="together must be at least 1, got 0"):
        run_bench(replace(settings, together=0))


def test_contestants_of_a_step_work_on_the_tokens_they_should(quick: Path) -> None:
    for name in ("step-train-nano-patch4-32px", "step-pretrain-nano-patch4-32px", "inference-nano-patch4-32px"):
        found = read_cells(quick)[name]["results"]
        assert found["batch"] == 4
        tokens = {name: contestant["tokens"] for name, contestant in found["contestants"].items()}
        assert tokens[PLAIN] == tokens[TIMM] == [64.0] * 12
        # The default budget: blocks work on 0.4 of the tokens, on average; mergers keep as many, block by block.
        assert np.mean(tokens[ASC]) / 64 == pytest.approx(0.4, abs=0.04)
        np.testing.assert_allclose(tokens[TOME], tokens[ASC], atol=1.5)
        assert all(c["images_per_s"] == pytest.approx(4e3 / c["ms"]) for c in found["contestants"].values())


def test_killed_in_the_middle_it_goes_on_with_what_is_missing(tmp_path: Path) -> None:
    words = ["--quick", "--only", "components", "growth", "cpu", "--out", str(tmp_path)]
    wanted = {cell.name for cell in all_cells(quick=True) if cell.group in ("components", "growth", "cpu")}
    running = subprocess.Popen(
        [sys.executable, "-m", "asc.bench.run", *words],
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    try:
        end = time.monotonic() + 60
        while not list(tmp_path.glob("cells/*.json")) and time.monotonic() < end:
            time.sleep(0.02)
    finally:
        running.kill()
        running.wait()
    kept = {file: file.read_bytes() for file in tmp_path.glob("cells/*.json")}
    assert 0 < len(kept) < len(wanted)
    assert main(words) == 0
    assert set(read_cells(tmp_path)) == wanted
    assert all(file.read_bytes() == content for file, content in kept.items())


def test_a_cell_that_is_there_is_measured_again_only_if_asked(tmp_path: Path) -> None:
    settings = BenchSettings(tmp_path, only=("cpu-*-random",), quick=True)
    times = []
    for again in (False, False, True):
        run_bench(BenchSettings(tmp_path, settings.only, again, quick=True))
        (cell,) = read_cells(tmp_path).values()
        times.append(cell["seconds"])
    assert times[0] == times[1] != times[2]


def test_cells_of_several_folders_are_merged(quick: Path, tmp_path: Path) -> None:
    cells = read_cells(quick)
    for number, answer in enumerate(cells.values()):
        write_cell(tmp_path / ("one", "other")[number % 2], answer)
    # Elsewhere there was no GPU: what was measured beats it, wherever it lies.
    lost = next(iter(read_cells(tmp_path / "other").values()))
    write_cell(tmp_path / "one", lost | {"status": "skipped", "reason": "needs a GPU", "results": None, "when": "9999"})
    run_bench(BenchSettings(tmp_path / "one", merge=(tmp_path / "other",), minutes=0, quick=True))
    assert read_cells(tmp_path / "one") == cells
    newer = lost | {"when": "9999"}
    take_over(tmp_path / "one", {lost["name"]: newer})
    assert read_cells(tmp_path / "one")[lost["name"]] == newer
    take_over(tmp_path / "one", {lost["name"]: lost})
    assert read_cells(tmp_path / "one")[lost["name"]] == newer


def test_networks_can_see_images_of_ones_own(tmp_path: Path) -> None:
    folder = tmp_path / "photographs"
    folder.mkdir()
    wide_HW3 = np.zeros((40, 60, 3), np.uint8)
    wide_HW3[:, 10:50, 0] = 255  # the central square is red
    Image.fromarray(wide_HW3).save(folder / "a.png")
    images_B3HW = own_images(folder, 3, 32, CPU)
    red_1HW3 = np.broadcast_to(np.array([255, 0, 0], np.uint8), (1, 32, 32, 3))
    torch.testing.assert_close(images_B3HW, normalise(red_1HW3.copy()).expand(3, -1, -1, -1))

    settings = BenchSettings(tmp_path / "out", only=("inference",), quick=True, networks=("plain ViT",))
    run_bench(replace(settings, images=folder))
    (cell,) = read_cells(tmp_path / "out").values()
    # One colour everywhere: few tokens stay, where scenes keep the budget's share.
    assert cell["results"]["images"] == str(folder) and str(folder) in (tmp_path / "out" / "bench.md").read_text()
    entering = cell["results"]["contestants"]["superpixels"]["tokens"]
    run_bench(settings)
    (again,) = read_cells(tmp_path / "out").values()
    assert again["when"] >= cell["when"] and again["results"]["images"] == "embedded scenes"
    assert again["results"]["contestants"]["superpixels"]["tokens"] != entering


def test_keys_can_be_those_of_ones_own_encoder_and_images(tmp_path: Path) -> None:
    model = asc.AscViT(VitConfig(width=128, depth=2, heads=2, patch_size=2, image_size=16, superpixels=None)).eval()
    asc.save(model, tmp_path / "encoder")
    pixels = np.random.default_rng(0).integers(0, 256, (2, 8, 8, 3), dtype=np.uint8)
    for name, image_HW3 in zip("ab", pixels, strict=True):
        Image.fromarray(image_HW3).save(tmp_path / f"{name}.png")
    source = Source(tmp_path, str(tmp_path / "encoder"))
    # 16 tokens are 4 x 4 patches: images of 8 pixels, as they are.
    found = network_keys(2, 16, 64, CPU, source)
    with torch.no_grad():
        normed = model.blocks[0].norm1(model._embed(normalise(pixels)).values_TC)
        heads = model.blocks[0].attn.qkv(normed)[:, 128:256].unflatten(1, (2, 64))
    torch.testing.assert_close(found, heads.mean(1))

    with pytest.raises(ValueError, match="have 64 channels, this cell wants 32"):
        network_keys(2, 16, 32, CPU, source)
    measured = {"status": "measured", "results": source.record}
    cell = Cell("components", "a", {}, lambda _: {})
    assert is_done(measured, cell, replace(SETUP, source=source))
    assert not is_done(measured, cell, replace(SETUP, source=source._replace(encoder=None)))


def test_networks_that_a_cell_lacks_join_those_that_it_has(tmp_path: Path) -> None:
    settings = BenchSettings(tmp_path, only=("inference",), quick=True, networks=("plain ViT",))
    run_bench(settings)
    # Only who took part is spoken of.
    text = (tmp_path / "bench.md").read_text()
    assert "the plain ViT (superpixels / plain ViT)" in text and "None" not in text
    run_bench(replace(settings, networks=("timm",)))
    (cell,) = read_cells(tmp_path).values()
    assert set(cell["results"]["contestants"]) == {ASC, PLAIN, TIMM}
    run_bench(replace(settings, networks=()))
    (cell,) = read_cells(tmp_path).values()
    assert set(cell["results"]["contestants"]) == set(EAGER)
    assert networks_of(cell, replace(SETUP, networks=("timm",))) == ()


def test_when_time_is_over_no_cell_is_begun(tmp_path: Path) -> None:
    run_bench(BenchSettings(tmp_path, minutes=0, quick=True))
    assert read_cells(tmp_path) == {}
    assert "not measured" in (tmp_path / "bench.md").read_text()


def test_options_without_the_command_line_library() -> None:
    assert parse_command(BenchSettings, "asc", []) == BenchSettings()
    words = ["--out", "there", "--only", "layer", "cpu", "--minutes", "2.5", "--quick"]
    words += ["--merge", "a", "b", "--no-compile", "--seed", "3"]
    assert parse_command(BenchSettings, "asc", words) == BenchSettings(
        Path("there"), ("layer", "cpu"), merge=(Path("a"), Path("b")), minutes=2.5, quick=True, compile=False, seed=3
    )


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in (
        (["--only", "layers"], "only: 'layers' is neither a group"),
        (["--merge", str(tmp_path / "empty")], "merge: there are no cells"),
        (["--device", "tpu"], "device must be"),
        (["--images", str(tmp_path / "none")], "there is no folder"),
        (["--encoder", str(tmp_path / "none")], "there is no encoder"),
        (["--encoder", "timm:vit_tiny_patch16_224"], "must be a network of ours"),
    ):
        assert main(["--out", str(tmp_path), *words]) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "cells").mkdir()
    (tmp_path / "cells" / "odd.json").write_text("{")
    assert main(["--out", str(tmp_path), "--minutes", "0"]) == 2
    assert "odd.json is no cell" in capsys.readouterr().err


# --- Cells that go wrong ----------------------------------------------------------------------------------


def test_what_goes_wrong_is_recorded_with_its_reason(tmp_path: Path) -> None:
    def fails(setup: Setup) -> dict[str, object]:
        raise RuntimeError("no such kernel")

    def too_large(setup: Setup) -> dict[str, object]:
        raise torch.OutOfMemoryError("tried to allocate 7 TiB")

    answers = [
        run_cell(Cell("layer", "a", {}, fails, needs_gpu=False), SETUP),
        run_cell(Cell("layer", "b", {}, too_large, needs_gpu=False), SETUP),
        run_cell(Cell("layer", "c", {}, fails), SETUP),
    ]
    expected = [
        ("failed", "RuntimeError: no such kernel"),
        ("out of memory", "OutOfMemoryError: tried to allocate 7 TiB"),
        ("skipped", "needs a GPU"),
    ]
    assert [(answer["status"], answer["reason"]) for answer in answers] == expected
    for answer in answers:
        write_cell(tmp_path, answer)
    write_report(tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert all(f"| {status} | {reason} |" in text for status, reason in expected)


def test_only_what_lacked_a_gpu_is_tried_again() -> None:
    def never(setup: Setup) -> dict[str, object]:
        raise AssertionError

    cell = Cell("layer", "a", {}, never)
    on_gpu = Setup(torch.device("cuda"))
    skipped, failed = {"status": "skipped"}, {"status": "failed"}
    assert not is_done(None, cell, SETUP)
    assert is_done(skipped, cell, SETUP) and not is_done(skipped, cell, on_gpu)
    assert is_done(failed, cell, SETUP) and is_done(failed, cell, on_gpu)
    without = {"status": "measured", "results": {"compiled": False}}
    assert is_done(without, cell, SETUP) and not is_done(without, cell, on_gpu)
    # What was measured with some networks serves those alone.
    some = {"status": "measured", "results": {"compiled": True, "networks": ["plain ViT", "timm"]}}
    assert is_done(some, cell, replace(SETUP, networks=("timm",)))
    assert not is_done(some, cell, replace(SETUP, networks=("timm", "Token Merging"))) and not is_done(
        some, cell, SETUP
    )
    every = {"status": "measured", "results": {"compiled": True, "networks": []}}
    assert is_done(every, cell, SETUP) and is_done(every, cell, replace(SETUP, networks=("timm",)))


def test_a_contestant_that_fails_leaves_the_others() -> None:
    working, failed = warm_up({"good": lambda: 1, "bad": lambda: 1 // 0})
    assert list(working) == ["good"] and isinstance(failed["bad"], ZeroDivisionError)


# --- Measuring --------------------------------------------------------------------------------------------


def test_attention_kernels_are_compared_at_the_size_that_peers_use_them(monkeypatch: pytest.MonkeyPatch) -> None:
    tried, real = [], contest.choose_attention

    def choose(shape_BHND: tuple[int, int, int, int], device: torch.device, grad: bool) -> AttentionChoice:
        found = real(shape_BHND, device, grad)._replace(fastest=f"of {shape_BHND[2]} tokens")
        tried.append(shape_BHND)
        return found

    monkeypatch.setattr(contest, "choose_attention", choose)
    # Who runs with which does not matter here, and names that are none could not be used.
    monkeypatch.setattr(contest, "attention_kernel", lambda name: nullcontext())
    made = Contest(Shape("nano", 4, 32, most=32), "inference", SETUP)
    assert made.run() == 32
    # Heads of 16 channels; Token Merging adds 8 for sizes, and has merged all but in its first blocks.
    left = tried[-1][2]
    assert tried == [(32, 3, 64, 16), (32, 3, left, 24)] and left == pytest.approx(made.tokens_after[-1], abs=2)
    kernels = {name: contestant.kernel for name, contestant in made.running.items()}
    assert kernels[ASC] is None and kernels[TOME] == f"of {left} tokens"
    assert kernels[PLAIN] == kernels[TIMM] == "of 64 tokens"


def test_contestants_take_turns() -> None:
    called = []

    def wait(name: str, seconds: float) -> None:
        called.append(name)
        time.sleep(seconds)

    functions = {"short": lambda: wait("short", 0.03), "long": lambda: wait("long", 0.09)}
    timings = take_turns(functions, CPU, rounds=3, seconds=10, calls=2)
    assert called == ["short", "short", "long", "long"] * 4  # a round to warm up, three that count
    assert timings["short"].samples == 3
    assert 30 <= timings["short"].ms < 60 and 90 <= timings["long"].ms < 180


def test_exponent_of_a_power_law() -> None:
    sizes = [256, 1024, 4096]
    assert exponent(sizes, [3e-9 * size**1.7 for size in sizes]) == pytest.approx(1.7)


def test_images_that_fit() -> None:
    # 2 images need 5 GB and 4 need 8: 1.5 GB each and 2 GB for the weights. 50 GB hold 32 of them.
    assert fitting(5.0, 8.0, 50.0) == 32
    assert fitting(5.0, 8.0, 49.9) == 31


@pytest.mark.parametrize("kind", KINDS)
def test_cases_keep_what_the_budget_asks_for(kind: str) -> None:
    made = case(kind, 3, 64, 16, CPU)
    torch.testing.assert_close(made.features_TD.norm(dim=1), torch.ones(3 * 64))
    labels = components(made.features_TD, made.cu_seqlens, made.theta)
    # A chain is one component, the hardest there is; others keep what a layer keeps under the default budget.
    kept = len(labels.unique()) / (3 * 64)
    assert kept == pytest.approx(1 / 64 if kind == "chain" else 0.73, abs=0.02)


def test_exactness_agrees_with_scipy_on_dense_matrices() -> None:
    from scipy.sparse.csgraph import connected_components

    made = case("image", 2, 64, 16, CPU)
    theta, expected, close = float(made.theta), [], 0
    for features in made.features_TD.double().view(2, 64, 16).numpy():
        similarity = features @ features.T
        _, labels = connected_components(similarity > theta, directed=False)
        expected += [int(np.flatnonzero(labels == label)[0]) + 64 * (len(expected) // 64) for label in labels]
        close += sum(abs(similarity[i, j] - theta) <= MARGIN for i in range(64) for j in range(i))
    right = torch.tensor(expected)
    assert exactness(made, right) == (0, close, 0)
    # Every token of a component of two or more becomes its own: those that lose their label are counted.
    alone = torch.arange(128)
    assert exactness(made, alone).differ == int((right != alone).sum()) > 0


def test_differences_are_explained_by_close_pairs_alone() -> None:
    # Three directions: the first two at a similarity just above θ, the third far away.
    theta = 0.9
    angles = torch.tensor([0.0, np.arccos(theta + MARGIN / 2), 2.0], dtype=torch.float64)
    features = torch.stack([angles.cos(), angles.sin()], dim=1)
    made = Case(features, torch.tensor([0, 3], dtype=torch.int32), torch.tensor(theta, dtype=torch.float64), 3)
    assert exactness(made, torch.tensor([0, 0, 2])) == (0, 1, 0)
    assert exactness(made, torch.tensor([0, 1, 2])) == (1, 1, 0)
    assert exactness(made, torch.tensor([0, 0, 0])) == (1, 1, 1)
    clear = made._replace(theta=torch.tensor(theta - 0.1, dtype=torch.float64))
    assert exactness(clear, torch.tensor([0, 1, 2])) == (1, 0, 1)
    assert algorithm_1((features @ features.T > theta).numpy()).tolist() == [0, 0, 2]


def test_token_merging_equals_a_loop() -> None:
    torch.manual_seed(0)
    values, keys = torch.randn(2, 9, 5), torch.randn(2, 9, 4)
    sizes = torch.randint(1, 4, (2, 9, 1)).float()
    merged, merged_sizes = merge_most_similar(values, sizes, keys, fewer=3)
    assert merged.shape == (2, 6, 5)
    for image in range(2):
        unit = F.normalize(keys[image], dim=1)
        partner = {a: max(range(1, 9, 2), key=lambda b: float(unit[a] @ unit[b])) for a in range(0, 9, 2)}
        joining = sorted(partner, key=lambda a: -float(unit[a] @ unit[partner[a]]))
        groups = [[a] for a in joining[3:]]
        groups += [[b] + [a for a in joining[:3] if partner[a] == b] for b in range(1, 9, 2)]
        for place, group in enumerate(groups):
            weights = sizes[image, group]
            torch.testing.assert_close(merged[image, place], (values[image, group] * weights).sum(0) / weights.sum())
            assert merged_sizes[image, place] == weights.sum()


def test_token_merging_attends_as_if_every_patch_were_there() -> None:
    torch.manual_seed(0)
    config = VitConfig(width=32, heads=2, depth=2, image_size=16, patch_size=4)
    block = TimmEncoder(config).vit.blocks[0]
    values, sizes = torch.randn(1, 5, 32), torch.tensor([1, 4, 2, 1, 3])
    ours, keys = attend(block, values, sizes.float()[None, :, None])
    repeated, repeated_keys = attend(block, values.repeat_interleave(sizes, dim=1), None)
    first = sizes.cumsum(0) - sizes
    torch.testing.assert_close(ours, repeated[:, first])
    torch.testing.assert_close(keys, repeated_keys[:, first])
    # The whole network: sizes count from the first merge on.
    images = torch.randn(2, 3, 16, 16)
    networks = {by_size: TokenMergingEncoder(config, [12, 8], by_size).eval() for by_size in (False, True)}
    networks[True].load_state_dict(networks[False].state_dict())
    equal, proportional = (networks[by_size](images) for by_size in (False, True))
    assert equal.shape == (2, 32) and not torch.allclose(equal, proportional, atol=1e-4)
    for network in networks.values():
        network.tokens_after = [16, 16]
    torch.testing.assert_close(networks[True](images), networks[False](images))


# --- Bars -------------------------------------------------------------------------------------------------


def made_up(name: str, group: str, results: dict[str, object], **settings: object) -> dict[str, object]:
    machine = {"versions": {"torch": "9"}, "seed": 0, "threads": 1, "device": "a GPU", "precision": "bf16 autocast"}
    machine |= {"memory_gb": 100, "cuda": "99"}
    answer = {"name": name, "group": group, "settings": settings, "status": "measured", "reason": None}
    return answer | {"results": results, "machine": machine, "when": "2030"}


def component_cell(kind: str, ms: float, outside: int) -> dict[str, object]:
    times = {"kernel": {"ms": ms}, "bmm": {"ms": 0.3}}
    exact = {"differ": outside, "close_pairs": 7, "outside": outside}
    results = {"times": times, "failed": {"torch": "too large"}, "floor_ms": 0.1, "kept": 0.7} | exact
    return made_up(f"components-64x3136x64-{kind}", "components", results, kind=kind, batch=64, count=3136, width=64)


def step_cell(rates: dict[str, float], peaks: dict[str, float]) -> dict[str, object]:
    contestants = {
        name: {"images_per_s": rate, "ms": 1.0, "peak_gb": peaks[name], "tokens": [1.0]} for name, rate in rates.items()
    }
    results = {"batch": 8, "contestants": contestants, "failed": {}}
    results |= {"attention_kernel": {"fastest": "FLASH"}, "attention_kernel_of_mergers": {"fastest": "CUDNN"}}
    shape = {"work": "pretrain", "size": "tiny", "patch": 4, "pixels": 224}
    return made_up("step-pretrain-tiny-patch4-224px", "step", results, **shape)


def test_bars_are_judged_by_the_numbers_of_the_cells(tmp_path: Path) -> None:
    compiled = ASC + COMPILED, TIMM + COMPILED
    rates = {ASC: 240.0, compiled[0]: 300.0, PLAIN: 100.0, compiled[1]: 125.0, TOME: 310.0}
    peaks = {ASC: 9.0, compiled[0]: 10.0, PLAIN: 21.0, compiled[1]: 16.0, TOME: 11.0}
    layer_times = {
        "forward": {"layer": {"ms": 0.2}, "attention": {"ms": 0.5}},
        "both": {"layer": {"ms": 0.5}, "attention": {"ms": 1.0}},
    }
    kernel = {"usual": "FLASH", "fastest": "CUDNN"}
    layer = made_up(
        "layer-tiny-3136-spatial",
        "layer",
        {"times": layer_times, "failed": {}, "kept": 0.7, "attention_kernel": kernel},
        **{"network": "tiny", "batch": 64, "count": 3136, "neighbourhood": "spatial"},
    )
    fit = {
        "time_exponent": 2.004,
        "last_time_exponent": 2.1,
        "memory_exponent": 1.02,
        "peak_mb": [1.0],
        "times": {"256": {"ms": 1.0}},
    }
    growth = made_up(
        "growth-tokens-256-16384", "growth", fit, grows="tokens", shapes=[[4, 256]], sizes=[256], kind="image"
    )
    found = {ASC: {"peak_gb": 12.0, "gb_per_image": 0.15, "images_that_fit": 900}}
    memory = made_up(
        "memory-tiny-patch4-224px",
        "memory",
        {"batch": 64, "contestants": found, "failed": {}},
        **{"size": "tiny", "patch": 4, "pixels": 224},
    )
    failed = component_cell("chain", 0.1, 0) | {"status": "out of memory", "reason": "too large", "results": None}
    for answer in (
        component_cell("random", 0.45, 0),
        component_cell("image", 0.46, 3),
        failed,
        step_cell(rates, peaks),
        layer,
        growth,
        memory,
    ):
        write_cell(tmp_path, answer)
    judged = {(v.bar.cell, v.bar.what.split(": ")[1]): (v.value, v.passed) for v in verdicts(read_cells(tmp_path))}
    step, ms = "step-pretrain-tiny-patch4-224px", "components-64x3136x64"
    # The fastest of ours (300) over the fastest plain network (125): 2.4 of 2.5; its memory: 10 / 16.
    assert judged[step, "× images/s of the plain ViT"] == (2.4, False)
    assert judged[step, "× peak memory of the plain ViT"] == (0.625, False)
    assert judged[step, "× images/s of Token Merging"] == (300 / 310, False)
    assert judged[f"{ms}-random", "ms"] == (0.45, True)
    assert judged[f"{ms}-image", "ms"] == (0.46, False)
    assert judged[f"{ms}-image", "tokens whose label rounding does not explain"] == (3, False)
    assert judged[f"{ms}-chain", "ms"] == (None, None)
    growths = [v for v in verdicts(read_cells(tmp_path)) if v.bar.cell == "growth-tokens-256-16384"]
    assert [(v.value, v.passed) for v in growths] == [(2.0, True), (1.02, False)]
    layers = [v for v in verdicts(read_cells(tmp_path)) if v.bar.cell == "layer-tiny-3136-spatial"]
    assert [(v.value, v.passed) for v in layers] == [(0.4, True), (0.5, False)]
    write_report(tmp_path)
    text = (tmp_path / "bench.md").read_text()
    assert "| pre-training step, tiny/4, 224 px: × images/s of the plain ViT | ≥ 2.5 | 2.400 | **FAIL** |" in text
    assert "| components, 64 × 3,136 × 64, random keys: ms | ≤ 0.45 | 0.450 | pass |" in text
    assert "| – | not measured (out of memory: too large) |" in text
    assert "torch could not take part: too large" in text
    assert "| tiny/4, 224 px | superpixels | 64 | 12.00 | 0.1500 | 900 |" in text


def test_a_bar_is_passed_from_its_limit_on(tmp_path: Path) -> None:
    write_cell(tmp_path, step_cell({ASC: 250.0, TIMM: 100.0, TOME: 250.0}, {ASC: 1.0, TIMM: 2.0, TOME: 1.0}))
    own = [v for v in verdicts(read_cells(tmp_path)) if v.bar.cell == "step-pretrain-tiny-patch4-224px"]
    assert [(v.value, v.passed) for v in own] == [(2.5, True), (0.5, True), (1.0, True)]


def test_a_bar_needs_its_peers(tmp_path: Path) -> None:
    cell = step_cell({ASC: 250.0, TOME: 250.0}, {ASC: 1.0, TOME: 1.0})
    name = cell["name"]
    cell["results"] |= {"failed": {PLAIN: "too slow", TIMM: "too old"}}
    own = [v for v in verdicts({name: cell}) if v.bar.cell == name]
    assert [v.passed for v in own] == [None, None, True]
    assert own[2].note == "without plain ViT, timm"
    # Nor can those speak that were not asked.
    cell["results"] |= {"failed": {}, "networks": [TOME]}
    assert verdicts({name: cell})[BARS.index(own[2].bar)].note == "without plain ViT, timm, pairs (ours)"
    # Peers that were not compiled are not at their best.
    cell["results"] |= {"compiled": False}
    assert {v.passed for v in verdicts({name: cell})} == {None}


def test_every_kernel_counts_towards_its_part_of_a_step() -> None:
    sources = Path(next(iter(kernels.__path__))).glob("*.py")
    launched = {name for source in sources for name in re.findall(r"\b(?:launch|_run)\(\s*(_\w+)", source.read_text())}
    assert len(launched) > 25
    # Pooling, augmentation, activations and the sums of bias gradients are no parts of their own.
    rest = {"_mean", "_mean_grad", "_recolour", "_gelu", "_gelu_backward", "_column_sums"}
    assert {name for name in launched if part_of(name) == REST} == rest
    assert part_of("_fuse_many") == "merging" and part_of("_choose_rows") == "gradient of θ"


def test_memory_of_a_step_is_counted_by_its_phases(monkeypatch: pytest.MonkeyPatch) -> None:
    # The module sets it for itself; here it is taken back afterwards.
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", os.environ.get("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16"))
    peaks_of = importlib.import_module("step_memory").peaks_of

    def step() -> None:
        with record_function("forward"):
            kept = torch.ones(1_000_000)
            torch.ones(500_000)
        with record_function("backward"):
            torch.ones(2_000_000)
        with record_function("optimiser"):
            del kept
            torch.ones(10)

    # 4 bytes a number: what is kept counts on, what is gone does not.
    expected = {"forward": 6e6, "backward": 12e6, "optimiser": 4e6}
    found = peaks_of(step)
    assert {phase: round(peak, -6) for phase, peak in found.items()} == expected
