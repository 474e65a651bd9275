"""What is asked of an engine, whatever its wire calls it, and the two ways in which it says no."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Ask", "InvalidRequest", "MalformedBody", "SamplingParams"]


class MalformedBody(Exception):
    """The HTTP layer refuses the request: a status, 400 as a rule, with this object as its answer."""

    def __init__(self, answer: dict[str, Any], status: int = 400) -> None:
        super().__init__(str(answer))
        self.answer = answer
        self.status = status


class InvalidRequest(ValueError):
    """The engine refuses the request after the response has begun; ``param`` is what it is about, if that is told."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters that have an effect here; ``max_new_tokens`` None is as long as the context allows.

    ``no_stop_trim`` leaves what ended the response in its text.
    """

    max_new_tokens: int | None = 128
    min_new_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    sampling_seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    no_stop_trim: bool = False
    skip_special_tokens: bool = True
    stream_interval: int | None = None
    n: int = 1
    custom_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is taken."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether fewer ids than the vocabulary can be chosen."""
        return self.greedy or self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class Ask:
    """One generation that is asked for.

    ``rid`` is its own among all that are live. ``null_logprobs_at`` are positions in the output whose logprob is told
    as after a NaN.
    """

    rid: str
    prompt: list[int]
    params: SamplingParams
    index: int | None = None  # in a body that asks for several
    seed: int = 0
    stream: bool = False
    logprobs: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    logprob_texts: bool = False
    null_logprobs_at: frozenset[int] = frozenset()
    top_p: bool = False  # the ids that sampling could choose, with the terminal event
    sampling_mask: bool = False  # the same, with each event
    experts: bool = False
    experts_start: int = 0
    experts_dtype: str = "int32"
    prompt_ids: bool = False
