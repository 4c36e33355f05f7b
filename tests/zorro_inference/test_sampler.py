import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    MambaConfig,
    MambaForCausalLM,
)

from arctic_platform.errors import ConfigError, InputError, NonFiniteError, UnsupportedModelError
from arctic_platform.forest import ATTENTION_NAME
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import Sampler
from tests.zorro_inference.models import (
    EOS_ID,
    FAMILIES,
    VOCAB_SIZE,
    build_model,
    forest_prompts,
    plain_greedy,
    random_prompt,
    teacher_forced,
    token_lists,
)

GREEDY = SamplingParams(temperature=0, max_tokens=12)


@pytest.fixture(scope="module")
def llama():
    return build_model("llama")


def make_sampler(model, **options):
    return Sampler(model, **{"eos_token_ids": [EOS_ID], **options})


@pytest.mark.parametrize("share", [True, False])
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_tokens_are_those_of_plain_decoding(family, share):
    model = build_model(family)
    response = make_sampler(model, share=share).generate(forest_prompts(), GREEDY)
    assert token_lists(response) == [plain_greedy(model, prompt, 12) for prompt in forest_prompts()]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_greedy_tokens_are_those_of_hugging_face_generate(family):
    model = build_model(family)
    response = make_sampler(model).generate(forest_prompts(), GREEDY)
    for prompt, rollout in zip(forest_prompts(), response.rollouts, strict=True):
        row = torch.tensor([prompt])
        options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": EOS_ID, "pad_token_id": 0}
        plain = model.generate(row, attention_mask=torch.ones_like(row), **options)
        assert rollout.token_ids == plain[0, len(prompt) :].tolist()


@pytest.mark.parametrize("kernel", ["flash", "math"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.0])
@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_are_those_of_a_teacher_forced_pass(family, temperature, kernel):
    model = build_model(family)
    params = SamplingParams(n=3, temperature=temperature, max_tokens=16, seed=0)
    response = make_sampler(model, attn_kernel=kernel).generate(forest_prompts(), params)
    errors = []
    for rollout in response.rollouts:
        prompt = forest_prompts()[rollout.prompt_index]
        errors.append(np.abs(teacher_forced(model, prompt, rollout.token_ids, temperature) - rollout.logprobs))
    assert np.concatenate(errors).max() < 1e-4
    assert np.concatenate(errors).mean() < 1e-5


def test_half_precision_is_as_close_to_float64_as_the_plain_pass():
    exact, half = build_model("llama", dtype=torch.float64), build_model("llama", dtype=torch.bfloat16)
    exact.load_state_dict(half.state_dict())
    response = make_sampler(half).generate(forest_prompts(), SamplingParams(n=4, max_tokens=12, seed=0))
    ours, plain = [], []
    for rollout in response.rollouts:
        prompt = forest_prompts()[rollout.prompt_index]
        truth = teacher_forced(exact, prompt, rollout.token_ids, 1.0)
        ours.append(np.abs(truth - rollout.logprobs))
        plain.append(np.abs(truth - teacher_forced(half, prompt, rollout.token_ids, 1.0)))
    assert np.concatenate(ours).mean() < 2 * np.concatenate(plain).mean()


def test_sharing_does_not_change_tokens(llama):
    params = SamplingParams(n=3, max_tokens=10, seed=4)
    shared = make_sampler(llama, share=True).generate(forest_prompts(), params)
    alone = make_sampler(llama, share=False).generate(forest_prompts(), params)
    assert token_lists(shared) == token_lists(alone)


