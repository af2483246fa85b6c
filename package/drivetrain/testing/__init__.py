"""A kit for the tests of users and of third-party strategies and storages, on real processes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from drivetrain.core.lazy import exports

if TYPE_CHECKING:
    from drivetrain.testing.distributed import run_distributed
    from drivetrain.testing.host_reads import HostReads, no_host_reads
    from drivetrain.testing.resume.check import assert_resumable
    from drivetrain.testing.strategies.check import check_strategy
    from drivetrain.testing.strategies.resume import check_resume
else:
    __getattr__, __dir__ = exports(
        __name__,
        {
            "drivetrain.testing.resume.check": ("assert_resumable",),
            "drivetrain.testing.strategies.resume": ("check_resume",),
            "drivetrain.testing.strategies.check": ("check_strategy",),
            "drivetrain.testing.host_reads": ("HostReads", "no_host_reads"),
            "drivetrain.testing.distributed": ("run_distributed",),
        },
    )

__all__ = [
    "HostReads",
    "assert_resumable",
    "check_resume",
    "check_strategy",
    "no_host_reads",
    "run_distributed",
]
