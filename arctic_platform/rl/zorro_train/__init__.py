"""ZoRRo Train: a batch's shared tokens are computed once, forward and backward.

Reading order: `module_patcher` (the model, prepared), `logprobs` (the head), `planner` (ranks and micro-batches; below
it `levelling`, `pouring`, `pieces`), `proof` (probe and receipt); then the documented faces of it:
`qwen_model_patcher`, `actor`, `seqlen_balancing`, and the model-free functions of `zorro_train`.
"""

from arctic_platform.rl.zorro_train.actor import DeduplicatedActor
from arctic_platform.rl.zorro_train.module_patcher import ModelOutput, ModuleReconstructionPatcher
from arctic_platform.rl.zorro_train.qwen_attention_patcher import QwenAttentionOncePatcher
from arctic_platform.rl.zorro_train.qwen_model_patcher import Qwen3ModelOncePatcher
from arctic_platform.rl.zorro_train.zorro_train import ReconstructionInfo, ZoRRoTrain

__all__ = [
    "DeduplicatedActor",
    "ModelOutput",
    "ModuleReconstructionPatcher",
    "Qwen3ModelOncePatcher",
    "QwenAttentionOncePatcher",
    "ReconstructionInfo",
    "ZoRRoTrain",
]