@pytest.mark.parametrize("max_batch_rows", [1, 2, 5, 23])
@pytest.mark.parametrize("share", [True, False])
def test_rows_that_wait_for_a_place_get_the_same_tokens(llama, share, max_batch_rows):
    params = SamplingParams(n=3, max_tokens=20, seed=1)
    wide = make_sampler(llama).generate(forest_prompts(), params)
    narrow = make_sampler(llama, share=share, max_batch_rows=max_batch_rows).generate(forest_prompts(), params)
    assert token_lists(narrow) == token_lists(wide)
    assert len({len(ids) for ids in token_lists(wide)}) > 2  # they did finish at different times


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_rows_that_wait_for_a_place_are_exact_with_windows(family):
    model = build_model(family)
    response = make_sampler(model, max_batch_rows=3).generate(forest_prompts(), GREEDY)
    assert token_lists(response) == [plain_greedy(model, prompt, 12) for prompt in forest_prompts()]


def test_tokens_of_a_row_do_not_depend_on_the_batch(llama):
    params = SamplingParams(n=2, max_tokens=10, seed=7)
    prompts = forest_prompts()
    together = token_lists(make_sampler(llama).generate(prompts, params))
    for i in (1, 3, 4):
        assert token_lists(make_sampler(llama).generate([prompts[i]], params)) == together[2 * i : 2 * i + 2]
    backwards = token_lists(make_sampler(llama).generate(prompts[1:6][::-1], params))
    assert backwards == [together[2 * i + j] for i in (5, 4, 3, 2, 1) for j in (0, 1)]


def test_rollouts_of_one_prompt_differ_and_a_repeated_prompt_goes_on_counting(llama):
    prompt = random_prompt(8, seed=0)
    four = token_lists(make_sampler(llama).generate([prompt], SamplingParams(n=4, max_tokens=8, seed=3)))
    assert len({tuple(ids) for ids in four}) == 4
    twice_two = make_sampler(llama).generate([prompt, prompt], SamplingParams(n=2, max_tokens=8, seed=3))
    assert token_lists(twice_two) == four
    assert [rollout.prompt_index for rollout in twice_two.rollouts] == [0, 0, 1, 1]


def test_seed_repeats_and_no_seed_does_not(llama):
    sampler, prompts = make_sampler(llama), [random_prompt(8, seed=0)]
    fixed = [token_lists(sampler.generate(prompts, SamplingParams(max_tokens=24, seed=s))) for s in (1, 1, 2)]
    assert fixed[0] == fixed[1] != fixed[2]
    free = [token_lists(sampler.generate(prompts, SamplingParams(max_tokens=24))) for _ in range(2)]
    assert free[0] != free[1]


@pytest.mark.parametrize("share", [True, False])
def test_every_prompt_token_is_computed_and_stored_once(llama, share):
    prompts, n = forest_prompts(), 4
    distinct = len({tuple(prompt[: i + 1]) for prompt in prompts for i in range(len(prompt))})
    response = make_sampler(llama, share=share).generate(prompts, SamplingParams(n=n, max_tokens=9, seed=0))
    naive = n * sum(map(len, prompts))
    decoded = sum(len(ids) - 1 for ids in token_lists(response))
    metrics = response.metrics
    assert metrics["tokens_naive"] == metrics["kv_tokens_naive"] == naive + decoded
    assert metrics["tokens_computed"] == metrics["kv_tokens_stored"] == (distinct if share else naive) + decoded
    assert metrics["prefill_seconds"] > 0 and metrics["decode_seconds"] > 0


def test_model_sees_every_token_once(llama):
    seen, sampler = [], make_sampler(llama)
    hook = llama.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["input_ids"]), with_kwargs=True)
    response = sampler.generate(forest_prompts(), SamplingParams(n=2, max_tokens=6, seed=0))
    hook.remove()
    assert sum(ids.numel() for ids in seen) == response.metrics["tokens_computed"]
    assert len(seen) == max(len(ids) for ids in token_lists(response))


def test_stop_tokens_end_a_row_and_are_kept(llama):
    prompt = random_prompt(10, seed=6)
    free = plain_greedy(llama, prompt, 12, eos_id=None)
    stop = free[4]
    params = GREEDY.model_copy(update={"stop_token_ids": (stop,), "ignore_eos": True})
    rollout = make_sampler(llama).generate([prompt], params).rollouts[0]
    assert rollout.token_ids == free[: free.index(stop) + 1]
    assert rollout.finish_reason == "stop"
    assert len(rollout.logprobs) == len(rollout.token_ids)


