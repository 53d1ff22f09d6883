"""The token budget: shares under a fixed total, their derivative, the controllers, several processes."""

import copy
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from budget_control import PATCHES, STARTS, augmented, clean, frame_pairs, small_model, token_share, train, trained

import asc
from asc.grouping.budget import TokenBudget, allocate, equal_keep, mean_share
from asc.grouping.threshold import Threshold


def test_equal_shares_meet_the_budget() -> None:
    keep = equal_keep(0.4, range(12), 12)
    # By hand: the mean of the geometric series 1, k, k², … k¹¹.
    assert (1 - keep**12) / (1 - keep) / 12 == pytest.approx(0.4)
    assert keep == pytest.approx(0.808, abs=1e-3)


@pytest.mark.parametrize(("blocks", "depth"), [(range(12), 12), ((0, 3, 7), 12), ((2, 4), 6)])
def test_any_allocation_meets_the_budget_and_respects_the_floor(blocks: tuple[int, ...], depth: int) -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        allocation = rng.normal(0, 2, len(blocks))
        keep, _ = allocate(allocation, 0.7, blocks, depth, floor=0.3)
        assert mean_share(keep, blocks, depth) == pytest.approx(0.7, abs=1e-6)
        assert (keep >= 0.3).all() and (keep < 1).all()
        assert (np.argsort(allocation) == np.argsort(-keep)).all()  # more allocation, more merging


def test_derivative_of_the_shares_equals_finite_differences() -> None:
    rng = np.random.default_rng(1)
    allocation = rng.normal(0, 0.5, 6)
    _, jacobian = allocate(allocation, 0.5, range(6), 6, floor=0.2)
    for index in range(6):
        step = np.zeros(6)
        step[index] = 1e-5
        up, down = (allocate(allocation + sign * step, 0.5, range(6), 6, 0.2)[0] for sign in (1, -1))
        assert jacobian[:, index] == pytest.approx((up - down) / 2e-5, abs=1e-6)


def test_gradient_of_theta_reaches_the_allocation_through_the_shares() -> None:
    budget = TokenBudget(0.4, range(6), 6, floor=0.5, learn=True)
    with torch.no_grad():
        budget.allocation.copy_(torch.tensor([0.3, -0.2, 0.1, 0.0, 0.4, -0.5]))
    budget.refresh()
    weight = torch.randn(6, generator=torch.Generator().manual_seed(0))
    thresholds = [Threshold("budget", "cosine", 0.9) for _ in range(6)]
    thetas = torch.stack(
        [threshold.theta(target) for threshold, target in zip(thresholds, budget.targets(), strict=True)]
    )
    assert thetas.tolist() == pytest.approx([0.9] * 6)
    (thetas * weight).sum().backward()
    # One step against that gradient must raise the shares where a higher θ is wanted, at equal budget.
    moved = budget.allocation.detach() - 1e-3 * budget.allocation.grad
    keep, _ = allocate(moved.double().numpy(), 0.4, range(6), 6, budget.floor)
    change = torch.from_numpy(keep).float() - budget.targets_L
    assert (change * weight).sum() < 0
    assert mean_share(keep, range(6), 6) == pytest.approx(0.4)


def test_controller_settles_from_anywhere_on_a_known_curve() -> None:
    rng = np.random.default_rng(0)
    for start in (-0.5, 0.0, 0.9, 0.999):
        for centre in (0.2, 0.9, 0.99):
            threshold = Threshold("budget", "cosine", start, keep=0.8)
            late = []
            for step in range(120):
                # A sigmoid in u with the slope of real blocks (about 3), read with the noise of a small batch.
                share = 1 / (1 + np.exp(3 * (float(threshold.u) - np.log(1 - centre)) + 0.2 * rng.normal()))
                threshold.control(share)
                late += [share] if step >= 90 else []
            assert np.mean(late) == pytest.approx(0.8, abs=0.02)


def test_controller_does_not_swing_where_a_few_tokens_answer_steeply() -> None:
    threshold = Threshold("budget", "cosine", 0.5, keep=0.6)
    late = []
    for step in range(200):
        share = 1 / (1 + np.exp(30 * (float(threshold.u) - np.log(1.5))))
        threshold.control(share)
        late += [share] if step >= 150 else []
    # With the full gain it would jump between 0 and 1 for ever.
    assert min(late) > 0.1 and max(late) < 0.95
    assert np.mean(late) == pytest.approx(0.6, abs=0.05)


def test_controllers_count_all_micro_batches_and_only_training() -> None:
    model, frames = small_model(asc.SuperpixelConfig()), frame_pairs()
    model.calibrate(clean(frames[:8, 0]))
    layer = model.superpixel_layers[0]
    model.eval()(clean(frames[:4, 0]))
    assert layer.threshold.tokens_in == 0
    model.train()
    for first in (0, 4):
        model(clean(frames[first : first + 4, 0]))
    assert layer.threshold.tokens_in == 8 * PATCHES
    before = layer.threshold.u.clone()
    model.update_thresholds()
    assert layer.threshold.tokens_in == 0 and layer.threshold.u != before
    unchanged = layer.threshold.u.clone()
    model.update_thresholds()  # nothing counted: nothing moves
    assert layer.threshold.u == unchanged


