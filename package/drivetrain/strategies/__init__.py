"""Where a step runs: one file for each strategy, chosen by name."""

from drivetrain.strategies.base import Prepared, Settings, Strategy, StrategyConfig, Support
from drivetrain.strategies.hardware import Hardware
from drivetrain.strategies.select import Choice, choose, select_precision, select_strategy
from drivetrain.strategies.single import SingleDevice
from drivetrain.strategies.table import STRATEGIES

__all__ = [
    "STRATEGIES",
    "Choice",
    "Hardware",
    "Prepared",
    "Settings",
    "SingleDevice",
    "Strategy",
    "StrategyConfig",
    "Support",
    "choose",
    "select_precision",
    "select_strategy",
]
