"""`drivetrain check-resume`: a program run through, killed and resumed, and what was not saved."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from drivetrain.cli.parser import Parser
from drivetrain.testing.resume.check import Check, check_program

_EPILOG = """\
The first 10 updates of a script, saved after 5, killed after 7 and resumed:
  drivetrain check-resume train.py --batch-size 32
Earlier, and with an epoch that ends within them:
  drivetrain check-resume --updates 8 --save-after 3 --epoch 4 train.py
As two processes, or this package's own command line:
  drivetrain check-resume --nproc 2 train.py
  drivetrain check-resume -m drivetrain fit --task digits.Digits --data digits.data
The exit code is 0 if nothing differs, 1 if something does or the program fails.
"""


def run(words: Sequence[str]) -> int:
    """Check a program, print what was found and return the exit code.

    Args:
        words: What stands after `drivetrain check-resume`.

    Raises:
        ConfigError: Numbers that do not fit together, or a program that is not there.
        ProgramError: It fails, or trains nothing.
    """
    parsed = _parser().parse_args(words)
    ignore = tuple(parsed.ignore)
    check = Check(parsed.updates, parsed.save_after, parsed.epoch, ignore, parsed.timeout, parsed.fit)
    program = [*(["-m"] if parsed.module else []), parsed.program, *parsed.arguments]
    report = check_program(program, check, parsed.nproc)
    print(report)
    return 0 if report.is_good else 1


def _parser() -> Parser:
    parser = Parser(
        prog="drivetrain check-resume",
        description="Run a program three times: through, killed, and resumed; compare, and name what was not"
        " saved.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--updates", type=int, default=10, metavar="N", help="how many to compare; default: 10")
    add("--save-after", type=int, metavar="N", help="the kill comes up to two later; default: in the middle")
    add("--epoch", type=int, metavar="N", help="end each epoch after so many updates; default: as it is")
    add("--fit", type=int, default=1, metavar="N", help="which fit of the program; default: its first")
    add("--nproc", type=int, metavar="N", help="start it as so many processes; default: as it does itself")
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="names that may differ, such as 'callback History.*'; can be given again",
    )
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for each run; default: 600")
    add("-m", "--module", action="store_true", help="the program is a module, as for python -m")
    add("program", help="a file")
    add("arguments", nargs=argparse.REMAINDER, help="what the program is given")
    return parser
