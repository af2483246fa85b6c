"""torchao: training with linear layers in float8."""
