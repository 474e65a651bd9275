"""The Rust core: parses the bytes of a streamed response into numpy arrays."""

import sys
from asyncio import BaseTransport
from collections.abc import Callable, Sequence
from os import PathLike
from socket import socket as Socket  # noqa: N812  # an argument has its name
from ssl import MemoryBIO, SSLObject
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import numpy.typing as npt
import torch
from typing_extensions import Self, disjoint_base

from streamfold.client.timings import Timings

__all__ = ["DIALECTS", "ConnectionProtocol", "Durations", "Exchange", "Experts", "Generation", "Parser", "ReadRest"]
__all__ += ["RequestHead", "__version__"]
if sys.platform == "linux":
    __all__ += ["Reactor"]

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

@disjoint_base
class ConnectionProtocol:
    """Carries exchanges on one connection of an event loop. A protocol, to be mixed with ``asyncio.BufferedProtocol``.

    - ``buffer``: what transports read into; its content is used at once, so all connections of a loop share one.
    - ``rest``: where a connection rests after it has read from a stream.
    - ``socket``: the socket below the transport.

    It carries one exchange at a time, and is used in the thread of its loop.
    """

    def __new__(cls, buffer: memoryview, rest: ReadRest, socket: Socket) -> Self: ...
    def attach(self, transport: BaseTransport, reader: BaseTransport) -> None:
        """Use ``transport``, above ``reader``, which reads from the socket."""
    def begin(self, exchange: Exchange, on_event: Callable[[str, Any], None]) -> list[tuple[str, Any]] | None:
        """Carry an exchange: its request leaves at once.

        ``on_event`` gets kind and payload of each event from now on. Returns the events that there are already, or None
        if the connection had been kept and shows a byte or its end: then it is closed, and nothing was sent.
        """
    def abort(self) -> None:
        """The rest of the reply is of no use: read it without a rest, and do not report what goes wrong with it."""
    def urgent(self) -> None:
        """Read as soon as the loop can."""
    def end(self) -> None:
        """Close the connection now; no event follows. Idempotent."""
    def connection_made(self, transport: BaseTransport) -> None:
        """The transport is open."""
    def get_buffer(self, sizehint: int) -> memoryview:
        """Return what the transport reads into."""
    def buffer_updated(self, nbytes: int) -> None:
        """The transport has read ``nbytes``."""
    def eof_received(self) -> bool:
        """The server has closed its side. Returns whether the transport stays open."""
    def connection_lost(self, exc: BaseException | None) -> None:
        """The transport is closed, or ``exc`` has broken it."""
    def pause_writing(self) -> None:
        """The transport holds enough of the request for now."""
    def resume_writing(self) -> None:
        """The transport takes more of the request."""

@final
class Durations:
    """Durations in seconds, counted in 2 KiB: quantiles are right to within 3 %, counts and sums are exact."""

    def __new__(cls) -> Durations: ...
    def add(self, seconds: float, count: int = 1) -> None:
        """Add ``count`` equal durations; a negative one counts as 0."""
    def merge(self, other: Durations) -> None:
        """Add all of another."""
    @property
    def count(self) -> int:
        """How many there are."""
    @property
    def sum(self) -> float:
        """Their sum."""
    def quantile(self, share: float) -> float | None:
        """The duration that a ``share`` of all, 0 to 1, does not exceed; None if there are none."""
    def below(self, seconds: float) -> int:
        """How many are shorter than ``seconds``: exactly where that is a power of two."""

