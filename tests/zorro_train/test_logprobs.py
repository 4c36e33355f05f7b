import pytest
import torch

from arctic_platform.errors import ConfigError
from arctic_platform.rl.zorro_train import logprobs as logprobs_module
from arctic_platform.rl.zorro_train.logprobs import LinearHead, check_logits_mode, check_peak, target_logprobs
from tests.zorro_train.memory import PeakMemory

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


WIDE = {"num_positions": 96, "width": 8, "vocab_size": 4096}
"""96 positions of 16 KiB of fp32 logits each: 1.5 MiB in one piece."""


def peak_of(mode: str, calculate_entropy: bool, temperature: float = 1.0, make_head=None, **options: object) -> int:
    """Bytes at the worst moment of forward and backward; the weight is frozen unless `make_head` says otherwise."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(WIDE["num_positions"], WIDE["width"], generator=generator).requires_grad_()
    weight = torch.randn(WIDE["vocab_size"], WIDE["width"], generator=generator)
    slots = torch.arange(WIDE["num_positions"])
    with PeakMemory() as memory:
        logprobs, entropy = target_logprobs(
            hidden,
            make_head(weight) if make_head else lambda h: h @ weight.T,
            slots * 7,
            slots,
            vocab_size=WIDE["vocab_size"],
            mode=mode,
            temperature=temperature,
            calculate_entropy=calculate_entropy,
            **options,
        )
        (logprobs.sum() + (entropy.square().sum() if calculate_entropy else 0.0)).backward()
    return memory.peak


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("calculate_entropy", [False, True])
@pytest.mark.parametrize("num_at_once", [1, 5, 24])
@pytest.mark.parametrize("make_head", [None, LinearHead, lambda w: LinearHead(w, None, 0.5, 3.0)])
def test_memory_mode_stays_within_the_peak_that_was_set(make_head, num_at_once, calculate_entropy, temperature):
    peak = num_at_once * 4 * 4 * WIDE["vocab_size"]
    measured = peak_of("memory", calculate_entropy, temperature, make_head, peak_gib=peak / 2**30)
    assert measured <= 1.1 * peak + 65536
    assert measured >= 0.5 * peak, "the peak is used"


@pytest.mark.parametrize("calculate_entropy", [False, True])
def test_each_mode_takes_less_memory_than_the_one_before(calculate_entropy):
    peak = 4 * 4 * 4 * WIDE["vocab_size"] / 2**30
    none, compute, memory = (
        peak_of(mode, calculate_entropy, **({} if mode == "none" else {"peak_gib": peak}))
        for mode in ("none", "compute", "memory")
    )
    assert none > 1.3 * compute > 1.3 * 1.3 * memory


@pytest.mark.parametrize("mode", ["compute", "memory"])
@pytest.mark.parametrize("peak_gib", [1e-9, 1e-6, 1.0])
def test_peak_changes_no_value_and_no_gradient(mode, peak_gib):
    results = []
    for options in ({}, {"peak_gib": peak_gib}):
        hidden, weight = inputs()
        head = lambda h, weight=weight: h @ weight.T  # noqa: E731
        logprobs, entropy = target_logprobs(
            hidden, head, IDS, SLOTS, vocab_size=11, mode=mode, calculate_entropy=True, **options
        )
        results.append([logprobs, *torch.autograd.grad(logprobs.sum() + entropy.square().sum(), [hidden, weight])])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_peak_that_nothing_reads_or_that_is_no_size_is_refused():
    with pytest.raises(ConfigError, match="has no effect with logits_optimization='none'"):
        check_peak(1.0, "none")
    with pytest.raises(ConfigError, match="must be above 0"):
        check_peak(0.0, "memory")
    assert check_peak(None, "none") is None


def test_gradient_of_a_linear_head_is_one_tensor_however_many_chunks_add_to_it():
    """Autograd would hold one more while it adds: the head's weights would count twice."""
    size = 4 * WIDE["vocab_size"] * WIDE["width"]
    peak = 4 * 4 * WIDE["vocab_size"]
    measured = peak_of("memory", False, 1.0, lambda w: LinearHead(w.requires_grad_()), peak_gib=peak / 2**30)
    assert measured <= 1.1 * peak + size + 65536


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("calculate_entropy", [False, True])
@pytest.mark.parametrize(("factor", "softcap"), [(1.0, None), (0.3, None), (1.0, 1.5), (2.0, 1.5)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_head_in_memory_mode_equals_autograd(
    chunk_len, has_bias, factor, softcap, calculate_entropy, temperature
):
    hidden, weight = inputs()
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64).requires_grad_() if has_bias else None
    leaves = [hidden, weight, bias] if has_bias else [hidden, weight]
    results = []
    for mode in ("none", "memory"):
        logprobs, entropy = target_logprobs(
            hidden,
            LinearHead(weight, bias, factor, softcap),
            IDS,
            SLOTS,
            vocab_size=11,
            temperature=temperature,
            mode=mode,
            calculate_entropy=calculate_entropy,
        )
        total = (logprobs * torch.arange(1, 8)).sum() + ((entropy**2).sum() if calculate_entropy else 0.0)
        results.append([logprobs, *torch.autograd.grad(total, leaves)])
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_gradients_of_many_chunks_are_summed_in_fp32(monkeypatch, dtype):
    monkeypatch.setattr(logprobs_module, "CHUNK_BYTES", 11 * 4)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(400, 5, generator=generator).to(dtype)
    weight = torch.randn(11, 5, generator=generator).to(dtype)
    slots, ids = torch.arange(400), torch.arange(400) % 11
    grads = []
    for wide in (torch.float64, dtype):
        leaf = weight.to(wide).requires_grad_()
        head = LinearHead(leaf)
        mode = "memory" if wide == dtype else "none"
        logprobs, _ = target_logprobs(hidden.to(wide), head, ids, slots, vocab_size=11, mode=mode)
        grads.append(torch.autograd.grad(logprobs.sum(), leaf)[0].double())
    exact, ours = grads
    rounded_once = (exact.to(dtype).double() - exact).norm()
    assert (ours - exact).norm() <= 6 * rounded_once + 3e-3 * exact.norm()
