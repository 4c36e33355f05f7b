"""A job that syncs changes only: the sampler draws what it draws in one process."""

from arctic_platform.rl.protocol import (
    FwdBwdRequest,
    GenerateRequest,
    LoadCheckpointRequest,
    SamplingParams,
    SaveCheckpointRequest,
    StepRequest,
    SyncWeightsRequest,
)
from arctic_platform.rl.server.backend import Backend, create_backend
from tests.rl.engines.builders import config, grouped_batch

REQUEST = GenerateRequest(prompts=[[3, 4, 5, 6]], sampling_params=SamplingParams(n=2, max_tokens=6, seed=1))


def trained(backend: Backend, seed: int) -> tuple[str, list[list[int]]]:
    """How a step's weights were synced, and what is drawn with them."""
    backend.handle(FwdBwdRequest(batch=grouped_batch(seed)))
    backend.handle(StepRequest())
    synced = backend.handle(SyncWeightsRequest())
    return synced.mechanism, [list(rollout.token_ids) for rollout in backend.handle(REQUEST).rollouts]


def test_all_weights_travel_once_and_changes_from_then_on_also_after_a_checkpoint(tmp_path, forked_workers) -> None:
    changes = {"colocate": False, "weight_sync": {"mechanism": "stream", "delta": True}}
    apart, together = create_backend(config(**changes)), create_backend(config())
    try:
        apart.handle(SaveCheckpointRequest(path=str(tmp_path / "first")))
        seen = [trained(apart, seed) for seed in range(3)]
        assert [mechanism for mechanism, _ in seen] == ["stream", "stream-delta", "stream-delta"]
        expected = [drawn for _, drawn in (trained(together, seed) for seed in range(3))]
        assert [drawn for _, drawn in seen] == expected
        apart.handle(LoadCheckpointRequest(path=str(tmp_path / "first")))
        mechanism, drawn = trained(apart, 0)
        assert (mechanism, drawn) == ("stream-delta", expected[0])
    finally:
        apart.close()
        together.close()