@final
class Exchange:
    """One request and its reply, on one connection: a socket layer drives it, and its caller takes the result.

    Made by :meth:`stream`, :meth:`reply` or :meth:`replies`. Can be used from any thread.
    """

    @staticmethod
    def stream(
        head: RequestHead,
        body: bytes,
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
    ) -> Exchange:
        """A request whose reply should be a stream of tokens. The keywords are those of :class:`Parser`.

        The stream ends 256 tokens past ``max_new_tokens``, with the finish reason ``"length"``. Of a reply that is no
        stream, 64 KiB of the body are kept. ``body`` is held without a copy until the head of the reply has come.

        Raises ``ValueError`` if a keyword has no valid value.
        """
    @staticmethod
    def reply(head: RequestHead, body: bytes, *, max_bytes: int) -> Exchange:
        """A request whose reply may be any: of its body ``max_bytes``, 0 or more, are kept, for :meth:`take_body`."""
    @staticmethod
    def replies(head: RequestHead, bodies: Sequence[bytes], *, max_bytes: int) -> Exchange:
        """As many requests as there are bodies, at least one, sent in one go (HTTP/1.1 pipelining), and their replies.

        Replies with a status below 300 are passed over and counted in :attr:`passed`, up to the one that is reported as
        with :meth:`reply`: the last, or the first other one, or one after which the connection ends.
        """
    @property
    def passed(self) -> int:
        """The number of good replies before the one that is reported; see :meth:`replies`."""
    @property
    def token_count(self) -> int:
        """The number of tokens received so far."""
    @property
    def first_token_at(self) -> float:
        """When the first token was read from the socket: seconds of ``time.monotonic()``; infinity before."""
    @property
    def last_token_at(self) -> float:
        """When the latest token was read from the socket: seconds of ``time.monotonic()``; infinity before one."""
    def gaps(self) -> tuple[Durations, int]:
        """The times between the tokens so far, and how many reads brought them. After :meth:`take` too."""
    @property
    def held_bytes(self) -> int:
        """Bytes of memory held, without the request's body."""
    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far: int32 ``[n]``. Empty after :meth:`take`."""
    def snapshot(self) -> Generation:
        """Return a copy of what the stream has brought so far, which goes on. Empty after :meth:`take`."""
    def notify_at(self, count: int) -> bool:
        """Report ``"tokens"`` once ``count`` have come, in place of an earlier ``count``. Returns whether they have."""
    def take(self) -> Generation:
        """Return what the stream has brought so far, at any time; it is not read any further. Empty the second time."""
    def take_body(self) -> bytes:
        """Return what was kept of the body of a reply that is no stream. The second call returns no bytes."""

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
        padded_rows: int = 0,
        top_p: tuple[npt.ArrayLike, npt.ArrayLike] | None = None,
        version_spans: list[tuple[str | None, int, int]] | None = None,
        prompt_token_ids: npt.ArrayLike | None = None,
        prompt_tokens: int | None = None,
        cached_tokens: int | None = None,
        clamped_logprobs: int = 0,
        missing: Sequence[str] | None = None,
        max_tokens_per_event: int = 0,
        timings: Timings | None = None,
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
        the engine did not send them for all tokens. Every slot of a padded row is -1; in the unsigned types 255 or
        65535.
        """
    @property
    def padded_rows(self) -> int:
        """The number of rows in ``routed_experts`` that the engine padded; 0 if the parser was given no ``experts``."""
    @property
    def top_p(self) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]] | None:
        """The candidates that each token was sampled from: ``(token_ids int32 [m], offsets int32 [n + 1])``.

        Those of token ``i`` are ``token_ids[offsets[i]:offsets[i + 1]]``. None if the engine did not send them for
        every token.
        """
    @property
    def version_spans(self) -> list[tuple[str | None, int, int]]:
        """The weight versions that produced the tokens: ``(version, start, end)``, half-open, in order.

        They cover all tokens. The version is None where the engine reported none, as vLLM does before its last event.
        """
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
    def missing(self) -> tuple[str, ...]:
        """What was requested and not received, by the names of the fields here; ``()`` if nothing is missing.

        Set by :class:`~streamfold.Client`: ``routed_experts``, ``top_p`` (if sampling is restricted),
        ``prompt_token_ids``, and ``indexer_topk`` of ``meta``. Empty without tokens.
        """
    @property
    def max_tokens_per_event(self) -> int:
        """The most new tokens that one event of the stream had; 0 if none had tokens.

        More than one with speculative decoding, with a stream interval, and where the engine joined events.
        """
    @property
    def meta(self) -> dict[str, Any]:
        """All other scalars and objects of the response, the latest value of each key.

        Keys of SGLang's event and ``meta_info``, or of vLLM's event, choice and usage, in one dict. If several of them
        have the same key, the innermost value counts. Lists are not kept.
        """
    @property
    def timings(self) -> Timings | None:
        """When the tokens came; no part of ``==``. None if no request was sent, and of a :class:`Parser` alone."""
    def _complete(self, missing: tuple[str, ...], timings: Timings | None) -> None: ...
    def torch(self) -> dict[str, torch.Tensor]:
        """The arrays as torch tensors that share their memory. Imports torch.

        Keys: ``token_ids``, ``logprobs``, ``routed_experts``, ``prompt_token_ids``, ``top_p_token_ids`` and
        ``top_p_offsets``. Arrays that are None are left out. Raises ``ImportError`` without torch.
        """
    def __eq__(self, other: object, /) -> bool:
        """Compares all fields but the timings; arrays bit by bit, so that a logprob of -0.0 does not equal 0.0."""
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
    def token_ids(self) -> npt.NDArray[np.int32]:
        """A copy of the tokens received so far: int32 ``[n]``. Raises ``ValueError`` after :meth:`take`."""
    def snapshot(self) -> Generation:
        """Return a copy of the tokens and side data received so far, and go on. ``ValueError`` after :meth:`take`."""
    @property
    def finished(self) -> bool:
        """Whether there is a finish reason: of the terminal event (vLLM sends usage after it) or by ``token_limit``."""
    @property
    def overrun(self) -> bool:
        """Whether the generation ended because it went past ``token_limit``. The engine does not know that."""
    @property
    def done(self) -> bool:
        """Whether ``[DONE]`` was received."""
    def __sizeof__(self) -> int:
        """Bytes of memory held: arrays, text, and an incomplete event."""

