"""Samples brought to their ends: one, resumed where it was cut, or many at once."""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from streamfold.engines import expects_top_p
from streamfold.errors import DecodeError, EngineError, EngineTimeout, StreamfoldError, StreamTruncated
from streamfold.sample import Sample, merge

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from streamfold._core import Generation
    from streamfold.client import Client

    OnEnd = Callable[[Sample, "StreamfoldError | ValueError | None"], object]

__all__ = ["Retries", "Rollout", "complete"]

_LOGGER = logging.getLogger("streamfold")
_ENDED: Final = (Sample.Status.COMPLETED, Sample.Status.TRUNCATED)


@dataclass(frozen=True)
class Retries:
    """How often a sample is asked for, and the pause before it is asked for again.

    Attributes:
        tries: calls for one sample at most, the first one included.
        first: seconds before the second try; each later pause is twice as long.
        longest: seconds that no pause exceeds. All pauses are shortened at random, by up to half.

    Raises:
        ValueError: ``tries`` is below 1, or a pause is negative.
    """

    tries: int = 6
    first: float = 0.5
    longest: float = 10.0

    def __post_init__(self) -> None:
        if self.tries < 1 or self.first < 0 or self.longest < 0:
            raise ValueError(f"at least one try and no negative pause, please: {self}")

    def pause(self, failures: int) -> float:
        """Seconds to wait after so many failures."""
        most = min(self.longest, self.first * 2.0 ** min(failures - 1, 64))
        return most * random.uniform(0.5, 1.0)  # noqa: S311  # it only keeps clients apart


# One sample.


async def complete(
    client: Client,
    sample: Sample,
    sampling_params: Mapping[str, Any],
    *,
    retries: Retries = Retries(),  # immutable
    stop_ids: set[int] | None = None,
    logprobs: bool = True,
    experts: bool = False,
) -> Sample:
    """Ask for ``sample`` until it is COMPLETED or TRUNCATED, each time going on from the tokens that it has.

    What a call brought is merged before anything else happens, also when the call failed or this is cancelled. A
    truncated stream, an abort that nobody here asked for, a silent engine and a retryable error lead to another try.

    A prompt without ids (``sample.tokens`` empty) goes to the engine as ``sample.prompt``. Such a sample cannot go on
    from its own tokens: once cut, it starts again from its prompt, and ``metadata["restarted_tokens"]`` counts what
    was dropped. So does one that an abort cut in the middle of what may be a stop string.

    Args:
        client: of the engine.
        sample: PENDING, or ABORTED and gone on with.
        sampling_params: as the engine has them, for the whole response: ``max_new_tokens`` must be there, and a call
            is given what is left of it. Never changed.
        retries: how often to try.
        stop_ids: tokens that end a response, besides ``stop_token_ids``. An abort may come with such a token, and
            then there is nothing to go on with. Those at which the engine is seen to stop are added to it.
        logprobs: whether to ask for log-probabilities; the same for all calls of a sample.
        experts: whether the client asks for routed experts. A response that ends without them is dropped.

    Returns:
        The sample.

    Raises:
        StreamfoldError: the last try failed, or another one would be refused again (4xx), or routed experts did not
            come. The sample is not at its end, and holds what can be gone on with.
        ValueError: ``max_new_tokens`` is missing, or something asked for makes no sense.
    """
    if "max_new_tokens" not in sampling_params:
        raise ValueError("sampling_params must hold max_new_tokens: a resumed call is given what is left of it")
    ends = set() if stop_ids is None else stop_ids
    for tried in itertools.count(1):
        _mend(sample, sampling_params, ends)
        if sample.status in _ENDED:
            if not (experts and _lacks_experts(sample)):
                return sample
            _restart(sample)
        error = await _ask(client, sample, sampling_params, ends, logprobs=logprobs)
        _mend(sample, sampling_params, ends)
        if sample.status in _ENDED:
            if not (experts and _lacks_experts(sample)):
                return sample
            _restart(sample)
            raise EngineError("the engine sent no routed experts with the last event: was it started with them?")
        if error is None:
            error = EngineError("the engine aborted it, and nobody here had asked for that", retryable=True)
        if tried >= retries.tries or not _worth_another_try(error):
            raise error
        _LOGGER.info("sample %s goes on from token %s after: %s", sample.index, sample.response_length, error)
        await asyncio.sleep(retries.pause(tried))
    raise AssertionError  # the count has no end


async def _ask(
    client: Client, sample: Sample, sampling_params: Mapping[str, Any], ends: set[int], *, logprobs: bool
) -> StreamfoldError | None:
    """One call, written to the sample however it ends; what it failed with."""
    has = sample.response_length
    params = dict(sampling_params)
    for name in ("max_new_tokens", "min_new_tokens"):
        if isinstance(params.get(name), int) and params[name] > 0:  # whatever else it is, is not for us to mend
            params[name] = max(0, params[name] - has)
    call = client.start(
        sample.tokens or None, params, logprobs=logprobs, extra=None if sample.tokens else {"text": sample.prompt}
    )
    error = None
    try:
        generation = await call
    except asyncio.CancelledError:
        try:
            _write(sample, await call.abort(), params)  # it has ended; this gives what was kept
        except ValueError:  # the cancel has to arrive all the same
            _LOGGER.exception("what had come of sample %s does not fit it", sample.index)
        raise
    except StreamfoldError as failure:
        error, generation = failure, await call.abort()
    if generation.finish_reason == "stop" and isinstance(generation.matched, int):
        ends.add(generation.matched)
    _write(sample, generation, params)
    return error


