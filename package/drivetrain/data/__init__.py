"""From a user's data to micro-batches on the device, in an order that any run can resume."""

from drivetrain.data.batch import batch_size, map_tensors, move, to_host
from drivetrain.data.feed import Feed, Measure, Window
from drivetrain.data.length_grouped import LengthGroupedSampler
from drivetrain.data.reading import as_source, evaluation_sources, pin_memory_for
from drivetrain.data.shard import Everywhere, Shard
from drivetrain.data.sources import Source
from drivetrain.data.split_source import already_split
from drivetrain.data.transfer import MicroBatch, Transfer

__all__ = [
    "Everywhere",
    "Feed",
    "LengthGroupedSampler",
    "Measure",
    "MicroBatch",
    "Shard",
    "Source",
    "Transfer",
    "Window",
    "already_split",
    "as_source",
    "batch_size",
    "evaluation_sources",
    "map_tensors",
    "move",
    "pin_memory_for",
    "to_host",
]
