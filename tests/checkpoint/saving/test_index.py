"""The policy of what is kept, against an oracle that is too simple to be wrong."""

import math
import os
import tempfile

from hypothesis import given
from hypothesis import strategies as st

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, Snapshot, verify

LOSS = "validation/loss"
values = st.sampled_from([0.0, 1.0, 2.0, 3.0, -1.0, math.inf, -math.inf, math.nan])
steps = st.lists(st.tuples(values, st.booleans(), st.booleans(), st.booleans()), max_size=14)


@given(steps, st.integers(0, 3), st.integers(0, 3), st.sampled_from(["min", "max"]))
def test_keep_last_and_best_agree_with_a_simple_oracle(steps, keep_last, best, mode):
    sign = 1 if mode == "min" else -1
    config = CheckpointConfig(keep_last=keep_last, best=best, mode=mode)
    points, keepers, names = [], [], {}
    with tempfile.TemporaryDirectory() as directory:
        manager = CheckpointManager(directory, config)
        for update, (value, due, evaluated, restart) in enumerate(steps):
            if restart:
                manager = CheckpointManager(directory, config)
            better = sum(sign * other <= sign * value for other, _ in keepers)
            keep = evaluated and not math.isnan(value) and better < best
            if evaluated:
                assert manager.should_keep({LOSS: value}) == keep
            if not (due or keep):
                continue
            metrics = {LOSS: value} if evaluated else {}
            saved = manager.save(update, 0, metrics, Snapshot, resume=due, keeper=keep)
            names[update] = saved.path
            points = [*points, update] if due else points
            points = points[len(points) - keep_last :] if len(points) > keep_last else points
            keepers = [*keepers, (value, update)] if keep else keepers
            keepers = sorted(keepers, key=lambda each: (sign * each[0], each[1]))[:best]
            assert saved.is_keeper == keep
            wanted = {*points, *(each for _, each in keepers), update}
            entries = manager.entries()
            assert [entry.update for entry in entries] == sorted(wanted)
            on_disk = {os.path.join(directory, name) for name in os.listdir(directory)}
            assert on_disk - {os.path.join(directory, "index.json")} == {names[each] for each in wanted}
            assert manager.best() == (names[keepers[0][1]] if keepers else None)
            assert {entry.update for entry in entries if entry.resume} == set(points)
            assert {entry.update for entry in entries if entry.keeper} == {each for _, each in keepers}
        reopened = CheckpointManager(directory, config)
        assert repr(reopened.entries()) == repr(manager.entries())
        for entry in reopened.entries():
            verify(os.path.join(directory, entry.name))
