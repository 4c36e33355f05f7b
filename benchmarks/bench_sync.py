"""Weight syncs between two processes: speed, memory, and what changes alone weigh.

    python benchmarks/bench_sync.py --out benchmarks/results/sync.json
    python benchmarks/bench_sync.py --quick

The last line is one JSON object. Sender and receiver are two processes with the shapes of SmolLM2-135M in bf16, and
each way to sync gets two fresh ones. `memcpy` copies the same tensors into memory that was used before, on the
receiver's side, in turns with the syncs (A B A B); medians. Memory is the peak of a process above its level before the
first sync, weights included there, after a sync of almost nothing has loaded what code there is. Growth is memory after
the last sync against that after the fifth. Changes are those of AdamW's steps on real text, told over a stream. CPU
seconds of either side are given too: on a loaded machine they change less than times do.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import platform
import statistics
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
sys.path.insert(0, str(Path(__file__).resolve().parent))  # where a process of its own finds this module

import cyclopts
import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from arctic_platform.rl.config import ArcticRLClientConfig, WeightSyncConfig
from arctic_platform.rl.engines.models import load_model
from arctic_platform.rl.engines.torch_train import TorchTrainEngine
from arctic_platform.rl.protocol import RolloutBatch
from arctic_platform.rl.weight_sync.base import Manifest, TensorSpec, weights_of
from arctic_platform.rl.weight_sync.delta import DeltaBase
from arctic_platform.rl.weight_sync.session import SyncOffer, open_receiver, send_weights

ROOT = Path(__file__).resolve().parents[1]
WAYS = ("shared_memory", "stream", "collective")
RATES = (1e-6, 1e-5)
TEXT = ROOT / "README.md"
ROW_LEN, NUM_ROWS = 48, 8
BF16_BYTES = 2
MIN_GROWTH_SYNCS = 5

Worker = Callable[..., None]

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["arctic_platform.rl.engines.torch_train", "arctic_platform.rl.weight_sync.session"])


@dataclass(frozen=True)
class Case:
    """One way to sync. layers: of the model whose shapes are sent; 30 is SmolLM2-135M. model: send its weights."""

    mechanism: str
    low_memory: bool
    bucket_mib: int
    layers: int = 0
    hidden: int = 0
    model: str = ""
    delta: bool = False

    @property
    def name(self) -> str:
        """As the record calls it."""
        return self.mechanism + ("_low_memory" if self.low_memory else "")

    def settings(self) -> WeightSyncConfig:
        """Of the receiver."""
        return WeightSyncConfig(
            mechanism=self.mechanism, bucket_mib=self.bucket_mib, delta=self.delta, timeout_seconds=60.0
        )


def shapes(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama with tied embeddings, in SmolLM2-135M's proportions."""
    wide, vocab, keys = hidden * 8 // 3, 49152 if hidden == 576 else 256, hidden // 3
    found: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden)}
    for layer in range(layers):
        at = f"model.layers.{layer}"
        found |= {f"{at}.self_attn.{name}_proj.weight": (keys, hidden) for name in ("k", "v")}
        found |= {f"{at}.self_attn.{name}_proj.weight": (hidden, hidden) for name in ("q", "o")}
        found |= {f"{at}.mlp.{name}_proj.weight": (wide, hidden) for name in ("gate", "up")}
        found[f"{at}.mlp.down_proj.weight"] = (hidden, wide)
        found |= {f"{at}.{name}_layernorm.weight": (hidden,) for name in ("input", "post_attention")}
    return found | {"model.norm.weight": (hidden,)}


