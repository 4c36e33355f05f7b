"""vLLM in a process of its own, apart from the trainer's."""

import os
import signal

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from arctic_platform.errors import ConfigError, WorkerLostError
from arctic_platform.rl import create_arctic_rl_client
from arctic_platform.rl.client import BlockingArcticRLClient
from arctic_platform.rl.protocol import SamplingParams
from tests.rl.engines.builders import config, grouped_batch
from tests.rl.workers.processes import all_end

GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


def test_vllm_in_its_own_process_gets_the_weights_and_comes_back_after_a_loss():
    settings = {"sampling_engine": "vllm", "colocate": False, "zorro_inference": {"max_batch_rows": 8}}
    with BlockingArcticRLClient(create_arctic_rl_client(config(**settings))) as client:
        transport = client._client._transport
        sampler = transport.service.backend(transport.job_id).sample
        client.fwd_bwd(grouped_batch(0))
        client.step()
        assert client.sync_weights().mechanism == "vllm-shared_memory"
        with pytest.raises(ConfigError, match="one copy, once that is whole"):
            client.sync_weights(low_memory=True)
        drawn = client.generate([[5, 6, 7]], GREEDY)
        assert drawn.weight_version == 1
        scored = client.log_probs({"prompts": [[5, 6, 7]], "responses": [drawn.rollouts[0].token_ids]})
        assert list(drawn.rollouts[0].logprobs) == pytest.approx(list(scored.logprobs[0]), abs=1e-3)
        os.kill(sampler.pid, signal.SIGKILL)
        with pytest.raises(WorkerLostError):
            client.generate([[5, 6, 7]], GREEDY)
        client.sync_weights()
        assert client.generate([[5, 6, 7]], GREEDY).rollouts[0].token_ids == drawn.rollouts[0].token_ids
        last = sampler.pid
    assert all_end([last])
