"""Ways to judge an encoder by classification: the paper's own, quick ones, and one for the score.

Times are for images that are small and a GPU that is fast; what counts is how many times the network sees every image.
"""

from __future__ import annotations

from collections.abc import Callable

from asc.tasks.classify.run import EvalConfig, FastLinearConfig, KnnConfig, TrainedConfig
from asc.tasks.classify.task import ClassifyConfig
from asc.tasks.classify.views import ViewConfig
from asc.train import Schedule, TrainConfig

_IMAGENET_MARGIN = 256 / 224


def knn(checkpoint: str, dataset: str) -> KnnConfig:
    """Nearest neighbours as DINO's: 10 and 20 of them, cosine, temperature 0.07. Nothing is learned.

    Command: ``asc eval knn --checkpoint RUN --dataset cifar10 --data DIR``. Time: that of one pass over the images,
    once for all protocols on frozen features.
    """
    return KnnConfig(checkpoint=checkpoint, dataset=dataset, recipe="knn")


def fast_linear(checkpoint: str, dataset: str) -> FastLinearConfig:
    """Logistic regression on features that are computed once, its weight decay chosen on the validation images.

    Command: ``asc eval linear --checkpoint RUN --dataset cifar10 --data DIR``. Time: one pass over the images, then
    seconds. Equal to scikit-learn's; no augmentation, so not quite the paper's protocol, but a hundredth of its time.
    """
    return FastLinearConfig(checkpoint=checkpoint, dataset=dataset, recipe="fast_linear")


def paper_linear_imagenet(checkpoint: str, dataset: str) -> TrainedConfig:
    """The paper's linear evaluation on ImageNet: frozen encoder, 100 epochs of SGD (momentum 0.9), learning rate 0.1
    divided by 10 after 60 and 80, weight decay 0.0001, a random crop of 224 pixels after resizing to 256.

    Command: ``torchrun --nproc-per-node 8 -m asc.cli eval linear --recipe paper_linear_imagenet --checkpoint RUN
    --dataset imagenet --data DIR``. Time: 100 passes over the images. The paper names no batch; 256 is usual with this
    learning rate. The last weights count. The paper's result: 82.1%.
    """
    return TrainedConfig(
        checkpoint=checkpoint,
        dataset=dataset,
        recipe="paper_linear_imagenet",
        classify=ClassifyConfig(frozen=True, chosen="last"),
        view=ViewConfig(crop="random", margin=_IMAGENET_MARGIN, flip=0.0),
        train=_sgd(0.1, schedule="steps"),
    )


def paper_linear(checkpoint: str, dataset: str) -> TrainedConfig:
    """The paper's linear evaluation on the other datasets: frozen encoder, up to 100 epochs of SGD (momentum 0.9),
    learning rate 0.01 along a cosine, weight decay 0.0001, early stopping, random resized crops and flips.

    Command: ``asc eval linear --recipe paper_linear --checkpoint RUN --dataset cifar10 --data DIR``. Time: up to 100
    passes over the images. The paper names neither batch nor patience; here 256 images and 10 epochs.
    """
    return TrainedConfig(
        checkpoint=checkpoint,
        dataset=dataset,
        recipe="paper_linear",
        classify=ClassifyConfig(frozen=True, patience=10.0),
        train=_sgd(0.01),
    )


def paper_finetune(checkpoint: str, dataset: str) -> TrainedConfig:
    """The paper's fine-tuning: as ``paper_linear``, but everything learns, with a learning rate of 0.0001.

    Command: ``asc eval finetune --checkpoint RUN --dataset cifar10 --data DIR``. Time: up to 100 epochs of training.
    """
    return TrainedConfig(
        checkpoint=checkpoint,
        dataset=dataset,
        recipe="paper_finetune",
        classify=ClassifyConfig(frozen=False, patience=10.0),
        train=_sgd(1e-4),
    )


def modern_finetune(checkpoint: str, dataset: str) -> TrainedConfig:
    """Fine-tuning for the score, as is usual for Vision Transformers: AdamW, 5 epochs of warm-up, a cosine, each block
    0.75 of the learning rate of the one behind it, label smoothing, gradients clipped.

    Command: ``asc eval finetune --recipe modern_finetune --checkpoint RUN --dataset cifar10 --data DIR``. Time: up to
    100 epochs of training.
    """
    return TrainedConfig(
        checkpoint=checkpoint,
        dataset=dataset,
        recipe="modern_finetune",
        classify=ClassifyConfig(frozen=False, patience=20.0, layer_decay=0.75, label_smoothing=0.1),
        train=TrainConfig(epochs=100, batch=256, lr=1e-3, lr_batch=256, weight_decay=0.05, clip=1.0),
    )


def _sgd(lr: float, schedule: Schedule = "cosine") -> TrainConfig:
    return TrainConfig(
        epochs=100,
        batch=256,
        optimiser="sgd",
        momentum=0.9,
        lr=lr,
        lr_batch=256,
        schedule=schedule,
        drops=(0.6, 0.8),
        warmup_epochs=0.0,
        weight_decay=1e-4,
    )


RECIPES: dict[str, Callable[[str, str], EvalConfig]] = {
    "knn": knn,
    "fast_linear": fast_linear,
    "paper_linear": paper_linear,
    "paper_linear_imagenet": paper_linear_imagenet,
    "paper_finetune": paper_finetune,
    "modern_finetune": modern_finetune,
}

BY_PROTOCOL: dict[str, tuple[str, ...]] = {
    "knn": ("knn",),
    "linear": ("fast_linear", "paper_linear", "paper_linear_imagenet"),
    "finetune": ("paper_finetune", "modern_finetune"),
}
"""Recipes of each protocol; the first is the default."""


def recipe_named(word: str) -> str:
    """The recipe that a protocol or a recipe's own name means."""
    name = BY_PROTOCOL[word][0] if word in BY_PROTOCOL else word
    if name not in RECIPES:
        raise ValueError(f"{word!r} is no protocol or recipe; choose from {', '.join(BY_PROTOCOL | RECIPES)}")
    return name
