"""Scheduling in virtual time: the real engine and scheduler over a runner that costs a plan instead of computing it."""