def test_end_token_ends_a_row_unless_ignored(llama):
    prompt = random_prompt(10, seed=6)
    free = plain_greedy(llama, prompt, 12, eos_id=None)
    sampler = make_sampler(llama, eos_token_ids=[free[2], VOCAB_SIZE - 1])
    stopped = sampler.generate([prompt], GREEDY).rollouts[0]
    assert (stopped.token_ids, stopped.finish_reason) == (free[: free.index(free[2]) + 1], "stop")
    ignored = sampler.generate([prompt], GREEDY.model_copy(update={"ignore_eos": True})).rollouts[0]
    assert (ignored.token_ids, ignored.finish_reason) == (free, "length")


def test_first_token_may_be_the_only_one(llama):
    prompts = forest_prompts()
    response = make_sampler(llama).generate(prompts, SamplingParams(n=2, temperature=0, max_tokens=1))
    assert token_lists(response) == [plain_greedy(llama, prompt, 1) for prompt in prompts for _ in range(2)]
    assert response.metrics["tokens_computed"] < sum(map(len, prompts))


def test_top_k_of_one_is_greedy(llama):
    params = SamplingParams(top_k=1, max_tokens=12, seed=0)
    assert token_lists(make_sampler(llama).generate(forest_prompts(), params)) == [
        plain_greedy(llama, prompt, 12) for prompt in forest_prompts()
    ]


def test_first_tokens_follow_the_models_distribution(llama):
    prompt, n = random_prompt(8, seed=0), 4000
    with torch.no_grad():
        probs = llama(input_ids=torch.tensor([prompt])).logits[0, -1].softmax(-1).numpy()
    response = make_sampler(llama, max_batch_rows=512).generate([prompt], SamplingParams(n=n, max_tokens=1, seed=0))
    counts = np.bincount([ids[0] for ids in token_lists(response)], minlength=VOCAB_SIZE)
    assert np.abs(counts / n - probs).max() < 4 * np.sqrt(0.25 / n)


def test_weights_changed_between_calls_count_in_the_next(llama):
    model = build_model("llama")
    sampler = make_sampler(model)
    before = token_lists(sampler.generate(forest_prompts(), GREEDY))
    model.load_state_dict(build_model("llama", seed=1).state_dict())
    after = token_lists(sampler.generate(forest_prompts(), GREEDY))
    assert before != after == [plain_greedy(model, prompt, 12) for prompt in forest_prompts()]


def test_model_is_left_as_it_was():
    model = build_model("llama").train()
    make_sampler(model).generate([[1, 2, 3]], GREEDY)
    assert model.training
    assert model.config._attn_implementation == "sdpa"
    assert all(parameter.requires_grad and parameter.grad is None for parameter in model.parameters())


def test_prefill_in_several_passes_changes_nothing(llama, monkeypatch):
    prompts = [*forest_prompts(), random_prompt(30, seed=8), random_prompt(31, seed=9)]
    whole = make_sampler(llama).generate(prompts, GREEDY)
    monkeypatch.setattr("arctic_platform.rl.zorro_inference.sampler.MAX_PASS_TOKENS", 32)
    assert token_lists(make_sampler(llama).generate(prompts, GREEDY)) == token_lists(whole)


def test_progress_is_reported(llama):
    calls = []
    make_sampler(llama).generate(forest_prompts(), GREEDY, progress=lambda done, rows: calls.append((done, rows)))
    assert calls[-1] == (8, 8)
    assert calls == sorted(calls)


def test_prompts_may_be_arrays_and_tensors(llama):
    lists = make_sampler(llama).generate([[1, 2, 3], [1, 2]], GREEDY)
    arrays = make_sampler(llama).generate([np.array([1, 2, 3], np.int32), torch.tensor([1, 2])], GREEDY)
    assert token_lists(lists) == token_lists(arrays)


