"""Spans, which remember what they were given."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_META_KEYS = ("id", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "e2e_latency")


@dataclass
class Span:
    """One span; ``attrs`` are those of its start and of all updates."""

    target: object
    name: str
    attrs: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    closed: bool = False

    def update(self, attrs: Mapping[str, Any]) -> None:
        self.attrs.update(attrs)


# All of them, in the order of their starts.
spans: list[Span] = []


@contextlib.contextmanager
def trace_span(target: object, name: str, *, attrs: Mapping[str, Any] | None = None) -> Iterator[Span]:
    span = Span(target, name, dict(attrs or {}))
    spans.append(span)
    try:
        yield span
    except BaseException as error:
        span.error = error
        raise
    finally:
        span.closed = True


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Select a span's attributes from terminal metadata; without a finish reason a KeyError, as in some releases."""
    attrs = {key: meta[key] for key in _META_KEYS if meta.get(key) is not None}
    return {**attrs, "finish_reason": meta["finish_reason"]["type"]}


def build_vllm_meta_trace_attrs(output: Mapping[str, Any]) -> dict[str, Any]:
    """The same for vime, which gives the reply that was not streamed, or what would have been in it."""
    usage = {key: value for key, value in output["usage"].items() if key in _META_KEYS and value is not None}
    return {"id": output.get("request_id"), **usage, "finish_reason": output["choices"][0]["finish_reason"]}
