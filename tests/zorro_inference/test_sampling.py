import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from arctic_platform.errors import InputError, NonFiniteError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.rules import RequestRules, RowRules
from arctic_platform.rl.zorro_inference.sampling import Draws, RowSettings, draw_tokens, report_tokens, row_generators


def rules_of(params: SamplingParams, prompt=(0,), tokens=(), *, vocab_size=50, eos=(), name="") -> RowRules:
    """One rollout of a request."""
    request = RequestRules.of(params, vocab_size=vocab_size, eos_token_ids=eos, tokenizer=None)
    return RowRules(request, np.array(prompt, np.int64), name, list(tokens))


def draw(logits: torch.Tensor, uniforms: torch.Tensor | None = None, params=None, **given_params) -> Draws:
    """Draw with the same parameters for every row."""
    params = SamplingParams(**given_params) if params is None else params
    uniforms = torch.zeros(len(logits), dtype=torch.float64) if uniforms is None else uniforms
    return draw_tokens(logits, uniforms, RowSettings.same(params, len(logits)))


def slow_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row's distribution, token by token: temperature, min_p, top_k, top_p, each renormalised. `[V] fp64`."""
    z = logits.astype(np.float64) / params.temperature
    probs = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
    order = [token for token in order if probs[token] >= params.min_p * probs[order[0]]]
    if params.top_k > 0:
        order = order[: params.top_k]
    held, kept = 0.0, []
    total = sum(probs[token] for token in order)
    for token in order:
        if held >= params.top_p * total:
            break
        kept.append(token)
        held += probs[token]
    out = np.zeros(len(probs))
    out[kept] = probs[kept] / probs[kept].sum()
    return out


def frequencies(logits: torch.Tensor, params: SamplingParams, num: int = 10_000) -> np.ndarray:
    """How often each token is drawn over an even grid of uniform numbers, `[V]`: the distribution up to 1 / num."""
    grid = (torch.arange(num, dtype=torch.float64) + 0.5) / num
    ids = draw(logits.expand(num, -1), grid, params).ids.numpy()
    return np.bincount(ids, minlength=logits.shape[-1]) / num


FILTERS = [
    {},
    {"temperature": 0.5},
    {"top_k": 3},
    {"top_k": 5000},
    {"top_k": -1},
    {"top_p": 0.6},
    {"top_k": 20, "top_p": 0.8},
    {"top_p": 0.01},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"min_p": 1e-9},
    {"min_p": 0.02, "top_p": 0.7, "temperature": 1.5},
    {"min_p": 0.01, "top_k": 9, "top_p": 0.9},
]


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 700])
@pytest.mark.parametrize("filters", FILTERS)
def test_tokens_follow_the_slow_twins_distribution(vocab_size, filters):
    logits = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    params = SamplingParams(**filters)
    expected = slow_probs(logits.numpy(), params)
    found = frequencies(logits, params)
    assert np.abs(found - expected).max() <= 2e-4
    assert not found[expected == 0].any()


def test_top_p_finds_its_set_among_a_flat_vocabulary_larger_than_the_first_candidates():
    logits = torch.linspace(0, 1e-3, 1000)
    for filters in ({"top_p": 0.9}, {"min_p": 0.9995}, {"min_p": 0.9991, "top_p": 0.9}):
        found = frequencies(logits, SamplingParams(**filters), num=4000)
        assert np.count_nonzero(found) == np.count_nonzero(slow_probs(logits.numpy(), SamplingParams(**filters)))


@pytest.mark.parametrize(
    ("warper", "filters"),
    [
        (TopPLogitsWarper(0.7), {"top_p": 0.7}),
        (TopKLogitsWarper(7), {"top_k": 7}),
        (MinPLogitsWarper(0.1), {"min_p": 0.1}),
    ],
)
def test_filters_keep_the_tokens_that_transformers_keeps(warper, filters):
    logits = 2 * torch.randn(300, generator=torch.Generator().manual_seed(3))
    kept = torch.isfinite(warper(None, logits[None].clone())[0]).numpy()
    expected = np.where(kept, np.exp(logits.double().numpy()), 0)
    found = frequencies(logits, SamplingParams(**filters))
    assert np.abs(found - expected / expected.sum()).max() <= 2e-4


