"""The clients by name. Each is imported only when it is measured, so that no other pays for its imports."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final, cast

if TYPE_CHECKING:
    from benches.clients.base import StreamClient, Target

PRODUCT: Final = "streamfold"
PRODUCT_ON_ASYNCIO: Final = "streamfold on asyncio"
HTTPX: Final = "httpx lines + json"
AIOHTTP: Final = "aiohttp + orjson"
AIOHTTP_JSON: Final = "aiohttp + json"
BARE: Final = "bare protocol"
_CLASSES: Final = {
    PRODUCT: ("product", "Product"),
    PRODUCT_ON_ASYNCIO: ("product", "ProductOnAsyncio"),
    HTTPX: ("httpx_lines", "HttpxLines"),
    AIOHTTP: ("aiohttp_bytes", "AiohttpOrjson"),
    AIOHTTP_JSON: ("aiohttp_bytes", "AiohttpJson"),
    BARE: ("bare", "Bare"),
}
CLIENTS: Final = tuple(_CLASSES)


def make(name: str, target: Target) -> StreamClient:
    """Make a client by its name."""
    module, kind = _CLASSES[name]
    return cast("StreamClient", getattr(importlib.import_module(f"benches.clients.{module}"), kind)(target))
