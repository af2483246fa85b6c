"""Run an unchanged program with its fits recorded.

`drivetrain check-resume` runs this module with the arguments DIRECTORY KIND STEPS SAVE EPOCH FIT [-m]
PROGRAM .... SAVE and EPOCH may be "-".
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from drivetrain.core.random_streams import seed_host
from drivetrain.testing.resume.fits import RunRecorder
from drivetrain.testing.resume.recording import Recording
from drivetrain.trainer.observer import observing

_SEED = 0
"""Seeds the global generators, so that a program that seeds nothing draws the same in every run."""


def main(words: Sequence[str]) -> None:
    directory, kind, steps, save, epoch, fit, *program = words
    save_after, short = (None if each == "-" else int(each) for each in (save, epoch))
    recording = Recording(Path(directory), kind, int(steps), save_after, short, int(fit))
    seed_host(_SEED)
    recorder = RunRecorder(recording)
    with observing(recorder):
        try:
            run_as_main(program)
        except BaseException as error:
            recorder.ends(error)
            raise


def run_as_main(program: Sequence[str]) -> None:
    """Run a program in this process as `python` does.

    Args:
        program: A file and its arguments, or "-m", a module and its arguments.
    """
    is_module = program[0] == "-m"
    name, *arguments = program[is_module:]
    argv, first = list(sys.argv), sys.path[0]
    sys.argv[:] = [name, *arguments]
    try:
        if is_module:
            sys.path[0] = os.getcwd()
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            sys.path[0] = str(Path(name).absolute().parent)  # as `python name` sets it
            runpy.run_path(name, run_name="__main__")
    finally:
        sys.argv[:], sys.path[0] = argv, first


if __name__ == "__main__":
    main(sys.argv[1:])
