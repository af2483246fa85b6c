"""The policies of what is kept, against an oracle that is too simple to be wrong."""

import math
import os
import tempfile

from hypothesis import example, given
from hypothesis import strategies as st

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, Snapshot, verify

LOSS, RARE = "validation/loss", "7 steps"
values = st.sampled_from([0.0, 1.0, 2.0, 3.0, -1.0, math.inf, -math.inf, math.nan])
intervals = st.sampled_from([[], [""], [RARE], ["", RARE]])
steps = st.lists(st.tuples(values, intervals, st.booleans(), st.booleans()), max_size=14)
WORSE, BETTER = ([(value, [""], True, False) for value in order] for order in ((1.0, 2.0), (2.0, 1.0)))


@given(steps, st.integers(0, 3), st.integers(0, 3), st.integers(0, 3), st.sampled_from(["min", "max"]))
@example(WORSE, 1, 1, 0, "min")
@example(BETTER, 1, 1, 0, "max")
def test_keep_last_and_best_of_two_policies_agree_with_a_simple_oracle(steps, keep_last, best, rare, mode):
    sign, limits = 1 if mode == "min" else -1, {"": keep_last, RARE: rare}
    config = [
        CheckpointConfig(keep_last=keep_last, best=best, mode=mode),
        CheckpointConfig(every=RARE, keep_last=rare, by=None),
    ]
    points, bests, names = {"": [], RARE: []}, [], {}
    with tempfile.TemporaryDirectory() as directory:
        manager = CheckpointManager(directory, config)
        for step, (value, due, evaluated, restart) in enumerate(steps):
            if restart:
                manager = CheckpointManager(directory, config)
            better = sum(sign * other <= sign * value for other, _ in bests)
            keep = evaluated and not math.isnan(value) and better < best
            if evaluated:
                assert manager.should_keep({LOSS: value}) == keep
            if not (due or keep):
                continue
            metrics = {LOSS: value} if evaluated else {}
            saved = manager.save(step, 0, metrics, Snapshot, resume=due, best=keep)
            names[step] = saved.path
            for name in due:
                points[name] = [*points[name], step]
            points = {name: each[max(0, len(each) - limits[name]) :] for name, each in points.items()}
            bests = [*bests, (value, step)] if keep else bests
            bests = sorted(bests, key=lambda each: (sign * each[0], each[1]))[:best]
            assert saved.is_best == keep
            wanted = {*points[""], *points[RARE], *(each for _, each in bests), step}
            entries = manager.entries()
            assert [entry.step for entry in entries] == sorted(wanted)
            on_disk = {os.path.join(directory, name) for name in os.listdir(directory)}
            assert on_disk - {os.path.join(directory, "index.json")} == {names[each] for each in wanted}
            assert manager.best() == (names[bests[0][1]] if bests else None)
            for name, kept in points.items():
                assert [entry.step for entry in entries if name in entry.resume] == kept
            assert {entry.step for entry in entries if entry.best} == {each for _, each in bests}
        reopened = CheckpointManager(directory, config)
        assert repr(reopened.entries()) == repr(manager.entries())
        for entry in reopened.entries():
            verify(os.path.join(directory, entry.name))
