"""What the two ends of a lane need to know."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Terms:
    """`host`: the receiver's address. `bucket_bytes`: of all slots. `device`: of this side's weights."""

    host: str
    bucket_bytes: int
    timeout_seconds: float
    device: torch.device
