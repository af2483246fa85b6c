"""From a user's data to micro-batches on the device, in an order that any run can resume."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
