"""Decoding with shared prompts against the same sampler with nothing shared, transformers and vLLM, step by step.

    python benchmarks/bench_sample.py
    python benchmarks/bench_sample.py --num-prompts 4 --num-rollouts 8
    python benchmarks/bench_sample.py --ways shared,unshared,generate,static,vllm-eager,vllm-compiled
    python benchmarks/bench_sample.py --ways batching --new-tokens 6
    python benchmarks/bench_sample.py --curve --plot docs/images/sample.svg

All ways hold their caches at once and take turns: every decode step of one is followed by a step of each other. So
what disturbs the machine disturbs all of them; ratios are medians over these rounds. The last line is one JSON object.

`shared` and `unshared` run the same code and kernels; with sharing off every rollout is prefilled and stored by itself.
`generate` and `static` are model.generate on the expanded batch with a dynamic and a static cache, `batching` is
transformers' continuous batching (it cannot be stepped from outside and runs by itself, after the others).
"""

from __future__ import annotations

import copy
import gc
import json
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Protocol

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cyclopts
import numpy as np
import torch
import transformers
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference import Sampler, SampleRequest

ROOT = Path(__file__).resolve().parents[1]
PREFILL_TOKENS = 8192
WAYS = ("shared", "unshared", "generate", "static", "batching", "vllm-eager", "vllm-compiled")


@dataclass(frozen=True)
class Shape:
    """`num_rollouts` of `new_tokens` for each of `num_prompts` prompts, whose first `shared_len` tokens are equal."""

    num_prompts: int
    prompt_len: int
    shared_len: int
    num_rollouts: int
    new_tokens: int

    @property
    def num_rows(self) -> int:
        """Rollouts in all."""
        return self.num_prompts * self.num_rollouts

    @property
    def row_len(self) -> int:
        """Tokens of a row. Rollouts that got their first token before the others may need some more in the end."""
        return self.prompt_len + self.new_tokens + 4 + self.num_rows * self.prompt_len // PREFILL_TOKENS

    def prompts(self, vocab_size: int) -> list[list[int]]:
        """Random tokens."""
        random = np.random.default_rng(0)
        shared = random.integers(0, vocab_size, self.shared_len).tolist()
        rest = self.prompt_len - self.shared_len
        return [shared + random.integers(0, vocab_size, rest).tolist() for _ in range(self.num_prompts)]


@dataclass(frozen=True)
class Setup:
    """The model and how it runs."""

    model: str
    dtype: str
    num_threads: int
    vllm_python: Path | None

    def load(self) -> PreTrainedModel:
        """The model, in eval mode."""
        kind = getattr(torch, self.dtype)
        return transformers.AutoModelForCausalLM.from_pretrained(self.model, dtype=kind).eval()


class Way(Protocol):
    """One way to decode. Both methods return seconds; `step` draws one token for every rollout, None at the end."""

    def prefill(self) -> float: ...
    def step(self) -> float | None: ...
    def close(self) -> None: ...


