"""The contents of a run's checkpoint, and how a run restores them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from drivetrain.checkpoint.format.manifest import Snapshot
from drivetrain.checkpoint.format.tree import pack, unpack, well_formed
from drivetrain.checkpoint.formats import origin_of
from drivetrain.checkpoint.saving.io import DirectoryCheckpointIO
from drivetrain.checkpoint.weights.frozen import FROZEN, check_same, has_unknown
from drivetrain.checkpoint.weights.module_state import SHOWN, load_module_state, module_state
from drivetrain.core.errors import CheckpointError, ConfigError
from drivetrain.core.messages import logger
from drivetrain.core.random_streams import host_state
from drivetrain.core.types import Json, Stateful
from drivetrain.data.resumption import Resumption
from drivetrain.distributed.failure.named_locations import named_location
from drivetrain.engine.metrics.means import joined_buffers
from drivetrain.engine.own_loop_checkpoint import like_module, optimizer_state, restore_optimizer_state
from drivetrain.run.run import Run
from drivetrain.task.model_info import info_of
from drivetrain.task.optim.state import TRAINED, take_averages
from drivetrain.task.stored import pack_hparams

_LOG = logger(__name__)

GO_ON = Resumption()
"""A resume at the checkpoint's position."""

LOST = "training changes what no checkpoint can hold"
"""The beginning of a warning."""


def snapshot_run(run: Run, resumable: bool = True) -> Snapshot:
    """Return the state of a run between two steps.

    Args:
        resumable: Whether to include what a run needs to resume, besides the task.
    """
    engine = run.engine
    engine.synchronize_buffers()
    engine.data_ranks.compare_calls()
    own = _own_state(run) if resumable else {}
    of_ranks = engine.data_ranks.gather_first(own) or [own]  # rank 0 writes them
    attributes = run.attributes.gather() if resumable and run.attributes is not None else []
    groups: dict[str, dict[str, Tensor]] = {}
    tree: dict[str, Any] = {}
    with engine.checkpoint_layout() as taken:
        groups["model"], extras = module_state(run.task)
        if resumable:
            groups["optimizer"], tree["optimizers"] = optimizer_state(run.task, taken)
    if resumable:
        lost = [] if run.attributes is None else [*run.attributes.lost]
        tree |= {**_state(run, of_ranks), "attributes": attributes, "lost": lost}
    state, groups["state"] = pack({**tree, "module_extras": extras})
    groups["model"], frozen = _without_frozen(run, groups["model"])
    return Snapshot(
        tensors=groups,
        objects={"state": state, "hparams": pack_hparams(run.task), **frozen},
        progress=dict(run.progress.to_json()),
        metrics=dict(run.metrics),
        task=type(run.task).__name__,
    )


def _state(run: Run, of_ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the state of a run beside its tensors, from the ranks' own states."""
    engine, feed = run.engine, run.train_feed
    tree = {
        **of_ranks[0],
        "ranks": of_ranks[1:],
        "seed": engine.seed,
        "data_seed": None if feed is None else feed.source.seed,
        "schedules": {name: updater.state_dict() for name, updater in engine.updaters.items()},
        "strategy": engine.strategy.state_dict(),
        "given": {name: updater.given for name, updater in engine.updaters.items()},
        **(feed.snapshot() if feed is not None else {"data": None}),
        "samples_per_step": feed.samples_per_step if feed is not None else None,
    }
    if engine.splitter is not None:
        tree["micro_batch"] = engine.splitter.state_dict()
    return tree


def _without_frozen(run: Run, weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Json]]:
    """Return the weights that the policy stores, and the object with the fingerprints of the others."""
    if run.frozen is None:
        return weights, {}
    run.frozen.check_unchanged(run.task)
    return run.frozen.without(weights), {FROZEN: dict(run.frozen.found)}


