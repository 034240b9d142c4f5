"""Scheduling: sequences, blocks, policies, plans. Standard library only; knows no arrays, clock, I/O or text."""
