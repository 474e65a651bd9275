"""One sample to its end: asked for, written, and asked for again from its own tokens, as the policy says.

Generations are never joined to each other. What a call brought is merged into the sample; a later call is asked with
the sample's tokens and the budget less them, exactly as for any partial sample.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from streamfold._core import Generation
from streamfold.client._internal import internals_of
from streamfold.client.abort_signal import AbortSignal
from streamfold.engines.base import expects_top_p
from streamfold.errors import DecodeError, EngineError, EngineTimeout, StreamfoldError, StreamTruncated
from streamfold.samples.merging import check_ready, merge
from streamfold.samples.reset import note
from streamfold.samples.stopping import Ending

if TYPE_CHECKING:
    from collections.abc import Iterable

    from streamfold._types import SampleLike, Tokenizer
    from streamfold.client.client import Client
    from streamfold.samples.sample import Sample

__all__ = ["Resume", "complete", "complete_all"]

Resume = Literal["continue", "restart", "raise"]
Extra = Mapping[str, Any] | Callable[[], Mapping[str, Any]]  # what a request holds besides, now or when it is made
S = TypeVar("S", bound="SampleLike")

_LOGGER = logging.getLogger("streamfold")
_PROMPTS: Final = {"text", "input_ids", "token_ids", "prompt"}  # keys of a request that hold its prompt


async def complete(
    client: Client,
    sample: S,
    sampling_params: Mapping[str, Any],
    *,
    resume: Resume = "continue",
    args: Any = None,  # noqa: ANN401  # the host's own
    logprobs: bool = True,
    tokenizer: Tokenizer | None = None,
    stop_ids: set[int] | None = None,
    headers: Mapping[str, str] | None = None,
    extra: Extra | None = None,
    aborted: Callable[[], bool] | None = None,
    resume_aborts: bool = True,
    on_generation: Callable[[Generation], object] | None = None,
) -> S:
    """Ask for ``sample`` until it is COMPLETED or TRUNCATED, each time going on from the tokens that it has.

    What a call brought is written before anything else happens, also when the call failed or this is cancelled. While
    no token has come the client itself tries again. After that ``resume`` decides about a stream that was truncated or
    damaged, an engine that fell silent, a retryable error and an abort that nobody here asked for. Each resume is
    logged and counted in ``metadata["resumed"]``; ``client.retries`` bounds how many there are, and says how long to
    wait before each.

    A prompt without ids (``sample.tokens`` empty) goes to the engine as ``sample.prompt``. Such a sample cannot go on
    from its own tokens: once cut, it starts again from its prompt, and ``metadata["restarted_tokens"]`` counts what
    was dropped. So does one that was cut in the middle of what may be a stop string, or that has a grammar or
    ``stop_regex``: an engine would begin with them anew. A later turn starts again from where it began; behind a
    prompt without ids there is none.

    Args:
        client: of the engine.
        sample: ours or a host's; PENDING, or ABORTED and gone on with. One that is at its end is returned as it is. If
            it is PENDING and has a response, a new turn begins behind that, whatever that ends with.
        sampling_params: as the engine has them, for the whole response: ``max_new_tokens`` counts all of it, and a
            call is given what is left. Without it nothing is resumed. Never changed.
        resume: ``"continue"`` goes on from the tokens that came. ``"restart"`` goes back to the state before the call
            that failed, and asks again. ``"raise"`` leaves it to the caller.
        args: the host's settings, for its samples.
        logprobs: whether to ask for log-probabilities; the same for all calls of a sample.
        tokenizer: makes text of ids where the engine sends none, or was cut; None: the client's.
        stop_ids: tokens that end a response, besides ``stop_token_ids``. An abort may come with such a token, and
            then there is nothing to go on with. Those at which the engine is seen to stop are added to it.
        headers: of each request.
        extra: further keys of each request, or a function that gives them anew. If there is ``text``, ``input_ids`` or
            ``token_ids`` among them, that is the prompt.
        aborted: a host's own flag: no request leaves while it is true, and nothing is resumed.
        resume_aborts: whether an abort event that nobody here asked for is gone on with. If not, it is a result.
        on_generation: told what each call brought, before it is written.

    Returns:
        The sample, at its end. ABORTED if somebody aborted its call, or the engine did and that is a result.

    Raises:
        StreamfoldError: the last try failed, or another one would be refused again (4xx), or side data that was asked
            for did not come. The sample is ABORTED and holds what can be gone on with.
        ValueError: something asked for makes no sense, or what came does not fit the sample.
        asyncio.CancelledError: somebody cancelled this. What had arrived is in the sample, which is ABORTED, unless
            the engine was faster.
    """
    internals, host_abort = internals_of(client), AbortSignal.of(aborted)
    client_abort = internals.abort_signal
    params = internals.engine_spec.normalize_params(sampling_params)
    ending = Ending(
        sample=sample,
        params=params,
        engine_spec=internals.engine_spec,
        tokenizer=tokenizer if tokenizer is not None else client.tokenizer,
        ends=set() if stop_ids is None else stop_ids,
        has_experts=client.experts is not None,
    )
    work = _Completion(
        client=client,
        sample=sample,
        params=params,
        ending=ending,
        args=args,
        logprobs=logprobs,
        headers=headers,
        extra=extra,
        aborted=host_abort,
        on_generation=on_generation,
    )
    if ending.has_come:
        return sample
    check_ready(sample)
    work.check()
    ending.begin()
    if (outlook := ending.settle()) == "ended":
        return sample
    failures = 0
    for tries_left in itertools.count(client.retries.tries - 1, -1):
        if outlook == "goes back":
            if host_abort.is_set():
                return sample  # it is not asked for again
            ending.go_back()
        generation, error, cut_here = await work.ask()
        cut_here = cut_here or client_abort.is_set()
        if host_abort.is_set():
            cut_here = True
            if isinstance(error, StreamTruncated):  # vLLM up to 0.31 ends so what was aborted
                error = None
        if error is None and generation.finish_reason == "abort" and resume_aborts and not cut_here:
            message = "the engine aborted it, and nobody here had asked for that"
            error = EngineError(message, retryable=True, partial=generation)
        again = (
            error is not None
            and resume != "raise"
            and tries_left > 0
            and "max_new_tokens" in params
            and _worth_another_try(error, generation)
        )
        if _is_damaged(error, generation) or (again and resume == "restart"):
            work.drop(generation)
        elif not work.try_to_write(generation, error):
            again = False
        if error is None or (outlook := ending.settle()) == "ended":
            return sample
        if not again:
            raise error
        _LOGGER.info("sample %s goes on from token %s after: %s", sample.index, sample.response_length, error)
        failures = 1 if len(generation.token_ids) else failures + 1
        if cut_here or await (client_abort | host_abort).wait(client.retries.pause(failures)):
            return sample  # an abort is a result
        note(sample, resumed=1)
    raise AssertionError  # the count has no end


@dataclass(frozen=True, kw_only=True)
class _Completion:
    """One sample, and how it is asked for."""

    client: Client
    sample: SampleLike
    params: dict[str, Any]
    ending: Ending
    args: Any
    logprobs: bool
    headers: Mapping[str, str] | None
    extra: Extra | None
    aborted: AbortSignal
    on_generation: Callable[[Generation], object] | None

    def check(self) -> None:
        """Refuse what cannot end well before anything is asked for."""
        sample, limit = self.sample, self.params.get("max_new_tokens")
        if isinstance(limit, int) and limit < sample.response_length:
            raise ValueError(f"max_new_tokens is {limit}, but the response has {sample.response_length} tokens already")
        if sample.response_length and self.logprobs != (sample.rollout_log_probs is not None):
            raise ValueError(
                "a part of the response has log-probabilities and the rest would not, or the other way round: "
                "ask for them always, or never"
            )
        has_top_p = getattr(sample, "rollout_top_p_token_offsets", None) is not None
        expects = expects_top_p(self.params)
        told_anyway = has_top_p and internals_of(self.client).engine_spec.sends_unrequested_side_data
        if sample.response_length and expects != has_top_p and not told_anyway:
            raise ValueError(
                "a part of the response has top-p ids and the rest would not: ask for them always, or never"
            )

    async def ask(self) -> tuple[Generation, StreamfoldError | None, bool]:
        """Make one call: what it brought, what it failed with, and whether it was cut from here."""
        sample, has = self.sample, self.sample.response_length
        params = dict(self.params)
        for name in ("max_new_tokens", "min_new_tokens"):
            if isinstance(params.get(name), int) and params[name] > 0:  # whatever else it is, is not for us to mend
                params[name] = max(0, params[name] - has)
        extra = dict((self.extra() if callable(self.extra) else self.extra) or {})
        if len(sample.tokens) == has and not extra.keys() & _PROMPTS:
            if has:  # what the prompt was as text cannot be put before them
                raise ValueError("another turn needs the ids of the prompt before those of the response: sample.tokens")
            extra["text"] = sample.prompt
        call = self.client.start(
            None if extra.keys() & _PROMPTS else sample.tokens,
            params,
            logprobs=self.logprobs,
            headers=self.headers,
            extra=extra,
            aborted=self.aborted,
        )
        try:
            return await call, None, call.aborting
        except StreamfoldError as error:
            return await call.abort(), error, call.aborting  # at once: it has ended
        except BaseException as because:
            generation = await call.abort()
            if _is_damaged(call.error, generation):
                self.drop(generation)
            else:
                self.try_to_write(generation, because)
            raise

    def try_to_write(self, generation: Generation, because: BaseException | None) -> bool:
        """Write what a call brought. Where it ended ``because`` of something, that is what has to be told."""
        try:
            self.write(generation)
        except Exception:
            if because is None:
                raise
            _LOGGER.exception("nothing of a call of sample %s could be kept", self.sample.index)
            return False
        return True

    def write(self, generation: Generation) -> None:
        """Write what a call brought, or count it as lost if it is of no use without what did not come with it.

        Raises:
            EngineError: the response has come to its end, and arrays that were asked for did not come with it.
            ValueError: it does not fit the sample.
        """
        if self.on_generation is not None:
            self.on_generation(generation)
        if self.client.experts is None and internals_of(self.client).engine_spec.sends_unrequested_side_data:
            generation = _without_experts(generation)
        sample, more = self.sample, len(generation.token_ids)
        ended = generation.finish_reason in ("stop", "length")
        lacks_top_p = more > 0 and generation.top_p is None and expects_top_p(self.params)
        lacks_experts = ended and self.client.experts is not None and generation.routed_experts is None
        if lacks_top_p or lacks_experts:
            # Both come with the terminal event alone. Tokens without their top-p ids cannot be replayed.
            note(sample, lost_side_data=more)
            sample.status = type(sample.status)["ABORTED"]
            if ended:
                what = "top-p ids" if lacks_top_p else "routed experts"
                raise EngineError(
                    f"the engine sent no {what}, which were asked for, with its last event: was it started with them?",
                    partial=generation,
                )
            return
        self.ending.learn(generation)
        known = self.ending.known_text
        merge(sample, generation, self.args, text=self.ending.text_of(generation))
        self.ending.border(generation, known)

    def drop(self, generation: Generation) -> None:
        """Leave the sample as it was before the call."""
        note(self.sample, restarted_tokens=len(generation.token_ids))
        self.sample.status = type(self.sample.status)["ABORTED"]


def _without_experts(generation: Generation) -> Generation:
    """The same without the routed experts that nobody has asked for: in no sample is a place for them."""
    if generation.routed_experts is None:
        return generation
    given, named = generation.__getnewargs_ex__()  # all that makes a generation, as for a pickle
    return Generation(*given, **{**named, "routed_experts": None})


def _is_damaged(error: BaseException | None, generation: Generation) -> bool:
    """Whether an event was lost, as only the count shows that comes after the end: then nothing of it is certain."""
    return isinstance(error, DecodeError) and generation.finish_reason is not None


def _worth_another_try(error: StreamfoldError, generation: Generation) -> bool:
    """Whether to go on after a failure. While no token had come the client has tried again as often as it may."""
    if isinstance(error, EngineError):
        return error.retryable and (len(generation.token_ids) > 0 or generation.finish_reason == "abort")
    # A damaged event after good tokens is a stream that was cut.
    return isinstance(error, (DecodeError, StreamTruncated, EngineTimeout)) and len(generation.token_ids) > 0


async def complete_all(
    client: Client,
    samples: Iterable[Sample],
    on_end: Callable[[Sample, StreamfoldError | ValueError | None], object],
    *,
    concurrency: int = 64,
    stop_ids: Iterable[int] = (),
    logprobs: bool = True,
) -> None:
    """Complete all ``samples``, each by its own ``metadata["sampling_params"]``, so many at once.

    ``on_end`` is called once for each sample that was begun, with the error that ended it, if one did; what it raises
    ends the run. Cancelling this cuts what is in flight, and hands the partial samples to ``on_end`` too. A second
    cancel ends the drains of side data.

    Raises:
        ValueError: ``concurrency`` is below 1.
    """
    if concurrency < 1:
        raise ValueError(f"concurrency must be at least 1, not {concurrency}")
    rest, ends = iter(samples), set(stop_ids)

    async def work() -> None:
        for sample in rest:
            params = sample.metadata["sampling_params"]
            error: StreamfoldError | ValueError | None = None
            try:
                await complete(client, sample, params, stop_ids=ends, logprobs=logprobs)
            except (StreamfoldError, ValueError) as failure:
                error = failure
            finally:
                on_end(sample, error)

    workers = [asyncio.ensure_future(work()) for _ in range(concurrency)]
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
