"""ZoRRo Inference: rollouts decode over a forest of shared keys and values.

Reading order: sampler.py (the loop), plan.py (which calls), attention.py (the calls and their merge), cache.py,
sampling.py (logits to tokens).
"""

from arctic_platform.rl.zorro_inference.sampler import Sampler

__all__ = ["Sampler"]
