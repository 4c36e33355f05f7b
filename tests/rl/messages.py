"""One example of every message that travels, used by the tests of the wire and of the transports."""

import math

from arctic_platform.rl import protocol
from arctic_platform.rl.protocol import Message, Processing, Rollout, RolloutBatch, SamplingParams

BATCH = RolloutBatch(
    prompts=[[1, 2], [3], [4, 5, 6]],
    responses=[[7], [8, 9], []],
    response_mask=[[1], [0, 1], []],
    advantages=[[0.5], [-1.0, 1e-300], []],
    old_logprobs=[[-0.1], [-0.2, -0.3], []],
    ref_logprobs=[[-0.1], [-0.2, -0.3], []],
    rollout_logprobs=[[-0.1], [-0.2, -0.3], []],
    pairs=[[0, 1], [1, 2]],
    content_keys=[[0, 0, 0], [1, -(2**63), 2**63 - 1], [0, 0, 0]],
)
METRICS = {"loss": math.nan, "a.b": -math.inf, "seconds": 0.25, "a": math.inf}
PARAMS = SamplingParams(
    n=2, stop_token_ids=(5, 6), seed=2**40, stop=("END",), logit_bias={3: -math.inf, 4: 1.5}, bad_words=("ü",)
)
LOGPROBS = [[-math.inf], [-0.1, math.nan], []]

MESSAGES: list[Message] = [
    protocol.GenerateRequest(prompts=[[1], [2, 3]], sampling_params=PARAMS, routing_key="group 1"),
    protocol.GenerateResponse(
        rollouts=[
            Rollout(
                prompt_index=0, token_ids=[3, 4], logprobs=[-0.1, -math.inf], finish_reason="stop", text="ü",
                stop_reason=4, top_logprobs=[{3: -0.1, 7: -math.inf}, {4: -0.5}], prompt_logprobs=[None, {1: math.nan}],
            ),
            Rollout(prompt_index=1, token_ids=[], logprobs=[], finish_reason="length"),
        ],
        weight_version=3,
        metrics=METRICS,
    ),
    protocol.LogProbsRequest(batch=BATCH, processing=Processing(calculate_entropy=True), reference=True),
    protocol.LogProbsResponse(logprobs=LOGPROBS, entropy=LOGPROBS, metrics=METRICS),
    protocol.FwdBwdRequest(batch=BATCH, processing=Processing(loss="dapo", clip_high=0.28)),
    protocol.FwdNoGradRequest(batch=RolloutBatch(prompts=[[1]], responses=[[2]])),
    protocol.FwdBwdResponse(logprobs=LOGPROBS, metrics=METRICS),
    protocol.StepRequest(),
    protocol.StepResponse(metrics=METRICS),
    protocol.SyncWeightsRequest(cuda_ipc=False, low_memory=True),
    protocol.SyncResponse(weight_version=1, num_tensors=2, num_bytes=2**40, seconds=0.1, mechanism="local"),
    protocol.SaveCheckpointRequest(path="runs/a", client_state={"at": [1, 2.5, None, {"x.y": "ü", "*": True}]}),
    protocol.LoadCheckpointRequest(),
    protocol.CheckpointResponse(path="runs/a", step=3, weight_version=3, client_state={"nan": "nan"}),
    protocol.ExportModelRequest(path="out"),
    protocol.PathResponse(path="\ud800 no text"),
    protocol.SleepSamplingRequest(level=2),
    protocol.WakeSamplingRequest(),
    protocol.SleepTrainingRequest(target="disk"),
    protocol.WakeTrainingRequest(),
    protocol.ResetPrefixCacheRequest(),
    protocol.WeightNormRequest(),
    protocol.WeightNormResponse(norm=math.inf),
    protocol.StatusRequest(),
    protocol.StatusResponse(
        kinds=("training", "sampling"),
        training_engine="TorchTrainEngine",
        sampling_engine="TorchSampleEngine",
        zorro_train_effect="on; no batch was run yet",
        zorro_inference_effect="on; nothing was sampled yet",
        model="m", num_parameters=10, dtype="float32", device="cpu", step=1, trainer_version=1, sampler_version=0,
        is_sampler_current=False, is_sampler_asleep=False, has_pending_gradients=True, zorro_train=True,
        zorro_inference=True, max_rollouts=None,
    ),
    protocol.SideBySideRequest(batch=BATCH, prompts=[[1, 2], [3]], sampling_params=PARAMS, repeats=1),
    protocol.SideBySideResponse(
        train_seconds_on=1, train_seconds_off=2, train_tokens_on=1, train_tokens_off=2, train_loss_on=math.nan,
        train_loss_off=1, sample_seconds_on=1, sample_seconds_off=2, sample_tokens_on=1, sample_tokens_off=2,
        repeats=3, train_ratio=2, sample_ratio=2,
    ),
    protocol.EmptyResponse(),
]  # fmt: skip
