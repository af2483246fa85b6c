"""`drivetrain check-resume`: run a program through, kill and resume it, and report the first difference."""

from __future__ import annotations

from collections.abc import Sequence

from drivetrain.cli.parser import Parser, program_words
from drivetrain.testing.resume.check import Check, check_program


def run(words: Sequence[str]) -> int:
    """Check a program, print the report and return the exit code."""
    parsed = _parser().parse_args(words)
    ignore = tuple(parsed.ignore)
    check = Check(parsed.steps, parsed.save_after, parsed.epoch, ignore, parsed.timeout, parsed.fit)
    report = check_program(program_words(parsed), check, parsed.nproc)
    print(report)
    return 0 if report.is_good else 1


def _parser() -> Parser:
    parser = Parser(
        prog="drivetrain check-resume",
        description="Run a program three times: through, killed, and resumed. Compare, and report what was"
        " not saved.",
        epilog="The exit code is 0 if nothing differs, and 1 if something differs or the program fails.",
    )
    add = parser.add_argument
    add("--steps", type=int, default=10, metavar="N", help="steps to compare; default: 10")
    add(
        "--save-after",
        type=int,
        metavar="N",
        help="save after this step, kill at most two later; default: in the middle",
    )
    add("--epoch", type=int, metavar="N", help="steps in each epoch; default: the program's")
    add("--fit", type=int, default=1, metavar="N", help="the fit to check; default: the program's first")
    add("--nproc", type=int, metavar="N", help="processes to start; default: the program starts its own")
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="PATTERN",
        help="names of values and weights that may differ, such as 'history/*'; may be repeated",
    )
    add("--timeout", type=float, default=600.0, metavar="S", help="seconds for each run; default: 600")
    parser.add_program()
    return parser
