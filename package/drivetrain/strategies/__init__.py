"""Where a step runs: one file for each strategy, chosen by name."""

from drivetrain.strategies.base import Prepared, Strategy, Support
from drivetrain.strategies.select import STRATEGIES, Hardware, select_strategy
from drivetrain.strategies.single import SingleDevice

__all__ = ["STRATEGIES", "Hardware", "Prepared", "SingleDevice", "Strategy", "Support", "select_strategy"]