if sys.platform == "linux":
    @final
    class Reactor:
        """Sockets to servers, and the exchanges that they carry, below an event loop. Linux only.

        The loop watches two descriptors: when :meth:`fileno` is readable, it calls :meth:`sweep`; when
        :meth:`urgent_fileno` is readable, it calls :meth:`sweep_urgent`. While there is something to read,
        :meth:`fileno` is unreadable for a rest after each sweep, so that one read takes several events.

        - ``rest_floor``: the shortest rest, in seconds; at least 0.001.
        - ``rest_ceiling``: the longest rest, in seconds.
        - ``rest_share``: in between, how many times as long as the sweep a rest is. With 19, reading takes a twentieth
          of a core.

        Events are tuples ``(connection, kind, payload)``:

        - ``"opened"``: 0, or the errno, and the connection is gone
        - ``"secured"``: None, or the exception that ended the TLS handshake, and the connection is gone
        - ``"head"``: ``(status, is_stream, fields)``; the fields are a list of names in lower case and values, or None
          for a stream
        - ``"first_token"``, ``"tokens"`` (see :meth:`Exchange.notify_at`), ``"finished"``, ``"overrun"``: None
        - ``"error"``: the exception
        - ``"failed"``: ``(errno or None, message, whether no byte of a reply was received)``
        - ``"ended"``: whether the connection can carry another exchange. It stays open in any case, until :meth:`end`

        Raises ``OSError`` if there are no descriptors left.
        """

        def __new__(
            cls, *, rest_floor: float = 0.005, rest_ceiling: float = 0.05, rest_share: float = 19.0
        ) -> Reactor: ...
        def fileno(self) -> int:
            """The descriptor of the ordinary poll: streams, and idle connections. -1 after :meth:`close`."""
        def urgent_fileno(self) -> int:
            """The descriptor of the urgent poll: of what connects, sends, gets no stream, or follows an abort."""
        def connect(self, host: str, port: int, scope_id: int = 0) -> int:
            """Start to connect to a literal address, and return the connection; ``"opened"`` follows.

            ``scope_id`` is the zone of an IPv6 address, as the index of its interface; 0 for none.

            Raises ``OSError`` if there is no descriptor left or no way to the address, and ``ValueError`` if it is no
            literal address.
            """
        def connect_unix(self, path: str | PathLike[str]) -> int:
            """As :meth:`connect`, to a Unix socket. Raises ``BlockingIOError`` while its backlog is full."""
        def start_tls(self, connection: int, ssl_object: SSLObject, incoming: MemoryBIO, outgoing: MemoryBIO) -> None:
            """Agree on TLS over a connection that was opened and carries nothing yet; ``"secured"`` follows.

            ``ssl_object`` is over the two ``ssl.MemoryBIO``. From now on the connection carries ciphertext. Raises what
            ends the handshake, and then the connection is gone.
            """
        def start(self, connection: int, exchange: Exchange) -> bool:
            """Let an open connection carry an exchange, and send at once what the socket takes.

            Returns False if there is no such connection, or if it has carried one before and shows a byte or its end:
            then it is closed, and the exchange can go over another connection.
            """
        def sweep(self) -> list[tuple[int, str, Any]]:
            """Read what the sockets of the ordinary poll hold, for 5 ms, 4 MiB, or 256 KiB of TLS. Returns the events.

            The descriptor stays readable if sockets are left that have not had their turn.
            """
        def sweep_urgent(self) -> list[tuple[int, str, Any]]:
            """Connect, send and read what the sockets of the urgent poll can, as :meth:`sweep`. Returns the events."""
        def read_now(self, connection: int) -> list[tuple[int, str, Any]]:
            """Read what the socket of one connection holds, up to 4 MiB. Returns the events."""
        def abort(self, connection: int) -> list[tuple[int, str, Any]]:
            """The rest of the reply is of no use: read it without a rest, keep what arrives. Returns the events."""
        def end(self, connection: int) -> None:
            """Close a connection now, for the server as well. No event follows. Idempotent."""
        def close(self) -> None:
            """Close all connections and the polls. The loop must not watch the descriptors any more. Idempotent."""

