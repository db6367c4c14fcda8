"""Metrics of pytorch-ignite: each is updated with what it takes, made of features and labels."""

from collections.abc import Callable
from typing import Any

import torch
from ignite import metrics
from ignite.metrics import clustering, regression
from torch import Tensor

CLASSES = 8
_Inputs = Callable[[Tensor, Tensor], tuple[Any, ...]]


class _Fed:
    def __init__(self, metric: Any, inputs: _Inputs) -> None:
        self._metric, self._inputs = metric, inputs

    def update(self, features: Tensor, labels: Tensor) -> None:
        self._metric.update(self._inputs(features.float(), labels))

    def compute(self) -> Any:
        return torch.as_tensor(self._metric.compute())

    def reset(self) -> None:
        self._metric.reset()


def _scores(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features, labels


def _likely(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features.softmax(1), labels


def _numbers(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0], features[:, 1] + 0.5 * features[:, 0]


def _positive(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0].exp(), features[:, 1].exp()


def _columns(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, :4], features[:, 4:] + features[:, :4]


def _binary(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0].sigmoid(), (labels < 4).long()


def _both(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return (features[:, 0].sigmoid() > 0.5).long(), (labels < 4).long()


def _images(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    one = features.sigmoid().view(-1, 1, 2, 4).repeat_interleave(8, 2).repeat_interleave(4, 3)
    return one, (one * 0.8 + 0.1 * one.flip(3))


_LISTED: list[tuple[str, Any, _Inputs, dict[str, Any]]] = [
    ("Accuracy", metrics, _scores, {}),
    ("Precision", metrics, _scores, {"average": "macro"}),
    ("PrecisionWeighted", metrics, _scores, {"average": "weighted"}),
    ("Recall", metrics, _scores, {"average": "macro"}),
    ("RecallMicro", metrics, _scores, {"average": "micro"}),
    ("TopKCategoricalAccuracy", metrics, _scores, {"k": 3}),
    ("ConfusionMatrix", metrics, _scores, {"num_classes": CLASSES}),
    ("MultiLabelConfusionMatrix", metrics,
     lambda f, y: ((f > 0).long(), (torch.arange(CLASSES) <= y.unsqueeze(1)).long()),
     {"num_classes": CLASSES}),
    ("Entropy", metrics, _scores, {}),
    ("MutualInformation", metrics, _scores, {}),
    ("KLDivergence", metrics, _columns, {}),
    ("JSDivergence", metrics, _columns, {}),
    ("CosineSimilarity", metrics, _columns, {}),
    ("MeanAbsoluteError", metrics, _numbers, {}),
    ("MeanSquaredError", metrics, _numbers, {}),
    ("RootMeanSquaredError", metrics, _numbers, {}),
    ("MeanPairwiseDistance", metrics, _columns, {}),
    ("Loss", metrics, _scores, {"loss_fn": torch.nn.functional.cross_entropy}),
    ("SSIM", metrics, _images, {"data_range": 1.0}),
    ("PSNR", metrics, _images, {"data_range": 1.0}),
    ("ROC_AUC", metrics, _binary, {}),
    ("AveragePrecision", metrics, _binary, {}),
    ("CohenKappa", metrics, _both, {}),
    ("CanberraMetric", regression, _numbers, {}),
    ("FractionalAbsoluteError", regression, _numbers, {}),
    ("FractionalBias", regression, _positive, {}),
    ("GeometricMeanAbsoluteError", regression, _numbers, {}),
    ("GeometricMeanRelativeAbsoluteError", regression, _numbers, {}),
    ("KendallRankCorrelation", regression, _numbers, {}),
    ("ManhattanDistance", regression, _numbers, {}),
    ("MaximumAbsoluteError", regression, _numbers, {}),
    ("MeanAbsoluteRelativeError", regression, _numbers, {}),
    ("MeanError", regression, _numbers, {}),
    ("MeanNormalizedBias", regression, _numbers, {}),
    ("MedianAbsoluteError", regression, _numbers, {}),
    ("MedianAbsolutePercentageError", regression, _numbers, {}),
    ("MedianRelativeAbsoluteError", regression, _numbers, {}),
    ("PearsonCorrelation", regression, _numbers, {}),
    ("R2Score", regression, _numbers, {}),
    ("SpearmanRankCorrelation", regression, _numbers, {}),
    ("WaveHedgesDistance", regression, _positive, {}),
    ("CalinskiHarabaszScore", clustering, _scores, {}),
    ("DaviesBouldinScore", clustering, _scores, {}),
    ("SilhouetteScore", clustering, _scores, {}),
]  # fmt: skip


def _added() -> list[str]:
    """Makes a function of each metric that this release has; returns their names."""
    names = []
    for name, place, inputs, settings in _LISTED:
        kind = getattr(place, name.removesuffix("Weighted").removesuffix("Micro"), None)
        if kind is None:
            continue

        def made(kind: Any = kind, inputs: _Inputs = inputs, settings: Any = settings) -> _Fed:
            return _Fed(kind(**settings), inputs)

        made.__name__ = name
        globals()[name] = made
        names.append(name)
    return names


NAMES = _added()
