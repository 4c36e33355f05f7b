"""Weights into a vLLM of several worker processes on this machine's GPUs: vLLM's own transfer by CUDA IPC."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def send_by_ipc(llm: Any, weights: Mapping[str, Tensor]) -> None:
    """Hand all weights over as CUDA memory handles; vLLM's workers copy and cut them, and acknowledge each buffer."""
    from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo

    class Source(WeightSource):
        def metadata(self) -> list[ParamMeta]:
            return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]

        def __iter__(self) -> Iterator[tuple[str, Tensor]]:
            return iter(weights.items())

    init_info = IPCTrainerInitInfo(rank=0, packed=True)
    trainer = WeightTransferTrainerFactory.trainer_init(init_info, client=_Client(llm), source=Source())
    trainer.send_weights()


class _Client:
    """The four calls by which vLLM's sender drives vLLM's receivers, on an `LLM` in this process."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._llm.init_weight_transfer_engine({"init_info": init_info})

    def shutdown_weight_transfer_engine(self) -> None:
        self._llm.shutdown_weight_transfer_engine()

    def start_weight_update(self) -> None:
        self._llm.start_weight_update()

    def update_weights(self, update_info: Any) -> None:
        self._llm.update_weights({"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._llm.finish_weight_update(weight_version)
