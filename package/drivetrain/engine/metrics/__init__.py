"""Scalars and metrics of steps: kept on the device, averaged by weight, joined over ranks."""
