"""A profile of a fit: the time of its phases, and traces of chosen steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch.profiler import ProfilerAction

from drivetrain.callbacks.base import Callback, check_only_one
from drivetrain.checkpoint.storage.files import replacing
from drivetrain.core.errors import ConfigError, StrategyError
from drivetrain.core.files import make_directory
from drivetrain.core.messages import columns, logger
from drivetrain.core.validation import by_name, check_names, flag, keywords, one_of
from drivetrain.distributed.failure.named_locations import register_opaque
from drivetrain.run.clock import Clock
from drivetrain.run.phases import timing_parts
from drivetrain.run.settings import has_run_dir

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

register_opaque(__file__)

KINDS = ("table", "trace")

_SCHEDULE = {"wait": 8, "warmup": 2, "active": 3, "repeat": 1}

_ARGUMENTS = keywords(torch.profiler.schedule)

_OPTIONS = frozenset(keywords(torch.profiler.profile) or ()) - {"schedule", "on_trace_ready"}

_ACTIVE = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)


@by_name
class Profile(Callback):
    """Profiles a fit, and writes the result to `RUN/profile`.

    - "table": the time of each phase of the whole fit: waiting for data, transfer, forward, backward,
      clipping, optimizer, each hook of each callback, log points, validation, saving. It is printed at the
      end, and written as text and JSON.
    - "trace": a trace of chosen steps by `torch.profiler`, with the phases as ranges, for
      https://ui.perfetto.dev or chrome://tracing. With ``options={"with_stack": True}`` it has each Python
      function, and with ``{"profile_memory": True}`` what each operator allocated.

    The table has the host's times: no phase waits for a device. A GPU runs behind the host, and its time
    appears where the host waits for it, as at log points. A trace has the times of both.

    Steps are numbered from 0 over all restarts; a skipped one counts too. The steps that the schedule
    chooses are slower. In the others each phase takes a few microseconds longer. Evaluations outside a fit
    are not profiled. A file that cannot be written is left out with a warning.

    Args:
        schedule: The steps for "trace": a mapping of the arguments of `torch.profiler.schedule`. None is
            ``{"wait": 8, "warmup": 2, "active": 3, "repeat": 1}``, the steps 10, 11 and 12.
        kinds: "table", "trace" or both.
        all_ranks: Whether all ranks are profiled, and write files of their own; else rank 0 alone.
        options: Options of `torch.profiler.profile` for "trace", such as `record_shapes`, `profile_memory`,
            `with_stack` and `with_flops`.

    Attributes:
        files: The files of the last fit: those of all ranks or, after an error, those of this rank.

    Raises:
        ConfigError: An argument that is not allowed or would have no effect; when a Trainer is made, no
            directory to write to; in a fit, another profiler that is active.
        StrategyError: "trace" on XLA.
    """

    def __init__(
        self,
        schedule: Mapping[str, int] | None = None,
        kinds: Sequence[str] = ("table", "trace"),
        *,
        all_ranks: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        self.kinds = _checked_kinds(kinds)
        self.all_ranks = flag("Profile(all_ranks=)", all_ranks)
        if not isinstance(options, (Mapping, type(None))):
            raise ConfigError(
                f"Profile(options=) takes a mapping like {{'with_stack': True}}, not {options!r}"
            )
        self.options = dict(options or {})
        self.schedule = _checked_schedule(_SCHEDULE if schedule is None else schedule)
        self.files: list[Path] = []
        check_names("Profile(options=)", self.options, _OPTIONS)
        if schedule is not None and self.kinds == ("table",):
            raise ConfigError("Profile(schedule=) has no effect on 'table', which covers all steps")
        if self.options and "trace" not in self.kinds:
            raise ConfigError("Profile(options=) is for 'trace', and kinds= has no 'trace'")

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that there is a directory to write to, and that the device can be profiled.

        Raises:
            ConfigError: There is no directory, or there are two of these callbacks.
            StrategyError: The device cannot be profiled.
        """
        if not has_run_dir(trainer):
            raise ConfigError(
                "Profile has no directory to write to: the fit writes no checkpoints and no logs, and so has"
                " no run directory. Give Trainer(run_dir=...)"
            )
        check_only_one(Profile, trainer, "need the same profiler. Give one, with the kinds of both")
        if "trace" in self.kinds and strategy.device.type == "xla":
            raise StrategyError(
                "Profile: torch.profiler cannot see the operations on XLA, which compiles each step as a"
                " whole. Use kinds='table', XLAReport, or torch_xla.debug.profiler"
            )

    @contextmanager
    def wrap_run(self, run: Run) -> Iterator[None]:
        """Profile the block, if it is a fit.

        Raises:
            OSError: The folder cannot be made.
        """
        if run.train_feed is None:
            yield
            return
        assert run.run_dir is not None  # `check_trainer` has seen to it
        folder = run.run_dir / "profile"
        if run.is_main:
            _LOG.info(f"Profile writes to {folder}")
        ranks, files = run.engine.ranks, []
        if self.all_ranks or run.is_main:
            make_directory(folder)
            session = _ProfileSession(self, run, folder, ranks.rank)
            try:
                with timing_parts(run, session.before_step):
                    yield
            except BaseException:
                self.files = session.end()
                raise
            files = session.end()
            session.check_recorded()
        else:
            yield
        self.files = [path for own in ranks.all_gather(files) for path in own]


