"""What the wire formats of all emulated engines have in common: a version, a frontend, and how errors are written."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

from streamfold.loopback.core.versions import check_version, parse_version

__all__ = ["FRONTENDS", "Frontend", "WireFormat"]

Frontend = Literal["python", "rust"]

FRONTENDS = ("python", "rust")


@dataclass(frozen=True, kw_only=True)
class WireFormat(ABC):
    """How an engine writes its responses; each emulated engine has a subclass.

    Args:
        version: engine version to emulate.
        frontend: which of the engine's two frontends writes.
        shuffle_keys: seed; the keys of each JSON object come in a different order in each event. None: the engine's
            own order.

    Raises:
        ValueError: the version is not emulated, or the frontend is unknown.
    """

    engine: ClassVar[Literal["sglang", "vllm"]]

    version: str
    frontend: Frontend = "python"
    shuffle_keys: int | None = None

    def __post_init__(self) -> None:
        if self.frontend not in FRONTENDS:
            msg = f"frontend must be 'python' or 'rust', got {self.frontend!r}"
            raise ValueError(msg)
        self._check_version()

    def _check_version(self) -> None:
        check_version(self.engine, self.version)

    @cached_property
    def release(self) -> tuple[int, ...]:
        """The version as numbers: three for SGLang, two for vLLM."""
        return parse_version(self.engine, self.version)

    @property
    def rust(self) -> bool:
        """Whether the Rust frontend writes."""
        return self.frontend == "rust"

    @abstractmethod
    def error_event(self, message: str, code: int = 400) -> bytes:
        """Return the stream event that reports an error instead of tokens."""

    @abstractmethod
    def http_error(self, message: str, status: int) -> dict[str, Any]:
        """Return the body of a response with an HTTP error status."""
