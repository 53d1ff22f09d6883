"""Predictor and target: the loss, what learns and what follows, and batch norm across processes."""

import copy
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_vit import calibrated, frames

import asc
from asc.pretrain.batchnorm import SyncedBatchNorm
from asc.pretrain.siamese import Siamese, SiameseConfig, momentum_at


def siamese(threshold: str = "budget", **settings: object) -> Siamese:
    encoder = calibrated(asc.SuperpixelConfig(threshold=threshold))
    torch.manual_seed(1)
    return Siamese(encoder, SiameseConfig(projection=16, hidden=32, **settings))


def pair() -> tuple[torch.Tensor, torch.Tensor]:
    images = frames(12, 32)
    return images[:6], images[6:]


def cosine_losses(model: Siamese, first: torch.Tensor, second: torch.Tensor) -> list[float]:
    """The paper's loss from its definition: squared distance of unit vectors, for both directions."""
    both = torch.cat([first, second])
    predicted = model.predictor(model.projector(model.encoder(both)))
    wanted = model.target_projector(model.target_encoder(both))
    predicted, wanted = (x / x.norm(dim=1, keepdim=True) for x in (predicted, wanted))
    return [
        float((predicted.detach()[:6] - wanted[6:]).square().sum(1).mean()),
        float((predicted.detach()[6:] - wanted[:6]).square().sum(1).mean()),
    ]


@pytest.mark.parametrize("symmetric", [True, False])
def test_loss_is_the_papers(symmetric: bool) -> None:
    model, (first, second) = siamese(symmetric=symmetric), pair()
    for slow in model.target_encoder.parameters():
        slow.add_(0.01)  # so that encoder and target differ
    losses = cosine_losses(model, first, second)
    expected = sum(losses) / 2 if symmetric else losses[0]
    assert float(model(torch.stack([first, second])).loss.detach()) == pytest.approx(expected, rel=1e-4)


def test_with_four_frames_every_two_are_compared() -> None:
    model = siamese()
    images = frames(12, 32)[:8].unflatten(0, (4, 2))
    both = images.flatten(0, 1)
    predicted = model.predictor(model.projector(model.encoder(both))).detach()
    wanted = model.target_projector(model.target_encoder(both))
    predicted, wanted = (torch.nn.functional.normalize(x, dim=1).unflatten(0, (4, 2)) for x in (predicted, wanted))
    distances = [float((predicted[i] - wanted[j]).square().sum(1).mean()) for i in range(4) for j in range(4) if i != j]
    assert float(model(images).loss.detach()) == pytest.approx(sum(distances) / 12, rel=1e-4)


def test_only_the_predictor_side_learns() -> None:
    model = siamese()
    model(torch.stack(pair())).loss.backward()
    for name, parameter in model.named_parameters():
        assert (parameter.grad is not None) == (not name.startswith("target")), name


def test_target_is_done_before_anything_is_kept_for_the_way_back() -> None:
    # In the other order its largest tensors come on top of all that the encoder keeps, which is the peak of a step.
    model, kept, begun = siamese(), [], []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor.numel())
        return tensor

    model.target_encoder.register_forward_pre_hook(lambda *_: begun.append(sum(kept)))
    model.target_projector.register_forward_hook(lambda *_: begun.append(sum(kept)))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.stack(pair()))
    assert begun == [0, 0] and sum(kept) > 0


def test_target_follows_by_the_momentum() -> None:
    model = siamese(momentum=0.9, last_momentum=1.0)
    before = copy.deepcopy(model.target_encoder)
    with torch.no_grad():
        for fast in model.encoder.parameters():
            fast.add_(torch.randn_like(fast))
    model.follow(progress=0.5)
    # By hand: half-way up the cosine from 0.9 to 1 the target keeps 0.95 of itself.
    fast, old = model.encoder.blocks[0].mlp.fc1.weight, before.blocks[0].mlp.fc1.weight
    torch.testing.assert_close(model.target_encoder.blocks[0].mlp.fc1.weight, 0.95 * old + 0.05 * fast)
    assert torch.equal(model.target_encoder.budget.allocation, model.encoder.budget.allocation)


@pytest.mark.parametrize("kind", ["fixed", "learnable", "budget"])
def test_target_takes_over_thresholds_but_those_that_it_controls_itself(kind: str) -> None:
    model = siamese(kind)
    threshold = model.encoder.superpixel_layers[1].threshold
    before = float(threshold.theta())
    threshold.set_theta(0.123)
    model.follow(progress=0.5)
    expected = before if kind == "budget" else 0.123
    assert float(model.target_encoder.superpixel_layers[1].threshold.theta()) == pytest.approx(expected, abs=1e-5)


