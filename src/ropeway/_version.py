"""The version, for the package and its build."""

__version__ = "0.1.0"