class Weights:
    """Tensors by name; a sync's source or its sink."""

    def __init__(self, held: dict[str, Tensor]) -> None:
        self.held = held

    @classmethod
    def drawn(cls, case: Case, seed: int) -> Weights:
        """Random bf16."""
        generator = torch.Generator().manual_seed(seed)
        return cls(
            {
                name: torch.randn(shape, generator=generator).bfloat16()
                for name, shape in shapes(case.layers, case.hidden).items()
            }
        )

    @classmethod
    def few(cls) -> Weights:
        """Almost nothing."""
        return cls({"few": torch.zeros(64, dtype=torch.bfloat16)})

    @classmethod
    def of_case(cls, case: Case, seed: int) -> Weights:
        """What the case's model holds, or random weights of its shapes."""
        if not case.model:
            return cls.drawn(case, seed)
        return cls(weights_of(load_model(case.model, torch.bfloat16, "cpu", seed=0)))

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.held.values())

    def manifest(self) -> Manifest:
        """Without aliases."""
        return Manifest(
            {name: TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self.held.items()}, {}
        )

    def begin_overwrite(self) -> None:
        """See WeightSink; nobody looks meanwhile."""

    def contents(self) -> tuple[Manifest, dict[str, Tensor]]:
        """See WeightSink."""
        return self.manifest(), self.held

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """See `send_weights`."""
        return iter(self.held.items())

    def touch(self) -> None:
        """Change a bit of every tensor, so that a sync which moves nothing is found out."""
        for tensor in self.held.values():
            tensor.view(torch.int16).reshape(-1)[0] ^= 1

    def checksum(self) -> int:
        """Of all bits."""
        crc = 0
        for name in sorted(self.held):
            crc = zlib.crc32(self.held[name].reshape(-1).view(torch.uint8).numpy().data, crc)
        return crc


class Memory:
    """Of this process, against what it had when this was made."""

    def __init__(self) -> None:
        self._before = _resident("VmRSS")

    def read(self) -> dict[str, int]:
        """Bytes above it: the peak since the last time, and what is held now."""
        found = {"peak": _resident("VmHWM") - self._before, "held": _resident("VmRSS") - self._before}
        Path("/proc/self/clear_refs").write_text("5")
        return found


def receive(case: Case, pipe: Connection) -> None:
    """The receiver's process: for every True an offer, its sync, and a memcpy; for False the checksum, and the end."""
    torch.set_num_threads(1)
    weights = Weights.of_case(case, seed=1)
    spare = [tensor.clone() for tensor in weights.held.values()]
    first = open_receiver(case.settings(), Weights.few(), low_memory=case.low_memory)
    pipe.send(first.new_offer().to_json())
    first.run()
    first.close()
    receiver = open_receiver(case.settings(), weights, low_memory=case.low_memory)
    pipe.send(weights.num_bytes)
    memory = Memory()
    while pipe.recv():
        started, worked = time.perf_counter(), time.process_time()
        pipe.send(receiver.new_offer().to_json())
        receiver.run()
        seconds, worked = time.perf_counter() - started, time.process_time() - worked
        used = memory.read() | {"cpu_seconds": worked}
        copied = _seconds(lambda: [one.copy_(new) for one, new in zip(spare, weights.held.values(), strict=True)])
        pipe.send({"seconds": seconds, "memcpy_seconds": copied, **used})
    receiver.close()
    pipe.send(weights.checksum())


def send_few(pipe: Connection) -> None:
    """The sync that comes first."""
    few = Weights.few()
    send_weights(SyncOffer.from_json(pipe.recv()), few.manifest(), few.items(), version=1)


def send(case: Case, pipe: Connection) -> None:
    """The sender's process: for every True an offer is awaited, and its sync made; for False the checksum, the end."""
    torch.set_num_threads(1)
    weights = Weights.drawn(case, seed=2)
    send_few(pipe)
    weights.touch()  # Its code is in memory then.
    pipe.send(weights.num_bytes)
    memory = Memory()
    while pipe.recv():
        weights.touch()
        pipe.send(True)
        offer = pipe.recv()
        worked = time.process_time()
        send_weights(SyncOffer.from_json(offer), weights.manifest(), weights.items(), version=1)
        pipe.send(memory.read() | {"cpu_seconds": time.process_time() - worked})
    pipe.send(weights.checksum())


