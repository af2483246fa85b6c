"""Data that is divided before the ranks are started, while this is one process."""

from tests.support.tasks import Regression, pairs, quiet

import drivetrain
from drivetrain import already_split

own = list(pairs(24))[drivetrain.rank() :: drivetrain.world_size()]
quiet(max_epochs=1, strategy="ddp", devices=2).fit(Regression(), already_split(own))
