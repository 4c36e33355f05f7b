"""Batches, a gradient check and a timing that need no data: what the demo, the benchmarks and the tests share.

Import from here: `create_dummy_batch`, `compare_gradients`, `check_gradient_correctness`, `benchmark_performance`.
The tests themselves are in the repository's `tests/` folder.
"""

from __future__ import annotations

import multiprocessing
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config

from arctic_platform.errors import ConfigError, InputError
from arctic_platform.rl.zorro_train.module_patcher import ModuleReconstructionPatcher

Batch = dict[str, Any]


def create_dummy_batch(
    batch_size: int,
    num_unique_prompts: int,
    prompt_len: int,
    response_len: int,
    device: str | torch.device = "cpu",
    include_training_fields: bool = True,
    add_padding: bool = False,
    vocab_size: int = 100,
    pad_token_id: int = 0,
    seed: int | None = None,
) -> Batch:
    """Random rows `[left pad][prompt][response][right pad]`, those of one prompt next to each other.

    Args:
        batch_size, num_unique_prompts: B rows over G different prompts, as evenly as they divide.
        prompt_len, response_len: padded lengths P and R.
        include_training_fields: add `old_log_probs`, `ref_log_prob` and `advantages`.
        add_padding: draw each prompt's length from 1..P and each response's from 1..R; otherwise no padding.
        vocab_size, pad_token_id: live tokens are below `vocab_size` and differ from `pad_token_id`.
        seed: None draws from torch's global generator.

    Returns:
        `input_ids`, `position_ids`, `attention_mask` [B, P + R] int64, `responses` [B, R] int64,
        `response_length` int, and the training fields [B, R] float32.

    Raises:
        InputError: a size is below 1, or the vocabulary is too small for that many different prompts.
    """
    sizes = (num_unique_prompts, prompt_len, response_len)
    if min(sizes) < 1 or batch_size < num_unique_prompts or vocab_size < 2:
        raise InputError(
            f"batch_size={batch_size}, num_unique_prompts={num_unique_prompts}, prompt_len={prompt_len}, "
            f"response_len={response_len}, vocab_size={vocab_size}: sizes are at least 1, a vocabulary at least 2, "
            "and every prompt needs a row"
        )
    generator = torch.default_generator if seed is None else torch.Generator().manual_seed(seed)
    tokens = torch.tensor([token for token in range(vocab_size) if token != pad_token_id])
    prompt_of_row = torch.arange(batch_size) * num_unique_prompts // batch_size
    prompts = _different_prompts(num_unique_prompts, prompt_len, tokens, generator)
    responses = tokens[torch.randint(len(tokens), (batch_size, response_len), generator=generator)]
    prompt_lens = torch.full((num_unique_prompts,), prompt_len)
    response_lens = torch.full((batch_size,), response_len)
    if add_padding:
        prompt_lens = _lens_that_keep_prompts_apart(prompts, generator)
        response_lens = torch.randint(1, response_len + 1, (batch_size,), generator=generator)
    prompt_mask = torch.arange(prompt_len) >= prompt_len - prompt_lens[prompt_of_row][:, None]
    response_mask = torch.arange(response_len) < response_lens[:, None]
    mask = torch.cat([prompt_mask, response_mask], dim=1)
    input_ids = torch.cat([prompts[prompt_of_row], responses], dim=1).masked_fill(~mask, pad_token_id)
    batch: Batch = {
        "input_ids": input_ids,
        "position_ids": (mask.long().cumsum(1) - 1).clamp(min=0),
        "attention_mask": mask.long(),
        "responses": input_ids[:, prompt_len:].clone(),
    }
    if include_training_fields:
        batch |= _training_fields(response_mask, vocab_size, generator)
    batch = {name: value.to(device) for name, value in batch.items()}
    return batch | {"response_length": response_len}


