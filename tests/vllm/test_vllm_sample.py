"""The five calls with vLLM as the sampler, against the trainer and against the embedded sampler.

These tests need an environment of their own: `make test-vllm`.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from arctic_platform.errors import CallTimeoutError, ConfigError, InputError, WeightSyncError
from arctic_platform.rl import ArcticRLClientConfig, RolloutBatch, SamplingParams
from arctic_platform.rl.client import SyncClient