class _ProfileSession:
    """The profile of one fit on one rank."""

    def __init__(self, profile: Profile, run: Run, folder: Path, rank: int) -> None:
        self.clock = run.clock = Clock()
        self._profile = profile
        self._run = run
        self._folder = folder
        self._rank = rank
        self._files: list[Path] = []
        self._began = perf_counter()
        self._base: int | None = None
        self._number = 0
        self._action = ProfilerAction.NONE
        self._first: int | None = None  # the first step of the present recording, or None
        self._recorded = False
        self._profiler: Any = None

    def before_step(self, made: int) -> None:
        """Begin or end to record, as the schedule has it; the step after `made` others comes next."""
        if self._base is None:
            self._base = self._run.progress.steps
        number = self._base + made
        if "trace" in self._profile.kinds:
            before, self._action = self._action, self._profile.schedule(number)
            if before is not ProfilerAction.NONE or self._action is not ProfilerAction.NONE:
                start = perf_counter()
                with self._not_traced():
                    self._record(before, number)
                self._run.timing["data"] -= perf_counter() - start  # which the loop adds to it
                self.clock.traced = self._action in _ACTIVE
        self._number = number

    def _not_traced(self) -> AbstractContextManager[None]:
        self.clock.traced = False  # the profiler ends inside, and so would this phase's range
        return self.clock.span("profiling")

    def _record(self, before: ProfilerAction, number: int) -> None:
        """Bring torch's profiler to a step; each recording has one of its own."""
        if before is ProfilerAction.RECORD_AND_SAVE or self._action is ProfilerAction.NONE:
            self._stop()
        if self._action is ProfilerAction.NONE:
            return
        if self._profiler is not None:
            self._profiler.step()
        elif torch.autograd.profiler._is_profiler_enabled:
            raise ConfigError(
                f"Profile cannot record step {number}: another profiler of torch is active, and there can be"
                " only one. End it, or leave Profile out"
            )
        else:
            self._profiler = torch.profiler.profile(
                schedule=lambda _: self._action, on_trace_ready=self._write_trace, **self._profile.options
            )
            self._profiler.step_num = number
            self._profiler.start()
        if self._action in _ACTIVE and self._first is None:
            self._first, self._recorded = number, True

    def _stop(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.stop()

    def _write_trace(self, profiler: torch.profiler.profile) -> None:
        first, self._first = self._first, None
        name = f"trace-steps-{first}-{self._number}"
        self._write(name, ".json.gz", lambda path: profiler.export_chrome_trace(str(path)))

    def end(self) -> list[Path]:
        """Write what there is at the end of the fit, or after an error, and return all files."""
        with self._not_traced():
            self._stop()
        if "table" in self._profile.kinds:
            self._write_table()
        return self._files

    def check_recorded(self) -> None:
        """Warn if no step was recorded."""
        if self._base is not None and not self._recorded and self._profile.kinds != ("table",):
            _LOG.warning(
                f"Profile: the schedule chose none of the steps {self._base} to {self._number}, so none was"
                " recorded. Give a schedule with a shorter wait, or train longer"
            )

    def _write_table(self) -> None:
        first = self._run.progress.steps if self._base is None else self._base
        last = max(self._number, first)
        passed = perf_counter() - self._began
        content = {
            "rank": self._rank,
            "device": self._run.engine.device.type,
            "steps": [first, last],
            "seconds": passed,
            "phases": [
                {"name": name, "calls": each.calls, "seconds": each.seconds, "own_seconds": each.own}
                for name, each in self.clock.found.items()
            ],
        }
        text = _table(content, self.clock)
        if self._run.is_main:
            _LOG.info(text)
        name = f"table-steps-{first}-{last}"
        self._write(name, ".txt", lambda path: path.write_text(f"{text}\n", encoding="utf-8"))
        self._write(
            name, ".json", lambda path: path.write_text(json.dumps(content, indent=1), encoding="utf-8")
        )

    def _write(self, stem: str, ending: str, write: Callable[[Path], object]) -> None:
        path = self._folder / f"{stem}-rank-{self._rank}{ending}"
        try:
            with replacing(str(path)) as partial:
                write(Path(partial))
        except (OSError, RuntimeError) as error:  # torch's own writer raises the second
            _LOG.warning(f"Profile could not write {path}: {error}. Training is not affected")
        else:
            self._files.append(path)


def _checked_kinds(kinds: object) -> tuple[str, ...]:
    given = (kinds,) if isinstance(kinds, str) else kinds
    if not isinstance(given, Sequence) or not given:
        raise ConfigError(f"Profile(kinds=...) takes some of {', '.join(map(repr, KINDS))}, not {kinds!r}")
    return tuple(dict.fromkeys(one_of("kind of profile", each, KINDS) for each in given))


def _checked_schedule(schedule: object) -> Callable[[int], ProfilerAction]:
    if not isinstance(schedule, Mapping):
        raise ConfigError(
            "Profile(schedule=...) takes the arguments of torch.profiler.schedule in a mapping, such as"
            f" {_SCHEDULE!r}, not {schedule!r}"
        )
    check_names("Profile(schedule=)", schedule, _ARGUMENTS)
    try:
        return torch.profiler.schedule(**schedule)
    except (TypeError, AssertionError) as error:
        raise ConfigError(f"Profile(schedule={dict(schedule)!r}): {error}. Example: {_SCHEDULE!r}") from None


def _table(content: Mapping[str, Any], clock: Clock) -> str:
    """Return the table as a text: the phases with the longest time of their own first."""
    whole, (first, last) = content["seconds"], content["steps"]
    rows = [("phase", "calls", "seconds", "own", "own %", "ms a call")]
    for name, each in sorted(clock.found.items(), key=lambda row: row[1].own, reverse=True):
        mean = f"{1e3 * each.seconds / each.calls:.3f}" if each.calls else ""
        rows.append((name, str(each.calls), *_seconds(each.seconds, each.own, whole), mean))
    other = whole - sum(each.own for each in clock.found.values())
    rows.append(("other", "", *_seconds(other, other, whole), ""))
    device, rank = content["device"], content["rank"]
    title = f"profile of steps {first} to {last} on rank {rank}, {device!r}: {whole:.3f} s of the host"
    return "\n".join([title, *columns(rows, range(1, 6))])


def _seconds(seconds: float, own: float, whole: float) -> tuple[str, str, str]:
    return f"{seconds:.3f}", f"{own:.3f}", f"{100 * own / whole:.1f}"
