import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from arctic_platform.errors import NonFiniteError
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.sampling import draw_tokens, row_generators


def slow_probs(logits: np.ndarray, params: SamplingParams) -> np.ndarray:
    """One row's distribution, token by token: temperature, then top_k, then top_p, each renormalised. `[V] fp64`."""
    z = logits.astype(np.float64) / params.temperature
    probs = np.exp(z - z.max()) / np.exp(z - z.max()).sum()
    order = sorted(range(len(probs)), key=lambda token: -probs[token])
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
    ids = draw_tokens(logits.expand(num, -1), grid, params).ids.numpy()
    return np.bincount(ids, minlength=logits.shape[-1]) / num


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 700])
@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"top_k": 3},
        {"top_k": 5000},
        {"top_p": 0.6},
        {"top_k": 20, "top_p": 0.8},
        {"top_p": 0.01},
    ],
)
def test_tokens_follow_the_slow_twins_distribution(vocab_size, filters):
    logits = 2 * torch.randn(vocab_size, generator=torch.Generator().manual_seed(vocab_size))
    params = SamplingParams(**filters)
    expected = slow_probs(logits.numpy(), params)
    found = frequencies(logits, params)
    assert np.abs(found - expected).max() <= 2e-4
    assert not found[expected == 0].any()


def test_top_p_finds_its_set_among_a_flat_vocabulary_larger_than_the_first_candidates():
    logits = torch.linspace(0, 1e-3, 1000)
    found = frequencies(logits, SamplingParams(top_p=0.9), num=4000)
    assert np.count_nonzero(found) == np.count_nonzero(slow_probs(logits.numpy(), SamplingParams(top_p=0.9)))


@given(
    st.lists(st.floats(-30, 30, width=32) | st.just(-float("inf")), min_size=1, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.sampled_from([{}, {"top_k": 2}, {"top_p": 0.5}]),
)
def test_a_token_without_probability_is_never_drawn(values, uniform, filters):
    logits = torch.tensor([[*values, 0.0]])
    draws = draw_tokens(logits, torch.tensor([uniform], dtype=torch.float64), SamplingParams(**filters))
    assert torch.isfinite(draws.logprobs).all()
    assert 0 <= int(draws.ids) < logits.shape[1]


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_ends_of_the_unit_interval_are_the_first_and_the_last_possible_token(uniform):
    logits = torch.full((1, 600), -float("inf"))
    logits[0, [7, 300, 598]] = torch.tensor([0.0, 1.0, 2.0])
    draws = draw_tokens(logits, torch.tensor([uniform], dtype=torch.float64), SamplingParams())
    assert int(draws.ids) == (7 if uniform == 0 else 598)


@pytest.mark.parametrize("filters", [{}, {"top_k": 4}, {"top_p": 0.5}, {"temperature": 0.0}, {"temperature": 1.7}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_logprob_is_that_of_the_whole_softmax(filters, dtype):
    logits = (3 * torch.randn(16, 500, generator=torch.Generator().manual_seed(0))).to(dtype)
    params = SamplingParams(**filters)
    draws = draw_tokens(logits, torch.rand(16, dtype=torch.float64), params)
    expected = torch.log_softmax(logits.double() / (params.temperature or 1.0), -1).gather(1, draws.ids[:, None])[:, 0]
    assert draws.logprobs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(draws.logprobs.double(), expected, atol=2e-6, rtol=0)


def test_greedy_takes_the_first_of_the_largest():
    logits = torch.tensor([[0.0, 2.0, 2.0], [1.0, 0.0, -1.0]])
    assert draw_tokens(logits, torch.zeros(2, dtype=torch.float64), SamplingParams(temperature=0)).ids.tolist() == [
        1,
        0,
    ]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 2}])
def test_logits_that_are_not_finite_are_an_error(value, filters):
    logits = torch.zeros(2, 5)
    logits[1, 3] = value
    with pytest.raises(NonFiniteError):
        draw_tokens(logits, torch.zeros(2, dtype=torch.float64), SamplingParams(**filters))


def test_generators_are_keyed_by_seed_prompt_and_number():
    a, b = np.array([1, 2]), np.array([2, 1])
    draw = lambda prompts, seed: [generator.random() for generator in row_generators(prompts, n=2, seed=seed)]  # noqa: E731
    values = draw([a, b, a], 0)
    assert len(set(values)) == 6
    assert draw([b, a, a], 0) == values[2:4] + values[:2] + values[4:]
    assert not set(draw([a, b, a], 1)) & set(values)
