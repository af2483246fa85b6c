"""What a checkpoint of a run holds, and how it is taken over again."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from drivetrain.checkpoint.format import IMPORTED, Snapshot
from drivetrain.checkpoint.tree import pack, unpack, well_formed
from drivetrain.engine_state import optimizer_state, restore_optimizer_state
from drivetrain.errors import CheckpointError
from drivetrain.imported_state import restore_imported
from drivetrain.metrics import joined_buffers
from drivetrain.module_state import load_module_state, module_state
from drivetrain.stored_task import pack_hparams
from drivetrain.streams import host_state
from drivetrain.types import Stateful

if TYPE_CHECKING:
    from drivetrain.run import Run


def snapshot_run(run: Run) -> Snapshot:
    """The state of a run between two updates.

    Raises:
        CheckpointError: A part of it cannot be stored; says which.
    """
    engine = run.engine
    engine.synchronize_buffers()
    own, *others = engine.data_ranks.all_gather(_own_state(run))
    with engine.exchanged() as taken:
        weights, extras = module_state(run.task)
        optimizers, meta = optimizer_state(run.task, taken)
    tree = {
        **own,
        "ranks": others,
        "seed": engine.seed,
        "optimizers": meta,
        "schedules": {name: updater.state_dict() for name, updater in engine.updaters.items()},
        "strategy": engine.strategy.state_dict(),
        "module_extras": extras,
        "metrics": run.metrics,
        "callbacks": {name: each.state_dict() for name, each in _stateful(run.callbacks).items()},
        "data": run.train_feed.snapshot() if run.train_feed is not None else None,
        "samples_per_update": run.train_feed.samples_per_update if run.train_feed is not None else None,
    }
    if engine.splitter is not None:
        tree["micro_batch"] = engine.splitter.state_dict()
    state, tensors = pack(tree)
    return Snapshot(
        tensors={"model": weights, "optimizer": optimizers, "state": tensors},
        objects={"state": state, "hparams": pack_hparams(run.task)},
        progress=dict(run.progress.to_json()),
        metrics=dict(run.metrics),
        task=type(run.task).__name__,
    )


def _own_state(run: Run) -> dict[str, Any]:
    """What each process has of its own; rank 0's stands for all where they only write or tell the same."""
    first = run.engine.ranks.rank == 0
    return {
        "host_streams": host_state(),
        "buffer": run.engine.buffer.state_dict(),
        "train_metrics": run.train_metrics.state_dict() if run.train_metrics else None,
        **({"values": run.pending_values(), "timing": run.timing} if first else {}),
        **(
            {"loggers": {name: each.state_dict() for name, each in _stateful(run.loggers).items()}}
            if first
            else {}
        ),
    }


def _states_for(rank: int, size: int, saved: list[Any]) -> list[Any]:
    """Those of the saved processes' states that one of `size` processes goes on from."""
    return saved[rank::size]


def restore_run(run: Run, snapshot: Snapshot, data: bool = True) -> None:
    """Take over a run's state.

    Args:
        run: The run.
        snapshot: What was saved.
        data: Whether the data, too, are to go on from there.

    Raises:
        CheckpointError: The checkpoint does not fit the task, its optimizers or the run; says what differs.
        OSError: A logger could not go on in its file, and the run does not go on without it.
    """
    if "state" not in snapshot.objects:
        raise CheckpointError(
            "this checkpoint holds weights only; it cannot be resumed from. Use from_checkpoint(path)"
        )
    with well_formed("the checkpoint's state"):
        tree = unpack(snapshot.objects["state"], snapshot.tensors.get("state", {}))
        take_over = restore_imported if IMPORTED in tree else _take_over
        take_over(run, snapshot, tree)
        if run.train_feed is not None and data and IMPORTED not in tree:
            run.train_feed.restore(tree["data"], run.progress.position)
            if run.is_main:
                _note_other_size(tree.get("samples_per_update"), run.train_feed.samples_per_update)


def take_back(run: Run, snapshot: Snapshot, address: str) -> None:
    """Take over an earlier state of the same run, while its data go on where they are.

    Progress is that of the checkpoint in updates, on which schedules and random streams depend, and that of
    now in what was read of the data. Updates that are taken back count as skipped.

    Raises:
        CheckpointError: It does not fit this run; says what differs.
        OSError: As `restore_run`.
    """
    progress, timing = run.progress, dict(run.timing)
    now = replace(progress)
    restore_run(run, snapshot, data=False)
    lost = now.updates - progress.updates
    read = ("micro_batches", "samples", "tokens", "bad_batches", "epoch", "epoch_batches", "position")
    for name in (*read, "seconds"):
        setattr(progress, name, getattr(now, name))
    progress.epoch_updates = max(0, now.epoch_updates - lost)
    progress.skipped = now.skipped + lost
    run.timing.update(timing)
    run.last_checkpoint = address
    run.engine.set_rates()
    run.triggers.log.start(progress)
    run.triggers.validate.start(progress)
    run.call(run.hooks.on_checkpoint_loaded)


