"""Small bodies of vLLM's replies, written here. Of a key that is given as LEFT_OUT nothing is sent."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from support.bodies import LEFT_OUT, logprob, sse

if TYPE_CHECKING:
    from collections.abc import Sequence

Wire: TypeAlias = Literal["0.32", "0.28", "rust", "completions"]
WIRES: tuple[Wire, ...] = ("0.32", "0.28", "rust", "completions")


def dialect_of(wire: Wire) -> str:
    return "vllm-completions" if wire == "completions" else "vllm"


def entry(token: int, wire: Wire = "0.32", /, **told: Any) -> dict[str, Any]:
    """What stands beside a token."""
    if wire == "0.32":
        likely: dict[str, Any] = {"token_id": token, "logprob": logprob(token), "rank": 1}
    else:
        name = f"token_id:{token}"
        likely = {"token": name, "logprob": logprob(token), "bytes": [*name.encode()] if wire == "rust" else None}
    return {key: value for key, value in {**likely, "top_logprobs": [likely], **told}.items() if value is not LEFT_OUT}


def logprobs_of(tokens: Sequence[int], wire: Wire = "0.32") -> dict[str, Any]:
    """The logprobs of an event."""
    if wire != "completions":
        return {"content": [entry(token, wire) for token in tokens]}
    return {
        "text_offset": [0] * len(tokens),
        "token_logprobs": [logprob(token) for token in tokens],
        "tokens": [f"token_id:{token}" for token in tokens],
        "top_logprobs": [{f"token_id:{token}": logprob(token)} for token in tokens],
    }


def usage(completion: int, *, cached: int | None = None, **told: Any) -> dict[str, Any]:
    """A usage: ``completion`` tokens so far, after a prompt of 3."""
    details = None if cached is None else {"cached_tokens": cached}
    counts = {"prompt_tokens": 3, "total_tokens": 3 + completion, "completion_tokens": completion}
    return {**counts, "prompt_tokens_details": details, **told}


def fields(
    tokens: Sequence[int] | None,
    reason: Any = None,
    /,
    *,
    wire: Wire = "0.32",
    top: dict[str, Any] | None = None,
    **choice: Any,
) -> dict[str, Any]:
    """An event's fields: new ``tokens`` (None: neither ids nor logprobs) and why it ends, if it does.

    ``top`` and ``choice`` replace or add fields of the event and of its choice.
    """
    told: dict[str, Any] = {"index": 0, "finish_reason": reason, "stop_reason": None}
    if tokens is not None:
        told |= {"token_ids": list(tokens), "logprobs": logprobs_of(tokens, wire)}
    told |= {"routed_experts": None, "sampling_mask": None} if wire in ("0.32", "0.28") else {}
    told |= choice
    if wire == "rust":
        told = {key: value for key, value in told.items() if value is not None}
    outer = {
        "id" if wire == "completions" else "request_id": "generate-tokens-r7",
        "usage": LEFT_OUT if wire == "rust" else None,
        "output_mode": "tokens" if wire == "0.32" else LEFT_OUT,
        "choices": [{key: value for key, value in told.items() if value is not LEFT_OUT}],
        **(top or {}),
    }
    return {key: value for key, value in outer.items() if value is not LEFT_OUT}


def event(tokens: Sequence[int] | None, reason: Any = None, /, **told: Any) -> bytes:
    """One event on the wire, see :func:`fields`."""
    return sse(fields(tokens, reason, **told))


def usage_event(completion: int, *, wire: Wire = "0.32", **told: Any) -> bytes:
    """The event that comes last, without a choice."""
    return event(None, wire=wire, top={"choices": [], "usage": usage(completion, **told)})
