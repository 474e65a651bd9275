"""Spans, which remember what they were given."""

from __future__ import annotations

import contextlib
import functools
import inspect
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

F = TypeVar("F", bound="Callable[..., Any]")

_META_KEYS = ("id", "prompt_tokens", "completion_tokens", "cached_tokens", "weight_version", "e2e_latency")


@dataclass
class Span:
    """One span; ``attrs`` are those of its start and of all updates."""

    target: object
    name: str
    attrs: dict[str, Any] = field(default_factory=dict)
    error: BaseException | None = None
    closed: bool = False
    parent: Span | None = None

    def update(self, attrs: Mapping[str, Any]) -> None:
        self.attrs.update(attrs)


# All of them, in the order of their starts.
spans: list[Span] = []
_current: ContextVar[Span | None] = ContextVar("span", default=None)


@contextlib.contextmanager
def trace_span(target: object, name: str, *, attrs: Mapping[str, Any] | None = None) -> Iterator[Span]:
    span = Span(target, name, dict(attrs or {}), parent=_current.get())
    spans.append(span)
    token = _current.set(span)
    try:
        yield span
    except BaseException as error:
        span.error = error
        raise
    finally:
        span.closed = True
        _current.reset(token)


def trace_function(name: str, target: str) -> Callable[[F], F]:
    """A span around each call of a coroutine function, on its argument ``target``; of a group with its size."""

    def decorate(function: F) -> F:
        signature = inspect.signature(function)

        @functools.wraps(function)
        async def traced(*args: Any, **options: Any) -> Any:
            on = signature.bind(*args, **options).arguments[target]
            with trace_span(on, name, attrs={"group_size": len(on)} if target == "group" else None):
                return await function(*args, **options)

        return cast("F", traced)

    return decorate


def build_sglang_meta_trace_attrs(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Select a span's attributes from terminal metadata; without a finish reason a KeyError, as in some releases."""
    attrs = {key: meta[key] for key in _META_KEYS if meta.get(key) is not None}
    return {**attrs, "finish_reason": meta["finish_reason"]["type"]}


def build_vllm_meta_trace_attrs(output: Mapping[str, Any]) -> dict[str, Any]:
    """The same for vime, which gives the reply that was not streamed, or what would have been in it."""
    usage = {key: value for key, value in output["usage"].items() if key in _META_KEYS and value is not None}
    return {"id": output.get("request_id"), **usage, "finish_reason": output["choices"][0]["finish_reason"]}
