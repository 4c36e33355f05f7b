"""Record how long real rollouts are: `num_rollouts` answers of a chat model to each of a few open questions.

    python benchmarks/record_lengths.py --model models/smollm2-135m

Writes `benchmarks/data/rollout_lengths.json`: for each prompt its tokens and those of every answer (the end-of-turn
token included; an answer that reaches `max_tokens` is cut there). `bench_balance.py` reads that file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import cyclopts
import torch
from tokenizers import Tokenizer

from arctic_platform.rl.engines.models import load_model
from arctic_platform.rl.protocol import SamplingParams
from arctic_platform.rl.zorro_inference.sampler import Sampler

ROOT = Path(__file__).resolve().parents[1]

QUESTIONS = [
    "What is the capital of Portugal?",
    "Write a haiku about rain.",
    "Explain why the sky is blue.",
    "What is 17 plus 25?",
    "Give me three ideas for a birthday present.",
    "How do I boil an egg?",
    "Write a short story about a lighthouse keeper.",
    "What does a compiler do?",
    "Translate 'good morning' into French.",
    "List the planets of the solar system.",
    "Write a Python function that reverses a string.",
    "Is a tomato a fruit or a vegetable?",
    "Summarize the plot of Romeo and Juliet.",
    "What should I pack for a week in the mountains?",
    "Name a famous painter.",
    "How does a bicycle stay upright?",
]


def record(
    *,
    model: str,
    num_rollouts: int = 12,
    max_tokens: int = 512,
    temperature: float = 1.0,
    seed: int = 0,
    num_threads: int = 1,
    out: Path = ROOT / "benchmarks" / "data" / "rollout_lengths.json",
) -> None:
    """Sample and write.

    Parameters
    ----------
    model: Folder of a chat model whose turns end with <|im_end|>.
    num_rollouts: Answers to each question.
    max_tokens: Longest answer.
    temperature: Of sampling.
    seed: Of sampling.
    num_threads: Threads of torch.
    out: File to write.
    """
    torch.set_num_threads(num_threads)
    tokenizer = Tokenizer.from_file(str(Path(model) / "tokenizer.json"))
    end = tokenizer.token_to_id("<|im_end|>")
    prompts = [
        tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n").ids
        for question in QUESTIONS
    ]
    sampler = Sampler(load_model(model), eos_token_ids=[end])
    params = SamplingParams(n=num_rollouts, temperature=temperature, max_tokens=max_tokens, seed=seed)
    rollouts = sampler.generate(prompts, params).rollouts
    groups = [
        {"prompt_len": len(ids), "response_lens": [len(r.token_ids) for r in rollouts if r.prompt_index == index]}
        for index, ids in enumerate(prompts)
    ]
    recorded = {
        "model": Path(model).name,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "groups": groups,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
    cyclopts.run(record)
