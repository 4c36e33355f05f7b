"""Forest cascade attention in vLLM's CPU engine, against the same engine without it."""

from contextlib import contextmanager

import numpy as np
import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from arctic_platform.rl.engines.vllm_start import prepare_process, process_as_it_was
from arctic_platform.rl.protocol import SamplingParams as OurParams
from arctic_platform.rl.zorro_inference.vllm_plugin import ENGINE_COST, ENGINE_SWITCH, install
from tests.vllm.engines import BLOCK, PROMPTS, vllm_backend

LAYERS = 2
SIZES = {"num_hidden_layers": LAYERS, "hidden_size": 64, "intermediate_size": 96, "vocab_size": 256, "head_dim": 32}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 1024}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A plain model, and one with soft-capped scores and a window in every second layer."""
    plain = Qwen3ForCausalLM(Qwen3Config(**SIZES, **HEADS))
    capped = Gemma2ForCausalLM(Gemma2Config(**SIZES, **HEADS, sliding_window=48, attn_logit_softcapping=5.0))
    found = {}
    for name, model in {"plain": plain, "capped": capped}.items():
        found[name] = str(tmp_path_factory.mktemp(name))
        for param in model.parameters():
            param.data.mul_(2.0)
        model.save_pretrained(found[name])
    return found


@contextmanager
def llm_of(folder, *, fca, call_cost=1, **settings):
    """vLLM with or without the cascade."""
    prepare_process()
    install()
    from vllm import LLM

    with process_as_it_was():
        llm = LLM(
            folder,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=512,
            block_size=BLOCK,
            kv_cache_memory_bytes=64 << 20,
            logprobs_mode="raw_logprobs",
            additional_config={ENGINE_SWITCH: fca, ENGINE_COST: call_cost},
            **settings,
        )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def read_counters(llm):
    def of_worker(worker):
        groups = [group for groups in worker.model_runner.attn_groups for group in groups]
        return [builder.counters for group in groups for builder in group.metadata_builders]

    found = llm.collective_rpc(of_worker)[0]
    return {name: sum(getattr(each, name) for each in found) for name in ("steps", "shared", "tail", "apart")}


def run(llm, prompts, *, num_tokens, num=1, seed=None):
    """Rollouts as (ids, log-probs); `num_tokens` by prompt, so that requests leave at different times."""
    from vllm import SamplingParams

    given, params = [], []
    for i, prompt in enumerate(prompts):
        for j in range(num):
            given.append({"prompt_token_ids": prompt})
            own_seed = None if seed is None else seed + 100 * i + j
            params.append(
                SamplingParams(
                    temperature=0.0 if seed is None else 0.8,
                    seed=own_seed,
                    max_tokens=num_tokens[i % len(num_tokens)] + j,
                    logprobs=0,
                    ignore_eos=True,
                    detokenize=False,
                )
            )
    outputs = [output.outputs[0] for output in llm.generate(given, params, use_tqdm=False)]
    return [
        (list(out.token_ids), [by_id[token].logprob for token, by_id in zip(out.token_ids, out.logprobs, strict=True)])
        for out in outputs
    ]


def several_levels():
    """A start of all, one of some, answers that differ; a prompt that ends within, and one apart."""
    draw = np.random.default_rng(0)
    start, branch = draw.integers(1, 256, 3 * BLOCK + 5).tolist(), draw.integers(1, 256, 2 * BLOCK + 9).tolist()
    ends = [draw.integers(1, 256, num).tolist() for num in (1, 40, 3, 70, 17)]
    return [start + branch + ends[0], start + branch + ends[1], start + ends[2], start + ends[3], ends[4] * 4, start]


WORKLOADS = {
    "seeded_rollouts": {"num": 4, "num_tokens": [40, 12], "seed": 7},
    "greedy": {"num_tokens": [50, 20, 35]},
    "once_more_from_the_cache": {"num_tokens": [20]},
    "and_seeded": {"num": 2, "num_tokens": [33], "seed": 8},
}
ENGINES = {
    "all_at_once": ("plain", {"enable_chunked_prefill": False, "max_num_seqs": 64}, list(WORKLOADS)),
    "joining_and_leaving": ("plain", {"enable_chunked_prefill": False, "max_num_seqs": 5}, list(WORKLOADS)),
    "chunked_prefill": ("plain", {"max_num_batched_tokens": 48}, ["greedy", "once_more_from_the_cache"]),
    "windows_and_softcaps": ("capped", {"enable_chunked_prefill": False, "max_num_seqs": 6}, list(WORKLOADS)),
}


@pytest.mark.parametrize("name", ENGINES)
def test_rollouts_are_those_of_plain_vllm(folders, name):
    model, settings, workloads = ENGINES[name]
    results, counted = {}, {}
    for fca in (False, True):
        with llm_of(folders[model], fca=fca, **settings) as llm:
            results[fca] = [run(llm, several_levels(), **WORKLOADS[workload]) for workload in workloads]
            counted[fca] = read_counters(llm)
    for plain, forest in zip(results[False], results[True], strict=True):
        for (ids, logprobs), (expected_ids, expected) in zip(forest, plain, strict=True):
            assert ids == expected_ids
            np.testing.assert_allclose(logprobs, expected, atol=1e-5)
    assert counted[False] == {"steps": 0, "shared": 0, "tail": 0, "apart": 0}
    assert counted[True]["steps"] > 20
    assert counted[True]["shared"] + counted[True]["tail"] < 0.7 * counted[True]["apart"]


def test_a_shared_block_is_read_once_for_all_who_share_it(folders):
    prompt_len, num, num_tokens = 4 * BLOCK + 10, 6, 15
    prompt = np.random.default_rng(1).integers(1, 256, prompt_len).tolist()
    with llm_of(folders["plain"], fca=True, enable_chunked_prefill=False) as llm:
        run(llm, [prompt], num=1, num_tokens=[1])
        run(llm, [prompt] * num, num_tokens=[num_tokens])
        counted = read_counters(llm)
    steps = num_tokens - 1
    lens = np.arange(prompt_len + 1, prompt_len + 1 + steps)
    assert counted["steps"] == LAYERS * steps
    assert counted["shared"] == LAYERS * steps * 4 * BLOCK
    assert counted["apart"] == LAYERS * num * lens.sum()
    assert counted["tail"] == LAYERS * num * (lens - 4 * BLOCK).sum()


def test_sharing_that_is_not_worth_a_call_is_left_to_vllm(folders):
    prompt = np.random.default_rng(2).integers(1, 256, 3 * BLOCK + 10).tolist()
    with llm_of(folders["plain"], fca=True, call_cost=3 * BLOCK * 3 + 1, enable_chunked_prefill=False) as llm:
        run(llm, [prompt] * 4, num_tokens=[5])
        assert read_counters(llm)["steps"] == 0
        run(llm, [prompt] * 5, num_tokens=[5])
        assert read_counters(llm)["steps"] > 0


def test_the_engine_draws_the_same_with_the_cascade_on_and_off():
    params = OurParams(n=4, max_tokens=20, seed=5, ignore_eos=True)
    found = {}
    for fca in (False, True):
        cost = 1 if fca else None
        with vllm_backend(zorro_inference={"vllm_fca": fca, "vllm_fca_call_cost": cost}) as backend:
            found[fca] = backend.sample.generate(PROMPTS, params).rollouts
            steps = read_counters(backend.sample._llm)["steps"] if fca else 0
    assert steps > 0
    for ours, plain in zip(found[True], found[False], strict=True):
        assert list(ours.token_ids) == list(plain.token_ids)
        np.testing.assert_allclose(list(ours.logprobs), list(plain.logprobs), atol=1e-5)


@pytest.mark.gpu
def test_on_a_gpu_rollouts_stay_close_to_plain_vllm(folders):
    from vllm import LLM, SamplingParams

    prepare_process()
    install()
    prompts, found = several_levels(), {}
    for fca in (False, True):
        llm = LLM(
            folders["plain"],
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=512,
            gpu_memory_utilization=0.2,
            additional_config={ENGINE_SWITCH: fca, ENGINE_COST: 1},
        )
        params = SamplingParams(temperature=0.0, max_tokens=20, logprobs=0, ignore_eos=True, detokenize=False)
        given = [{"prompt_token_ids": prompt} for prompt in prompts for _ in range(4)]
        first = [output.outputs[0].logprobs[0] for output in llm.generate(given, params, use_tqdm=False)]
        found[fca] = [next(iter(by_id.values())).logprob for by_id in first]
        if fca:
            assert read_counters(llm)["steps"] > 0
        llm.llm_engine.engine_core.shutdown()
    np.testing.assert_allclose(found[True], found[False], atol=0.1)