def bench(
    *,
    model: str = "models/smollm2-135m",
    num_prompts: int = 1,
    prompt_len: int = 2049,
    shared_len: int = 0,
    num_rollouts: int = 16,
    new_tokens: int = 64,
    dtype: str = "float32",
    ways: str = "shared,unshared",
    vllm_python: Path | None = None,
    curve: bool = False,
    curve_lens: str = "257,513,1025,2049,4097",
    curve_groups: str = "4,16",
    num_threads: int | None = None,
    out: Path | None = None,
    table: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Measure one shape on the CPU, or a curve over prompt lengths and group sizes.

    Parameters
    ----------
    model: Folder or hub id of a Hugging Face causal LM.
    num_prompts: Different prompts, of random tokens.
    prompt_len: Tokens of each prompt.
    shared_len: Tokens at the start of the prompts that all of them share.
    num_rollouts: Rollouts of each prompt.
    new_tokens: Tokens of each rollout, at least 3.
    dtype: Precision of the weights.
    ways: Some of shared, unshared, generate, static, batching, vllm-eager, vllm-compiled.
    vllm_python: Interpreter of vLLM's environment; without it the one that `make test-vllm` made.
    curve: Time shared and unshared decoding over curve_lens and curve_groups, 8 steps each.
    curve_lens: Prompt lengths of the curve.
    curve_groups: Rollouts of one prompt in the curve.
    num_threads: Threads of torch; without it as many as torch takes.
    out: File that also receives the JSON object.
    table: File that receives the table in Markdown.
    plot: Picture of the curve, or of the steps of all ways (SVG or PNG).
    """
    if num_threads is not None:
        torch.set_num_threads(num_threads)
    setup = Setup(model, dtype, torch.get_num_threads(), vllm_python or _vllm_environment())
    if curve:
        lens, groups = ([int(part) for part in text.split(",")] for text in (curve_lens, curve_groups))
        results = {"points": _curve(setup, lens, groups)}
        lines = curve_table(results["points"])
    else:
        shape = Shape(num_prompts, prompt_len, shared_len, num_rollouts, new_tokens)
        results = {"shape": asdict(shape), "ways": _compare(setup, shape, _chosen(ways, setup))}
        lines = way_table(results["ways"])
    print("\n".join(lines))
    if table is not None:
        table.write_text("\n".join(lines) + "\n")
    if plot is not None:
        draw_curve(results["points"], plot) if curve else draw_ways(results["ways"], plot)
    line = json.dumps({"benchmark": "sample", **results, **_origin(setup)})
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(line + "\n")
    print(line)


def _chosen(ways: str, setup: Setup) -> list[str]:
    chosen = [way.strip() for way in ways.split(",") if way.strip()]
    for way in chosen:
        if way not in WAYS:
            sys.exit(f"--ways has {way!r}; choose some of {', '.join(WAYS)}")
        if way.startswith("vllm") and setup.vllm_python is None:
            sys.exit(f"--ways {way} needs vLLM's environment: run `make test-vllm`, or give --vllm-python")
    return chosen


def _vllm_environment() -> Path | None:
    python = ROOT / ".venvs" / "vllm" / "bin" / "python"
    return python if python.exists() else None


@dataclass
class Timings:
    """Seconds of one way: its prefill, and its decode steps, one per round."""

    prefill: float
    steps: list[float] = field(default_factory=list)
    start: float = 0.0


def _compare(setup: Setup, shape: Shape, names: list[str]) -> dict[str, dict[str, float]]:
    model = setup.load()
    prompts = shape.prompts(model.config.vocab_size)
    # Memory that lies idle while another way starts is written out by some machines: the slowest start comes first.
    slowest_first = sorted((name for name in names if name != "batching"), key=_start_rank)
    ways = {name: _open(name, model, prompts, shape, setup) for name in slowest_first}
    timings = {}
    for name, way in ways.items():
        timings[name] = Timings(way.prefill(), start=getattr(way, "start_seconds", 0.0))
        _say(f"{name}: prefill {timings[name].prefill:.1f} s")
    _take_turns(ways, timings, shape)
    for way in ways.values():
        way.close()
    ways.clear()
    if "batching" in names:
        timings["batching"] = _continuous_batching(setup.load(), prompts, shape)
    return {name: _summary(timings[name], timings) for name in names}


def _start_rank(name: str) -> int:
    return {"vllm-compiled": 0, "vllm-eager": 1}.get(name, 2)


def _take_turns(ways: dict[str, Way], timings: dict[str, Timings], shape: Shape) -> None:
    """One step of each way after the other; a way that has finished is left out."""
    going = dict(ways)
    for _ in range(shape.new_tokens - 1):
        for name, way in list(going.items()):
            seconds = way.step()
            if seconds is None:
                del going[name]
            else:
                timings[name].steps.append(seconds)


def _summary(found: Timings, timings: dict[str, Timings]) -> dict[str, float]:
    """Medians in milliseconds, and how much longer than `shared` a step takes, as the median over rounds."""
    summary = {
        "prefill_seconds": found.prefill,
        "step_ms": 1000 * median(found.steps),
        "decode_seconds": sum(found.steps),
        "total_seconds": found.prefill + sum(found.steps),
        "num_steps": len(found.steps),
        "start_seconds": found.start,
    }
    if "shared" in timings:
        rounds = zip(found.steps, timings["shared"].steps, strict=False)
        summary["times_shared"] = median(one / shared for one, shared in rounds)
    return summary


def _open(name: str, model: PreTrainedModel, prompts: list[list[int]], shape: Shape, setup: Setup) -> Way:
    if name in ("shared", "unshared"):
        return SamplerWay(_twin(model), prompts, shape, share=name == "shared")
    if name in ("generate", "static"):
        return GenerateWay(_twin(model), prompts, shape, is_static=name == "static")
    return VllmWay(setup, prompts, shape, is_eager=name == "vllm-eager")


def _twin(model: PreTrainedModel) -> PreTrainedModel:
    """A model of its own over the same weights, so that no way sees what another does to its modules."""
    shared = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in shared})


class SamplerWay:
    """This project's sampler, through `add` and `step`."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]], shape: Shape, *, share: bool) -> None:
        self._num_rows = shape.num_rows
        started = time.perf_counter()
        self._sampler = Sampler(
            model,
            eos_token_ids=[],
            share=share,
            max_batch_rows=shape.num_rows,
            kv_cache_tokens=shape.num_rows * (shape.row_len + 64),
            prefill_chunk_tokens=PREFILL_TOKENS,
        )
        self.start_seconds = time.perf_counter() - started
        num = shape.row_len - shape.prompt_len
        params = SamplingParams(n=shape.num_rollouts, max_tokens=num, seed=0, ignore_eos=True)
        self._requests = [SampleRequest(str(i), np.array(prompt), params) for i, prompt in enumerate(prompts)]

    def prefill(self) -> float:
        """Until every rollout has its first token."""
        started, first = time.perf_counter(), set()
        for request in self._requests:
            self._sampler.add(request)
        while len(first) < self._num_rows:
            first |= {(delta.request_id, delta.rollout) for delta in self._sampler.step() if delta.token_ids}
        return time.perf_counter() - started

    def step(self) -> float | None:
        """One token for every rollout; None once some have finished."""
        started = time.perf_counter()
        deltas = self._sampler.step()
        return time.perf_counter() - started if len(deltas) == self._num_rows else None

    def close(self) -> None:
        """Drop the caches."""
        del self._sampler
        gc.collect()


class GenerateWay(StoppingCriteria):
    """model.generate in a thread of its own, held between two tokens by its own stopping criterion."""

    def __init__(self, model: PreTrainedModel, prompts: list[list[int]], shape: Shape, *, is_static: bool) -> None:
        self._model = model
        self._ids = torch.tensor(prompts).repeat_interleave(shape.num_rollouts, 0)
        num = shape.new_tokens
        self._options: dict = {"do_sample": True, "top_k": 0, "max_new_tokens": num, "min_new_tokens": num}
        if is_static:
            self._options |= {"cache_implementation": "static", "disable_compile": True}
        self._go, self._drawn = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False
        self._num_threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        """After every token: hand the turn back and wait for the next."""
        self._drawn.release()
        self._go.acquire()
        return torch.full((len(input_ids),), self._is_over)

    def prefill(self) -> float:
        """Until every rollout has its first token."""
        started = time.perf_counter()
        self._thread.start()
        self._drawn.acquire()
        return time.perf_counter() - started

    def step(self) -> float | None:
        """One token for every rollout."""
        if not self._thread.is_alive():
            return None
        started = time.perf_counter()
        self._go.release()
        self._drawn.acquire()
        return time.perf_counter() - started if self._thread.is_alive() and not self._is_over else None

    def close(self) -> None:
        """Let the thread end."""
        self._is_over = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        torch.set_num_threads(self._num_threads)
        mask = torch.ones_like(self._ids)
        options = {"pad_token_id": 0, "stopping_criteria": StoppingCriteriaList([self]), **self._options}
        self._model.generate(self._ids, attention_mask=mask, **options)
        self._is_over = True
        self._drawn.release()


class VllmWay:
    """vLLM in a process of its own, stepped through a pipe; its own clock counts."""

    def __init__(self, setup: Setup, prompts: list[list[int]], shape: Shape, *, is_eager: bool) -> None:
        self._num_rows = shape.num_rows
        request = {
            "model": setup.model,
            "prompts": prompts,
            "num_rollouts": shape.num_rollouts,
            "max_tokens": shape.row_len - shape.prompt_len,
            "dtype": setup.dtype,
            "eager": is_eager,
            "num_threads": setup.num_threads,
            "kv_gib": 2,
        }
        command = [str(setup.vllm_python), str(ROOT / "benchmarks" / "vllm_steps.py"), json.dumps(request)]
        self._log = Path(tempfile.mkdtemp(prefix="bench-sample-")) / "vllm.log"
        with self._log.open("w") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
            )
        self.start_seconds = self._read()["start_seconds"]

    def prefill(self) -> float:
        """Until every rollout has its first token; prompts are computed once and found in the prefix cache after."""
        seconds, num_first = 0.0, 0
        while num_first < self._num_rows:
            found = self._ask()
            seconds += found["seconds"]
            num_first = max(num_first, len(found["tokens"]))
        return seconds

    def step(self) -> float | None:
        """One token for every rollout; None once some have finished."""
        found = self._ask()
        return found["seconds"] if len(found["tokens"]) == self._num_rows else None

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=60)

    def _ask(self) -> dict:
        assert self._process.stdin is not None
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"vLLM ended; the end of {self._log}:\n{self._log.read_text()[-2000:]}")
        return json.loads(line)