def _different_prompts(count: int, length: int, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """[count, length]: the last token counts upwards, so that even one-token prompts differ, the rest is random."""
    if count > len(tokens) ** min(length, 8):
        raise InputError(
            f"num_unique_prompts={count} of prompt_len={length} do not exist over {len(tokens)} tokens; "
            "pass a larger vocab_size"
        )
    digits = torch.randint(len(tokens), (count, length), generator=generator)
    rest = torch.arange(count)
    for column in range(length - 1, max(length - 9, -1), -1):
        digits[:, column] = (digits[0, column] + rest % len(tokens)) % len(tokens)
        rest = rest // len(tokens)
        if not rest.any():
            break
    return tokens[digits]


def _lens_that_keep_prompts_apart(prompts: Tensor, generator: torch.Generator) -> Tensor:
    """[G] lengths in 1..P, long enough that the tokens that remain still differ between prompts."""
    count, length = prompts.shape
    shortest = next(n for n in range(1, length + 1) if len(torch.unique(prompts[:, -n:], dim=0)) == count)
    return torch.randint(shortest, length + 1, (count,), generator=generator)


def _training_fields(response_mask: Tensor, vocab_size: int, generator: torch.Generator) -> dict[str, Tensor]:
    """Log-probs near those of a model that knows nothing, and one advantage per row; 0 at padding."""
    shape = response_mask.shape
    guess = -torch.log(torch.tensor(float(vocab_size)))
    noise = 0.1 * torch.randn((2, *shape), generator=generator)
    advantages = torch.randn((shape[0], 1), generator=generator).expand(shape)
    fields = {"old_log_probs": guess + noise[0], "ref_log_prob": guess + noise[1], "advantages": advantages}
    return {name: value.masked_fill(~response_mask, 0.0) for name, value in fields.items()}


def compare_gradients(
    dedup_grads: Mapping[str, Tensor | None],
    baseline_grads: Mapping[str, Tensor | None],
    atol: float = 1e-5,
    rtol: float = 1e-4,
) -> float:
    """Relative error of all gradients together, `||dedup - baseline|| / ||baseline||`, computed in float64.

    A parameter with an element outside `atol + rtol * |baseline|` is named in a warning. A missing gradient (None)
    counts as zero. Two all-zero sides have error 0; a zero baseline alone, infinity.

    Raises:
        InputError: the two sides do not hold the same parameters, or shapes differ.
    """
    if dedup_grads.keys() != baseline_grads.keys():
        odd = sorted(dedup_grads.keys() ^ baseline_grads.keys())
        raise InputError(f"{odd[0]!r} is in one of the two sets of gradients only; pass the same parameters in both")
    difference, norm, outside = 0.0, 0.0, []
    for name, (ours, theirs) in {key: (dedup_grads[key], baseline_grads[key]) for key in baseline_grads}.items():
        shape = next((grad.shape for grad in (ours, theirs) if grad is not None), ())
        ours, theirs = _wide(ours, shape), _wide(theirs, shape)
        if ours.shape != theirs.shape:
            raise InputError(f"{name!r} has shape {tuple(ours.shape)} and {tuple(theirs.shape)}; shapes must agree")
        difference += float((ours - theirs).square().sum())
        norm += float(theirs.square().sum())
        if not torch.allclose(ours, theirs, rtol=rtol, atol=atol):
            outside.append(name)
    if outside:
        names = ", ".join(outside)
        warnings.warn(f"gradients of {names} differ by more than {atol} + {rtol} * |baseline|", stacklevel=2)
    if norm == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return (difference / norm) ** 0.5


def _wide(grad: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64) if grad is None else grad.detach().cpu().double()


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of all gradients by parameter name, None where a parameter has none."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def padded_response_logprobs(model: nn.Module, batch: Batch, temperature: float = 1.0) -> Tensor:
    """The baseline: one forward of the unpatched model over the whole padded batch.

    Returns:
        Log-probs of the live response tokens, row after row: [sum of response lengths], fp32 or fp64.
    """
    num_responses = int(batch["response_length"])
    logits = model(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        position_ids=batch["position_ids"],
        use_cache=False,
        logits_to_keep=num_responses + 1,
    ).logits[:, :-1]
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = torch.log_softmax(wide / temperature, dim=-1).gather(-1, batch["responses"][..., None])[..., 0]
    return logprobs[batch["attention_mask"][:, -num_responses:].bool()]


@dataclass(frozen=True)
class Correctness:
    """Largest absolute difference of a log-prob, and the relative error of all gradients."""

    logprob_error: float
    gradient_error: float


def check_gradient_correctness(
    patcher: ModuleReconstructionPatcher, batch: Batch, temperature: float = 1.0
) -> Correctness:
    """Compare one deduplicated forward and backward with the same model's own padded ones.

    The loss weighs every response token differently, so that no two errors cancel. The model's gradients are
    cleared; it is left patched.
    """
    model = patcher.model
    weights = torch.randn(int(batch["attention_mask"][:, -int(batch["response_length"]) :].sum()))
    weights = (weights / len(weights)).to(batch["input_ids"].device)
    results = []
    for run in (_baseline_pass, _dedup_pass):
        model.zero_grad(set_to_none=True)
        logprobs = run(patcher, batch, temperature)
        (logprobs * weights).sum().backward()
        results.append((logprobs.detach(), gradients_of(model)))
    model.zero_grad(set_to_none=True)
    (baseline, baseline_grads), (dedup, dedup_grads) = results
    return Correctness(float((dedup - baseline).abs().max()), compare_gradients(dedup_grads, baseline_grads))


def _baseline_pass(patcher: ModuleReconstructionPatcher, batch: Batch, temperature: float = 1.0) -> Tensor:
    patcher.unpatch_forward()
    return padded_response_logprobs(patcher.model, batch, temperature)


def _dedup_pass(patcher: ModuleReconstructionPatcher, batch: Batch, temperature: float = 1.0) -> Tensor:
    model = patcher.patch_forward()
    return model(
        input_ids=batch["input_ids"],
        position_ids=batch["position_ids"],
        attention_mask=batch["attention_mask"],
        use_cache=False,
        temperature=temperature,
        response_len=batch["response_length"],
    ).logprobs


PASSES: dict[str, Callable[..., Tensor]] = {"baseline": _baseline_pass, "dedup": _dedup_pass}


@dataclass(frozen=True)
class Timing:
    """Medians of one variant: seconds, and the peak of memory above the level before the pass, in bytes."""

    forward: float
    backward: float
    peak_bytes: int

    @property
    def overall(self) -> float:
        """Forward and backward together."""
        return self.forward + self.backward


@dataclass(frozen=True)
class Performance:
    """The plain padded batch against the deduplicated one; ratios above 1 are in favour of deduplication."""

    baseline: Timing
    dedup: Timing

    def lines(self) -> str:
        """Four lines: forward, backward, overall, memory."""
        rows = [f"{'':10}{'baseline':>12}{'dedup':>12}{'ratio':>10}"]
        for name in ("forward", "backward", "overall"):
            slow, fast = getattr(self.baseline, name), getattr(self.dedup, name)
            rows.append(f"{name + ':':10}{slow:>10.3f} s{fast:>10.3f} s{slow / fast:>9.2f}x")
        slow, fast = self.baseline.peak_bytes / 2**20, self.dedup.peak_bytes / 2**20
        rows.append(f"{'memory:':10}{slow:>8.0f} MiB{fast:>8.0f} MiB{slow / fast:>9.2f}x")
        return "\n".join(rows)


def benchmark_performance(
    build_model: Callable[[], PreTrainedModel], batch: Batch, repeats: int = 3, **options: Any
) -> Performance:
    """Time forward and backward with and without deduplication, in turns, and measure memory one process each.

    Those processes import the calling script again: call this below `if __name__ == "__main__":`.

    Args:
        build_model: a picklable function that builds or loads the model on the batch's device.
        repeats: timed passes of each variant; the medians are reported.
        options: keywords of `ModuleReconstructionPatcher`; the baseline runs the model as it was built.
    """
    if repeats < 1:
        raise ConfigError(f"repeats={repeats} must be 1 or more")
    peaks = {name: _peak_in_own_process(build_model, batch, name, options) for name in PASSES}
    patcher = ModuleReconstructionPatcher(build_model(), **options)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in PASSES}
    for _ in range(repeats):
        for name in PASSES:
            seconds[name].append(_time_pass(patcher, batch, name))
    timings = {}
    for name, runs in seconds.items():
        forward, backward = (statistics.median(column) for column in zip(*runs, strict=True))
        timings[name] = (forward, backward)
    return Performance(**{name: Timing(*timings[name], peaks[name]) for name in PASSES})


