"""Whether more or less of a value is better: from its metric, from a well-known name, or from the user."""

from __future__ import annotations

import math
import re

from drivetrain.core.errors import ConfigError

MODES = ("auto", "min", "max")

_LESS_WORDS = """
    loss losses error errors err perplexity ppl nll mae mse rmse msle rmsle mape smape wape wmape
    crossentropy logloss wer cer ter mer wil eer bpb bpc bpd hinge brier ece mce fid kid lpips kl kld
    divergence deviance distance regret fpr fnr far frr cost misclassification hamming nmse nrmse medae huber
    wasserstein emd chamfer hausdorff assd ade fde der
"""
_MORE_WORDS = """
    accuracy acc accuracies f1 f2 fbeta fscore fmeasure auc auroc rocauc prauc auprc ap map mar iou miou
    giou jaccard dice bleu sacrebleu gleu rouge meteor chrf bertscore precision recall sensitivity
    specificity tpr tnr r2 likelihood psnr ssim msssim ndcg dcg mrr hit hits mcc matthews kappa spearman
    pearson kendall concordance correlation corrcoef similarity reward rewards return returns success win
    wins top match em elbo mos pesq stoi snr sdr sisdr cider spice correct improvement logprob vmaf
"""
_LESS, _MORE = frozenset(_LESS_WORDS.split()), frozenset(_MORE_WORDS.split())

_PHRASES = {
    "cross_entropy": "crossentropy",
    "bits_per": "bpb",
    "explained_variance": "r2",
    "false_positive": "error",
    "false_negative": "error",
    "true_positive": "recall",
    "true_negative": "specificity",
    "false_discovery": "error",
    "exact_match": "accuracy",
    "log_prob": "likelihood",
}

ENDS = {"accuracy": "max", "precision": "max", "recall": "max", "perplexity": "min", "loss": "min"}
"""The words that names end with even without a separator, as in "valloss"."""

_STAGE = re.compile(r"^(validation|valid|val|dev|evaluation|eval|test|train|training)(?=[a-z])")
_WORD = re.compile(r"[A-Z]+(?=[A-Z][a-z])|[A-Z]?[a-z]+\d*|[A-Z]+\d*|\d+")


def direction_of(name: str) -> str | None:
    """Return "min" or "max" for a well-known name such as "val_loss" or "MulticlassF1Score", else None.

    The last word that is known decides, because it is the noun: an accuracy's error is an error. Of a name
    with slashes the last known part decides.
    """
    for part in reversed(name.split("/")):
        known = _direction_of_part(part)
        if known is not None:
            return known
    return None


def _direction_of_part(part: str) -> str | None:
    text = re.sub(r"[^A-Za-z0-9]+", "_", part).strip("_")
    plain = text.lower()
    for phrase, word in _PHRASES.items():
        if phrase in plain:
            text = plain = plain.replace(phrase, word)
    directions = []
    for word in text.split("_"):
        whole = _direction_of_word(word.lower())
        found = [whole] if whole else map(_direction_of_word, map(str.lower, _WORD.findall(word)))
        directions += [each for each in found if each is not None]
    if not directions:
        return None
    if plain.startswith(("neg_", "negative_")):  # scikit-learn's name of an error with its sign turned
        return "max" if directions[-1] == "min" else "min"
    return directions[-1]


def _direction_of_word(word: str) -> str | None:
    word = _STAGE.sub("", word)
    for each in (word, word.rstrip("0123456789")):
        if each in _LESS:
            return "min"
        if each in _MORE or each.startswith(("rouge", "bleu")):
            return "max"
    return next((way for end, way in ENDS.items() if word.endswith(end)), None)


def improves(
    value: float, best: float | None, direction: str | None, threshold: float, relative: bool
) -> bool:
    """Return whether a value beats the best so far; one that is not finite never does.

    Args:
        direction: "min" or "max".
        threshold: The difference that it must exceed; if `relative`, as a share of the best's magnitude.
    """
    if best is None or not math.isfinite(value):
        return math.isfinite(value)
    margin = threshold * (abs(best) if relative else 1.0)
    return value < best - margin if direction == "min" else value > best + margin


def resolved_direction(mode: str, known: str | None, name: str, argument: str) -> str:
    """Return the direction of a value: "min" or "max".

    Args:
        known: The direction by the value's metric or its name; None if it is unknown.
        argument: How the mode is written, such as "EarlyStopping('validation/score', mode={})".
    """
    if mode != "auto":
        return mode
    if known is None:
        raise ConfigError(
            f"it is unknown whether more or less of {name!r} is better: the name is none of the usual ones,"
            f" and no metric of the task says so. Write {argument.format(repr('max'))}, or 'min'; or give the"
            " metric that metrics() returns an attribute higher_is_better, True or False"
        )
    return known