def snapshot_to_save(run: Run, resumable: bool = True) -> Snapshot:
    """Return everything that a checkpoint holds, checked for NaN and infinity first.

    Raises:
        NonFiniteError: A loss since the last log point, or a weight, was NaN or infinite: such weights are
            not worth keeping.
        CheckpointError: A callback's, logger's or data's state cannot be stored.
        ConfigError: The task has a new parameter that is not trained.
    """
    run.check_parameters()
    run.engine.buffer.check()
    snapshot = snapshot_run(run, resumable)
    run.nonfinite.check_weights(snapshot)
    if resumable and run.is_main and run.attributes is not None and (lost := run.attributes.news()):
        named = ", ".join(f"{name!r} ({kind})" for name, kind in lost.items())
        _LOG.warning(
            f"{LOST}: {named} of {type(run.task).__name__}. In a"
            " resumed run it is as the program makes it. Make it a buffer, keep tensors, numbers, texts or"
            " containers of them in the attribute, or give its class state_dict and load_state_dict."
            " 'drivetrain check-resume' finds out whether a step depends on it"
        )
    if resumable and run.attributes is not None and (strangers := run.attributes.strangers()) and run.is_main:
        _LOG.warning(
            f"{', '.join(map(repr, strangers[:SHOWN]))} of {type(run.task).__name__} came or went during the"
            " fit, so its checkpoints cannot be resumed: the task that a program makes has other names."
            " Register them in the constructor; register_buffer(name, None) has no values yet"
        )
    return snapshot


@named_location("as it takes over a checkpoint")
def restore(
    run: Run, snapshot: Snapshot, address: str, settings_of: str | None = None, how: Resumption = GO_ON
) -> None:
    """Restore a checkpoint's state when a fit begins, and call the callbacks."""
    before, run.last_checkpoint = run.last_checkpoint, address
    try:
        restore_run(run, snapshot, settings_of, how)
        _refuse_past_end(run, address)
    except (CheckpointError, ConfigError):  # the error must not advise to resume from this checkpoint
        run.last_checkpoint = before
        raise
    run.engine.set_rates()
    run.call(run.hooks.on_checkpoint_loaded)
    left = [slot for each in run.engine.updaters.values() for slot in take_averages(each.optimizer)]
    if TRAINED in left:
        run.last_checkpoint = before
        raise CheckpointError(
            f"the weights of {address} are averages, and a resume needs the trained weights, which are stored"
            " beside them. Resume with the callback that has saved them: WeightAverage(...)"
        )


def _refuse_past_end(run: Run, address: str) -> None:
    length, progress = run.length, run.progress
    limit = ""
    if length.max_steps is not None and progress.steps > length.max_steps:
        limit = f"max_steps={length.max_steps}"
    if length.end is not None and (progress.epoch, progress.epoch_batches) > length.end:
        limit = f"max_epochs={length.max_epochs}"
    if limit:
        begun = progress.epoch + (1 if progress.epoch_batches else 0)
        raise CheckpointError(
            f"{address} is past the end of this run: it is at step {progress.steps} in epoch {begun}, and"
            f" {limit}. Give a larger limit, or start in another run_dir"
        )


def _own_state(run: Run) -> dict[str, Any]:
    """Return the state of this rank; rank 0's serves for all where they only write or report the same."""
    logged = _logged_state(run)
    return {
        "host_streams": host_state(),
        **(logged if run.unlogged is None else {**run.unlogged, "at_limit": logged}),
        **({"postponed": run.postponed} if run.postponed is not None else {}),
        **({"requests": asked} if (asked := _unmet(run)) else {}),
        **({"timing": run.timing} if run.engine.ranks.rank == 0 else {}),
    }


def _logged_state(run: Run) -> dict[str, Any]:
    """Return what a log point and a validation change, beside the schedules."""
    callbacks = _states("callback", run.callbacks)  # on all ranks: they may gather it
    state: dict[str, Any] = {
        "buffer": run.engine.buffer.state_dict(),
        "train_metrics": run.train_metrics.state_dict() if run.train_metrics else None,
    }
    if run.engine.ranks.rank == 0:
        state |= {"values": run.pending_values(), "metrics": run.metrics, "validated": run.validated}
        state |= {"callbacks": callbacks, "loggers": _states("logger", run.loggers)}
    return state