@pytest.mark.parametrize(
    ("prompts", "params", "message"),
    [
        ([], {}, "prompts is empty"),
        ([[1], []], {}, r"prompts\[1\] is empty"),
        ([[1, 2.5]], {}, r"prompts\[0\] must be a flat list of integer token ids"),
        ([[[1, 2]]], {}, r"prompts\[0\] must be a flat list"),
        ([[1, [2]]], {}, r"prompts\[0\] must be a flat list"),
        ([[True, False]], {}, r"prompts\[0\] must be a flat list"),
        ([[1, VOCAB_SIZE]], {}, rf"prompts\[0\] has token id {VOCAB_SIZE}; the model's ids are 0..{VOCAB_SIZE - 1}"),
        ([[-1]], {}, r"prompts\[0\] has token id -1"),
        ([[1] * 500], {"max_tokens": 13}, r"prompts\[0\] has 500 tokens .* lower max_tokens to 12"),
        ([[1]], {"stop_token_ids": (VOCAB_SIZE,)}, f"stop_token_ids has {VOCAB_SIZE}"),
    ],
)
def test_wrong_input_is_refused_in_one_line(llama, prompts, params, message):
    with pytest.raises(InputError, match=message) as caught:
        make_sampler(llama).generate(prompts, SamplingParams(**params))
    assert "\n" not in str(caught.value)


def test_row_as_long_as_the_model_allows_is_sampled(llama):
    response = make_sampler(llama).generate([[1] * 500], SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
    assert len(response.rollouts[0].token_ids) == 12


@pytest.mark.parametrize("option", [{"max_batch_rows": 0}, {"attn_kernel": "flash3"}])
def test_unusable_setting_is_refused_by_name(llama, option):
    name, value = next(iter(option.items()))
    with pytest.raises(ConfigError, match=f"{name}={value!r}"):
        make_sampler(llama, **option)


def test_weights_that_are_not_finite_are_an_error():
    model = build_model("llama")
    sampler = make_sampler(model)
    model.lm_head.weight.data[3] = float("nan")
    with pytest.raises(NonFiniteError, match="not finite"):
        sampler.generate([[1, 2]], GREEDY)


def build_bloom():
    return BloomForCausalLM(BloomConfig(vocab_size=VOCAB_SIZE, hidden_size=64, n_layer=2, n_head=2))


def build_mamba():
    return MambaForCausalLM(MambaConfig(vocab_size=VOCAB_SIZE, hidden_size=64, state_size=8, num_hidden_layers=2))


@pytest.mark.parametrize("build", [build_bloom, build_mamba])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_architecture_that_would_decode_wrongly_is_refused_by_name(build, dtype):
    torch.manual_seed(0)
    model = build().to(dtype).eval()
    with pytest.raises(UnsupportedModelError, match=model.config.model_type):
        make_sampler(model)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_probe_accepts_exact_architectures_in_other_precisions(family, dtype):
    make_sampler(build_model(family, dtype=dtype))


def test_probe_leaves_mode_and_attention_as_they_were(llama):
    model = build_model("llama").train()
    model.set_attn_implementation(ATTENTION_NAME)
    make_sampler(model)
    assert model.training
    assert model.config._attn_implementation == ATTENTION_NAME


def num_replaced(model):
    return sum("forward" in vars(module) for module in model.modules())


def test_long_work_runs_on_laid_out_weights_and_restores_the_model(llama):
    seen = []
    sampler = make_sampler(llama)
    hook = llama.register_forward_pre_hook(lambda *_: seen.append(num_replaced(llama)))
    sampler.generate([random_prompt(4, seed=0)], GREEDY.model_copy(update={"max_tokens": 2}))
    assert set(seen) == {0}
    seen.clear()
    sampler.generate([random_prompt(4, seed=0)], GREEDY.model_copy(update={"ignore_eos": True, "max_tokens": 40}))
    hook.remove()
    assert set(seen) == {15 if torch.backends.mkldnn.is_available() else 0}
    assert num_replaced(llama) == 0
