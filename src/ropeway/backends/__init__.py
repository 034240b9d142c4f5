"""Executing Programs over arrays. `reference` is the oracle, `native` is the fast one; neither knows of scheduling."""