def unlogged_state(run: Run) -> dict[str, Any]:
    """Return a copy of all that a log point changes, to go on from as if it had not been made."""
    return copy.deepcopy(_logged_state(run))


def _unmet(run: Run) -> list[str]:
    """Return what hooks have asked for and this checkpoint does not contain."""
    asked = run.agreed.union(run.requests)
    return sorted(asked if run.progress.epoch_batches else asked - {"end_epoch"})


def restore_run(
    run: Run, snapshot: Snapshot, settings_of: str | None = None, how: Resumption = GO_ON
) -> None:
    """Restore a run's state.

    Args:
        settings_of: "program" if the optimizers have the settings that the user gives now, where they have
            changed, "checkpoint" if they keep those of the checkpoint.
        how: Where the data goes on.

    Raises:
        ConfigError: The settings have changed, and `optimizer_settings` is None.
        CheckpointError: The checkpoint does not fit the task, its optimizers or the run; says what differs.
        OSError: A logger could not continue its file, and save errors are not tolerated.
    """
    with well_formed("the checkpoint's state"):
        state = snapshot.objects.get("state")
        tree = {} if state is None else unpack(state, snapshot.tensors.get("state", {}))
        if has_weights_only(tree):
            raise CheckpointError(
                "this checkpoint holds weights only, like imported ones and those of"
                " CheckpointConfig(resumable=False), and no run can resume from it. To start from its"
                " weights, use from_checkpoint(path) or load_weights(path)"
            )
        _check_frozen(run, snapshot)
        _take_over(run, snapshot, tree, how)
        for name, before in tree["given"].items():
            kept_out, taken = run.engine.updaters[name].take_given(before, settings_of)
            if kept_out and run.is_main:
                _LOG.warning(
                    "the optimizer keeps the settings of the checkpoint, not those of the program:"
                    f" {kept_out}. Trainer.fit(..., optimizer_settings='program') takes those of the program"
                )
            if taken and run.is_main:
                _LOG.info(f"the optimizer goes on with settings that have changed: {taken}")
        if run.train_feed is not None:
            moved = run.train_feed.resume(tree, how)
            limit = run.length.limit_reached(run.progress)
            if moved and limit is not None:
                raise CheckpointError(
                    f"with {how.asked} no step is left to train: {limit}. Steps and epochs count on from the"
                    " checkpoint's, so give a larger limit"
                )
            if run.is_main:
                _note_other_size(tree.get("samples_per_step"), run.train_feed.samples_per_step)


def has_weights_only(state: Json) -> bool:
    """Return whether the object "state" of a checkpoint, packed or not, has nothing to resume a run from."""
    return not isinstance(state, Mapping) or set(state) <= {"module_extras"}


def _check_frozen(run: Run, snapshot: Snapshot) -> None:
    """Check that checkpoint and run leave out the same frozen parameters, or none."""
    stored = snapshot.objects.get(FROZEN)
    if stored is None and run.frozen is None:
        return
    if run.frozen is None:
        raise CheckpointError(
            "the checkpoint holds the trained parameters only. Resume from it with"
            " CheckpointConfig(parameters='trainable')"
        )
    if stored is None:
        raise CheckpointError(
            "the checkpoint holds all parameters, but with CheckpointConfig(parameters='trainable') later"
            " checkpoints would lack the frozen ones. Resume with parameters='all', or begin a new run from"
            " its weights: task.load_weights(path)"
        )
    mine, theirs = dict(info_of(run.task).origin), origin_of(snapshot.objects.get("hparams"))
    differ = mine != theirs and bool(mine) and bool(theirs)
    other = (
        f"the frozen parameters of the checkpoint are those of {_named(theirs)}, and this run has those of"
        f" {_named(mine)}. Load the same ones"
    )
    try:
        check_same(stored, run.frozen.found, "the checkpoint")
    except CheckpointError as error:
        raise CheckpointError(f"{other}: {error}") if differ else error from None
    if differ and has_unknown(run.frozen.found):  # the hashes do not prove that they are equal
        raise CheckpointError(other)


def _named(origin: Mapping[str, str]) -> str:
    name, revision = origin.get("name", "?"), origin.get("revision")
    return repr(name) if revision is None else f"{name!r} at the revision {revision!r}"


