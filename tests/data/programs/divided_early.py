"""Data that is divided before the ranks are started, while this is one process; a list, or a stream."""

import json
import sys

from tests.support.tasks import Regression, pairs, quiet

import drivetrain
from drivetrain import already_split

batches = list(pairs(24))
own = batches[drivetrain.rank() :: drivetrain.world_size()]


class Stream:
    def __iter__(self):
        return iter(own)


data = own if json.loads(sys.argv[1])["kind"] == "list" else Stream()
quiet(max_epochs=1, strategy="ddp", devices=2).fit(Regression(), already_split(data))
