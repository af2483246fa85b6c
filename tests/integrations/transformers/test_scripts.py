"""Scripts in the shape of transformers' examples give the same numbers with one import changed."""

from __future__ import annotations

import pytest

pytest.importorskip("datasets")

from tests.integrations.transformers.equality import BOUND, OTHER, TABLE, Result, compared, largest_difference

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Result]]:
    """The results of each script with transformers' Trainer and with ours."""
    return compared(list(TABLE), tmp_path_factory.mktemp("scripts"))


@pytest.mark.parametrize("name", [name for name in TABLE if name != OTHER])
def test_losses_and_metrics_are_equal(name: str, results: dict[str, dict[str, Result]]) -> None:
    theirs, ours = results[name].values()
    assert len(ours.losses) == 20
    assert largest_difference(theirs, ours) < BOUND
    assert ours.metric == pytest.approx(theirs.metric, abs=BOUND)


@pytest.mark.parametrize("name", TABLE)
def test_scripts_leave_the_same_files(name: str, results: dict[str, dict[str, Result]]) -> None:
    """All but the pickle of the arguments."""
    theirs, ours = results[name].values()
    assert ours.files == [each for each in theirs.files if each != "training_args.bin"]


def test_the_loss_of_a_gpt2_is_a_mean_over_the_labels_that_it_predicts(
    results: dict[str, dict[str, Result]],
) -> None:
    theirs, ours = results[OTHER].values()
    assert theirs.losses[0] == pytest.approx(ours.losses[0] * 31 / 32, rel=1e-6)
