"""Arctic Platform: reinforcement-learning post-training that computes every shared token once."""

__version__ = "0.1.0"