def _time_pass(patcher: ModuleReconstructionPatcher, batch: Batch, name: str) -> tuple[float, float]:
    patcher.model.zero_grad(set_to_none=True)
    (patcher.patch_forward if name == "dedup" else patcher.unpatch_forward)()
    started = _now(batch)
    loss = PASSES[name](patcher, batch).mean()
    turned = _now(batch)
    loss.backward()
    return turned - started, _now(batch) - turned


def _now(batch: Batch) -> float:
    if batch["input_ids"].is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_in_own_process(
    build_model: Callable[[], PreTrainedModel], batch: Batch, name: str, options: dict[str, Any]
) -> int:
    """A process of its own: memory that an earlier pass freed and the allocator kept would hide a peak."""
    batch = {key: value.cpu() if isinstance(value, Tensor) else value for key, value in batch.items()}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as pool:
        return pool.submit(_peak_of_pass, build_model, batch, name, options, torch.get_num_threads()).result()


def _peak_of_pass(
    build_model: Callable[[], PreTrainedModel], batch: Batch, name: str, options: dict[str, Any], num_threads: int
) -> int:
    torch.set_num_threads(num_threads)
    model = build_model()
    device = next(model.parameters()).device
    batch = {key: value.to(device) if isinstance(value, Tensor) else value for key, value in batch.items()}
    patcher = ModuleReconstructionPatcher(model, **options)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    return peak_extra_bytes(lambda: PASSES[name](patcher, batch).mean().backward(), device)