def train_and_send(case: Case, lr: float, pipe: Connection) -> None:
    """As `send`, and an AdamW step before every sync. Says what travelled, and which part of the weights changed."""
    torch.set_num_threads(1)
    optimizer = {"lr": lr}
    config = ArcticRLClientConfig(model=case.model, dtype="bfloat16", kinds=("training",), optimizer=optimizer)
    engine, base, batches = TorchTrainEngine(config), DeltaBase(), batches_of(case.model)
    weights = Weights(weights_of(engine.model))
    send_few(pipe)
    pipe.send(weights.num_bytes)
    while pipe.recv():
        before = {name: tensor.detach().clone() for name, tensor in weights.held.items()}
        engine.fwd_bwd(next(batches))
        engine.step()
        changed = sum(int((before[name] != tensor).sum()) for name, tensor in weights.held.items())
        del before
        pipe.send(True)
        offer = pipe.recv()
        worked = time.process_time()
        items = ((name, tensor.detach()) for name, tensor in weights.items())
        report = send_weights(
            SyncOffer.from_json(offer), weights.manifest(), items, version=engine.num_steps, base=base
        )
        worked = time.process_time() - worked
        pipe.send({"sent": report.num_sent_bytes, "changed": changed, "cpu_seconds": worked})
    pipe.send(weights.checksum())


def batches_of(model: str) -> Iterator[RolloutBatch]:
    """Rows of real text where the model has a tokenizer, each half prompt and half response; random ids elsewhere."""
    draw, tokenizer = np.random.default_rng(0), Path(model) / "tokenizer.json"
    ids = np.arange(3, 256)
    if tokenizer.is_file():
        ids = np.array(Tokenizer.from_file(str(tokenizer)).encode(TEXT.read_text(encoding="utf-8")).ids)
    while True:
        starts = draw.integers(0, len(ids) - ROW_LEN, NUM_ROWS)
        rows = [ids[start : start + ROW_LEN].tolist() for start in starts]
        half = ROW_LEN // 2
        yield RolloutBatch(
            prompts=[row[:half] for row in rows],
            responses=[row[half:] for row in rows],
            advantages=draw.standard_normal(NUM_ROWS),
        )


@dataclass(frozen=True)
class Rounds:
    """What both sides said of every sync."""

    num_bytes: int
    received: list[dict[str, Any]]
    sent: list[dict[str, Any]]
    is_equal: bool

    @classmethod
    def of(cls, case: Case, sender: Worker, num_syncs: int, *given: Any) -> Rounds:
        """Of two processes of their own."""
        with two_processes((receive, case), (sender, case, *given)) as (receiving, sending):
            sending.send(receiving.recv())
            num_bytes = receiving.recv()
            assert sending.recv() == num_bytes
            received, sent = [], []
            for _ in range(num_syncs):
                sending.send(True)
                sending.recv()
                receiving.send(True)
                sending.send(receiving.recv())
                received.append(receiving.recv())
                sent.append(sending.recv())
            receiving.send(False)
            sending.send(False)
            return cls(num_bytes, received, sent, receiving.recv() == sending.recv())

    @property
    def cpu_seconds(self) -> dict[str, float]:
        """Medians of both sides."""
        return {"receiver": _median(self.received, "cpu_seconds"), "sender": _median(self.sent, "cpu_seconds")}


def measure(case: Case, num_syncs: int) -> dict[str, Any]:
    """Speed and memory of one way to sync."""
    rounds = Rounds.of(case, send, num_syncs)
    seconds, copied = _median(rounds.received, "seconds"), _median(rounds.received, "memcpy_seconds")
    sides = {"receiver": rounds.received, "sender": rounds.sent}
    return {
        "gb_per_s": round(rounds.num_bytes / seconds / 1e9, 3),
        "memcpy_gb_per_s": round(rounds.num_bytes / copied / 1e9, 3),
        "part_of_memcpy": round(copied / seconds, 3),
        "cpu_seconds": rounds.cpu_seconds,
        "peak_mb": {side: round(max(one["peak"] for one in told) / 1e6, 1) for side, told in sides.items()},
        "growth_mb": {side: _growth(told) for side, told in sides.items()},
        "is_equal": rounds.is_equal,
    }


