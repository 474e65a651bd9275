"""By which header a router keeps all calls of a sample on one worker, so that its prefix cache serves them."""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, Final

from streamfold.client.fields import with_fields

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold._types import SampleLike
    from streamfold.engines.base import EngineSpec

__all__ = ["AUTO", "check_routing_header", "routed_headers", "session_of"]

AUTO: Final = "auto"


def check_routing_header(name: str | None) -> None:
    """Raise ValueError unless ``name`` can be a header, or is ``"auto"`` or None."""
    if name is None:
        return
    try:
        with_fields((), {name: ""})
    except (TypeError, ValueError) as error:
        raise ValueError(
            f'routing_header must be "auto", the name of a header, or None; not {name!r}: {error}'
        ) from None


def session_of(sample: SampleLike) -> str | None:
    """Give the ``session_id`` of a sample, which is made if it is None; None if its samples have none.

    Raises:
        TypeError: it is no text.
    """
    own: Any = sample  # an optional attribute
    if not hasattr(own, "session_id"):
        return None
    if own.session_id is None:
        own.session_id = uuid.uuid4().hex
    session: str = own.session_id
    if not isinstance(session, str):
        raise TypeError(f"sample.session_id must be text, or None to have one made; not {session!r}")
    return session


def routed_headers(
    sample: SampleLike,
    headers: Mapping[str, str] | None,
    routing_header: str | None,
    engine: EngineSpec,
    client_names: frozenset[str],
) -> Mapping[str, str] | None:
    """Add the key of ``sample`` to the headers of its requests, unless they have that header.

    ``client_names`` are those of the client, in lower case: one of them wins over ``"auto"``, not over a name.
    """
    is_auto = routing_header == AUTO
    name = engine.session_header if is_auto else routing_header
    taken = {each.lower() for each in headers or ()} | (client_names if is_auto else set())
    if name is None or name.lower() in taken:
        return headers
    session = session_of(sample)
    return {name: session, **(headers or {})} if session else headers
