"""The built-in generate function of a rollout: calls ``complete()`` and spreads samples over DP ranks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from streamfold.client._internal import internals_of
from streamfold.engines.base import with_extra
from streamfold.errors import EngineError
from streamfold.samples.completion import complete
from streamfold.samples.metadata import DP_RANK, metadata_of, own_metadata, remove_keys
from streamfold.samples.options import CompletionOptions
from streamfold.samples.status import is_finished
from streamfold.samples.turn import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator, Mapping

    from streamfold.client.client import Client
    from streamfold.rollout.config import RolloutConfig
    from streamfold.samples.sample import Sample

__all__ = ["CompleteSample"]

_logger = logging.getLogger("streamfold")


class CompleteSample:
    """Generates a sample with :func:`~streamfold.complete`; an abort cancels it."""

    abort_mode: Final = "request"

    def __init__(self, client: Client, config: RolloutConfig) -> None:
        self._client = client
        self._config = config
        self._stop_ids = set(config.stop_ids)
        self._requests_of_rank = [0] * config.dp_size
        self._refused_before: set[int] = set()

    async def __call__(
        self, sample: Sample, sampling_params: Mapping[str, Any], /, *, aborted: Callable[[], bool]
    ) -> Sample:
        """Return the sample, finished or ABORTED."""
        if self._config.dp_size == 1:
            return await self._complete(sample, sampling_params, aborted, None)
        refused: set[int] = set()
        while True:
            rank = self._rank_of(sample, refused)
            try:
                with self._counted(rank):
                    return await self._complete(sample, sampling_params, aborted, rank)
            except EngineError as error:
                if not internals_of(self._client).engine_spec.refuses_rank(error):
                    raise
                self._forget(sample, rank, error)
                refused.add(rank)
                if len(refused) == self._config.dp_size:
                    raise

    async def _complete(
        self,
        sample: Sample,
        sampling_params: Mapping[str, Any],
        aborted: Callable[[], bool],
        rank: int | None,
    ) -> Sample:
        config = self._config
        headers, extra = internals_of(self._client).engine_spec.to_rank(rank)
        options = CompletionOptions(
            logprobs=config.logprobs,
            prompt_token_ids=config.prompt_token_ids,
            stop_ids=self._stop_ids,
            headers={**headers, **(config.headers or {})},
            extra=with_extra(extra, config.extra),
            routing_header=config.routing_header,
            aborted=aborted,
            resume_penalties=config.resume_penalties,
        )
        try:
            return await complete(self._client, sample, sampling_params, resume=config.resume, options=options)
        except asyncio.CancelledError:
            if is_finished(sample):
                return sample  # before the cancel took effect
            raise

    def _rank_of(self, sample: Sample, refused: Collection[int]) -> int:
        """The rank that has the sample's prefix in its cache, or else the one with the fewest requests."""
        size = self._config.dp_size
        noted = metadata_of(sample).get(DP_RANK)
        if isinstance(noted, list) and noted[1:] == [size] and noted[0] in range(size):
            return int(noted[0])
        rank = min(set(range(size)) - set(refused), key=lambda each: (self._requests_of_rank[each], each))
        own_metadata(sample)[DP_RANK] = [rank, size]
        return rank

    def _forget(self, sample: Sample, rank: int, error: EngineError) -> None:
        remove_keys(sample, DP_RANK)
        if rank not in self._refused_before:
            self._refused_before.add(rank)
            _logger.warning(
                "an engine refuses the data-parallel rank %s, so its samples get another one; dp_size is %s: %s",
                rank,
                self._config.dp_size,
                error,
            )

    async def truncate(self, sample: Sample, sampling_params: Mapping[str, Any]) -> Sample:
        """Finish a sample that has reached its time limit, with its whole text."""
        internals = internals_of(self._client)
        Turn(
            sample=sample,
            params=internals.engine_spec.normalize_params(sampling_params),
            engine_spec=internals.engine_spec,
            tokenizer=internals.tokenizer,
            eos_ids=self._stop_ids,
            has_experts=internals.experts is not None,
        ).truncate()
        return sample

    @contextlib.contextmanager
    def _counted(self, rank: int) -> Iterator[None]:
        self._requests_of_rank[rank] += 1
        try:
            yield
        finally:
            self._requests_of_rank[rank] -= 1