def _take_over(run: Run, snapshot: Snapshot, tree: Any) -> None:
    engine = run.engine
    lacking = {"seed", "optimizers", "schedules", "buffer", "callbacks", "loggers"} - set(tree)
    if lacking:
        raise CheckpointError(
            f"this is no checkpoint of a Trainer's run: it lacks {', '.join(sorted(lacking))}"
        )
    if tree["seed"] != engine.seed:
        raise CheckpointError(
            f"the checkpoint was saved with seed={tree['seed']}, this Trainer has seed={engine.seed}: the"
            f" order of the data would change in the middle of an epoch. Use Trainer(seed={tree['seed']})"
        )
    with engine.exchanged(write=True) as optimizers:
        load_module_state(
            run.task, snapshot.tensors.get("model", {}), tree["module_extras"], where="the checkpoint"
        )
        restore_optimizer_state(
            run.task, optimizers, snapshot.tensors.get("optimizer", {}), tree["optimizers"]
        )
    for name, updater in engine.updaters.items():
        updater.load_state_dict(tree["schedules"][name])
    engine.strategy.load_state_dict(tree["strategy"])
    if engine.splitter is not None:
        engine.splitter.load_state_dict(tree.get("micro_batch"))
    run.progress.load_json(snapshot.progress)
    # What each process had of its own: with fewer of them now, one goes on from several; with more, some
    # begin with nothing.
    mine = _states_for(engine.data_ranks.rank, engine.data_ranks.size, [tree, *tree.get("ranks", [])])
    if mine:
        run.host_streams = mine[0]["host_streams"]
        engine.buffer.load_state_dict(joined_buffers([each["buffer"] for each in mine]), engine.device)
        metrics = [each["train_metrics"] for each in mine if each["train_metrics"] is not None]
        if run.train_metrics and metrics:
            run.train_metrics.load_states(metrics)
    run.set_pending_values(_numbers(tree, "values"))
    run.metrics.update(_numbers(tree, "metrics"))
    run.latest_at = -1
    run.validated = any(name.startswith("validation/") for name in run.metrics)
    run.timing.update(_numbers(tree, "timing"))
    _restore_each(run.callbacks, tree["callbacks"], "callback", lambda part: nullcontext())
    if run.is_main:
        changed = "what {} changes in its log to go on after update"
        _restore_each(
            run.loggers,
            tree["loggers"],
            "logger",
            lambda part: run.logging_to(part, changed.format(type(part).__name__)),
        )


def _note_other_size(before: Any, now: int | None) -> None:
    if isinstance(before, int) and now is not None and before != now:
        warnings.warn(
            f"this run goes on with {now} samples per update, the checkpoint's had {before}: the samples of a"
            " batch, times the processes, times gradient_accumulation_steps. The learning rate and the"
            " schedule's number of updates are not adapted",
            stacklevel=2,
        )


def _numbers(tree: Any, part: str) -> dict[str, float]:
    """A part of the state that is numbers by name; what is none would show only where it is next used."""
    numbers: dict[str, float] = tree[part]
    if not all(isinstance(name, str) and isinstance(each, (int, float)) for name, each in numbers.items()):
        raise CheckpointError(f"the checkpoint's state has {part} that are not numbers by name")
    return numbers


def _stateful(parts: Iterable[Any]) -> dict[str, Stateful]:
    """Those parts that have a state, named by class; the second of a class is "Name:1"."""
    named: dict[str, Stateful] = {}
    counts: dict[str, int] = {}
    for part in parts:
        kind = type(part).__name__
        number = counts[kind] = counts.get(kind, -1) + 1
        if isinstance(part, Stateful):
            named[f"{kind}:{number}" if number else kind] = part
    return named


def _restore_each(
    parts: Iterable[Any],
    states: Mapping[str, Any],
    what: str,
    restoring: Callable[[Any], AbstractContextManager[None]],
) -> None:
    named = _stateful(parts)
    for name, part in named.items():
        if name in states:
            with restoring(part), well_formed(f"the checkpoint's state of the {what} {name}"):
                part.load_state_dict(states[name])
        else:
            warnings.warn(f"the checkpoint has no state for the {what} {name}; it starts anew", stacklevel=2)
    gone = sorted(set(states) - set(named))
    if gone:
        warnings.warn(
            f"the checkpoint has the state of {what}s that this run does not have: {', '.join(gone)}",
            stacklevel=2,
        )
