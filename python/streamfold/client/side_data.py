"""What a call requested and did not receive beside its tokens: ``Generation.missing``, one warning for each name."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from streamfold._core import Generation
    from streamfold.client.request import CallRequest

__all__ = ["MissingSideData"]

_logger = logging.getLogger("streamfold")


class MissingSideData:
    """Notes what the generations of one client lack, and warns once for each name."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def names(self, request: CallRequest, generation: Generation) -> tuple[str, ...]:
        """The names of what is missing.

        A warning follows if the engine has finished the response: from an aborted one side data may be missing.
        """
        if not request.side_data or not len(generation.token_ids):
            return ()
        missing = tuple([name for name in request.side_data if not _has(generation, name)])
        if generation.finish_reason in ("stop", "length"):
            for name in missing:
                self._warn(request, name)
        return missing

    def _warn(self, request: CallRequest, name: str) -> None:
        if name in self._warned:
            return
        self._warned.add(name)
        _logger.warning("a response of %s has no %s", request.url, request.engine.lacking(name))


def _has(generation: Generation, name: str) -> bool:
    return getattr(generation, name, None) is not None or (name == "indexer_topk" and name in generation.meta)
