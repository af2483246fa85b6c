"""Data that is divided before the ranks are started, while this is one process."""

from tests.support.tasks import Regression, pairs, quiet

import drivetrain
from drivetrain import already_split

batches = list(pairs(24))
own = already_split(batches[drivetrain.rank() :: drivetrain.world_size()])
quiet(max_epochs=1, strategy="ddp", devices=2).fit(Regression(), own)