def check_training(start: float, neighbourhood: str, seed: int) -> None:
    frames = frame_pairs()
    model = trained(start, neighbourhood, frames, seed)
    # The controllers see augmented frames only, in which crops have enlarged things; clean ones keep more tokens.
    for name, images, error in (("augmented", augmented(frames[:, 0]), 0.1), ("clean", clean(frames[:, 0]), 0.15)):
        assert token_share(model, images) == pytest.approx(0.4, rel=error), name
        for block, stats in model.diagnostics().items():
            assert stats.tokens_mean > 1.3 and stats.largest_share < 0.95, (name, block, stats)
    # The allocation has been learned, not just kept.
    assert model.budget.allocation.abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
@pytest.mark.parametrize(("start", "neighbourhood"), [(-0.5, "global"), (0.999, "spatial")])
def test_budget_holds_in_training_from_any_start_and_after_a_jump(start: float, neighbourhood: str) -> None:
    check_training(start, neighbourhood, seed=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("neighbourhood", ["global", "spatial"])
@pytest.mark.parametrize("start", STARTS)
def test_budget_holds_from_every_start(start: float, neighbourhood: str, seed: int) -> None:
    check_training(start, neighbourhood, seed)


def test_thresholds_and_controller_state_live_in_the_checkpoint(tmp_path: Path) -> None:
    frames, model = frame_pairs(), small_model(asc.SuperpixelConfig())
    model.calibrate(clean(frames[:8, 0]))
    for _ in train(model, frames, steps=3):
        pass
    asc.save(model, tmp_path)
    loaded = asc.load(tmp_path)
    assert all(bool(layer.threshold.calibrated) for layer in loaded.superpixel_layers)
    for ours, theirs in zip(model.superpixel_layers, loaded.superpixel_layers, strict=True):
        for name, value in ours.threshold.state_dict().items():
            assert torch.equal(value, theirs.threshold.state_dict()[name]), name
    assert torch.equal(model.budget.allocation, loaded.budget.allocation)
    assert torch.equal(model.budget.targets_L, loaded.budget.targets_L)


def test_two_processes_have_identical_thresholds_at_every_step(tmp_path: Path) -> None:
    here = Path(__file__).parent
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parent / "benchmarks")}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = here / "two_processes.py"
    subprocess.run([*launcher, str(script), str(tmp_path)], check=True, env=environment, timeout=300)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    assert first.shape == (8, 4)  # calibration and seven steps; θ and target share of two layers
    assert torch.equal(first, second)
    assert first.unique(dim=0).shape[0] == 8  # and they do move


def test_what_the_host_was_told_is_never_copied_and_does_not_outlive_a_calibration() -> None:
    model = small_model(asc.SuperpixelConfig())
    images = clean(frame_pairs()[:4, 0])
    model.calibrate(images)
    model.train()(images)
    copied = copy.deepcopy(model)
    for layer in model.superpixel_layers:
        layer.threshold.set_theta(-0.9)  # far away
    copied.load_state_dict(model.state_dict())
    model.calibrate(images)
    found = [float(layer.threshold.u) for layer in model.superpixel_layers]
    model.update_thresholds()
    # One step of a controller at most; what was told before the calibration is forgotten.
    assert [float(layer.threshold.u) for layer in model.superpixel_layers] == pytest.approx(found, abs=0.5)
    # The copy was told nothing: it sees where its thresholds were put.
    copied.update_thresholds()
    assert [float(layer.threshold.u) for layer in copied.superpixel_layers] == pytest.approx(
        [0.642] * len(found), abs=0.5
    )


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")
def test_thresholds_that_learn_or_stay_are_left_to_themselves() -> None:
    """The controllers' step comes after the optimiser's, with numbers from before it: it must not undo that."""
    model = small_model(asc.SuperpixelConfig(threshold="learnable", theta=0.5))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
    model.train()(clean(frame_pairs()[:4, 0])).square().sum().backward()
    optimiser.step()
    learned = [layer.threshold.u.detach().clone() for layer in model.superpixel_layers]
    assert any(float(u) != pytest.approx(np.log(0.5), abs=1e-9) for u in learned)
    model.update_thresholds()
    assert [float(layer.threshold.u.detach()) for layer in model.superpixel_layers] == [float(u) for u in learned]


@pytest.mark.parametrize("learn", [True, False])
def test_weights_of_another_budget_do_not_change_it(learn: bool) -> None:
    settings = {"blocks": "all", "learn_allocation": learn}
    theirs, model = (small_model(asc.SuperpixelConfig(budget=budget, **settings)) for budget in (0.8, 0.5))
    with torch.no_grad():
        theirs.budget.allocation[0] = 0.5 if learn else 0.0
    theirs.budget.refresh()
    model.load_state_dict(theirs.state_dict())
    blocks, depth = model.budget.blocks, model.budget.depth
    assert mean_share(model.budget.targets_L.double().numpy(), blocks, depth) == pytest.approx(0.5, abs=1e-6)
    # How it is spent comes with the weights.
    by_hand, _ = allocate(theirs.budget.allocation.detach().double().numpy(), 0.5, blocks, depth, model.budget.floor)
    assert model.budget.targets_L.tolist() == pytest.approx(by_hand, abs=1e-6)


def test_what_the_host_was_told_does_not_outlive_loaded_weights() -> None:
    model = small_model(asc.SuperpixelConfig())
    images = clean(frame_pairs()[:4, 0])
    model.calibrate(images)
    state = copy.deepcopy(model.state_dict())
    for layer in model.superpixel_layers:
        layer.threshold.set_theta(-0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # all tokens are joined
        model.train()(images)
    model.load_state_dict(state)
    found = [float(layer.threshold.u) for layer in model.superpixel_layers]
    model.update_thresholds()
    assert [float(layer.threshold.u) for layer in model.superpixel_layers] == pytest.approx(found, abs=0.5)
