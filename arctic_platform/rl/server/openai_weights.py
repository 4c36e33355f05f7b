"""Pause, new weights from a folder, resume: what a trainer beside the server asks for (prime-rl's names).

    POST /pause?mode=keep      running rollouts wait where they are
    POST /update_weights       {"weight_dir": "..."}; loaded aside, compared, then written between two steps
    POST /resume

A folder that does not hold the served model changes nothing. Folders are read only below the root that the server
was started with.
"""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Literal

from arctic_platform.errors import ConfigError, RequestError, WeightSyncError
from arctic_platform.rl.engines.models import load_model
from arctic_platform.rl.server.openai_body import Body
from arctic_platform.rl.server.openai_serving import PATIENCE_SECONDS, Serving
from arctic_platform.rl.weight_sync.local import sync_local
from arctic_platform.rl.zorro_inference.sampler import Sampler

logger = logging.getLogger("arctic_platform.rl.server")
PauseMode = Literal["abort", "wait", "keep"]


class UpdateWeightsRequest(Body):
    """POST /update_weights. `in_flight`: what becomes of rollouts that have begun; `version`: none counts on by one.

    keep: they go on over the keys and values that they have. recompute: these are computed anew. abort: they end.
    """

    weight_dir: str
    in_flight: Literal["keep", "recompute", "abort"] = "keep"
    version: int | None = None
    skip_prefix_cache_reset: bool = False


class WeightControl:
    """Pauses a served sampler and gives it new weights. `root`: None refuses updates."""

    def __init__(self, serving: Serving, root: Path | None) -> None:
        self._serving = serving
        self._root = root.resolve() if root is not None else None
        self._one_at_a_time = asyncio.Lock()
        self.is_paused = False

    async def pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        """Stop drawing. abort: requests end as they are; wait: they finish, new ones queue; keep: all freeze."""
        serving = self._serving
        if mode == "wait":
            serving.admits.clear()
        try:
            while mode == "wait" and serving.in_flight:
                await asyncio.sleep(PATIENCE_SECONDS)
            ended = sorted(serving.in_flight) if mode == "abort" else []

            def stop(sampler: Sampler) -> None:
                for request_id in ended:
                    sampler.abort(request_id)
                sampler.pause()
                if clear_cache and mode != "keep":
                    sampler.reset_prefix_cache()

            await serving.between_steps(stop)
            self.is_paused = True
        finally:
            serving.admits.set()

    async def resume(self) -> None:
        """Go on; harmless where nothing was paused."""
        await self._serving.between_steps(Sampler.resume)
        self.is_paused = False

    async def update(self, request: UpdateWeightsRequest) -> int:
        """Load a folder's weights; the version that draws from now on.

        Raises:
            RequestError: updates are off, the folder is elsewhere, or it holds another model; nothing changed.
        """
        folder = self._checked(request.weight_dir)
        async with self._one_at_a_time:
            served = self._serving.engine.sampler.model
            try:
                model = await asyncio.to_thread(load_model, str(folder), served.dtype, str(served.device))
            except ConfigError as error:
                raise RequestError(str(error), param="weight_dir", code="weights_unreadable") from error

            def write(sampler: Sampler) -> int:
                sync_local(model, sampler.model, low_memory=True)
                version = sampler.weight_version + 1 if request.version is None else request.version
                sampler.update_weights(version, in_flight=request.in_flight)
                return version

            try:
                version = await self._serving.between_steps(write)
            except WeightSyncError as error:
                raise RequestError(str(error), param="weight_dir", code="weights_differ") from error
        logger.info("weights are now of version %d", version)
        return version

    def _checked(self, weight_dir: str) -> Path:
        if self._root is None:
            raise RequestError(
                "this server takes no weights; start it with --weights-root FOLDER to allow folders below it",
                status=403,
                code="weights_refused",
            )
        folder = Path(weight_dir).resolve()
        if not folder.is_relative_to(self._root) or not folder.is_dir():
            raise RequestError(
                f"weight_dir={weight_dir!r} is no folder below the server's weights root",
                param="weight_dir",
                code="weights_refused",
            )
        return folder
