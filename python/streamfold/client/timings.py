"""Timings: when the tokens of one call came, in the words of vLLM's serving benchmark."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Timings"]


@dataclass(frozen=True)
class Timings:
    """When the tokens of one call came, in seconds: ``Generation.timings``.

    They are those of the last try. What came before it, pauses and failed tries included, is in :attr:`queued`. The
    clock starts when the request is sent, so ``queued + connect + ttft`` is what the caller has waited for the first
    token. (vLLM's ``bench serve`` has no queue of its own, and counts the connect to the TTFT.)

    Tokens are stamped when they are read from the socket. Under load one read brings several events; the tokens of one
    read share the time since the read before evenly. :attr:`resolution` tells how far apart the reads were. The tokens
    of a call's first read have no read before them, so a call has as many times between tokens as it has tokens
    behind its first read: ``tokens - 1`` if that brought one, fewer if it brought several. A sample that was resumed
    has had several calls, and each had a first read.

    Attributes:
        queued: from the start of the call to the start of the last try: its wait for a slot, and what came before.
        connect: from there until the request was sent: name look-up, connection, TLS; nearly 0 on a kept connection.
        ttft: time to first token, from sending the request. None without a token.
        latency: from sending the request to the last token. None without a token.
        tpot: time per output token behind the first: ``(latency - ttft) / (tokens - 1)``. None below two tokens.
        itl_mean: inter-token latency, the time from one token to the next, on average. None if all came in one read.
        itl_p99: its 99th percentile, to within 3 %.
        resolution: from one read that brought tokens to the next on average; shorter times between tokens are not told
            apart. Where it equals :attr:`itl_mean`, each read brought one token. None if all came in one read.
    """

    queued: float
    connect: float
    ttft: float | None = None
    latency: float | None = None
    tpot: float | None = None
    itl_mean: float | None = None
    itl_p99: float | None = None
    resolution: float | None = None

    def __str__(self) -> str:
        """Those that tell most, in milliseconds."""
        shown = {"ttft": self.ttft, "latency": self.latency, "tpot": self.tpot}
        return ", ".join(f"{name}={1000 * value:.1f} ms" for name, value in shown.items() if value is not None)
