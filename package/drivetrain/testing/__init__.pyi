from drivetrain.testing.distributed import run_distributed as run_distributed
from drivetrain.testing.host_reads import HostReads as HostReads
from drivetrain.testing.host_reads import no_host_reads as no_host_reads
from drivetrain.testing.resume.check import assert_resumable as assert_resumable
from drivetrain.testing.strategies.check import check_strategy as check_strategy
from drivetrain.testing.strategies.resume import check_resume as check_resume
