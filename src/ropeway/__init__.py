"""Ropeway: a continuous-batching inference engine and server for open-weight language models."""

from ropeway._version import __version__

__all__ = ["__version__"]
