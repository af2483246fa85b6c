"""Which way a value is better: by well-known names."""

from drivetrain.core.direction import direction_of

LESS = (
    "loss val_loss valloss perplexity word_error_rate WER MeanSquaredError NRMSE top_1_error bits_per_byte"
    " accuracy_error false_positive_rate log_loss kl_divergence negative_log_likelihood"
)
MORE = (
    "accuracy valAccuracy top5_acc MulticlassF1Score f1_macro BinaryAUROC mIoU mAP50 recall@10 rougeL bleu4"
    " neg_mean_squared_error exact_match log_prob R2Score errors/accuracy accuracy/0"
)


def test_a_well_known_name_says_which_way_is_better() -> None:
    assert {name: direction_of(name) for name in LESS.split()} == dict.fromkeys(LESS.split(), "min")
    assert {name: direction_of(name) for name in MORE.split()} == dict.fromkeys(MORE.split(), "max")
    assert [direction_of(name) for name in ("score", "objective", "latency", "mapping", "")] == [None] * 5
