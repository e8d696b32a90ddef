"""For tools that look for this file. The package is described in pyproject.toml."""

from setuptools import setup

setup()
