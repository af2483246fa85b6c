"""The policy of what is kept, against an oracle that is too simple to be wrong."""

import math
import os
import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st

from drivetrain.checkpoint import CheckpointConfig, CheckpointManager, Snapshot, verify

LOSS = "validation/loss"


def open_manager(directory, **config):
    return CheckpointManager(str(directory), CheckpointConfig(**config))


def updates(manager):
    return [entry.update for entry in manager.entries()]


def on_disk(directory):
    return sorted(name for name in os.listdir(directory) if name != "index.json")


values = st.sampled_from([0.0, 1.0, 2.0, 3.0, -1.0, math.inf, -math.inf, math.nan])
steps = st.lists(st.tuples(values, st.booleans(), st.booleans(), st.booleans()), max_size=14)


@settings(max_examples=80, deadline=None)
@given(steps, st.integers(0, 3), st.integers(0, 3), st.sampled_from(["min", "max"]))
def test_the_policy_agrees_with_a_simple_oracle(steps, keep_last, best, mode):
    sign = 1 if mode == "min" else -1
    points, keepers, names = [], [], {}
    with tempfile.TemporaryDirectory() as directory:
        manager = open_manager(directory, keep_last=keep_last, best=best, mode=mode)
        for update, (value, due, evaluated, restart) in enumerate(steps):
            if restart:
                manager = open_manager(directory, keep_last=keep_last, best=best, mode=mode)
            better = sum(sign * other <= sign * value for other, _ in keepers)
            keep = evaluated and not math.isnan(value) and better < best
            if evaluated:
                assert manager.should_keep({LOSS: value}) == keep
            if not (due or keep):
                continue
            saved = manager.save(
                update, 0, {LOSS: value} if evaluated else {}, Snapshot, resume=due, keeper=keep
            )
            names[update] = saved.path
            points = [*points, update] if due else points
            points = points[len(points) - keep_last :] if len(points) > keep_last else points
            keepers = sorted(
                [*keepers, (value, update)] if keep else keepers, key=lambda each: (sign * each[0], each[1])
            )
            keepers = keepers[:best]
            assert saved.is_keeper == keep
            wanted = {*points, *(each for _, each in keepers), update}
            assert updates(manager) == sorted(wanted)
            assert {os.path.join(directory, name) for name in on_disk(directory)} == {
                names[each] for each in wanted
            }
            assert manager.best() == (names[keepers[0][1]] if keepers else None)
            assert {entry.update for entry in manager.entries() if entry.resume} == set(points)
            assert {entry.update for entry in manager.entries() if entry.keeper} == {
                each for _, each in keepers
            }
        reopened = open_manager(directory, keep_last=keep_last, best=best, mode=mode)
        assert repr(reopened.entries()) == repr(manager.entries())
        for entry in reopened.entries():
            verify(os.path.join(directory, entry.name))