@final
class ReadRest:
    """Lets transports rest after a read, so that the next one finds several events at once.

    - ``schedule``: called once, when the first transport rests: it has to call :meth:`resume` after :attr:`seconds`.
    - ``shortest``, ``longest``: the bounds of a rest, in seconds.

    A transport whose events come too rarely for a rest to gather them does not rest.

    Raises ``ValueError`` if a bound is negative, or the shortest is longer than the longest.
    """

    def __new__(cls, schedule: Callable[[], object], shortest: float, longest: float) -> ReadRest: ...
    @property
    def seconds(self) -> float:
        """Seconds that a rest takes now: nine times the work of the reads since the last one, within the bounds."""
    def resume(self) -> None:
        """Let all transports read again."""

@final
class RequestHead:
    """The head of an HTTP/1.1 request, checked and written once: method, path, ``Host`` and header fields.

    - ``method``: ``"GET"`` or ``"POST"``. The body of a GET is not sent.
    - ``target``: the path with its query, percent-encoded.
    - ``host``: what the ``Host`` field holds: a name or an address, in brackets if it is IPv6 and without its zone, and
      a port unless it is the default one.
    - ``fields``: names and values, in their order. Values are sent in latin-1.

    Raises ``ValueError`` that names the part that can't be sent; see :meth:`check_field`.
    """

    def __new__(
        cls, method: Literal["GET", "POST"], target: str, host: str, fields: Sequence[tuple[str, str]] = ...
    ) -> RequestHead: ...
    @staticmethod
    def check_field(name: str, value: str) -> None:
        """Check a header field that a user wants to send.

        Raises ``ValueError`` if the name is no token or is one that the client writes itself (``Content-Length``,
        ``Transfer-Encoding``, ``Connection``, ``Host``, ``Expect``, ``Upgrade``, ``TE``, ``Trailer``), or if the value
        holds a control character or a character beyond latin-1.
        """
