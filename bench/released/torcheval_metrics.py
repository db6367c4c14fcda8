"""Metrics of torcheval, computed with its `sync_and_compute` for all ranks."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torcheval import metrics
from torcheval.metrics.toolkit import sync_and_compute

CLASSES = 8
_Inputs = Callable[[Tensor, Tensor], tuple[Any, ...]]


class _Synced:
    def __init__(self, metric: Any, inputs: _Inputs) -> None:
        self._metric, self._inputs = metric, inputs

    def update(self, features: Tensor, labels: Tensor) -> None:
        self._metric.update(*self._inputs(features.float(), labels))

    def compute(self) -> Any:
        return sync_and_compute(self._metric)

    def reset(self) -> None:
        self._metric.reset()


def _scores(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features, labels


def _binary(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0].sigmoid(), (labels < 4).long()


def _multilabel(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features.sigmoid(), (torch.arange(CLASSES) <= labels.unsqueeze(1)).long()


def _numbers(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0], features[:, 1] + 0.5 * features[:, 0]


def _one(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return (features[:, 0],)


def _clicks(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return ((labels < 4).float(),)


def _tokens(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features.view(-1, 2, 4), torch.stack([labels % 4, (labels + 1) % 4], 1)


def _images(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    one = features.sigmoid().view(-1, 1, 2, 4)
    return one, one * 0.8 + 0.1


def _words(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    said = [" ".join(words[i] for i in row.topk(4).indices.tolist()) for row in features]
    meant = [" ".join(words[i] for i in row.topk(5).indices.tolist()[1:]) for row in features]
    return said, meant


_C = {"num_classes": CLASSES}
_LISTED: list[tuple[str, _Inputs, dict[str, Any]]] = [
    ("MulticlassAccuracy", _scores, {"average": "macro", **_C}),
    ("MulticlassPrecision", _scores, {"average": "macro", **_C}),
    ("MulticlassRecall", _scores, {}),
    ("MulticlassF1Score", _scores, {"average": "macro", **_C}),
    ("MulticlassConfusionMatrix", _scores, _C),
    ("MulticlassAUROC", _scores, _C),
    ("MulticlassAUPRC", _scores, _C),
    ("BinaryAccuracy", _binary, {}),
    ("BinaryPrecision", _binary, {}),
    ("BinaryRecall", _binary, {}),
    ("BinaryF1Score", _binary, {}),
    ("BinaryConfusionMatrix", _binary, {}),
    ("BinaryAUROC", _binary, {}),
    ("BinaryAUPRC", _binary, {}),
    ("BinaryNormalizedEntropy", _binary, {}),
    ("MultilabelAccuracy", _multilabel, {}),
    ("MultilabelAUPRC", _multilabel, {"num_labels": CLASSES}),
    ("MeanSquaredError", _numbers, {}),
    ("R2Score", _numbers, {}),
    ("Mean", _one, {}),
    ("Sum", _one, {}),
    ("Max", _one, {}),
    ("Min", _one, {}),
    ("ClickThroughRate", _clicks, {}),
    ("WeightedCalibration", _binary, {}),
    ("Perplexity", _tokens, {}),
    ("PeakSignalNoiseRatio", _images, {}),
    ("WordErrorRate", _words, {}),
    ("WordInformationLost", _words, {}),
    ("WordInformationPreserved", _words, {}),
    ("BLEUScore", _words, {"n_gram": 2}),
    ("AUC", _numbers, {}),
]


def _added() -> list[str]:
    for name, inputs, settings in _LISTED:

        def made(name: str = name, inputs: _Inputs = inputs, settings: Any = settings) -> _Synced:
            return _Synced(getattr(metrics, name)(**settings), inputs)

        made.__name__ = name
        globals()[name] = made
    return [name for name, _, _ in _LISTED]


NAMES = _added()
