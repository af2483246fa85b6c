"""transformers' own Trainer replaced by ours in a program, for subclasses inside other packages."""

from __future__ import annotations

import importlib
import sys
from typing import Any

from transformers import trainer, trainer_seq2seq, trainer_utils

from drivetrain.core.errors import ConfigError
from drivetrain.core.messages import logger
from drivetrain.integrations.transformers.script import methods
from drivetrain.integrations.transformers.script.last_checkpoint import get_last_checkpoint
from drivetrain.integrations.transformers.script.seq2seq import Seq2SeqTrainer
from drivetrain.integrations.transformers.script.trainer import Trainer

_LOG = logger(__name__)


def replace_trainer() -> None:
    """Make `transformers.Trainer` and `transformers.Seq2SeqTrainer` those of drivetrain in this process.

    ::

        from drivetrain.integrations.transformers import replace_trainer

        replace_trainer()
        from trl import SFTTrainer

    The trainers of packages that are imported afterwards, such as TRL, are then subclasses of ours. `python
    -m drivetrain.integrations.transformers script.py` calls this before it runs a script.
    `get_last_checkpoint` of `transformers.trainer_utils` is replaced too.

    Raises:
        ConfigError: A module that has transformers' Trainer is imported already.
    """
    early = sorted({name.partition(".")[0] for name in _holders()})
    if early:
        raise ConfigError(
            f"replace_trainer() comes too late: transformers' own Trainer is already in {', '.join(early)}."
            " Call it before other imports, or run: python -m drivetrain.integrations.transformers script.py"
        )
    package: Any = importlib.import_module("transformers")  # the object that others get: its init runs twice
    if package.Trainer is Trainer:
        return
    methods.REPLACED.add(True)
    package.Trainer = trainer.Trainer = trainer_seq2seq.Trainer = Trainer
    package.Seq2SeqTrainer = trainer_seq2seq.Seq2SeqTrainer = Seq2SeqTrainer
    trainer_utils.get_last_checkpoint = get_last_checkpoint
    _LOG.info("transformers.Trainer and Seq2SeqTrainer are drivetrain's in this process")


def _holders() -> set[str]:
    """Return the modules of other packages that have transformers' Trainer, or a subclass of it."""
    theirs = methods.THEIRS
    return {
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("transformers", "drivetrain")
        # Not isinstance, which asks objects for their class; some warn then.
        and any(type in type(each).__mro__ and theirs in each.__mro__ for each in list(vars(module).values()))
    }
