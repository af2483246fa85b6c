"""Optimizers, their parameter groups, states and schedules."""
