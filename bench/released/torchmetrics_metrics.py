"""Metrics of torchmetrics: each is updated with what it takes, made of features and labels."""

from collections.abc import Callable
from typing import Any

import torch
import torchmetrics
from torch import Tensor

_OF = torchmetrics
CLASSES = 8


class _Fed:
    """A metric that is given what `inputs` makes of features [n, 8] and labels [n]."""

    def __init__(self, metric: Any, inputs: Callable[[Tensor, Tensor], tuple[Any, ...]]) -> None:
        self._metric, self._inputs = metric, inputs

    def update(self, features: Tensor, labels: Tensor) -> None:
        self._metric.update(*self._inputs(features, labels))

    def compute(self) -> Any:
        return self._metric.compute()

    def reset(self) -> None:
        self._metric.reset()


def _classes(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features.softmax(1), labels


def _binary(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0].sigmoid(), (labels < 4).long()


def _multilabel(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features.sigmoid(), (torch.arange(CLASSES) <= labels.unsqueeze(1)).long()


def _numbers(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0], features[:, 1] + 0.5 * features[:, 0]


def _positive(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0].exp(), features[:, 1].exp()


def _columns(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, :4], features[:, 4:] + features[:, :4]


def _distributions(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, :4].softmax(1), features[:, 4:].softmax(1)


def _queries(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0].sigmoid(), (features[:, 1] > 0).long(), labels


def _pairs(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return labels, features.argmax(1)


def _one(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return (features[:, 0],)


def _weighted(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features[:, 0], labels.to(features) + 1


def _signals(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features, features.roll(1, 1) + 0.3 * features


def _images(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    one = features.sigmoid().view(-1, 1, 2, 4).repeat_interleave(8, 2).repeat_interleave(4, 3)
    return one, (one * 0.8 + 0.1 * one.flip(3))


def _words(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    words = ["one", "two", "three", "four", "five", "six", "seven", "eight"]
    said = [" ".join(words[i] for i in row.topk(4).indices.tolist()) for row in features]
    meant = [" ".join(words[i] for i in row.topk(5).indices.tolist()[1:]) for row in features]
    return said, meant


def _tokens(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features.view(-1, 2, 4), torch.stack([labels % 4, (labels + 1) % 4], 1)


def _scores(features: Tensor, labels: Tensor) -> tuple[Any, ...]:
    return features, labels


_TASKS: dict[str, tuple[Callable[[Tensor, Tensor], tuple[Any, ...]], list[Any]]] = {
    "multiclass": (_classes, [
        "Accuracy", "Precision", "Recall", "F1Score", "Specificity", "StatScores", "AUROC",
        "AveragePrecision", "CalibrationError", "CohenKappa", "ConfusionMatrix", "HammingDistance",
        "JaccardIndex", "MatthewsCorrCoef", "ExactMatch", "NegativePredictiveValue",
    ]),
    "binary": (_binary, [
        "Accuracy", "Precision", "Recall", "F1Score", "Specificity", "StatScores", "AUROC",
        "AveragePrecision", "CalibrationError", "CohenKappa", "ConfusionMatrix", "HammingDistance",
        "JaccardIndex", "MatthewsCorrCoef", "HingeLoss", "LogAUC",
    ]),
    "multilabel": (_multilabel, [
        "Accuracy", "Precision", "Recall", "F1Score", "HammingDistance", "StatScores",
        "ExactMatch", "RankingLoss", "CoverageError", "RankingAveragePrecision", "AUROC",
    ]),
}  # fmt: skip
_PLAIN: dict[Callable[[Tensor, Tensor], tuple[Any, ...]], list[tuple[str, dict[str, Any]]]] = {
    _numbers: [(name, {}) for name in (
        "MeanSquaredError", "MeanAbsoluteError", "MeanAbsolutePercentageError",
        "SymmetricMeanAbsolutePercentageError", "WeightedMeanAbsolutePercentageError", "R2Score",
        "ExplainedVariance", "PearsonCorrCoef", "SpearmanCorrCoef", "KendallRankCorrCoef",
        "ConcordanceCorrCoef", "RelativeSquaredError", "LogCoshError", "MinkowskiDistance",
        "NormalizedRootMeanSquaredError", "CriticalSuccessIndex",
    )],
    _positive: [("MeanSquaredLogError", {}), ("TweedieDevianceScore", {"power": 1.5})],
    _columns: [("CosineSimilarity", {}), ("regression.JensenShannonDivergence", {})],
    _distributions: [("KLDivergence", {}), ("JensenShannonDivergence", {})],
    _queries: [(f"retrieval.{name}", {}) for name in (
        "RetrievalMAP", "RetrievalMRR", "RetrievalPrecision", "RetrievalRecall",
        "RetrievalNormalizedDCG", "RetrievalHitRate", "RetrievalFallOut", "RetrievalRPrecision",
        "RetrievalAUROC",
    )],
    _pairs: [(f"clustering.{name}", {}) for name in (
        "MutualInfoScore", "AdjustedMutualInfoScore", "NormalizedMutualInfoScore", "RandScore",
        "AdjustedRandScore", "FowlkesMallowsIndex", "HomogeneityScore", "CompletenessScore",
        "VMeasureScore",
    )] + [(f"nominal.{name}", {"num_classes": CLASSES}) for name in (
        "CramersV", "PearsonsContingencyCoefficient", "TheilsU", "TschuprowsT",
    )],
    _scores: [(f"clustering.{name}", {}) for name in (
        "CalinskiHarabaszScore", "DaviesBouldinScore", "DunnIndex",
    )],
    _one: [("MeanMetric", {}), ("SumMetric", {}), ("MaxMetric", {}), ("MinMetric", {})],
    _weighted: [("MeanMetric", {})],
    _signals: [(f"audio.{name}", {}) for name in (
        "SignalNoiseRatio", "ScaleInvariantSignalNoiseRatio",
        "ScaleInvariantSignalDistortionRatio",
    )],
    _images: [
        ("image.PeakSignalNoiseRatio", {"data_range": 1.0}),
        ("image.StructuralSimilarityIndexMeasure", {"data_range": 1.0}),
        ("image.UniversalImageQualityIndex", {}), ("image.TotalVariation", {}),
        ("image.SpectralAngleMapper", {}), ("image.RelativeAverageSpectralError", {}),
        ("image.RootMeanSquaredErrorUsingSlidingWindow", {}),
        ("image.ErrorRelativeGlobalDimensionlessSynthesis", {}),
        ("image.SpectralDistortionIndex", {}), ("image.PeakSignalNoiseRatioWithBlockedEffect", {}),
        ("image.VisualInformationFidelity", {}), ("image.SpatialCorrelationCoefficient", {}),
    ],
    _words: [(f"text.{name}", {}) for name in (
        "WordErrorRate", "CharErrorRate", "MatchErrorRate", "WordInfoLost", "WordInfoPreserved",
        "EditDistance", "CHRFScore", "TranslationEditRate", "ExtendedEditDistance",
    )],
    _tokens: [("text.Perplexity", {})],
}  # fmt: skip


def _found(place: str) -> Any:
    value: Any = _OF
    for part in place.split("."):
        value = getattr(value, part, None)
    return value


def _named(place: str, task: str) -> Any:
    return getattr(_OF.classification, f"{task.capitalize()}{place}", None)


def _added() -> list[str]:
    """Makes a function of each metric that this release has; returns their names."""
    names = []

    def add(name: str, make: Callable[[], Any], inputs: Any) -> None:
        def made() -> _Fed:
            return _Fed(make(), inputs)

        made.__name__ = name
        globals()[name] = made
        names.append(name)

    for task, (inputs, listed) in _TASKS.items():
        sizes = {"multiclass": {"num_classes": CLASSES}, "multilabel": {"num_labels": CLASSES}}
        for place in listed:
            if (kind := _named(place, task)) is not None:
                settings = sizes.get(task, {})
                add(f"{task}_{place}", lambda k=kind, s=settings: k(**s), inputs)
    for inputs, plain in _PLAIN.items():
        for place, settings in plain:
            if (kind := _found(place)) is not None:
                name = place.rpartition(".")[2] + ("_weighted" if inputs is _weighted else "")
                if inputs is _images and "TotalVariation" in place:
                    add(name, kind, lambda f, y: _images(f, y)[:1])
                    continue
                settings = {"p": 3} if place == "MinkowskiDistance" else settings
                settings = {"threshold": 0.5} if place == "CriticalSuccessIndex" else settings
                add(name, lambda k=kind, s=settings: k(**s), inputs)
    return names


NAMES = _added()


class NRMSE_of_columns(_Fed):
    """Of several outputs, by each way to normalize."""

    def __init__(self) -> None:
        kind = torchmetrics.NormalizedRootMeanSquaredError
        super().__init__(kind(num_outputs=4, normalization="mean"), _columns)


class SSIM_of_each(_Fed):
    """Without a reduction: the values of all images, whose count follows from the batch."""

    def __init__(self) -> None:
        kind = torchmetrics.StructuralSimilarityIndexMeasure
        super().__init__(kind(data_range=1.0, reduction=None), _images)

    def compute(self) -> Any:
        values = torch.as_tensor(self._metric.compute()).flatten()
        return torch.stack(
            [values.sum(), values.square().sum(), values.numel() * values.new_ones(())]
        )


class Pearson_of_columns(_Fed):
    def __init__(self) -> None:
        super().__init__(torchmetrics.PearsonCorrCoef(num_outputs=4), _columns)


class _OfOneClass(_Fed):
    """Ranks may have seen no sample of the one class that is looked at, and so have empty lists."""

    def update(self, features: Tensor, labels: Tensor) -> None:
        chosen = labels == 5
        if chosen.any():
            super().update(features[chosen], labels[chosen])


class Cosine_where_some_have_none(_OfOneClass):
    """Its lists are of rows."""

    def __init__(self) -> None:
        super().__init__(torchmetrics.CosineSimilarity(reduction="mean"), _columns)


class Calibration_where_some_have_none(_OfOneClass):
    """Its lists are of numbers."""

    def __init__(self) -> None:
        super().__init__(torchmetrics.classification.BinaryCalibrationError(), _binary)


class Values_where_some_have_none(_OfOneClass):
    """Its list is of numbers, in the dtype of an empty list."""

    def __init__(self) -> None:
        super().__init__(torchmetrics.CatMetric(), _one)

    def compute(self) -> Any:
        return torch.as_tensor(self._metric.compute()).mean()