@pytest.mark.filterwarnings("ignore::asc.SuperpixelWarning")  # it begins far from its budget
def test_target_keeps_its_budget_though_its_keys_are_others() -> None:
    model = siamese(momentum=1.0, last_momentum=1.0).train()
    images = torch.stack(pair())
    model.encoder.calibrate(images[0])
    model.target_encoder.load_state_dict(model.encoder.state_dict())
    with torch.no_grad():
        for block in model.target_encoder.blocks:
            block.attn.qkv.bias.add_(0.3)  # what all keys have in common makes them alike
    for step in range(80):
        model(images)
        if step == 0:
            strayed = [stats.kept_share for stats in model.target_encoder.diagnostics().values()]
        model.follow(progress=0.5)
    wanted = model.target_encoder.budget.targets_L.tolist()
    kept = [stats.kept_share for stats in model.target_encoder.diagnostics().values()]
    assert max(abs(share - want) for share, want in zip(strayed, wanted, strict=True)) > 0.08
    assert kept == pytest.approx(wanted, abs=0.05)


def test_momentum_rises_by_a_cosine() -> None:
    config = SiameseConfig()
    assert momentum_at(config, 0.0) == pytest.approx(0.996)
    assert momentum_at(config, 1.0) == pytest.approx(1.0)
    assert momentum_at(config, 0.25) == pytest.approx(1 - 0.004 * (math.cos(math.pi / 4) + 1) / 2)
    assert momentum_at(SiameseConfig(last_momentum=0.996), 0.7) == pytest.approx(0.996)


def test_stop_gradient_target_is_the_encoder_itself() -> None:
    model, (first, second) = siamese(target="stop_gradient"), pair()
    agreement = model(torch.stack([first, second]))
    projected = model.projector(model.encoder(torch.cat([first, second])))
    expected = torch.nn.functional.normalize(projected, dim=1)[6:].detach()
    torch.testing.assert_close(agreement.projections_BZ, expected, atol=1e-5, rtol=1e-5)
    agreement.loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_contrastive_loss_equals_its_definition() -> None:
    model, (first, second) = siamese(loss="contrastive", symmetric=False, temperature=0.5), pair()
    predicted = model.predictor(model.projector(model.encoder(torch.cat([first, second]))))[:6]
    wanted = model(torch.stack([first, second])).projections_BZ
    predicted = predicted / predicted.norm(dim=1, keepdim=True)
    losses = []
    for row in range(6):
        scores = [math.exp(float(predicted[row] @ wanted[other]) / 0.5) for other in range(6)]
        losses.append(-math.log(scores[row] / sum(scores)))
    assert float(model(torch.stack([first, second])).loss.detach()) == pytest.approx(sum(losses) / 6, rel=1e-4)


def test_one_process_is_plain_batch_norm() -> None:
    torch.manual_seed(0)
    ours, theirs = SyncedBatchNorm(5), torch.nn.BatchNorm1d(5)
    rows = torch.randn(20, 5)
    assert torch.equal(ours(rows), theirs(rows))


def test_two_processes_normalise_as_one_would(tmp_path: Path) -> None:
    script = Path(__file__).with_name("two_process_batchnorm.py")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*launcher, str(script), str(tmp_path)], check=True, env=environment, timeout=300)
    parts = [torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1)]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(20, 5, generator=generator).mul(3).add(100).requires_grad_()
    weight = torch.randn(20, 5, generator=generator)
    norm = torch.nn.BatchNorm1d(5)
    normed = norm(rows)
    (normed * weight).sum().backward()
    # 13 rows in one process, 7 in the other.
    for name, whole in (("normed", normed), ("gradient", rows.grad)):
        torch.testing.assert_close(torch.cat([part[name] for part in parts]), whole, atol=1e-5, rtol=1e-5)
    summed = parts[0]["weight_gradient"] + parts[1]["weight_gradient"]
    torch.testing.assert_close(summed, norm.weight.grad, atol=1e-4, rtol=1e-5)
    for part in parts:
        torch.testing.assert_close(part["running_mean"], norm.running_mean)
        torch.testing.assert_close(part["running_var"], norm.running_var, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": "frozen"}, "unknown target 'frozen'"),
        ({"loss": "mse"}, "unknown loss 'mse'"),
        ({"momentum": 1.2}, r"momentum must lie in \[0, 1\]"),
        ({"temperature": 0.0}, "temperature must be positive"),
    ],
)
def test_unfit_settings(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SiameseConfig(**settings)
