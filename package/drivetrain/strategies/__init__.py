"""Strategies: where a step runs. Each has a file or folder, and a name."""

from drivetrain.strategies.base import Held, Prepared, SharedSettings, Strategy, StrategyConfig, Support
from drivetrain.strategies.hardware import Hardware
from drivetrain.strategies.registry import STRATEGIES
from drivetrain.strategies.select import Choice, choose, select_precision, select_strategy
from drivetrain.strategies.single import SingleDevice

__all__ = [
    "STRATEGIES",
    "Choice",
    "Hardware",
    "Held",
    "Prepared",
    "SharedSettings",
    "SingleDevice",
    "Strategy",
    "StrategyConfig",
    "Support",
    "choose",
    "select_precision",
    "select_strategy",
]
