"""The Rust core: parses the bytes of a streamed response into numpy arrays."""

from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DIALECTS", "Experts", "Generation", "Parser", "__version__"]

__version__: Final[str]
DIALECTS: Final[tuple[str, ...]]
"""The stream formats that :class:`Parser` can parse.

- ``"sglang"``: SGLang's ``/generate``. Whether the stream is cumulative or incremental is detected.
- ``"sglang-cumulative"``: SGLang's default, in which each event repeats the whole response.
- ``"sglang-incremental"``: SGLang with ``--incremental-streaming-output``, in which each event holds only new tokens.
- ``"vllm"``: vLLM's ``/inference/v1/generate``.
- ``"vllm-completions"``: vLLM's ``/v1/completions`` with ``return_token_ids``.
"""

_FinishReason: TypeAlias = Literal["stop", "length", "abort"]
_ExpertsDtype: TypeAlias = Literal["int32", "uint8", "uint16"]

@final
class Experts:
    """Shape and dtype of the routed experts that the engine sends (for router replay, R3).

    ``num_layers`` and ``top_k`` are the last two dimensions of :attr:`Generation.routed_experts`. ``num_experts`` is
    the number of experts in a layer: ids outside the range are a ``DecodeError``. ``dtype`` is the type of one id on
    the wire (``"int32"``, ``"uint8"`` or ``"uint16"``, little endian); if the response names its dtype, as vLLM's does,
    that one is used. Older SGLang versions always send int32: int32 data is accepted too if its size is exactly right.
    """

    def __new__(
        cls, num_layers: int, top_k: int, num_experts: int | None = None, dtype: _ExpertsDtype = "int32"
    ) -> Experts: ...
    @property
    def num_layers(self) -> int:
        """The number of layers with experts: the second dimension of the array."""
    @property
    def top_k(self) -> int:
        """The number of experts that a token is routed to in each layer: the third dimension of the array."""
    @property
    def num_experts(self) -> int | None:
        """The number of experts in each layer: ids must be less. None: ids have no upper bound."""
    @property
    def dtype(self) -> _ExpertsDtype:
        """The type of one id on the wire, if the response does not name it."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs__(self) -> tuple[int, int, int | None, str]: ...

@final
class Generation:
    """The result of one HTTP call: tokens, logprobs, text and side data.

    Immutable and picklable. The arrays are owned by the caller and writable; ``n`` is the number of tokens.
    """

    def __new__(
        cls,
        token_ids: npt.ArrayLike,
        logprobs: npt.ArrayLike | None = None,
        *,
        text: str | None = None,
        finish_reason: _FinishReason | None = None,
        matched: int | str | None = None,
        routed_experts: npt.NDArray[Any] | None = None,
        top_p: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        version_spans: list[tuple[str, int, int]] | None = None,
        prompt_token_ids: npt.ArrayLike | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        clamped_logprobs: int = 0,
        meta: dict[str, Any] | None = None,
    ) -> Generation: ...
    @property
    def token_ids(self) -> npt.NDArray[np.int32]:
        """The sampled tokens, including the stop token: int32 ``[n]``."""
    @property
    def logprobs(self) -> npt.NDArray[np.float64] | None:
        """The natural log-probability of each token, exactly as sent: float64 ``[n]``; None if not requested."""
    @property
    def text(self) -> str | None:
        """The engine's text; None if it sent no text, or if an event with tokens had no text."""
    @property
    def finish_reason(self) -> _FinishReason | None:
        """Why the generation ended; None if the stream ended before the engine sent a finish reason."""
    @property
    def matched(self) -> int | str | None:
        """The stop token (int) or stop string (str), if the engine reports it; else None.

        If vLLM's repetition detection ended the generation, vLLM's name for it, such as ``"repetition"``.
        """
    @property
    def routed_experts(self) -> npt.NDArray[Any] | None:
        """The experts that each token was routed to: int32, uint8 or uint16 ``[rows, num_layers, top_k]``.

        ``rows`` is prompt tokens + ``n`` - 1 - ``experts_start``. Flat if the parser was given no ``experts``. None if
        the engine did not send them for all tokens.
        """
    @property
    def top_p(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None:
        """The candidates that each token was sampled from: ``(token_ids int32 [m], offsets int32 [n + 1])``.

        Those of token ``i`` are ``token_ids[offsets[i]:offsets[i + 1]]``. None if the engine did not send them for
        every token.
        """
    @property
    def version_spans(self) -> list[tuple[str, int, int]]:
        """The weight versions that produced the tokens: ``(version, start, end)``, half-open, in order."""
    @property
    def prompt_token_ids(self) -> npt.NDArray[np.int32] | None:
        """The prompt's tokens as the engine reports them: int32 ``[m]``; None if it did not send them.

        From ``prompt_token_ids``, which SGLang sends with ``return_prompt_token_ids`` and vLLM with
        ``return_token_ids``.
        """
    @property
    def prompt_tokens(self) -> int | None:
        """The number of prompt tokens that the engine reports, the latest value; None if it reports none."""
    @property
    def cached_tokens(self) -> int | None:
        """The number of prompt tokens read from the engine's prefix cache, the latest value; None if not reported."""
    @property
    def clamped_logprobs(self) -> int:
        """The number of logprobs that are the engine's substitute for minus infinity (0 unless ``clamped="keep"``)."""
    @property
    def meta(self) -> dict[str, Any]:
        """All other scalars and objects of the response, the latest value of each key.

        Keys of SGLang's event and ``meta_info``, or of vLLM's event, choice and usage, in one dict. If several of them
        have the same key, the innermost value counts. Lists are not kept.
        """
    def torch(self) -> dict[str, torch.Tensor]:
        """The arrays as torch tensors that share their memory. Imports torch.

        Keys: ``token_ids``, ``logprobs``, ``routed_experts``, ``prompt_token_ids``, ``top_p_token_ids`` and
        ``top_p_offsets``. Arrays that are None are left out.
        """
    def __eq__(self, other: object, /) -> bool:
        """Compares all fields; arrays bit by bit, so that a logprob of -0.0 does not equal 0.0."""
    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]: ...

