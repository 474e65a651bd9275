"""One loopback engine: the emulated engine, its scheduler, its faults, and the HTTP requests that it received."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.core.scheduler import Scheduler
from streamfold.loopback.faults.injector import Injector
from streamfold.loopback.faults.script import Faults
from streamfold.loopback.sglang.emulation import SGLANG
from streamfold.loopback.vllm.emulation import VLLM

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.reply import Reply
    from streamfold.loopback.core.wire_format import WireFormat
    from streamfold.loopback.faults.fault import Listener
    from streamfold.loopback.http.emulation import Emulation

__all__ = ["Engine", "SeenRequest", "undisturbed"]

# The engines that can be emulated, by ``Config.engine``.
EMULATIONS = {"sglang": SGLANG, "vllm": VLLM}


@dataclass
class SeenRequest:
    """One HTTP request as it was received. Header names are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]
    parts: list[bytes] = field(default_factory=list)

    @property
    def body(self) -> bytes:
        """The part of the body that was read so far."""
        return b"".join(self.parts)

    def json(self) -> Any:  # noqa: ANN401  # any JSON
        """Parse the body as JSON; None if it is empty."""
        body = self.body
        return orjson.loads(body) if body else None


@dataclass
class Engine:
    """The state behind one application, see :func:`streamfold.loopback.create_app`."""

    config: Config
    scheduler: Scheduler = field(init=False)
    seen: deque[SeenRequest] = field(init=False)
    faults: Injector = field(init=False)
    emulation: Emulation = field(init=False)
    wire_format: WireFormat = field(init=False)
    listener: Listener | None = None

    def __post_init__(self) -> None:
        config = self.config
        self.scheduler = Scheduler(config)
        self.seen = deque(maxlen=config.keep_requests)
        if config.faults is not None and not isinstance(config.faults, Faults):
            msg = f"faults must be a Faults or None, got {config.faults!r}"
            raise TypeError(msg)
        self.faults = Injector(config.faults, config.engine)
        self.emulation = EMULATIONS[config.engine]
        self.wire_format = self.emulation.wire_format(config)

    @property
    def server(self) -> Listener:
        """The server around it.

        Raises:
            RuntimeError: the application runs in another server than Loopback's.
        """
        if self.listener is None:
            msg = "this fault needs the server itself: run the engine with Loopback or serve()"
            raise RuntimeError(msg)
        return self.listener


def undisturbed(
    config: Config, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
) -> Reply:
    """Generate without HTTP, clock or faults: any aborted and resumed generation must equal the result.

    It has to be sampled with one seed that is known: that of ``sampling_params``, the engine's with
    ``Config(sampling_seed=None)``, or none if decoding is greedy.

    Args:
        config: configuration of the engine.
        input_ids: the prompt.
        sampling_params: named as in the engine's API.
        **body: other keys of the request's body.

    Raises:
        InvalidRequest: the engine would reject the request.
        MalformedBody: vLLM's HTTP layer would reject it.
        ValueError: the seed is not known.
    """
    return EMULATIONS[config.engine].undisturbed(config, input_ids, sampling_params, **body)
