"""The built-in generate function of a rollout: calls ``complete()`` and spreads requests over DP ranks."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any, Final

from streamfold.client._internal import internals_of
from streamfold.samples.completion import CompletionOptions, complete

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from streamfold.client.client import Client
    from streamfold.rollout.config import RolloutConfig
    from streamfold.samples.sample import Sample

__all__ = ["CompleteSample"]


class CompleteSample:
    """Generates a sample with :func:`~streamfold.complete`; an abort cancels it."""

    abort_mode: Final = "request"

    def __init__(self, client: Client, config: RolloutConfig) -> None:
        self._client = client
        self._config = config
        self._stop_ids = set(config.stop_ids)
        self._requests_of_rank = [0] * config.dp_size

    async def __call__(
        self, sample: Sample, sampling_params: Mapping[str, Any], /, *, aborted: Callable[[], bool]
    ) -> Sample:
        """Return the sample, finished or ABORTED."""
        with self._rank() as rank:
            headers, extra = internals_of(self._client).engine_spec.route(getattr(sample, "session_id", None), rank)
            options = CompletionOptions(
                logprobs=self._config.logprobs,
                stop_ids=self._stop_ids,
                headers=headers,
                extra=extra,
                aborted=aborted,
                resume_penalties=self._config.resume_penalties,
            )
            return await complete(self._client, sample, sampling_params, resume=self._config.resume, options=options)

    @contextlib.contextmanager
    def _rank(self) -> Iterator[int | None]:
        """The data-parallel rank with the fewest requests; None if there is only one rank."""
        requests = self._requests_of_rank
        if len(requests) == 1:
            yield None
            return
        rank = requests.index(min(requests))
        requests[rank] += 1
        try:
            yield rank
        finally:
            requests[rank] -= 1