def restore_weights(run: Run, path: str) -> None:
    """Restore the weights of a checkpoint of this run, and nothing else. All ranks call it together."""
    engine, loaded = run.engine, list[Snapshot]()
    with engine.checkpoint_layout():
        like = like_module(run.task)
    engine.ranks.together(lambda: loaded.append(DirectoryCheckpointIO().load(path, like=like)))
    snapshot = loaded[0]
    with well_formed("the checkpoint's state"):
        state = unpack(snapshot.objects.get("state"), snapshot.tensors.get("state", {}))
        with engine.checkpoint_layout(write=True):
            _load_weights(run, snapshot, state)


def _load_weights(run: Run, snapshot: Snapshot, tree: Any) -> None:
    kept = () if run.frozen is None else run.frozen.found
    weights, extras = snapshot.tensors.get("model", {}), tree["module_extras"]
    load_module_state(run.task, weights, extras, where="the checkpoint", kept=kept)


def _check_seed_of_data(run: Run, tree: Any) -> None:
    feed = run.train_feed
    if feed is not None and tree.get("data_seed", feed.source.seed) != feed.source.seed:
        raise CheckpointError(
            "the checkpoint was saved with another data_seed, or the generator of the training data's"
            " DataLoader or sampler had another seed: the order of the data would differ. Give the"
            " same seed, or begin the data at its start: fit(..., new_data=True)"
        )


def _take_over(run: Run, snapshot: Snapshot, tree: Any, how: Resumption) -> None:
    """Restore the state."""
    engine = run.engine
    lacking = {"seed", "optimizers", "schedules", "buffer", "callbacks", "loggers"} - set(tree)
    if lacking:
        raise CheckpointError(f"this is no checkpoint of a Trainer: it lacks {', '.join(sorted(lacking))}")
    if tree["seed"] != engine.seed:
        raise CheckpointError(
            f"the checkpoint was saved with seed={tree['seed']}, this Trainer has seed={engine.seed}: the"
            f" order of the data would change in the middle of an epoch. Use Trainer(seed={tree['seed']})"
        )
    if not (how.new_data and how.applies_to(tree)):
        _check_seed_of_data(run, tree)
    _restore_attributes(run, tree)  # first, so that the program's own set_extra_state has the last word
    with engine.checkpoint_layout(write=True) as optimizers:
        _load_weights(run, snapshot, tree)
        restore_optimizer_state(
            run.task, optimizers, snapshot.tensors.get("optimizer", {}), tree["optimizers"]
        )
    engine.modes.load()
    for name, updater in engine.updaters.items():
        updater.load_state_dict(tree["schedules"][name])
    engine.strategy.load_state_dict(tree["strategy"])
    if engine.splitter is not None:
        engine.splitter.load_state_dict(tree.get("micro_batch"))
    run.progress.load_json(snapshot.progress)
    # The ranks' states: with fewer ranks now, one rank resumes from several states; with more, some ranks
    # start without a state.
    saved = [tree, *tree.get("ranks", [])]
    if run.length.limit_reached(run.progress) is not None:  # nothing is left to train: it has logged its end
        saved = [{**each, **each.get("at_limit", {})} for each in saved]
        tree = saved[0]
    mine = saved[engine.data_ranks.rank :: engine.data_ranks.size]
    asked = frozenset(str(name) for each in saved for name in each.get("requests", ()))
    run.agreed = asked if run.evaluation_feeds else asked - {"validate"}
    if mine:
        _restore_own(run, mine)
    run.set_pending_values(_numbers(tree, "values"))
    run.metrics.update(_numbers(tree, "metrics"))
    run.latest_at = -1
    run.validated = bool(tree["validated"])
    run.timing.update(_numbers(tree, "timing"))
    _restore_parts(run, tree)


