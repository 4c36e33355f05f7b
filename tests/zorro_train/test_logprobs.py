import pytest
import torch

from arctic_platform.errors import ConfigError
from arctic_platform.rl.zorro_train import logprobs as logprobs_module
from arctic_platform.rl.zorro_train.logprobs import check_logits_mode, target_logprobs

SLOTS = torch.tensor([0, 0, 1, 3, 3, 3, 6])
IDS = torch.tensor([4, 9, 0, 10, 3, 3, 7])


def plain(hidden, weight, temperature):
    """The definition, left to autograd."""
    logp = torch.log_softmax((hidden @ weight.T) / temperature, dim=-1)
    return logp[SLOTS, IDS], -(logp.exp() * logp).sum(-1)[SLOTS]


def inputs(dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((7, 5), (11, 5))
    ]


@pytest.fixture(params=[1, 3, 10**9], ids=lambda n: f"chunk{n}")
def chunk_len(request, monkeypatch):
    monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", request.param * 11 * 8)


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
@pytest.mark.parametrize("calculate_entropy", [False, True])
def test_every_mode_equals_the_definition_forward_and_backward(chunk_len, mode, temperature, calculate_entropy):
    hidden, weight = inputs()
    logprobs, entropy = target_logprobs(
        hidden,
        lambda h: h @ weight.T,
        IDS,
        SLOTS,
        vocab_size=11,
        temperature=temperature,
        mode=mode,
        calculate_entropy=calculate_entropy,
    )
    expected, expected_entropy = plain(hidden, weight, temperature)
    total, expected_total = (logprobs * torch.arange(1, 8)).sum(), (expected * torch.arange(1, 8)).sum()
    assert (logprobs - expected).abs().max() < 1e-12
    if calculate_entropy:
        assert (entropy - expected_entropy).abs().max() < 1e-12
        total, expected_total = total + (entropy**2).sum(), expected_total + (expected_entropy**2).sum()
    else:
        assert entropy is None
    grads = torch.autograd.grad(total, [hidden, weight])
    for ours, theirs in zip(grads, torch.autograd.grad(expected_total, [hidden, weight]), strict=True):
        assert (ours - theirs).abs().max() < 1e-12


@pytest.mark.parametrize("mode", ["none", "compute", "memory"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_dtypes_reduce_in_fp32_and_are_no_worse_than_plain(mode, dtype):
    hidden, weight = inputs(dtype)
    logprobs, _ = target_logprobs(hidden, lambda h: h @ weight.T, IDS, SLOTS, vocab_size=11, mode=mode)
    exact, _ = plain(hidden.double(), weight.double(), 1.0)
    rounded, _ = plain(hidden, weight, 1.0)
    assert logprobs.dtype == torch.float32
    assert (logprobs - exact).abs().max() <= 2 * (rounded - exact).abs().max()


def test_entropy_is_that_of_the_tempered_distribution():
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    _, entropy = target_logprobs(
        logits, lambda h: h, torch.tensor([0]), torch.tensor([0]), vocab_size=4, temperature=0.5, calculate_entropy=True
    )
    assert entropy.item() == pytest.approx(
        torch.distributions.Categorical(logits=logits / 0.5).entropy().item(), rel=1e-5
    )


def test_no_targets_give_empty_values_that_still_differentiate_to_zero():
    hidden, weight = inputs()
    none = torch.zeros(0, dtype=torch.long)
    logprobs, entropy = target_logprobs(
        hidden, lambda h: h @ weight.T, none, none, vocab_size=11, calculate_entropy=True
    )
    assert len(logprobs) == len(entropy) == 0
    assert torch.autograd.grad(logprobs.sum(), hidden)[0].abs().max() == 0


def test_memory_mode_never_holds_all_logits(monkeypatch):
    monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", 2 * 11 * 8)
    hidden, weight = inputs()
    widths = []

    def head(states):
        widths.append(len(states))
        return states @ weight.T

    logprobs, _ = target_logprobs(hidden, head, IDS, SLOTS, vocab_size=11, mode="memory")
    logprobs.sum().backward()
    assert max(widths) == 2
    assert sum(widths) == 2 * len(hidden), "each chunk is computed once forward and once again for backward"


def test_an_unknown_mode_lists_the_known_ones():
    with pytest.raises(ConfigError, match="none, compute, memory"):
        check_logits_mode("fast")
