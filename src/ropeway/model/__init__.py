"""Model files and architectures: what a model computes, as data. Knows no scheduling, no text, no backend."""