def _restore_attributes(run: Run, tree: Any) -> None:
    """Restore the attributes of this rank; ranks that the saved run did not have take those of rank 0."""
    of_ranks, rank = tree.get("attributes", []), run.engine.data_ranks.rank
    if run.attributes is None or not of_ranks:
        return
    mine = {**of_ranks[0], **(of_ranks[rank] if rank < len(of_ranks) else {})}
    with well_formed("the checkpoint's attributes of the task"):
        missing = run.attributes.load(mine, run.engine.device)
    if run.is_main and (missing := sorted({*missing, *tree.get("lost", ())})):
        _LOG.warning(
            f"the checkpoint does not bring back {', '.join(map(repr, missing))} of"
            f" {type(run.task).__name__}: the attribute could not be stored, or the program has changed. It"
            " is as the program makes it"
        )


def _restore_own(run: Run, mine: Sequence[Mapping[str, Any]]) -> None:
    """Restore what is this rank's own, from the states of one or more ranks."""
    run.host_streams = mine[0]["host_streams"]
    run.engine.buffer.load_state_dict(joined_buffers([each["buffer"] for each in mine]), run.engine.device)
    run.postponed = next((str(each["postponed"]) for each in mine if "postponed" in each), None)
    metrics = [each["train_metrics"] for each in mine if each["train_metrics"] is not None]
    if run.train_metrics and metrics:
        run.train_metrics.load_states(metrics)


def _restore_parts(run: Run, tree: Any) -> None:
    """Restore the callbacks and the loggers."""

    def load(part: Any, state: Any) -> None:
        part.load_state_dict(state)

    def load_logger(part: Any, state: Any) -> None:
        with run.logging_to(part, f"what {type(part).__name__} changes in its log to go on after step"):
            part.load_state_dict(state)

    _restore_each(_stateful(run.callbacks), tree["callbacks"], "callback", load)
    if run.is_main:
        _restore_each(_stateful(run.loggers), tree["loggers"], "logger", load_logger)


def _note_other_size(before: Any, now: int | None) -> None:
    if isinstance(before, int) and now is not None and before != now:
        _LOG.warning(
            f"this run goes on with {now} samples per step, the checkpoint's had {before}: the samples of a"
            " batch, times the processes, times gradient_accumulation_steps. The learning rate and the"
            " schedule's number of steps are not adapted"
        )


def _numbers(tree: Any, part: str) -> dict[str, float]:
    """Return a part of the state that maps names to numbers; anything else would fail only when next used."""
    numbers: dict[str, float] = tree[part]
    if not all(isinstance(name, str) and isinstance(each, (int, float)) for name, each in numbers.items()):
        raise CheckpointError(f"the checkpoint's part {part!r} is invalid: it must map names to numbers")
    return numbers


def _stateful(parts: Iterable[Any]) -> dict[str, Stateful]:
    """Return the parts with a state, named by class; the second of a class is "Name:1"."""
    named: dict[str, Stateful] = {}
    counts: dict[str, int] = {}
    for part in parts:
        kind = type(part).__name__
        number = counts[kind] = counts.get(kind, -1) + 1
        if isinstance(part, Stateful):
            named[f"{kind}:{number}" if number else kind] = part
    return named


def _states(what: str, parts: Iterable[Any]) -> dict[str, Any]:
    """Return the states of the parts that have one; names the one whose `state_dict` raises."""
    states = {}
    for name, part in _stateful(parts).items():
        try:
            states[name] = part.state_dict()
        except Exception as error:
            raise CheckpointError(
                f"the state of the {what} {name} could not be taken: its state_dict raised"
                f" {type(error).__name__}: {error}"
            ) from error
    return states


def _restore_each(
    parts: Mapping[str, Any], states: Mapping[str, Any], what: str, load: Callable[[Any, Any], None]
) -> None:
    """Load the parts' states by name; warn of parts without one, and of states without a part."""
    for name, part in parts.items():
        if name in states:
            with well_formed(f"the checkpoint's state of the {what} {name}"):
                load(part, states[name])
        else:
            _LOG.warning(f"the checkpoint has no state for the {what} {name}; it starts anew")
    gone = sorted(states.keys() - parts.keys())
    if gone:
        _LOG.warning(f"the checkpoint has the state of {what}s that this run lacks: {', '.join(gone)}")