@given(
    st.lists(st.floats(-30, 30, width=32) | st.just(-float("inf")), min_size=1, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.5}, {"min_p": 0.3}, {"temperature": 1e-300}]),
)
def test_a_token_without_probability_is_never_drawn(values, uniform, filters):
    logits = torch.tensor([[*values, 0.0]])
    draws = draw(logits, torch.tensor([uniform], dtype=torch.float64), **filters)
    assert torch.isfinite(draws.logprobs).all()
    assert 0 <= int(draws.ids) < logits.shape[1]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_ends_of_the_unit_interval_are_the_first_and_the_last_possible_token(uniform):
    logits = torch.full((1, 600), -float("inf"))
    logits[0, [7, 300, 598]] = torch.tensor([0.0, 1.0, 2.0])
    draws = draw(logits, torch.tensor([uniform], dtype=torch.float64))
    assert int(draws.ids) == (7 if uniform == 0 else 598)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 4}, {"top_p": 0.5}, {"temperature": 0.0}, {"temperature": 1.7}, {"temperature": 1e-3}]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logprob_is_that_of_the_whole_softmax(filters, dtype):
    logits = (3 * torch.randn(16, 500, generator=torch.Generator().manual_seed(0))).to(dtype)
    params = SamplingParams(**filters)
    draws = draw(logits, torch.rand(16, dtype=torch.float64), params)
    expected = torch.log_softmax(logits.double() / (params.temperature or 1.0), -1).gather(1, draws.ids[:, None])[:, 0]
    assert draws.logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(draws.logprobs.double(), expected, atol=2e-6, rtol=0)


@pytest.mark.parametrize("temperature", [1e-3, 1e-20, 1e-300])
def test_no_temperature_is_too_small(temperature):
    logits = 100 * torch.randn(4, 300, generator=torch.Generator().manual_seed(0))
    draws = draw(logits, torch.full((4,), 0.5, dtype=torch.float64), temperature=temperature)
    assert torch.equal(draws.ids, logits.argmax(-1))
    assert torch.equal(draws.logprobs, torch.zeros(4))


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])
    assert draw(logits, temperature=0).ids.tolist() == [1, 0]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 2}])
def test_logits_that_are_not_finite_are_an_error_that_names_the_row(value, filters):
    logits = torch.zeros(2, 5)
    logits[1, 3] = value
    with pytest.raises(NonFiniteError, match="row 1: the model's logits are not finite"):
        draw(logits, **filters)
    rows = RowSettings.of([rules_of(SamplingParams(**filters), vocab_size=5, name=f"request {i}") for i in "ab"])
    with pytest.raises(NonFiniteError, match="request b: "):
        draw_tokens(logits, torch.zeros(2, dtype=torch.float64), rows)


PARAMS = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.7]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    top_k=st.sampled_from([0, 2, 30]),
    min_p=st.sampled_from([0.0, 0.2]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    frequency_penalty=st.sampled_from([-0.5, 0.0]),
    logit_bias=st.dictionaries(st.integers(0, 4), st.sampled_from([-np.inf, 3.0]), max_size=2),
    min_tokens=st.sampled_from([0, 3]),
    logprobs=st.sampled_from([None, 0, 3, -1]),
    logprobs_mode=st.sampled_from(["processed", "raw"]),
)


