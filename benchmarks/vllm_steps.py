"""vLLM, one engine step at a time, for bench_sample.py; runs in vLLM's own environment, without this project.

    python benchmarks/vllm_steps.py '{"model": ..., "prompts": [[...]], "num_rollouts": 16, "max_tokens": 64, ...}'

Each line on standard input asks for a step; each line on standard output is one JSON object: first the start-up, then
`{"seconds": ..., "tokens": [new tokens of each rollout that got one]}` per step.
"""

import json
import os
import sys
import time

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def main() -> None:
    """Start, then step on demand until standard input ends."""
    request = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever vLLM prints goes to standard error
    os.environ.update(SETTINGS, VLLM_CPU_KVCACHE_SPACE=str(request["kv_gib"]))
    started = time.perf_counter()
    engine, params = build(request)
    reply(out, {"start_seconds": time.perf_counter() - started})
    seen: dict[str, int] = {}
    for index, prompt in enumerate(request["prompts"]):
        for rollout in range(request["num_rollouts"]):
            engine.add_request(f"{index}-{rollout}", {"prompt_token_ids": prompt}, params)
    for _ in sys.stdin:
        started = time.perf_counter()
        outputs = engine.step() if engine.has_unfinished_requests() else []
        seconds = time.perf_counter() - started
        tokens = {output.request_id: len(output.outputs[0].token_ids) for output in outputs}
        new = {name: num - seen.get(name, 0) for name, num in tokens.items()}
        seen.update(tokens)
        reply(out, {"seconds": seconds, "tokens": [num for num in new.values() if num]})


def build(request: dict) -> tuple:
    """The engine, and parameters that draw like the other ways."""
    import torch
    from vllm import LLM, SamplingParams

    torch.set_num_threads(request["num_threads"])
    llm = LLM(
        model=request["model"],
        dtype=request["dtype"],
        enforce_eager=request["eager"],
        max_model_len=max(map(len, request["prompts"])) + request["max_tokens"],
        max_num_seqs=len(request["prompts"]) * request["num_rollouts"],
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    params = SamplingParams(
        temperature=1.0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=0, detokenize=False
    )
    return llm.llm_engine, params


def reply(out, message: dict) -> None:
    """One line."""
    print(json.dumps(message), file=out, flush=True)


if __name__ == "__main__":
    main()
