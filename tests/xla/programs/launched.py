"""Several processes of torch_xla, of which each would train for itself."""

import torch_xla

from drivetrain.strategies.xla.single import XLA


def train(index):
    XLA().setup()


if __name__ == "__main__":
    torch_xla.launch(train)
