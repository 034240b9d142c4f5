"""Scheduling: sequences, blocks, policies, plans. Standard library only; knows no arrays, clock, I/O or text.

What runs is compiled from these modules by mypyc when the package is built; see `ropeway._written_core`.
"""