def _continuous_batching(model: PreTrainedModel, prompts: list[list[int]], shape: Shape) -> Timings:
    """transformers' continuous batching: gaps between the tokens of a rollout, once all have their first."""
    rows = [prompt for prompt in prompts for _ in range(shape.num_rollouts)]
    config = transformers.GenerationConfig(
        max_new_tokens=shape.new_tokens, do_sample=True, top_k=0, eos_token_id=-1, pad_token_id=0
    )
    page = 256
    pages = shape.num_rows * (-(-(shape.prompt_len + shape.new_tokens) // page) + 1)
    paging = transformers.ContinuousBatchingConfig(
        page_size=page, num_blocks=pages, max_batch_tokens=max(2048, shape.num_rows)
    )
    started = time.perf_counter()
    outputs = model.generate_batch(
        rows, generation_config=config, continuous_batching_config=paging, record_timestamps=True, warmup=False
    )
    stamps = [output.timestamps for output in outputs.values()]
    if len(stamps) < len(rows) or any(len(times) < shape.new_tokens for times in stamps):
        sys.exit("transformers' continuous batching did not finish; see its messages above")
    all_started = max(times[0] for times in stamps)
    steps = [after - before for times in stamps[:1] for before, after in pairwise(times)]
    late = [s for s, at in zip(steps, stamps[0][1:], strict=True) if at > all_started] or steps
    total = time.perf_counter() - started
    return Timings(total - sum(late), late)


CURVE_STEPS = 8


def _curve(setup: Setup, lens: list[int], groups: list[int]) -> list[dict[str, float]]:
    points = []
    for num_rollouts in groups:
        for prompt_len in lens:
            found = _compare(setup, Shape(1, prompt_len, 0, num_rollouts, CURVE_STEPS + 1), ["shared", "unshared"])
            point = {"prompt_len": prompt_len, "num_rollouts": num_rollouts}
            point |= {f"{name}_step_ms": found[name]["step_ms"] for name in found}
            point |= {"step_ratio": found["unshared"]["times_shared"]}
            point |= {"prefill_ratio": found["unshared"]["prefill_seconds"] / found["shared"]["prefill_seconds"]}
            points.append(point)
            _say(f"{num_rollouts} rollouts of {prompt_len}: a step {point['step_ratio']:.2f} times as fast")
    return points


def way_table(ways: dict[str, dict[str, float]]) -> list[str]:
    """One line per way, in Markdown."""
    lines = ["| way | prefill, s | decode step, ms | times `shared` | total, s |", "| --- | --- | --- | --- | --- |"]
    for name, way in ways.items():
        times = f"{way['times_shared']:.2f}" if "times_shared" in way else ""
        numbers = f"{way['prefill_seconds']:.1f} | {way['step_ms']:.0f} | {times} | {way['total_seconds']:.1f}"
        lines.append(f"| {name} | {numbers} |")
    return lines


def curve_table(points: list[dict[str, float]]) -> list[str]:
    """One line per prompt length, a column per group size: how many times as fast a decode step is."""
    groups = sorted({point["num_rollouts"] for point in points})
    lines = ["| prompt tokens | " + " | ".join(f"{num} rollouts" for num in groups) + " |"]
    lines.append("| --- |" + " --- |" * len(groups))
    for prompt_len in sorted({point["prompt_len"] for point in points}):
        cells = {p["num_rollouts"]: f"{p['step_ratio']:.2f}" for p in points if p["prompt_len"] == prompt_len}
        lines.append(f"| {prompt_len} | " + " | ".join(cells.get(num, "") for num in groups) + " |")
    return lines


def draw_curve(points: list[dict[str, float]], path: Path) -> None:
    """The gain of sharing in a decode step over prompt lengths, a line per group size."""

    def fill(axes) -> None:
        for num in sorted({point["num_rollouts"] for point in points}):
            line = sorted((p["prompt_len"], p["step_ratio"]) for p in points if p["num_rollouts"] == num)
            axes.plot(*zip(*line, strict=True), marker="o", label=f"{num} rollouts")
        axes.set(xscale="log", xlabel="prompt tokens", ylabel="decode step, unshared / shared")
        axes.axhline(1.0, color="grey", linewidth=0.8)
        axes.legend()

    _draw(fill, path)


def draw_ways(ways: dict[str, dict[str, float]], path: Path) -> None:
    """A bar per way: milliseconds of a decode step."""

    def fill(axes) -> None:
        axes.barh(list(ways)[::-1], [way["step_ms"] for way in ways.values()][::-1])
        axes.set(xlabel="decode step, ms")

    _draw(fill, path)


def _draw(fill: Callable, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg" if path.suffix == ".svg" else "agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    fill(axes)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


def _origin(setup: Setup) -> dict[str, object]:
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    versions["transformers"] = transformers.__version__
    git = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "model": setup.model,
        "dtype": setup.dtype,
        "num_threads": setup.num_threads,
        "commit": git.stdout.strip() if git.returncode == 0 else "unknown",
        "command": " ".join(["python", *sys.argv]),
        "versions": versions,
    }


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    cyclopts.run(bench)
