"""The embedded sampler: token ids in, token ids and log-probs out, every shared token computed and stored once.

Requests join at any time. Their prompts become paths of the KV forest (cache.py); a prefill pass computes what is new
of them and draws first tokens; a decode step runs the newest tokens of all active rows with a DecodePlan as its
attention. Both are calls of the unmodified model, or of what fused.py makes of it. scheduler.py says who is next and
what fits.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Literal, get_args

import numpy as np
import torch
import transformers
from numpy.typing import ArrayLike
from torch import Tensor
from transformers import PreTrainedModel

from arctic_platform.errors import ConfigError, InputError, UnsupportedModelError
from arctic_platform.forest import ATTENTION_NAME, forest_attention_forward, order_rows
from arctic_platform.forest.attention import AttendPlan
from arctic_platform.forest.kernels import Kernel
from arctic_platform.rl.hybrid import join_recurrent_layers
from arctic_platform.rl.limits import longest_exact_pass, longest_exact_row, short_windows
from arctic_platform.rl.protocol import GenerateResponse, SamplingParams
from arctic_platform.rl.zorro_inference.attention import DecodePlan, Readers
from arctic_platform.rl.zorro_inference.cache import CachePolicy
from arctic_platform.rl.zorro_inference.fused import FusedModel, all_modules
from arctic_platform.rl.zorro_inference.packed import PackedLinears, pays_for
from arctic_platform.rl.zorro_inference.plan import lay_out
from arctic_platform.rl.zorro_inference.prefill import PrefillPass, PrefillPlan
from arctic_platform.rl.zorro_inference.probe import NEW_TOKENS, attention_of, check_rollouts, probe_prompts
from arctic_platform.rl.zorro_inference.requests import FinishReason, SampleRequest, SamplerStats, TokenDelta
from arctic_platform.rl.zorro_inference.rows import Job, Prefill, Row, open_job
from arctic_platform.rl.zorro_inference.rules import RequestRules
from arctic_platform.rl.zorro_inference.sampling import Draws, RowSettings, draw_tokens, report_tokens
from arctic_platform.rl.zorro_inference.scheduler import OVERRUN, Scheduler
from arctic_platform.rl.zorro_inference.states import States
from arctic_platform.rl.zorro_inference.stop_strings import Tokenizer
from arctic_platform.rl.zorro_inference.suffix import capacity_for

transformers.AttentionInterface.register(ATTENTION_NAME, forest_attention_forward)

InFlight = Literal["keep", "recompute", "abort"]
"""What a weight update does to rows in work: they go on over the keys and values that they have, compute them anew with
the new weights, or end."""

Progress = Callable[[int, int], None]
"""Called after every step with the number of finished rollouts and of all rollouts."""

MAX_PASS_TOKENS = 8192
"""Tokens of a prefill pass while nobody decodes, to bound activations."""

DEFAULT_CACHE_BYTES = 4 * 2**30


class Sampler:
    """Samples from a Hugging Face causal LM with every shared token computed once and stored once.

    model: its forward must be its own (not one that the trainer patched); it is put into eval mode, and onto the
    forest's attention, while it works. eos_token_ids end a rollout unless a request ignores them.
    share=False decodes with the same code and kernels and every rollout as a root of its own: the fair comparison.
    max_batch_rows: rollouts that decode at once; the others wait for a place. attn_kernel: `flash`, or `math`.
    tokenizer: of `tokenizers` or transformers; rollouts then have text, and requests may name stop texts and bad words.
    kv_cache_tokens: tokens whose keys and values are kept at once, of running rollouts and of finished ones; None for
    as many as 4 GiB hold. prefix_cache_policy: what a weight update does to cached prefixes. prefill_chunk_tokens:
    prompt tokens between two decode steps. pack_weights: keep a second copy of linear weights, laid out for the CPU,
    from one weight update to the next, where enough tokens are due. probe: sample three short rows at once, and refuse
    the model (UnsupportedModelError) unless they come out exactly.
    Raises ConfigError for a setting that is not one of these.

    Not thread-safe: see AsyncSampler. Weights that change without `update_weights` are noticed, and the cache is reset.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        eos_token_ids: Sequence[int],
        share: bool = True,
        max_batch_rows: int = 64,
        attn_kernel: Kernel = "flash",
        tokenizer: Tokenizer | None = None,
        kv_cache_tokens: int | None = None,
        prefix_cache_policy: CachePolicy = "reset",
        prefill_chunk_tokens: int = 512,
        pack_weights: bool = True,
        probe: bool = True,
    ) -> None:
        _check_choice("attn_kernel", attn_kernel, get_args(Kernel))
        _check_choice("prefix_cache_policy", prefix_cache_policy, get_args(CachePolicy))
        _check_count("max_batch_rows", max_batch_rows, 64)
        _check_count("prefill_chunk_tokens", prefill_chunk_tokens, 512)
        if kv_cache_tokens is not None:
            _check_count("kv_cache_tokens", kv_cache_tokens, 65536)
        join_recurrent_layers(model)
        self.model = model
        self.eos_token_ids = frozenset(int(token) for token in eos_token_ids)
        self.share = share
        self.max_batch_rows = max_batch_rows
        self.attn_kernel = attn_kernel
        self.tokenizer = tokenizer
        self.prefix_cache_policy = prefix_cache_policy
        self.prefill_chunk_tokens = prefill_chunk_tokens
        self._is_budget_given = kv_cache_tokens is not None
        self.kv_cache_tokens = kv_cache_tokens or DEFAULT_CACHE_BYTES // _bytes_per_token(model)
        self.weight_version = 0
        self.stats = SamplerStats()
        self._scheduler = Scheduler(
            budget=self.kv_cache_tokens, max_batch_rows=max_batch_rows, share=share, stats=self.stats
        )
        self._packed = PackedLinears(model, enable=pack_weights)
        self._fused = FusedModel(model)
        self._is_fused: bool | None = None
        self._packing_pays: bool | None = None
        self._readers: Readers | None = None
        self._settings: RowSettings | None = None
        self._outbox: list[TokenDelta] = []
        self._is_paused = False
        self._is_in_session = False
        self._session = ExitStack()
        self._prefilled_last = False
        self._fingerprint = _fingerprint(model)
        if probe:
            self._probe()
            self._fused.prepare(enable=pack_weights)

    @property
    def vocab_size(self) -> int:
        """Ids that the model knows, 0 .. vocab_size - 1."""
        return self.model.config.get_text_config().vocab_size

    @property
    def max_row_len(self) -> int | None:
        """Tokens that a row may have, prompt and response: the model's context, or up to where it decodes exactly."""
        context = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        return min((limit for limit in (context, longest_exact_row(self.model)) if limit), default=None)

    @property
    def has_work(self) -> bool:
        """A step would do something."""
        return bool(self._outbox) or (bool(self._scheduler.jobs) and not self._is_paused)

    @property
    def num_held(self) -> int:
        """Holders of cached segments: 0 whenever no request is in work."""
        return self._scheduler.forest.num_held

    def add(self, request: SampleRequest) -> None:
        """Queue a request. Raises InputError, and leaves everything else as it is."""
        if request.request_id in self._scheduler.jobs:
            raise InputError(f"request_id={request.request_id!r} is in work already; give every request its own")
        name = f"request {request.request_id}"
        prompt = _as_prompt(request.prompt_ids, name, self.vocab_size)
        self._scheduler.add(self._open(request, prompt, name, streams=True))
        self._count()

    def step(self) -> list[TokenDelta]:
        """One prefill pass or one decode step, in turns while there is both; what the rows got since the last step."""
        if self._scheduler.jobs and not self._is_paused:
            with self.session():
                self._advance(interleave=True)
        self._count()
        deltas, self._outbox = self._outbox, []
        return deltas

    def abort(self, request_id: str) -> None:
        """End a request in any phase; the next step reports its rows. One that is not known is left alone."""
        job = self._scheduler.jobs.pop(request_id, None)
        if job is None:
            return
        self._scheduler.abort(job)
        self._readers = None
        for row in job.rows:
            if not row.rollout.is_finished:
                self._end(row, "abort")
        self._count()

    def pause(self) -> None:
        """Do nothing until `resume`; requests keep their places, new ones wait."""
        self._is_paused = True

    def resume(self) -> None:
        """Go on after `pause`."""
        self._is_paused = False

    def update_weights(self, version: int, *, in_flight: InFlight = "keep") -> None:
        """The model's weights are now those of `version`; in_flight says what becomes of rollouts that have tokens.

        Requests that have none yet begin anew with the new weights. Cached prefixes: as `prefix_cache_policy` says.
        """
        _check_choice("in_flight", in_flight, get_args(InFlight))
        if in_flight == "abort":
            for job in [job for job in self._scheduler.jobs.values() if any(row.rollout.token_ids for row in job.rows)]:
                self.abort(job.request.request_id)
        self._scheduler.update(version, self.prefix_cache_policy, recompute=in_flight == "recompute")
        self._readers = None
        self._adopt_weights()
        self.weight_version = version

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request holds."""
        self._scheduler.forest.reset()
        self._scheduler.restart_prefills()

    def free_memory(self) -> None:
        """Give the memory of keys, values and laid-out weights back. Raises InputError while requests are in work."""
        if self._scheduler.jobs:
            raise InputError("requests are in work; let them finish or abort them before the memory is freed")
        self.reset_prefix_cache()
        self._readers = None
        self._scheduler.pool.free_memory()
        self._scheduler.suffix.free_memory()
        self._scheduler.states.free_memory()
        self._packed.drop()
        self._fused.drop()

    def generate(
        self, prompts: Sequence[ArrayLike], params: SamplingParams | None = None, progress: Progress | None = None
    ) -> GenerateResponse:
        """Sample `params.n` rollouts of every prompt, a non-empty list of token ids.

        Rollouts come prompt-major. A stop token is the last of `token_ids`, with its log-prob, and the finish reason
        is "stop"; so is the token that completes a stop text. Raises InputError for what cannot be sampled, and while
        other requests are in work, NonFiniteError where logits are not finite.
        """
        if self._scheduler.jobs or self._outbox:
            raise InputError("other requests are in work; use AsyncSampler for calls that overlap")
        params = SamplingParams() if params is None else params
        before = SamplerStats(**vars(self.stats))
        jobs: list[Job] = []
        try:
            jobs += self._open_all(prompts, params)
            self._packing_pays = self._pays_by_itself(jobs)
            with self.session():
                self._finish(jobs, progress)
        finally:
            for job in jobs:
                self.abort(job.request.request_id)
            self._packing_pays = None
        rollouts = [row.rollout.as_rollout(i) for i, job in enumerate(jobs) for row in job.rows]
        metrics = self._metrics(jobs, before)
        self._count()
        return GenerateResponse(rollouts=rollouts, weight_version=self.weight_version, metrics=metrics)

    @contextmanager
    def session(self) -> Generator[None]:
        """The model as steps need it; who takes many steps enters once. Weights that changed before are noticed."""
        if self._is_in_session:
            yield
            return
        if _fingerprint(self.model) != self._fingerprint:
            self.reset_prefix_cache()
            self._adopt_weights()
        self._is_in_session, self._is_fused = True, None
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.no_grad())
                stack.enter_context(_eval_mode(self.model))
                self._session = stack
                yield
        finally:
            self._is_in_session = False

    def _finish(self, jobs: list[Job], progress: Progress | None) -> None:
        """Step until all jobs are over, prompts first: nobody waits for single tokens."""
        rows = [row for job in jobs for row in job.rows]
        while self._scheduler.jobs:
            self._advance(interleave=False)
            for job in jobs:
                if job.error is not None:
                    raise job.error
            if progress is not None:
                progress(sum(row.rollout.is_finished for row in rows), len(rows))

    def _pays_by_itself(self, jobs: list[Job]) -> bool:
        """Whether these requests alone pay for laid-out weights, whatever is cached."""
        prompts, rows = [job.prompt for job in jobs], [row for job in jobs for row in job.rows]
        num_prompt_tokens = order_rows(prompts).num_packed() if self.share else sum(map(len, prompts))
        num_new = sum(row.rollout.max_tokens for row in rows)
        return pays_for(num_prompt_tokens + num_new, max(row.rollout.max_tokens for row in rows))

    def _advance(self, *, interleave: bool) -> None:
        """interleave: a short prefill pass only, and decode steps in between."""
        scheduler, started = self._scheduler, time.perf_counter()
        scheduler.admit()
        scheduler.skip_computed()
        is_decoding = bool(scheduler.active or scheduler.ready)
        step = None
        if not (interleave and is_decoding and self._prefilled_last):
            is_short = (interleave and is_decoding) or any(prefill.reports for prefill in scheduler.prefilling)
            step = scheduler.next_pass(self._pass_limit(self.prefill_chunk_tokens if is_short else MAX_PASS_TOKENS))
        self._prefilled_last = step is not None
        if step is not None:
            self._prefill(step)
            self.stats.prefill_seconds += time.perf_counter() - started
        elif is_decoding:
            self._decode()
            self.stats.decode_seconds += time.perf_counter() - started

    def _pass_limit(self, wanted: int) -> int:
        """What `next_pass` may be asked for: it exceeds its limit a little, and runs last tokens beside it."""
        longest = longest_exact_pass(self.model)
        return wanted if longest is None else max(min(wanted, int((longest - self.max_batch_rows) / OVERRUN)), 1)

    def _prefill(self, step: PrefillPass) -> None:
        """Compute new segments, and draw the first tokens of the rows whose prompt is complete."""
        device, prefilling = self.model.device, self._scheduler.prefilling
        plan = PrefillPlan(step.forest, kernel=self.attn_kernel, device=device, step=step, pool=self._scheduler.pool)
        kept = _tokens_with_logits(step, prefilling)
        logits = self._logits(plan.input_ids, plan.position_ids, plan, keep=self._to_device(kept))
        self.stats.tokens_computed += step.forest.num_tokens
        self._note_states(plan.ends)
        self._check_layers()
        broken = self._report_prompts(step, kept, logits)
        for prefill in self._scheduler.computed(step, plan.ends):
            if prefill in broken:
                continue
            failed: list[Row] = []
            if prefill.draws:
                assert prefill.path is not None
                at = int(np.searchsorted(kept, step.last_token[prefill.path]))
                self.stats.prompt_tokens += len(prefill.ids) * len(prefill.rows)
                for first in range(0, len(prefill.rows), self.max_batch_rows):
                    rows = prefill.rows[first : first + self.max_batch_rows]
                    settings = RowSettings.of([row.rollout.rules for row in rows], device)
                    failed += self._draw(rows, logits[at : at + 1].expand(len(rows), -1), settings)
            self._scheduler.seat(prefill, forget=bool(failed))
        for prefill in broken:
            self._scheduler.seat(prefill, forget=True)

    def _report_prompts(self, step: PrefillPass, kept: np.ndarray, logits: Tensor) -> list[Prefill]:
        """For all that ask; those whose logits are not finite end alone, and are returned."""
        broken: list[Prefill] = []
        for prefill in [prefill for prefill in self._scheduler.prefilling if prefill.reports]:
            try:
                self._report_prompt(prefill, step, kept, logits)
            except InputError as error:
                broken.append(prefill)
                for row in prefill.rows:
                    self._end(row, "abort", error)
                self._close(prefill.rows)
        return broken

    def _report_prompt(self, prefill: Prefill, step: PrefillPass, kept: np.ndarray, logits: Tensor) -> None:
        """Log-probs of the prompt's tokens that are predicted in this pass, `prompt_logprobs` of its first rollout."""
        assert prefill.path is not None
        rollout = prefill.rows[0].rollout
        rollout.prompt_logprobs = rollout.prompt_logprobs or [None]
        for segment in prefill.path.path():
            targets = prefill.ids[segment.depth + 1 : segment.end + 1]
            if segment in step.first_token and len(targets):
                at = np.searchsorted(kept, step.first_token[segment] + np.arange(len(targets)))
                params = prefill.rows[0].job.params
                rollout.prompt_logprobs += report_tokens(logits[self._to_device(at)], self._to_device(targets), params)

    def _decode(self) -> None:
        """One token for every active row."""
        scheduler = self._scheduler
        if scheduler.make_room() | scheduler.join() or self._readers is None:
            self._readers = self._new_readers()
            rules = [row.rollout.rules for row in self._readers.order]
            self._settings = RowSettings.of(rules, self.model.device)
        readers, settings = self._readers, self._settings
        assert settings is not None
        states = scheduler.states.step(readers.order) if scheduler.forest.needs_states else None
        plan = DecodePlan(readers, self.attn_kernel, states)
        newest = np.array([row.rollout.token_ids[-1] for row in readers.order], np.int64)
        logits = self._logits(self._to_device(newest)[None], self._to_device(plan.positions)[None], plan)
        plan.commit()
        self.stats.decode_steps += 1
        self.stats.tokens_computed += len(newest)
        self.stats.kv_tokens_read += plan.num_keys
        self.stats.forest_tokens_read += plan.num_tokens
        failed = self._draw(readers.order, logits, settings)
        scheduler.fail(failed)
        finished = [row for row in readers.order if row.rollout.is_finished and row not in failed]
        scheduler.leave(finished, keep_answers=True)
        if finished or failed:
            self._readers = None

    def _new_readers(self) -> Readers:
        scheduler, rows = self._scheduler, self._scheduler.active
        live = lay_out([row.path for row in rows if row.path is not None])
        return Readers(live, rows, scheduler.suffix, scheduler.pool, self.model.device)

    def _logits(self, input_ids: Tensor, position_ids: Tensor, plan: AttendPlan, keep: Tensor | int = 0) -> Tensor:
        """`[kept, V]`: all positions for keep=0, else those at packed indices `keep`."""
        is_due = self._packed.is_due(input_ids.shape[1], pays=self._packing_pays)
        if is_due and self._can_fuse():
            return self._fused.logits(input_ids, position_ids, plan, keep)
        if self.model.config._attn_implementation != ATTENTION_NAME:
            self._session.enter_context(attention_of(self.model, ATTENTION_NAME))
        with self._packed.active(is_due):
            out = self.model(
                input_ids=input_ids, position_ids=position_ids, forest=plan, use_cache=False, logits_to_keep=keep
            )
        return out.logits[0]

    def _can_fuse(self) -> bool:
        """Asked once per session: nobody changes the model's modules within one."""
        if self._is_fused is None:
            self._is_fused = self._fused.fits()
        return self._is_fused

    def _draw(self, rows: Sequence[Row], logits: Tensor, settings: RowSettings) -> list[Row]:
        """Append one token to each of `rows` from `logits [len(rows), V]`; those that cannot be drawn fail alone."""
        uniforms = self._to_device(np.array([row.rollout.uniform() for row in rows]))
        failed: list[Row] = []
        try:
            self._take(rows, draw_tokens(logits, uniforms, settings))
        except InputError:
            for i, row in enumerate(rows):
                alone = RowSettings.of([row.rollout.rules], self.model.device)
                try:
                    self._take([row], draw_tokens(logits[i : i + 1], uniforms[i : i + 1], alone))
                except InputError as error:
                    failed.append(row)
                    self._end(row, "abort", error)
        self._close(rows)
        return failed

    def _take(self, rows: Sequence[Row], draws: Draws) -> None:
        self.stats.generated_tokens += len(rows)
        drawn = zip(rows, draws.ids.tolist(), draws.logprobs.tolist(), draws.top_logprobs, strict=True)
        for row, token, logprob, top in drawn:
            row.rollout.append(token, logprob, top)
            if row.job.streams:
                self._report(row, 1)

    def _end(self, row: Row, reason: FinishReason, error: InputError | None = None) -> None:
        """A row ends without a new token."""
        row.rollout.end(reason)
        row.job.error = row.job.error or error
        if row.job.streams:
            self._report(row, 0)

    def _report(self, row: Row, num_new: int) -> None:
        rollout, start = row.rollout, len(row.rollout.token_ids) - num_new
        self._outbox.append(
            TokenDelta(
                request_id=row.job.request.request_id,
                rollout=row.number,
                token_ids=rollout.token_ids[start:],
                logprobs=rollout.logprobs[start:],
                finish_reason=rollout.finish_reason,
                weight_version=self.weight_version,
                top_logprobs=None if rollout.top_logprobs is None else rollout.top_logprobs[start:],
                text=rollout.new_text(),
                prompt_logprobs=rollout.prompt_logprobs if start == 0 else None,
                error=row.job.error if rollout.finish_reason == "abort" else None,
                stop_reason=rollout.stop_reason,
            )
        )

    def _close(self, rows: Sequence[Row]) -> None:
        """Forget requests whose rows have all finished."""
        for job in {row.job for row in rows if row.rollout.is_finished}:
            if job.is_over:
                self._scheduler.jobs.pop(job.request.request_id, None)

    def _open_all(self, prompts: Sequence[ArrayLike], params: SamplingParams) -> list[Job]:
        """One request per prompt; the rollouts of a prompt that occurs again are numbered on."""
        if not len(prompts):
            raise InputError("prompts is empty; give at least one list of token ids")
        if params.seed is None:
            params = params.model_copy(update={"seed": secrets.randbits(63)})
        occurrences: Counter[bytes] = Counter()
        jobs = []
        for i, prompt in enumerate(prompts):
            ids = _as_prompt(prompt, f"prompts[{i}]", self.vocab_size)
            first = occurrences[ids.tobytes()]
            occurrences[ids.tobytes()] += params.n
            request = SampleRequest(f"generate-{i}", ids, params, first)
            jobs.append(self._open(request, ids, f"prompts[{i}]", streams=False))
        for job in jobs:
            self._scheduler.add(job)
        return jobs

    def _open(self, request: SampleRequest, prompt: np.ndarray, name: str, *, streams: bool) -> Job:
        """Check a request whole; nothing is queued yet."""
        rules = RequestRules.of(
            request.params, vocab_size=self.vocab_size, eos_token_ids=self.eos_token_ids, tokenizer=self.tokenizer
        )
        max_tokens = rules.max_new_tokens(len(prompt), self.max_row_len, name=name)
        if request.params.max_tokens is None:
            max_tokens = max(min(max_tokens, (self.kv_cache_tokens - len(prompt)) * 2 // 3), 1)
        num_places = len(prompt) + capacity_for(max_tokens) + 2 * self._scheduler.forest.places_per_state
        if num_places > self.kv_cache_tokens:
            raise InputError(
                f"{name} has {len(prompt)} tokens and max_tokens={request.params.max_tokens}, which takes up to "
                f"{num_places} places; kv_cache_tokens={self.kv_cache_tokens} are all"
            )
        return open_job(
            request, prompt, rules, max_tokens=max_tokens, tokenizer=self.tokenizer, name=name, streams=streams
        )

    def _probe(self) -> None:
        prompts = probe_prompts(self.vocab_size)
        params = SamplingParams(max_tokens=NEW_TOKENS, seed=0, ignore_eos=True)
        with _eval_mode(self.model), short_windows(self.model):
            check_rollouts(self.model, prompts, self.generate(prompts, params).rollouts)
        if not self._is_budget_given:
            self.kv_cache_tokens = DEFAULT_CACHE_BYTES // self._scheduler.pool.bytes_per_place
        self.free_memory()
        self._scheduler.set_budget(self.kv_cache_tokens)
        vars(self.stats).update(vars(SamplerStats()))

    def _adopt_weights(self) -> None:
        """Nothing of the old weights is used from here on."""
        self._fingerprint = _fingerprint(self.model)
        self._packed.drop()
        self._fused.drop()

    def _count(self) -> None:
        scheduler = self._scheduler
        self.stats.running = len(scheduler.active)
        self.stats.waiting = scheduler.num_waiting
        self.stats.cached_tokens = scheduler.forest.num_tokens

    def _note_states(self, ends: States) -> None:
        """The first pass tells whether the model has recurrent layers, and how large their states are."""
        forest = self._scheduler.forest
        if ends and not forest.needs_states:
            num_bytes = sum(x[0].numel() * x.element_size() for x in ends)
            forest.needs_states, forest.places_per_state = True, -(-num_bytes // _bytes_per_token(self.model))

    def _check_layers(self) -> None:
        """Every layer attends through the registry or keeps a state that is known; the probe sees whether all do."""
        config = self.model.config.get_text_config()
        layers = self._scheduler.pool.layers
        if layers != list(range(config.num_hidden_layers)) and not self._scheduler.forest.needs_states:
            raise UnsupportedModelError(
                f"{config.model_type} has {config.num_hidden_layers} layers, and {len(layers)} of them "
                "keep keys and values through transformers' attention registry; this sampler needs all of them to"
            )

    def _metrics(self, jobs: list[Job], before: SamplerStats) -> dict[str, float]:
        """What this call did."""
        gained = {name: value - getattr(before, name) for name, value in vars(self.stats).items()}
        prompts = [job.prompt for job in jobs]
        naive = sum(len(job.prompt) * len(job.rows) for job in jobs)
        num_decoded = sum(len(row.rollout.token_ids) - 1 for job in jobs for row in job.rows)
        stored = order_rows(prompts).num_packed() if self.share else naive
        return {
            "tokens_computed": float(gained["tokens_computed"]),
            "tokens_naive": float(naive + num_decoded),
            "kv_tokens_stored": float(stored + num_decoded),
            "kv_tokens_naive": float(naive + num_decoded),
            "prefix_hit_tokens": float(gained["prefix_hit_tokens"]),
            "kv_tokens_read": float(gained["kv_tokens_read"]),
            "forest_tokens_read": float(gained["forest_tokens_read"]),
            "prefill_seconds": gained["prefill_seconds"],
            "decode_seconds": gained["decode_seconds"],
        }

    def _to_device(self, x: np.ndarray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(x)).to(self.model.device)


def _tokens_with_logits(step: PrefillPass, prefilling: Sequence[Prefill]) -> np.ndarray:
    """Packed tokens, ascending: ends of prompts, and all of those whose log-probs are asked for; the last at least."""
    kept = [np.array([step.forest.num_tokens - 1])]
    for prefill in prefilling:
        assert prefill.path is not None
        if prefill.draws and prefill.path in step.last_token:
            kept.append(np.array([step.last_token[prefill.path]]))
        for segment in prefill.path.path() if prefill.reports else ():
            if segment in step.first_token:
                kept.append(step.first_token[segment] + np.arange(len(segment.ids)))
    return np.unique(np.concatenate(kept))


def _fingerprint(model: PreTrainedModel) -> list[tuple[int, int]]:
    """Changes with every write to a parameter that torch counts."""
    params = (param for module in all_modules(model) for param in module._parameters.values())
    return [(param.data_ptr(), param._version) for param in params if param is not None]


def _bytes_per_token(model: PreTrainedModel) -> int:
    """Of one token's keys and values in all layers, as far as the config says."""
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_attention_heads", None) or 1
    num_kv_heads = getattr(config, "num_key_value_heads", None) or num_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return 2 * config.num_hidden_layers * num_kv_heads * head_dim * model.dtype.itemsize


def _check_count(name: str, value: int, default: int) -> None:
    if value < 1:
        raise ConfigError(f"{name}={value} must be 1 or more; {default} is usual")


def _check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known; choose one of {', '.join(choices)}")


@contextmanager
def _eval_mode(model: PreTrainedModel) -> Generator[None]:
    """The model in eval mode; afterwards every module as it was."""
    in_training = [module for module in all_modules(model) if module.training]
    for module in in_training:
        module.training = False
    try:
        yield
    finally:
        for module in in_training:
            module.training = True


def _as_prompt(prompt: ArrayLike, name: str, vocab_size: int) -> np.ndarray:
    try:
        ids = np.asarray(prompt)
    except ValueError:
        raise InputError(f"{name} must be a flat list of integer token ids, got a nested one") from None
    if ids.size == 0:
        raise InputError(f"{name} is empty; give at least one token id (a BOS token, say)")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise InputError(f"{name} must be a flat list of integer token ids, got {ids.dtype} of {ids.ndim} axes")
    if ids.min() < 0 or ids.max() >= vocab_size:
        wrong = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise InputError(f"{name} has token id {wrong}; the model's ids are 0..{vocab_size - 1}")
    return ids.astype(np.int64)
