"""How well classes are told apart: scores of labels against probabilities, and which class is taken for which."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

BINS = 15


def class_scores(
    labels: np.ndarray, answers: np.ndarray, probabilities: np.ndarray, metrics: Sequence[str]
) -> dict[str, float]:
    """The metrics by name, in their order.

    labels         (examples,) int64, as are `answers`, the likeliest classes
    probabilities  (examples, classes)

    accuracy           right / examples
    balanced_accuracy  the mean of the classes' recalls, over the classes that occur
    macro_f1           the mean of the classes' F1, over those that occur or are answered
    auroc              the mean area under the ROC curve of each class against the others, over the classes that some
                       examples are of and some are not; not there where all examples are of one class
    calibration_error  the expected calibration error with 15 bins of equal width; lower is better

    Source: scikit-learn's recall_score, f1_score and roc_auc_score; Guo et al. 2017, eq. 3 (calibration).
    """
    scores: dict[str, float] = {}
    for name in metrics:
        value = _SCORES[name](labels, answers, probabilities)
        if value is not None:
            scores[name] = value
    return scores


def confusion(labels: Sequence[float], answers: Sequence[float], names: Sequence[str]) -> dict[str, dict[str, int]]:
    """How often each class was taken for which, by the names of both; pairs that do not occur are left out.

    >>> confusion([0, 0, 1], [0, 1, 1], ["cat", "dog"])
    {'cat': {'cat': 1, 'dog': 1}, 'dog': {'dog': 1}}
    """
    counted: dict[str, dict[str, int]] = {}
    for (label, answer), count in sorted(Counter(zip(labels, answers, strict=True)).items()):
        counted.setdefault(names[int(label)], {})[names[int(answer)]] = count
    return counted


def majority_score(labels: Sequence[int], training: Sequence[int], classes: int, metric: str) -> float | None:
    """What the class that is most frequent in training scores as the answer to everything; the lowest of several.

    >>> majority_score([0, 0, 1, 1, 1], [1, 0, 0], 2, "accuracy")
    0.4
    """
    if not labels or not training:
        return None
    most = np.bincount(training, minlength=classes).argmax()
    answers = np.full(len(labels), most)
    return class_scores(np.array(labels), answers, np.eye(classes)[answers], [metric]).get(metric)


def _accuracy(labels: np.ndarray, answers: np.ndarray, probabilities: np.ndarray) -> float:
    return int((labels == answers).sum()) / len(labels)


def _balanced_accuracy(labels: np.ndarray, answers: np.ndarray, probabilities: np.ndarray) -> float:
    from sklearn.metrics import recall_score

    return float(recall_score(labels, answers, labels=np.unique(labels), average="macro"))


def _macro_f1(labels: np.ndarray, answers: np.ndarray, probabilities: np.ndarray) -> float:
    from sklearn.metrics import f1_score

    return float(f1_score(labels, answers, average="macro"))


def _auroc(labels: np.ndarray, answers: np.ndarray, probabilities: np.ndarray) -> float | None:
    from sklearn.metrics import roc_auc_score

    present = np.unique(labels)
    if len(present) < 2:
        return None
    return float(np.mean([roc_auc_score(labels == label, probabilities[:, label]) for label in present]))


def _calibration_error(labels: np.ndarray, answers: np.ndarray, probabilities: np.ndarray) -> float:
    sure, right = probabilities.max(1).astype(np.float64), labels == answers
    bins = np.minimum((sure * BINS).astype(int), BINS - 1)
    gaps = np.bincount(bins, right - sure, BINS)  # of each bin: (accuracy - confidence) times its examples
    return float(np.abs(gaps).sum()) / len(labels)


_SCORES = {
    "accuracy": _accuracy,
    "balanced_accuracy": _balanced_accuracy,
    "macro_f1": _macro_f1,
    "auroc": _auroc,
    "calibration_error": _calibration_error,
}
