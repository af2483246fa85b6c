"""Builds the package; everything about it is declared in setup.cfg."""

from setuptools import setup

setup()
