"""What the loopback engine needs of a causal language model and of its tokenizer: the mock one and a real one fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Sequence

    import numpy as np
    import numpy.typing as npt

    from streamfold.loopback.core.request_params import RequestParams

__all__ = ["CausalLM", "Detokenizer", "LogprobsOf", "SequenceState", "Tokenizer", "WeightsError"]

# The distribution whose logprobs an engine reports: the model's own, behind penalties and temperature, or renormalised
# over the ids that top-p, top-k and min-p keep.
LogprobsOf = Literal["raw", "scaled", "kept"]


class WeightsError(ValueError):
    """New weights do not fit the model; it keeps those that it had."""


class SequenceState(Protocol):
    """One prompt and what was generated after it, inside a model.

    ``logprob``, ``rank`` (1 for the most probable id), ``kept`` (the ids that could have been drawn), ``kept_logprob``
    (renormalised over them) and :meth:`candidates` are those of the token that was drawn last.
    """

    @property
    def logprob(self) -> float:
        """The logprob that the engine reports."""

    @property
    def rank(self) -> int:
        """The place of the token among all ids, by probability."""

    @property
    def kept(self) -> list[int]:
        """The ids that could have been drawn, this one included."""

    @property
    def kept_logprob(self) -> float:
        """The logprob, renormalised over the ids that could have been drawn."""

    def draw(self) -> int:
        """Draw the next token and append it."""

    def candidates(self, count: int) -> list[tuple[float, int]]:
        """The ``count`` most probable ids with their logprobs, most probable first."""

    def prompt_logprobs(self, start: int) -> list[tuple[float | None, int]] | None:
        """The prompt's tokens from ``start`` on with their logprobs, the first of them None; None: not computed yet."""

    def experts(self, start: int, output: Sequence[int]) -> npt.NDArray[np.int32]:
        """The experts of the positions from ``start`` to the last but one: int32 ``[positions, layers, top_k]``.

        ``output`` are the generated tokens. The last one was not run through the model, so it has no row.
        """

    def retract(self) -> None:
        """Drop the KV cache; the next draw computes it anew, with the weights of then."""

    def release(self) -> None:
        """Drop the KV cache for good."""


class CausalLM(Protocol):
    """A causal language model. ``blocking``: :meth:`forward` takes long, and must run outside the event loop."""

    blocking: bool

    def start(
        self,
        params: RequestParams,
        *,
        stop_ids: Collection[int] = (),
        counts_prompt: frozenset[str] = frozenset(),
        logprobs_of: LogprobsOf = "scaled",
    ) -> SequenceState:
        """Return a sequence without generated tokens.

        Args:
            params: prompt and sampling parameters, with a seed.
            stop_ids: ids that are not drawn before ``min_new_tokens``.
            counts_prompt: penalties that count the prompt's tokens too.
            logprobs_of: the distribution whose logprobs are reported.
        """

    def forward(self, sequences: Sequence[SequenceState]) -> None:
        """Compute the next token of each sequence, as one batch; :meth:`SequenceState.draw` then takes it."""

    def used_tokens(self, sequences: Sequence[SequenceState]) -> int:
        """The tokens that the KV cache holds for these running sequences, and for any other."""

    def load_weights(self, path: str) -> None:
        """Replace all weights by those of a directory. Raises WeightsError, or OSError if it cannot be read."""

    def load_bucket(self, data: bytes) -> None:
        """Replace the weights that a bucket, a safetensors file, holds. Raises WeightsError."""


class Detokenizer(Protocol):
    """Detokenizes token by token; incomplete characters are held back."""

    def push(self, token: int) -> str:
        """Add the next token; return the characters that it completes."""


class Tokenizer(Protocol):
    """Maps text to ids and back. ``image_token_id`` is the placeholder of images, None if the model takes none."""

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The ids that end a response."""

    @property
    def image_token_id(self) -> int | None:
        """The placeholder of an image."""

    def encode(self, text: str) -> list[int]:
        """Tokenize text; special tokens in the text become their ids."""

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Detokenize ids. Invalid UTF-8 becomes U+FFFD."""

    def detokenizer(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a detokenizer for one response."""
