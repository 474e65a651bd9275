"""What the calls of a sample have generated, written to the sample: :class:`CallWriter`."""

from __future__ import annotations

import contextlib
import logging
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from streamfold.client.request import replaced
from streamfold.errors import DecodeError, EngineError, EngineTimeout, StreamfoldError, StreamTruncated
from streamfold.samples.images import check_prompt_count
from streamfold.samples.metadata import add_counts
from streamfold.samples.staleness import note_version

if TYPE_CHECKING:
    from streamfold._core import Generation
    from streamfold._types import SampleLike
    from streamfold.engines.base import EngineSpec
    from streamfold.samples.options import CompletionOptions, Resume
    from streamfold.samples.turn import Turn

__all__ = ["CallOutcome", "CallWriter"]

_logger = logging.getLogger("streamfold")


@dataclass(frozen=True)
class CallOutcome:
    """How a call ended.

    Attributes:
        generation: what it has generated.
        error: what it failed with; None if it finished, or if its abort is the result.
        was_aborted: whether the caller, the client or the host has aborted it.
        has_wrong_prompt: whether the engine counted another prompt than in the calls before: it would do so again.
    """

    generation: Generation
    error: StreamfoldError | None
    was_aborted: bool
    has_wrong_prompt: bool = False

    @property
    def has_tokens(self) -> bool:
        """Whether it has generated any."""
        return len(self.generation.token_ids) > 0

    @property
    def is_damaged(self) -> bool:
        """Whether no token is certain: an event was lost, as a count behind the terminal event says."""
        is_lost = isinstance(self.error, DecodeError) and self.generation.finish_reason is not None
        return is_lost or self.has_wrong_prompt

    @property
    def is_resumable(self) -> bool:
        """Whether another call may succeed. One that has received no token was retried by the client already."""
        error = self.error
        if self.has_wrong_prompt:
            return False
        if isinstance(error, EngineError):
            return error.retryable and (self.has_tokens or self.generation.finish_reason == "abort")
        return isinstance(error, (DecodeError, StreamTruncated, EngineTimeout)) and self.has_tokens


@dataclass(kw_only=True)
class CallWriter:
    """Writes what calls have generated to a sample, one after the other.

    Attributes:
        sample: ours or a host's.
        turn: of the sample, that is being generated.
        engine_spec: the engine's behaviour.
        options: how the requests are made.
        resume: what follows a failure.
        has_experts: whether routed experts are requested.
        args: the host's settings.
        version: in which the call was sent; None: versions are not noted.
        has_media: whether the call's request has images, and ids or a text that stand for them.
    """

    sample: SampleLike
    turn: Turn
    engine_spec: EngineSpec
    options: CompletionOptions
    resume: Resume
    has_experts: bool
    args: Any
    version: int | None = None
    has_media: bool = False

    def outcome(self, generation: Generation, error: StreamfoldError | None, *, was_aborted: bool) -> CallOutcome:
        """How a call ended. One whose prompt was another than before has failed, however it ended."""
        miscounted = check_prompt_count(self.sample, generation, has_media=self.has_media)
        return CallOutcome(generation, miscounted or error, was_aborted, has_wrong_prompt=miscounted is not None)

    def write_or_drop(
        self, outcome: CallOutcome, *, may_resume: bool = False, cause: BaseException | None = None
    ) -> bool:
        """Merge what a call has generated, or leave the sample as it was before the call.

        Args:
            outcome: of the call.
            may_resume: whether another call may follow.
            cause: what ended the call, if it is not the outcome's error.

        Returns:
            Whether another call may still follow.
        """
        if outcome.is_damaged or (may_resume and self.resume == "restart"):
            add_counts(self.sample, restarted_tokens=len(outcome.generation.token_ids))
            self.abort_sample()
            return may_resume
        try:
            self._write(outcome.generation)
        except Exception:
            if outcome.error is None and cause is None:
                raise
            # The error that ended the call is the one to raise.
            _logger.exception("the tokens of a call of sample %s could not be merged", self.sample.index)
            return False
        return may_resume

    def _write(self, generation: Generation) -> None:
        """Merge what a call has generated, or drop and count it if requested side data is missing.

        Raises:
            EngineError: the response is finished, and requested side data was not received.
            ValueError: what was received does not fit the sample.
        """
        if self.options.on_generation is not None:
            self.options.on_generation(generation)
        if not self.has_experts and self.engine_spec.sends_unrequested_side_data:
            generation = _without_experts(generation)
        finished, missing = generation.finish_reason in ("stop", "length"), self._missing_side_data(generation)
        if missing is None:
            before = self.sample.response_length
            self.turn.write(generation, self.args)
            if self.version is not None:
                note_version(self.sample, self.version, before)
            return
        add_counts(self.sample, lost_side_data=len(generation.token_ids))
        self.abort_sample()
        if finished:
            lacking = self.engine_spec.lacking(missing)
            raise EngineError(f"the engine's last event has no {lacking}", partial=generation)

    def _missing_side_data(self, generation: Generation) -> str | None:
        """Name requested side data without which the generation's tokens are of no use."""
        if "top_p" in generation.missing:
            return "top_p"  # tokens without them cannot be replayed
        if generation.finish_reason in ("stop", "length"):  # otherwise the next call brings the rows of all tokens
            if self.has_experts and generation.routed_experts is None:
                return "routed_experts"
            if self.options.indexer_topk and "indexer_topk" not in generation.meta:
                return "indexer_topk"
        return None

    def write_snapshot(self, generation: Generation, sample: SampleLike) -> None:
        """Write to a copy of the sample what an abort of the call at this moment would leave in the sample.

        Args:
            generation: what the call has received so far.
            sample: the copy. Nobody but the copy notices.
        """
        turn = replace(self.turn, sample=sample, eos_ids=set(self.turn.eos_ids))
        copied = replace(self, sample=sample, turn=turn, options=replace(self.options, on_generation=None))
        with contextlib.suppress(Exception):  # that it does not fit is said when the call ends
            copied.write_or_drop(copied.outcome(generation, None, was_aborted=True))

    def abort_sample(self) -> None:
        """Make the sample one that was aborted."""
        self.sample.status = type(self.sample.status)["ABORTED"]


def _without_experts(generation: Generation) -> Generation:
    """A copy without routed experts, which were not requested: samples then have no place for them."""
    return generation if generation.routed_experts is None else replaced(generation, routed_experts=None)
