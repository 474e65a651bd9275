"""Parameters of one generation, independent of the engine's wire format, and the two errors for invalid requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["EngineFault", "InvalidRequest", "MalformedBody", "RequestParams", "SamplingParams", "check_known_seed"]


class MalformedBody(Exception):
    """The HTTP layer rejects the request: ``content`` is the JSON body of the response, ``status`` usually 400."""

    def __init__(self, content: dict[str, Any], status: int = 400) -> None:
        super().__init__(str(content))
        self.content = content
        self.status = status


class EngineFault(Exception):
    """The engine fails on the request after the response has started: nothing more is sent, not even a last chunk."""


class InvalidRequest(ValueError):
    """The engine rejects the request after the response has started; ``param`` names the parameter, if reported."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """The sampling parameters that have an effect here.

    ``max_new_tokens`` None is limited by the context length only. ``no_stop_trim`` keeps the stop string or stop token
    in the text.
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
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stream_interval: int | None = None
    n: int = 1
    custom_params: Mapping[str, Any] = field(default_factory=dict)

    @property
    def greedy(self) -> bool:
        """Whether decoding is greedy."""
        return self.temperature == 0 or self.top_k == 1

    @property
    def penalties(self) -> dict[str, float]:
        """The penalties that have an effect, by name."""
        neutral = {"frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
        return {name: value for name, none in neutral.items() if (value := getattr(self, name)) != none}

    @property
    def filtered(self) -> bool:
        """Whether fewer ids than the whole vocabulary can be sampled."""
        return self.greedy or self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, kw_only=True)
class RequestParams:
    """Parameters of one generation.

    ``rid`` is unique among all live requests. ``null_logprobs_at`` are positions in the output whose logprob is sent as
    null, as after a NaN.
    """

    rid: str
    prompt: list[int]
    sampling: SamplingParams
    index: int | None = None  # in a body with several generations
    seed: int | None = None  # None: the engine draws one
    stream: bool = False
    logprobs: bool = False
    logprob_start: int = -1
    top_logprobs: int = 0
    logprob_texts: bool = False
    null_logprobs_at: frozenset[int] = frozenset()
    top_p: bool = False  # return the ids that could be sampled, with the terminal event
    sampling_mask: bool = False  # the same, with each event
    experts: bool = False
    experts_start: int = 0
    experts_dtype: str = "int32"
    prompt_ids: bool = False


def check_known_seed(params: RequestParams, name: str) -> None:
    """Raise ValueError if an engine would draw the seed; ``name`` is that of the sampling parameter for it."""
    if params.seed is None and not params.sampling.greedy:
        msg = (
            f"the request names no seed, so the engine draws one: name it ({name}) here and in the requests that are "
            "compared, or run the engine with sampling_seed=None"
        )
        raise ValueError(msg)
