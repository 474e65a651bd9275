"""JSON responses, and the list of workers that a router reports."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson
from starlette.responses import Response

if TYPE_CHECKING:
    from starlette.requests import Request as HttpRequest

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.scheduler import Scheduler

__all__ = ["OrjsonResponse", "worker_list"]


class OrjsonResponse(Response):
    """A JSON response without spaces, as the engines write it."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:  # noqa: ANN401  # any JSON
        """Encode the body."""
        return orjson.dumps(content)


def worker_list(request: HttpRequest, config: Config, scheduler: Scheduler) -> dict[str, Any]:
    """Return what a router in front of this engine, or of the configured ``workers``, reports at ``/workers``."""
    itself = str(request.base_url).rstrip("/") + config.base_path
    urls = (itself,) if config.workers is None else config.workers
    workers = [
        {
            "id": f"worker-{i}",
            "url": url,
            "model_id": config.model_name,
            "worker_type": "regular",
            "is_healthy": True,
            "load": scheduler.running + scheduler.waiting if url == itself else 0,
            "connection_mode": "http",
        }
        for i, url in enumerate(urls)
    ]
    return {"workers": workers, "total": len(workers), "stats": {"regular_count": len(workers)}}
