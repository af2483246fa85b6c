"""The energy and the emissions of a fit, measured by CodeCarbon."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from drivetrain.callbacks.base import Callback, check_only_one
from drivetrain.core.errors import ConfigError, MissingDependencyError, nearest
from drivetrain.core.messages import logger
from drivetrain.core.registry import is_installed
from drivetrain.core.validation import by_name
from drivetrain.distributed.processes import local_rank

if TYPE_CHECKING:
    from drivetrain.run.run import Run
    from drivetrain.run.settings import RunSettings
    from drivetrain.strategies import Strategy

_LOG = logger(__name__)

_OURS = ("country_iso_code", "output_handlers", "output_methods", "tracking_mode", "allow_multiple_runs")
"""Arguments of CodeCarbon's that this callback sets."""


@by_name
class CodeCarbon(Callback):
    """Logs the energy and the emissions of a fit, by CodeCarbon's offline tracker, which uses no network.

    One process of each machine measures the whole machine, and the values are sums over all machines:

    - ``carbon/energy_kwh`` and ``carbon/emissions_kg`` (of CO2 equivalents), at each log point: those of the
      fit so far. A resumed fit starts from the values in its checkpoint;
    - ``carbon/epoch_energy_kwh`` and ``carbon/epoch_emissions_kg``, after each epoch: those of the epoch.

    At the end of the fit the first two are also a line of ``ledger.jsonl``, whose event is "emissions".

    Args:
        country: The country whose mix of energy counts, as three letters (ISO 3166), such as "DEU".
        options: Further arguments of CodeCarbon's `OfflineEmissionsTracker`, such as region, cloud_provider,
            cloud_region or measure_power_secs.

    Raises:
        ConfigError: An unknown country or option.
        MissingDependencyError: codecarbon is not installed.
    """

    def __init__(self, country: str, *, options: Mapping[str, Any] | None = None) -> None:
        if not is_installed("codecarbon"):
            raise MissingDependencyError("codecarbon", "codecarbon", "CodeCarbon")
        from codecarbon import OfflineEmissionsTracker
        from codecarbon.input import DataSource

        countries = DataSource().get_global_energy_mix_data()
        if country not in countries:
            # CodeCarbon takes the world's average for it.
            raise ConfigError(f"CodeCarbon(country={country!r}): {nearest(str(country), countries)}")
        known = {
            name
            for kind in OfflineEmissionsTracker.__mro__[:2]
            for name in inspect.signature(kind).parameters
            if name not in ("args", "kwargs", *_OURS)
        }
        for name in options or {}:
            if name not in known:  # CodeCarbon passes over what its constructor raises
                raise ConfigError(f"CodeCarbon(options={{{name!r}: ...}}): {nearest(name, known)}")
        self.country = country
        self._options = dict(options or {})
        self._tracker: Any = None
        self._reading = _EnergyReading()
        self._warned = False
        self._reset()

    def _reset(self) -> None:
        self._is_on, self._epochs = False, 0
        self._before = self._until = self._epoch = [0.0, 0.0]

    def check_trainer(self, trainer: RunSettings, strategy: Strategy) -> None:
        """Check that there is no other one."""
        check_only_one(CodeCarbon, trainer, "both would log the same names")

    def on_fit_start(self, run: Run) -> None:
        """Begin to measure.

        Raises:
            ConfigError: Nothing can be measured.
        """
        self._is_on, self._warned, self._reading = True, False, _EnergyReading()
        if local_rank() != 0:
            return
        from codecarbon import OfflineEmissionsTracker
        from codecarbon.external.logger import set_logger_level

        given = {"log_level": "error", **self._options}
        set_logger_level(given["log_level"])
        self._tracker = OfflineEmissionsTracker(
            country_iso_code=self.country,
            output_handlers=[self._reading],
            output_methods=[],
            allow_multiple_runs=True,
            **given,
        )
        self._tracker.start()
        self._tracker.flush()
        if self._reading.values is None:
            self._stop()
            raise ConfigError(
                "CodeCarbon cannot measure here; CodeCarbon(options={'log_level': 'debug'}) shows why"
            )

    def on_log(self, run: Run) -> None:
        """Log the values of the fit."""
        self._read(run)
        run.log("carbon/energy_kwh", self._until[0])
        run.log("carbon/emissions_kg", self._until[1])

        self._log_epoch(run)

    def on_epoch_end(self, run: Run) -> None:
        """Log the values of the epoch, if no log point has come at its end."""
        if run.progress.epoch > self._epochs:
            self._read(run)
            self._log_epoch(run)

    def _log_epoch(self, run: Run) -> None:
        if run.progress.epoch > self._epochs:
            run.log("carbon/epoch_energy_kwh", self._until[0] - self._epoch[0])
            run.log("carbon/epoch_emissions_kg", self._until[1] - self._epoch[1])
            self._epoch, self._epochs = self._until, run.progress.epoch

    def on_fit_end(self, run: Run) -> None:
        """Store the values of the fit, and stop."""
        self._read(run)
        if run.is_main:
            run.ledger.note("emissions", energy_kwh=self._until[0], emissions_kg=self._until[1])
        self._stop()

    def on_exception(self, run: Run) -> None:
        """Stop."""
        self._stop()

    def _read(self, run: Run) -> None:
        # CodeCarbon reports an error of its own to its log and returns None.
        if self._tracker is not None and self._tracker.flush() is None and not self._warned:
            self._warned = True
            _LOG.warning("CodeCarbon cannot measure any more; what is logged lacks the energy since then")
        found = run.engine.ranks.total(self._reading.values or [0.0, 0.0])
        self._until = [before + now for before, now in zip(self._before, found, strict=True)]

    def _stop(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.stop()
        self._reset()

    def state_dict(self) -> dict[str, Any]:
        """Return the values of the fit, and those at the end of the last epoch."""
        return {"until": list(self._until), "epoch": list(self._epoch), "epochs": self._epochs}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        if not self._is_on:
            self._before = self._until = [float(each) for each in state["until"]]
            self._epoch, self._epochs = [float(each) for each in state["epoch"]], int(state["epochs"])


class _EnergyReading:
    """Takes what CodeCarbon's tracker has measured, as one of its outputs.

    Attributes:
        values: The energy in kWh and the emissions in kg since its start.
    """

    def __init__(self) -> None:
        self.values: list[float] | None = None

    def out(self, total: Any, delta: Any) -> None:
        self.values = [float(total.energy_consumed), float(total.emissions)]

    def live_out(self, total: Any, delta: Any) -> None: ...

    def exit(self) -> None: ...
