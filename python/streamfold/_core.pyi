"""The Rust core: raw bytes of a streamed reply in, arrays out."""

from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["DIALECTS", "Experts", "Generation", "Parser", "__version__"]

__version__: Final[str]
DIALECTS: Final[tuple[str, ...]]
"""What :class:`Parser` reads.

``"sglang"``: SGLang's ``/generate``, cumulative or incremental, which the stream shows; ``"sglang-cumulative"`` and
``"sglang-incremental"`` accept one of them alone. ``"vllm"``: vLLM's ``/inference/v1/generate``.
``"vllm-completions"``: its ``/v1/completions`` with ``return_token_ids``.
"""

_FinishReason: TypeAlias = Literal["stop", "length", "abort"]
_ExpertsDtype: TypeAlias = Literal["int32", "uint8", "uint16"]

@final
class Experts:
    """How an engine writes routed experts (router replay).

    ``num_layers`` and ``top_k`` give the shape, ``num_experts`` the range that ids are checked against,
    ``dtype`` the type of one id on the wire (little endian). A dtype that the reply itself tells wins; vLLM's does.
    An SGLang engine that tells none may not know that another one can be asked for: it sends int32, which is taken
    too if there are exactly as many bytes.
    """

    def __new__(
        cls, num_layers: int, top_k: int, num_experts: int | None = None, dtype: _ExpertsDtype = "int32"
    ) -> Experts: ...
    @property
    def num_layers(self) -> int:
        """Layers with experts: the second dimension of the array."""
    @property
    def top_k(self) -> int:
        """Experts that a token is routed to in each layer: the third dimension."""
    @property
    def num_experts(self) -> int | None:
        """How many experts a layer has, so that each id is less. None: there is no upper bound."""
    @property
    def dtype(self) -> _ExpertsDtype:
        """The type of one id on the wire, where the reply does not tell it."""
    def __eq__(self, other: object, /) -> bool: ...
    def __hash__(self) -> int: ...
    def __getnewargs__(self) -> tuple[int, int, int | None, str]: ...

@final
class Generation:
    """What one HTTP call produced. Immutable and picklable; its arrays belong to the caller and are writable."""

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
        """The sampled tokens, stop token included: int32 ``[n]``."""
    @property
    def logprobs(self) -> npt.NDArray[np.float64] | None:
        """One natural logarithm per token, float64 ``[n]``, exactly as sent; None if not asked for."""
    @property
    def text(self) -> str | None:
        """The engine's text; None if it sent none (or left it out of an event that brought tokens)."""
    @property
    def finish_reason(self) -> _FinishReason | None:
        """Why the engine ended it; None if the stream was cut before it said so."""
    @property
    def matched(self) -> int | str | None:
        """The stop token or stop string, if the engine told; of a repetition that vLLM ended, its word for that."""
    @property
    def routed_experts(self) -> npt.NDArray[Any] | None:
        """int32, uint8 or uint16 ``[rows, num_layers, top_k]``; flat if the parser was given no ``experts``."""
    @property
    def top_p(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None:
        """``(token_ids int32 [m], offsets int32 [n + 1])``: the ids that sampling could choose, per token."""
    @property
    def version_spans(self) -> list[tuple[str, int, int]]:
        """``(weight version, start, end)`` over this call's tokens, half open, in order."""
    @property
    def prompt_token_ids(self) -> npt.NDArray[np.int32] | None:
        """The prompt's tokens as the engine sent them: int32 ``[m]``; None if it did not send them."""
    @property
    def prompt_tokens(self) -> int | None:
        """The length of the prompt, as last told by the engine."""
    @property
    def cached_tokens(self) -> int | None:
        """How many tokens of the prompt came from the engine's cache, as last told."""
    @property
    def clamped_logprobs(self) -> int:
        """How many logprobs were the engine's stand-in for minus infinity (only with ``clamped="keep"``)."""
    @property
    def meta(self) -> dict[str, Any]:
        """Every other scalar or object that the engine told, the latest value of each key.

        vLLM's event, choice and usage together; of a key in several of them the innermost counts.
        """
    def torch(self) -> dict[str, torch.Tensor]:
        """The arrays as tensors over the same memory, where torch knows the dtype (imports torch here).

        Keys: ``token_ids``, ``logprobs``, ``routed_experts``, ``prompt_token_ids``, ``top_p_token_ids``,
        ``top_p_offsets``; those that are None are left out.
        """
    def __eq__(self, other: object, /) -> bool:
        """Bit for bit: a logprob of -0.0 is not one of 0.0."""
    def __getnewargs_ex__(self) -> tuple[tuple[Any, ...], dict[str, Any]]: ...

@final
class Parser:
    """Folds the bytes of one streamed reply into one :class:`Generation`; ``dialect`` is one of ``DIALECTS``.

    ``logprobs`` says whether they were asked for. ``prompt_len`` is checked against the engine's count and gives
    routed experts their rows, less ``experts_start``. ``clamped`` says what to do with a logprob that is the
    engine's stand-in for minus infinity. ``max_new_tokens`` sizes the first buffers; it is no limit. An event longer
    than ``max_event_bytes`` is a ``DecodeError``.

    After an error ``feed`` and ``close`` raise it again, and ``take`` gives the state of the last good event.
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
        max_event_bytes: int = 1073741824,
    ) -> Parser: ...
    def feed(self, data: bytes | bytearray | memoryview, /) -> int:
        """Read the next bytes, cut anywhere; the number of tokens that became available (0: more are needed).

        Raises ``DecodeError`` or ``EngineError``; ``ValueError`` after :meth:`take`.
        """
    def close(self, aborted: bool = False) -> None:
        """Tell that the body has ended.

        Raises ``StreamTruncated`` if no finish reason was seen, unless ``aborted``.
        """
    def take(self) -> Generation:
        """Give what is there, at any time, after an error too. The parser is spent afterwards."""
    @property
    def token_count(self) -> int:
        """Tokens so far."""
    @property
    def finished(self) -> bool:
        """Whether the terminal event, the one with a finish reason, was seen. vLLM tells its usage afterwards."""
    @property
    def done(self) -> bool:
        """Whether ``[DONE]`` was seen too."""
    def __sizeof__(self) -> int:
        """Bytes held: arrays, text, and the event that is still incomplete."""
