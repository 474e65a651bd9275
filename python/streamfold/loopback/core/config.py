"""What can be set on the loopback engine."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, Protocol

from streamfold.loopback.core.models import Model
from streamfold.loopback.core.tokenizer import Tokenizer
from streamfold.loopback.sglang import wire
from streamfold.loopback.vllm import wire as vllm_wire

if TYPE_CHECKING:
    from streamfold.loopback.faults.script import Faults

__all__ = ["NEWEST", "Config", "Dialect"]

# The releases whose wire is spoken if none is named.
NEWEST = {"sglang": "0.5.23", "vllm": "0.32.0"}
_VLLM_ONLY = frozenset(
    ("enable_scale_out", "dev_mode", "track_load", "return_routed_experts", "return_sampling_mask", "max_logprobs")
)


class Dialect(Protocol):
    """How an engine writes, as far as it matters to all of them."""

    @property
    def rust(self) -> bool:
        """Whether the Rust frontend writes."""

    def error_event(self, message: str, code: int) -> bytes:
        """Write the event that tells of an error instead of tokens."""

    def http_error(self, message: str, status: int) -> dict[str, Any]:
        """Give the body of an answer with a status that is none of success."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one engine, each with a default that suits a test.

    Whom it is like: the ``engine``, "sglang" or "vllm", its ``version`` (empty: the newest that is known here) and its
    ``frontend``.

    Its model: ``seed`` stands for the weights, ``vocab_size`` is at least 512, ``stop_probability`` is that of the
    end-of-sequence token at each free choice, ``num_layers``, ``top_k`` and ``num_experts`` shape the routed experts
    (no layers: no experts to tell), ``context_length`` counts prompt and output.

    Its speed: ``token_rate`` in tokens per second and request (None: as fast as it goes), ``tokens_per_step`` as under
    speculative decoding, ``prefill_delay`` in seconds before the first token, ``max_running_requests`` at once,
    ``max_queued_requests`` waiting behind them (None: any number).

    Its wire: a ``stream_interval`` in tokens, ``skip_tokenizer_init`` (no text; vLLM's ``--tokens-only``), and
    ``shuffle_keys``, a seed (None: the engine's own order), ``incremental`` or cumulative (vLLM: always incremental,
    whatever is said here).

    vLLM's flags, for it alone: ``enable_scale_out`` (without it the token endpoint is disabled, as from 0.30, or not
    there), ``dev_mode`` (pause, abort all, weight versions), ``track_load`` (without it ``/load`` tells 0),
    ``return_routed_experts`` with every response, ``return_sampling_mask`` (as from 0.32), ``max_logprobs``.

    Its surroundings: ``model_name``, ``api_key`` asked for as a bearer token, ``base_path`` before every path,
    ``weight_version`` at the start, ``workers`` that it names as a router does (None: itself), ``leave_delay`` in
    seconds from a client's leaving to the end of its request (None: never, as in some releases), ``send_buffer`` in
    bytes that the system may hold for a slow reader (None: as it likes, which is megabytes), how many of the last HTTP
    requests it remembers, ``keep_requests``, and the ``faults`` that it has (:mod:`streamfold.loopback.faults.script`).
    """

    engine: Literal["sglang", "vllm"] = "sglang"
    version: str = ""
    frontend: Literal["python", "rust"] = "python"

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
    skip_tokenizer_init: bool = False
    shuffle_keys: int | None = None

    enable_scale_out: bool = True
    dev_mode: bool = True
    track_load: bool = False
    return_routed_experts: bool = False
    return_sampling_mask: bool = False
    max_logprobs: int = 20

    model_name: str = "streamfold-loopback"

    api_key: str | None = None
    base_path: str = ""
    weight_version: str = "default"
    workers: tuple[str, ...] | None = None
    leave_delay: float | None = 0.0
    send_buffer: int | None = None
    keep_requests: int = 256
    faults: Faults | None = None

    def __post_init__(self) -> None:
        if self.engine not in NEWEST:
            self._refuse("engine", f"one of {', '.join(NEWEST)}")
        for f in fields(self):
            if self.engine != "vllm" and f.name in _VLLM_ONLY and getattr(self, f.name) != f.default:
                self._refuse(f.name, f"left alone: {self.engine} has no such flag")
        if not self.version:
            object.__setattr__(self, "version", NEWEST[self.engine])  # the class is frozen, and still being made
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
            "max_logprobs",
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
        if self.faults is not None:
            self.faults.check(self.engine, incremental=self.incremental)
        # Built now, so that what is wrong with them is told here.
        _ = self.dialect, self.tokenizer

    def _require(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < at_least:
            self._refuse(name, f"at least {at_least}")

    def _refuse(self, name: str, wanted: str) -> None:
        msg = f"{name} must be {wanted}, got {getattr(self, name)!r}"
        raise ValueError(msg)

    @property
    def dialect(self) -> Dialect:
        """How this engine writes."""
        return self.vllm if self.engine == "vllm" else self.sglang

    @cached_property
    def sglang(self) -> wire.Dialect:
        """How this engine writes, which is SGLang."""
        return wire.Dialect(
            incremental=self.incremental, frontend=self.frontend, version=self.version, shuffle=self.shuffle_keys
        )

    @cached_property
    def vllm(self) -> vllm_wire.Dialect:
        """How this engine writes, which is vLLM."""
        return vllm_wire.Dialect(frontend=self.frontend, version=self.version, shuffle=self.shuffle_keys)

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