def peak_extra_bytes(run: Callable[[], object], device: torch.device) -> int:
    """Peak memory while `run()` runs, above the level before it.

    CUDA: allocated by torch. CPU: resident set of this process (on Linux exact, elsewhere the growth of the highest
    resident set so far, a lower bound).
    """
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    before = _reset_peak_resident()
    run()
    return _peak_resident() - before


def _reset_peak_resident() -> int:
    if sys.platform != "linux":
        return _peak_resident()
    Path("/proc/self/clear_refs").write_text("5")
    return _peak_resident()


def _peak_resident() -> int:
    if sys.platform == "linux":
        match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
        assert match, "the kernel reports VmHWM for every process"
        return int(match[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def build_qwen3(
    hidden_size: int = 64,
    num_layers: int = 2,
    num_heads: int = 2,
    num_kv_heads: int = 1,
    head_dim: int = 32,
    vocab_size: int = 256,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    attn_implementation: str = "sdpa",
) -> PreTrainedModel:
    """A Qwen3 model with random weights (seed 0), built from its configuration without any download."""
    config = Qwen3Config(
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        max_position_embeddings=32768,
        tie_word_embeddings=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attn_implementation)
    return model.to(device=device, dtype=dtype)


def load_model(name: str, dtype: torch.dtype, device: str, attn_implementation: str = "sdpa") -> PreTrainedModel:
    """A model from a folder or a hub id, for `benchmark_performance`."""
    return AutoModelForCausalLM.from_pretrained(name, dtype=dtype, attn_implementation=attn_implementation).to(device)
