"""Every family of the training sweep through the sampler; docs/architectures.md holds the outcome, column `sampler`.

python -m tests.zorro_inference.architectures            # judge, compare with the table
python -m tests.zorro_inference.architectures --write    # and write what was found into the table
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch
import transformers
from transformers import PreTrainedModel

from arctic_platform.errors import UnsupportedModelError
from arctic_platform.rl.protocol import Rollout, SamplingParams
from arctic_platform.rl.zorro_inference import Sampler
from tests.zorro_inference.models import teacher_forced
from tests.zorro_train import sweep
from tests.zorro_train.architectures import FAMILIES, VOCAB, build

COLUMN = sweep.SAMPLER
NEW_TOKENS = 8
MAX_ERROR, MEAN_ERROR = 1e-4, 1e-5
EOS_ID = 2
GREEDY = SamplingParams(temperature=0, max_tokens=NEW_TOKENS)


@dataclass(frozen=True)
class Verdict:
    """`word`: exact, refused (by name) or WRONG. `errors`: of all log-probs, absolute. `reason`: what was wrong."""

    word: str
    errors: np.ndarray = field(default_factory=lambda: np.zeros(1))
    reason: str = ""


def sweep_prompts() -> list[list[int]]:
    """Longer than the windows of the sweep; one is a prefix of another, one shares nothing, one comes twice."""
    ids = np.random.default_rng(0).integers(3, VOCAB, 40).tolist()
    return [ids[:13], ids[:9], ids[:9] + ids[20:23], ids[30:35], ids[:13]]


def judge(name: str) -> Verdict:
    """Greedy tokens against plain generate and log-probs against plain passes, shared and not, in several batches."""
    model = build(name)
    try:
        samplers = [
            Sampler(model, eos_token_ids=[EOS_ID], share=share, probe=share, max_batch_rows=rows)
            for share, rows in ((True, 64), (False, 64), (True, 2))
        ]
    except UnsupportedModelError as refusal:
        return Verdict("refused" if model.config.model_type in str(refusal) else "WRONG", reason=str(refusal))
    prompts = sweep_prompts()
    expected = [generate_plainly(model, prompt) for prompt in prompts[:-1]]
    expected.append(expected[0])
    batches = [(samplers[0], [0, 1, 2, 3, 4]), (samplers[0], [3, 1]), (samplers[1], [2, 0]), (samplers[2], [4, 2, 1])]
    rollouts = []
    for sampler, chosen in batches:
        answers = sampler.generate([prompts[i] for i in chosen], GREEDY).rollouts
        if [rollout.token_ids for rollout in answers] != [expected[i] for i in chosen]:
            return Verdict("WRONG", reason=f"other tokens: share={sampler.share}, prompts {chosen}")
        rollouts += [(chosen[rollout.prompt_index], rollout) for rollout in answers]
    errors = logprob_errors(model, prompts, rollouts, temperature=0)
    is_exact = errors.max() <= MAX_ERROR and errors.mean() <= MEAN_ERROR
    return Verdict("exact" if is_exact else "WRONG", errors, f"log-probs {errors.max():.1e}, mean {errors.mean():.1e}")


@torch.no_grad()
def generate_plainly(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """transformers' own greedy decoding of one prompt."""
    row = torch.tensor([prompt])
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": EOS_ID, "pad_token_id": 0}
    return model.generate(row, attention_mask=torch.ones_like(row), **options)[0, len(prompt) :].tolist()


def logprob_errors(
    model: PreTrainedModel, prompts: list[list[int]], rollouts: list[tuple[int, Rollout]], *, temperature: float
) -> np.ndarray:
    """Of every token of `(prompt number, rollout)`, against its row alone; each different row is computed once."""
    alone: dict[tuple[int, ...], np.ndarray] = {}
    errors = []
    for i, rollout in rollouts:
        key = (i, *rollout.token_ids)
        if key not in alone:
            alone[key] = teacher_forced(model, prompts[i], rollout.token_ids, temperature)
        errors.append(np.abs(alone[key] - rollout.logprobs))
    return np.concatenate(errors)


def sample_everywhere(name: str, dtype: torch.dtype) -> np.ndarray:
    """Errors of sampled log-probs at temperature 0.7: both kernels, sharing on and off, many seats and few."""
    model, prompts = build(name, dtype), sweep_prompts()
    params = SamplingParams(n=3, temperature=0.7, max_tokens=24, seed=0, ignore_eos=True)
    rollouts = []
    for kernel, share, seats in product(("flash", "math"), (True, False), (64, 4)):
        sampler = Sampler(
            model, eos_token_ids=[EOS_ID], attn_kernel=kernel, share=share, max_batch_rows=seats, probe=False
        )
        rollouts += [(rollout.prompt_index, rollout) for rollout in sampler.generate(prompts, params).rollouts]
    return logprob_errors(model, prompts, rollouts, temperature=0.7)


def main() -> int:
    """Judge all; compare with the table or write it."""
    transformers.logging.set_verbosity_error()
    cells = sweep.read_table()
    wrong = 0
    for name in FAMILIES:
        verdict = judge(name)
        said = cells[name].get(COLUMN, "nothing")
        print(f"{name:20s} {verdict.word:8s} {verdict.errors.max():.1e} {verdict.reason[:80]}".rstrip(), flush=True)
        wrong += verdict.word != said
        cells[name][COLUMN] = verdict.word
    if "--write" in sys.argv:
        sweep.write_table(cells)
        return 0
    print(f"{wrong} families differ from the table")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
