"""ZoRRo Inference: rollouts decode over a forest of shared keys and values.

Reading order: sampler.py (the loop), plan.py (which calls), attention.py (the calls and their merge), cache.py,
sampling.py (logits to tokens), stream.py (tokens as they come).
"""

from arctic_platform.rl.zorro_inference.requests import SampleRequest, SamplerStats, TokenDelta
from arctic_platform.rl.zorro_inference.sampler import Sampler
from arctic_platform.rl.zorro_inference.stream import AsyncSampler

__all__ = ["AsyncSampler", "SampleRequest", "Sampler", "SamplerStats", "TokenDelta"]
