"""What can be set on the loopback engine."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from streamfold.loopback.models import Model
from streamfold.loopback.tokenizer import Tokenizer
from streamfold.loopback.wire import Dialect

__all__ = ["Config"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one engine, each with a default that suits a test.

    Its model: ``seed`` stands for the weights, ``vocab_size`` is at least 512, ``stop_probability`` is that of the
    end-of-sequence token at each free choice, ``num_layers``, ``top_k`` and ``num_experts`` shape the routed experts
    (no layers: no experts to tell), ``context_length`` counts prompt and output.

    Its speed: ``token_rate`` in tokens per second and request (None: as fast as it goes), ``tokens_per_step`` as under
    speculative decoding, ``prefill_delay`` in seconds before the first token, ``max_running_requests`` at once,
    ``max_queued_requests`` waiting behind them (None: any number).

    Its wire: ``incremental`` or cumulative, a ``stream_interval`` in tokens, which ``frontend`` writes as in which
    ``version``, ``skip_tokenizer_init`` (no text), and ``shuffle_keys``, a seed (None: the engine's own order).

    Its surroundings: ``api_key`` asked for as a bearer token, ``base_path`` before every path, ``weight_version`` at
    the start, ``workers`` that it names as a router does (None: itself), ``leave_delay`` in seconds from a client's
    leaving to the end of its request (None: never, as in some releases), ``send_buffer`` in bytes that the system may
    hold for a slow reader (None: as it likes, which is megabytes), and how many of the last HTTP requests it
    remembers, ``keep_requests``.
    """

    seed: int = 0
    vocab_size: int = Tokenizer.SMALLEST
    stop_probability: float = 1 / 256
    num_layers: int = 4
    top_k: int = 2
    num_experts: int = 16
    context_length: int = 32_768

    token_rate: float | None = None
    tokens_per_step: int = 1
    prefill_delay: float = 0.0
    max_running_requests: int = 1024
    max_queued_requests: int | None = None

    incremental: bool = False
    stream_interval: int = 1
    frontend: Literal["python", "rust"] = "python"
    version: str = "0.5.23"
    skip_tokenizer_init: bool = False
    shuffle_keys: int | None = None

    api_key: str | None = None
    base_path: str = ""
    weight_version: str = "default"
    workers: tuple[str, ...] | None = None
    leave_delay: float | None = 0.0
    send_buffer: int | None = None
    keep_requests: int = 256

    def __post_init__(self) -> None:
        for name in ("tokens_per_step", "max_running_requests", "stream_interval", "context_length", "num_experts"):
            self._require(name, at_least=1)
        for name in (
            "num_layers",
            "top_k",
            "prefill_delay",
            "keep_requests",
            "max_queued_requests",
            "leave_delay",
            "send_buffer",
        ):
            self._require(name, at_least=0)
        if self.token_rate is not None and self.token_rate < 0:
            self._refuse("token_rate", "at least 0 (0 or None: as fast as it goes)")
        if not 0 <= self.stop_probability <= 1:
            self._refuse("stop_probability", "between 0 and 1")
        if self.top_k > self.num_experts:
            self._refuse("top_k", f"no more than num_experts, {self.num_experts}")
        if self.base_path and (not self.base_path.startswith("/") or self.base_path.endswith("/")):
            self._refuse("base_path", "empty or like /api, with a slash in front only")
        # Built now, so that what is wrong with them is told here.
        _ = self.dialect, self.tokenizer

    def _require(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < at_least:
            self._refuse(name, f"at least {at_least}")

    def _refuse(self, name: str, wanted: str) -> None:
        msg = f"{name} must be {wanted}, got {getattr(self, name)!r}"
        raise ValueError(msg)

    @cached_property
    def dialect(self) -> Dialect:
        """How this engine writes."""
        return Dialect(
            incremental=self.incremental, frontend=self.frontend, version=self.version, shuffle=self.shuffle_keys
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Give the tokenizer; it exists even where the engine itself goes without."""
        return Tokenizer(self.vocab_size)

    @cached_property
    def model(self) -> Model:
        """Give the model; it has no state, so that one serves all requests."""
        return Model(
            self.tokenizer,
            seed=self.seed,
            stop_probability=self.stop_probability,
            num_layers=self.num_layers,
            top_k=self.top_k,
            num_experts=self.num_experts,
        )