@final
class Parser:
    """Parses the body of one streamed response into one :class:`Generation`.

    - ``dialect``: the format of the stream, one of ``DIALECTS``.
    - ``logprobs``: whether logprobs were requested. If so, tokens without logprobs are a ``DecodeError``.
    - ``experts``: the shape of routed experts, if they were requested.
    - ``prompt_len``: the number of prompt tokens sent. It is checked against the engine's count.
    - ``experts_start``: the position of the first row of routed experts.
    - ``clamped``: what to do with the engine's substitute for a logprob of minus infinity: ``"raise"`` a
      ``DecodeError``, or ``"keep"`` and count it.
    - ``max_new_tokens``: the number of tokens to reserve memory for when the first ones arrive. It is not a limit.
    - ``token_limit``: the event with which the stream has more tokens than this is its last: its tokens are kept, the
      finish reason is ``"length"``, and later events are skipped.
    - ``max_event_bytes``: an event with more bytes is a ``DecodeError``.

    Events are applied atomically. After an error, :meth:`feed` and :meth:`close` raise it again, and :meth:`take`
    returns the tokens before the event with the error.
    """

    def __new__(
        cls,
        dialect: str,
        *,
        logprobs: bool = True,
        experts: Experts | None = None,
        prompt_len: int | None = None,
        experts_start: int = 0,
        clamped: Literal["raise", "keep"] = "raise",
        max_new_tokens: int | None = None,
        token_limit: int | None = None,
        max_event_bytes: int = 1073741824,
    ) -> Parser: ...
    def feed(self, data: bytes | bytearray | memoryview, /) -> int:
        """Parse the next bytes of the body, split at any byte. Returns the number of tokens that became available.

        Raises ``DecodeError`` if the bytes break a rule of the dialect, ``EngineError`` if the engine reports an error
        in the stream, and ``ValueError`` after :meth:`close` or :meth:`take`.
        """
    def close(self, aborted: bool = False) -> None:
        """End the stream: the body is complete or the connection is closed.

        Raises ``StreamTruncated`` if there was no finish reason, unless ``aborted``; ``DecodeError`` or ``EngineError``
        as :meth:`feed` does; ``ValueError`` after :meth:`take`.
        """
    def take(self) -> Generation:
        """Return the tokens and side data received so far. Works at any time, also after an error.

        The parser cannot be used afterwards: further calls raise ``ValueError``.
        """
    @property
    def token_count(self) -> int:
        """The number of tokens received so far."""
    @property
    def finished(self) -> bool:
        """Whether the generation has its finish reason, from the terminal event or because of ``token_limit``.

        vLLM sends the usage after the terminal event.
        """
    @property
    def overrun(self) -> bool:
        """Whether the generation ended because it went past ``token_limit``. The engine does not know that."""
    @property
    def done(self) -> bool:
        """Whether ``[DONE]`` was received."""
    def __sizeof__(self) -> int:
        """Bytes of memory held: arrays, text, and an incomplete event."""