def measure_changes(case: Case, lr: float, num_steps: int) -> dict[str, Any]:
    """A sync of everything, then one of what changed after each of `num_steps` steps."""
    rounds = Rounds.of(case, train_and_send, num_steps + 1, lr)
    return {
        "times_smaller": round(rounds.num_bytes / _median(rounds.sent, "sent"), 1),
        "part_changed": round(_median(rounds.sent, "changed") * BF16_BYTES / rounds.num_bytes, 5),
        "seconds": _median(rounds.received, "seconds"),
        "seconds_in_full": round(rounds.received[0]["seconds"], 4),
        "cpu_seconds": rounds.cpu_seconds,
        "is_equal": rounds.is_equal,
    }


@contextmanager
def two_processes(*works: tuple[Any, ...]) -> Generator[tuple[Connection, ...]]:
    """Run both beside this process: (function, arguments ...), and the other end of a pipe as its last argument."""
    pipes = [_FORKS.Pipe() for _ in works]
    processes = [
        _FORKS.Process(target=work, args=(*given, theirs), daemon=True)
        for (work, *given), (_, theirs) in zip(works, pipes, strict=True)
    ]
    for process, (_, theirs) in zip(processes, pipes, strict=True):
        process.start()
        theirs.close()
    try:
        yield tuple(ours for ours, _ in pipes)
    finally:
        for process in processes:
            process.join(10)
            process.kill()


def _growth(rounds: list[dict[str, Any]]) -> float | None:
    """From the fifth sync to the last; none where there were too few."""
    if len(rounds) <= MIN_GROWTH_SYNCS:
        return None
    return round((rounds[-1]["held"] - rounds[MIN_GROWTH_SYNCS - 1]["held"]) / 1e6, 1)


def _median(rounds: list[dict[str, Any]], name: str) -> float:
    """Without the first sync, which pays for memory that later ones find there."""
    return round(statistics.median(one[name] for one in rounds[1:]), 6)


def _resident(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _versions() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return {
        "commit": commit,
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "command": " ".join(["python", *sys.argv]),
    }


def bench(
    *,
    ways: str = ",".join(WAYS),
    num_syncs: int = 50,
    bucket_mib: int = 8,
    model: str = str(ROOT / "models/smollm2-135m"),
    num_steps: int = 4,
    quick: bool = False,
    out: Path | None = None,
) -> None:
    """Measure every way, then changes.

    Parameters
    ----------
    ways: Mechanisms to measure.
    num_syncs: Of each way.
    bucket_mib: As `weight_sync.bucket_mib`.
    model: Whose steps make the changes; `arctic-rl fetch smollm2-135m` brings the one that is meant.
    num_steps: Steps, and syncs of changes, at each learning rate.
    quick: Tiny models and few syncs: that everything runs, no figure to quote.
    out: File that the JSON line is written to.
    """
    layers, hidden = (2, 96) if quick else (30, 576)
    if quick:
        num_syncs, bucket_mib, num_steps, model = 3, 1, 2, "tiny-random"
    cases = [Case(way, low, bucket_mib, layers, hidden) for way in ways.split(",") if way for low in (False, True)]
    record: dict[str, Any] = {
        "bench": "sync",
        "num_parameters": sum(math.prod(shape) for shape in shapes(layers, hidden).values()),
        "num_syncs": num_syncs,
        "bucket_mib": bucket_mib,
        "ways": {},
        "changes": {},
    }
    for case in cases:
        record["ways"][case.name] = found = measure(case, num_syncs)
        _print(case.name, found)
    for lr in RATES:
        case = Case("stream", False, bucket_mib, model=model, delta=True)
        record["changes"][f"{lr:g}"] = found = measure_changes(case, lr, num_steps)
        _print(f"changes at lr {lr:g}", found)
    line = json.dumps(record | _versions())
    print(line)
    if out is not None:
        out.write_text(line + "\n")


def _print(name: str, found: dict[str, Any]) -> None:
    print(f"{name:26} " + "  ".join(f"{key} {value}" for key, value in found.items()), flush=True)


if __name__ == "__main__":
    cyclopts.run(bench)
