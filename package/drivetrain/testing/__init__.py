"""A kit for the tests of users and of third-party strategies and storages, on real processes."""

from drivetrain.core.lazy import exports

__getattr__, __dir__, __all__ = exports(__name__)