def _write(sample: Sample, generation: Generation, params: Mapping[str, Any]) -> None:
    more = len(generation.token_ids)
    cut = generation.finish_reason not in ("stop", "length")
    if cut and more and generation.top_p is None and expects_top_p(params):
        # They come with the terminal event alone, and tokens without them cannot be replayed.
        sample.metadata["lost_side_data"] = sample.metadata.get("lost_side_data", 0) + more
        sample.status = Sample.Status.ABORTED
        return
    if sample.response and generation.text:
        sample.metadata["text_joined"] = True  # a character that was cut in two shows as U+FFFD
    merge(sample, generation)


def _mend(sample: Sample, params: Mapping[str, Any], ends: set[int]) -> None:
    """Bring a cut sample into a state that can be gone on with, or see that it is at its end already."""
    if not sample.response_length or sample.status in _ENDED:
        return
    if not params.get("ignore_eos") and sample.tokens[-1] in ends.union(params.get("stop_token_ids") or ()):
        sample.status = Sample.Status.COMPLETED
        return
    told = params.get("stop") or []
    stops = [stop for stop in ([told] if isinstance(told, str) else told) if stop]
    for stop in stops:
        if (found := sample.response.find(stop)) >= 0:
            end = found + len(stop) if params.get("no_stop_trim") else found
            sample.response, sample.status = sample.response[:end], Sample.Status.COMPLETED
            return
    # An engine looks for stop strings in what it generates itself: it would miss one that begins before the cut.
    within_stop = any(sample.response.endswith(stop[:size]) for stop in stops for size in range(1, len(stop)))
    if within_stop or len(sample.tokens) == sample.response_length:
        _restart(sample)


def _restart(sample: Sample) -> None:
    dropped = sample.response_length
    clean = Sample()
    sample.tokens = sample.tokens[: len(sample.tokens) - dropped]
    for name in (
        "response", "response_length", "loss_mask", "rollout_log_probs", "rollout_top_p_token_ids",
        "rollout_top_p_token_offsets", "rollout_routed_experts", "weight_versions", "version_spans", "prompt_tokens",
        "cached_tokens", "status",
    ):  # fmt: skip
        setattr(sample, name, getattr(clean, name))
    sample.metadata.pop("text_joined", None)
    sample.metadata["restarted_tokens"] = sample.metadata.get("restarted_tokens", 0) + dropped


def _lacks_experts(sample: Sample) -> bool:
    rows = sample.rollout_routed_experts
    return sample.response_length > 0 and (rows is None or len(rows) != len(sample.tokens) - 1)


def _worth_another_try(error: StreamfoldError) -> bool:
    if isinstance(error, EngineError):
        return error.retryable
    if isinstance(error, DecodeError):  # after good tokens it is a stream that was cut
        return error.partial is not None and len(error.partial.token_ids) > 0
    return isinstance(error, (StreamTruncated, EngineTimeout))


# Many samples.


class Rollout:
    """Brings many samples to their ends, so many at once.

    Args:
        client: of the engine.
        concurrency: how many samples are in flight; as one ends, the next begins.
        retries: for each sample.
        stop_ids: as for :func:`complete`.
        logprobs, experts: likewise.

    Attributes:
        restarted_tokens: tokens that were dropped, because their samples had to start again: see :func:`complete`.

    Raises:
        ValueError: ``concurrency`` is below 1.
    """

    def __init__(
        self,
        client: Client,
        *,
        concurrency: int = 64,
        retries: Retries = Retries(),  # immutable
        stop_ids: Iterable[int] = (),
        logprobs: bool = True,
        experts: bool = False,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency must be at least 1, not {concurrency}")
        self._client = client
        self._concurrency = concurrency
        self._retries = retries
        self._stop_ids = set(stop_ids)
        self._logprobs = logprobs
        self._experts = experts
        self._written = 0
        self.restarted_tokens = 0

    @property
    def tokens(self) -> int:
        """Tokens that have arrived, those of running calls included."""
        return self._written + sum(call.token_count for call in self._client.running)

    async def run(self, samples: Iterable[Sample], on_end: OnEnd) -> None:
        """Complete all ``samples``, each by its own ``metadata["sampling_params"]``.

        ``on_end`` is called once for each sample that was begun, with the error that ended it, if one did; what it
        raises ends the run. Cancelling this cuts what is in flight, and hands the partial samples to ``on_end`` too. A
        second cancel ends the drains of side data.
        """
        work = iter(samples)
        workers = [asyncio.ensure_future(self._work(work, on_end)) for _ in range(self._concurrency)]
        cancelled = None
        while pending := [worker for worker in workers if not worker.done()]:
            try:
                await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
            except asyncio.CancelledError as error:
                cancelled = error
            for worker in pending:  # none is left, or one has failed, or all are to end: calls end within bounds
                worker.cancel()
        for worker in workers:
            if not worker.cancelled():
                worker.result()
        if cancelled is not None:
            raise cancelled

    async def _work(self, work: Iterator[Sample], on_end: OnEnd) -> None:
        for sample in work:
            before, dropped = sample.response_length, sample.metadata.get("restarted_tokens", 0)
            error: StreamfoldError | ValueError | None = None
            try:
                await complete(
                    self._client,
                    sample,
                    sample.metadata["sampling_params"],
                    retries=self._retries,
                    stop_ids=self._stop_ids,
                    logprobs=self._logprobs,
                    experts=self._experts,
                )
            except (StreamfoldError, ValueError) as failure:
                error = failure
            finally:
                self._written += max(0, sample.response_length - before)
                self.restarted_tokens += sample.metadata.get("restarted_tokens", 0) - dropped
                on_end(sample, error)