@settings(max_examples=60)
@given(st.lists(PARAMS, min_size=1, max_size=6), st.integers(0, 1000))
def test_rows_with_different_parameters_draw_as_each_would_alone(params, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(len(params), 50, generator=generator)
    uniforms = torch.rand(len(params), dtype=torch.float64, generator=generator)
    tokens = torch.randint(0, 50, (len(params), 4), generator=generator).tolist()
    rules = [rules_of(p, row[:2], row[2:], eos=[7]) for p, row in zip(params, tokens, strict=True)]
    together = draw_tokens(logits, uniforms, RowSettings.of(rules))
    for r, rule in enumerate(rules):
        alone = draw_tokens(logits[r : r + 1], uniforms[r : r + 1], RowSettings.of([rule]))
        assert together.ids[r] == alone.ids[0]
        assert together.logprobs[r] == alone.logprobs[0]
        assert together.top_logprobs[r] == alone.top_logprobs[0]


@settings(max_examples=60)
@given(PARAMS, st.integers(0, 1000))
def test_edits_change_what_is_drawn_and_never_the_logprob(params, seed):
    logits = 3 * torch.randn(1, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    draws = draw_tokens(
        logits, torch.tensor([0.4], dtype=torch.float64), RowSettings.of([rules_of(params, [1, 2], [2])])
    )
    temperature = 1.0 if params.logprobs_mode == "raw" else params.temperature or 1.0
    expected = torch.log_softmax(logits[0] / temperature, -1)
    assert abs(float(draws.logprobs) - float(expected[draws.ids])) < 1e-12
    for token, logprob in (draws.top_logprobs[0] or {}).items():
        assert abs(logprob - float(expected[token])) < 1e-12


@pytest.mark.parametrize(("logprobs", "num"), [(0, 1), (2, 2), (3, 3), (-1, 50)])
def test_most_probable_tokens_are_reported_beside_the_drawn_one(logprobs, num):
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(0))
    draws = draw(logits, temperature=0, logprobs=logprobs)
    unlikely = torch.full((2,), 1 - 2**-53, dtype=torch.float64)
    last = draw(logits, unlikely, logprobs=logprobs)
    for r in range(2):
        best = logits[r].argsort(descending=True)[:num].tolist()
        assert list(draws.top_logprobs[r]) == (best if logprobs else [int(draws.ids[r])])
        assert set(last.top_logprobs[r]) == {49, *(best if logprobs else [])}
        assert last.top_logprobs[r][49] == pytest.approx(float(last.logprobs[r]), abs=1e-6)


def test_nothing_is_reported_unasked():
    assert draw(torch.zeros(2, 5)).top_logprobs == [None, None]


def test_a_token_that_the_model_bans_is_reported_as_minus_infinity():
    logits = torch.tensor([[0.0, -float("inf"), 1.0]])
    assert draw(logits, logprobs=-1).top_logprobs[0][1] == -float("inf")


@pytest.mark.parametrize("mode", ["processed", "raw"])
def test_prompt_tokens_are_reported_by_the_same_definition(mode):
    logits = 2 * torch.randn(3, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    params = SamplingParams(temperature=0.5, top_k=1, prompt_logprobs=2, logprobs_mode=mode)
    reports = report_tokens(logits, torch.tensor([4, 5, 6]), params)
    expected = torch.log_softmax(logits / (0.5 if mode == "processed" else 1.0), -1)
    for r, report in enumerate(reports):
        assert set(report) == {4 + r, *logits[r].topk(2).indices.tolist()}
        assert all(abs(logprob - float(expected[r, token])) < 1e-12 for token, logprob in report.items())


def test_a_row_with_nothing_left_to_draw_is_an_error_that_names_it():
    logits = torch.full((2, 3), -float("inf"))
    logits[:, 0] = 0.0
    rows = [rules_of(SamplingParams(logit_bias=bias), vocab_size=3) for bias in ({}, {0: -np.inf})]
    with pytest.raises(InputError, match=r"row 1: .* leave no token"):
        draw_tokens(logits, torch.zeros(2, dtype=torch.float64), RowSettings.of(rows))


def test_generators_are_keyed_by_seed_prompt_and_number():
    a, b = np.array([1, 2]), np.array([2, 1])
    draw = lambda prompts, seed: [generator.random() for generator in row_generators(prompts, n=2, seed=seed)]  # noqa: E731
    values = draw([a, b, a], 0)
    assert len(set(values)) == 6
    assert draw([b, a, a], 0) == values[2:4] + values[:2] + values[4:]
    assert not set(draw([a, b, a], 1)) & set(values)
