"""Settings of the loopback engine: which engine it emulates, its mock model, its speed, its wire format."""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Protocol

from streamfold.loopback.core.model import MockModel
from streamfold.loopback.core.tokenizer import MockTokenizer
from streamfold.loopback.core.versions import NEWEST, check_version, parse_version
from streamfold.loopback.core.wire_format import FRONTENDS, Frontend

if TYPE_CHECKING:
    from streamfold.loopback.core.causal_lm import CausalLM, Tokenizer
    from streamfold.loopback.core.request_params import SamplingParams

__all__ = ["Config", "EngineName", "FaultScript", "LogprobsMode"]

EngineName = Literal["sglang", "vllm"]
LogprobsMode = Literal["raw_logprobs", "processed_logprobs"]

_VLLM_ONLY = frozenset(
    (
        *("enable_scale_out", "dev_mode", "track_load", "log_stats", "api_servers"),
        *("return_routed_experts", "return_sampling_mask", "max_logprobs", "logprobs_mode"),
    )
)
_DIRECTORY = "hf:"  # of a model: the prefix of its path
_AT_LEAST_1 = (
    "tokens_per_step",
    "max_running_requests",
    "stream_interval",
    "context_length",
    "num_experts",
    "dp_size",
    "api_servers",
)
_AT_LEAST_0 = (
    *("num_layers", "top_k", "prefill_delay", "keep_requests", "max_queued_requests", "leave_delay", "send_buffer"),
    "max_logprobs",
)


class FaultScript(Protocol):
    """A script of faults, :class:`streamfold.loopback.Faults`, as the configuration sees it."""

    def check(self, engine: EngineName, *, incremental: bool) -> None:
        """Raise ValueError if a rule is impossible in this engine and stream mode."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of one loopback engine, each with a default that suits a test.

    Emulation: ``engine`` is "sglang" or "vllm", ``version`` the engine version to emulate (empty: the newest that is
    supported here), ``frontend`` which of the engine's frontends answers.

    Model: ``model`` is "mock", or "hf:" and the path of a directory with a causal language model as transformers saves
    it, which needs the extra ``hf``; ``batch_invariant``, for such a model, computes each request alone, so that its
    numbers do not depend on the requests beside it. Its vocabulary, the shape of its routed experts and its longest
    context replace what is said of them below.

    Mock model: ``seed``, in place of weights; ``sampling_seed``, of the engine's generator, which gives each request
    that names no seed one of its own (None: all of them get ``seed``, so that one that is aborted and resumed without a
    seed equals the undisturbed one); ``vocab_size``, at least 512; ``stop_probability``, the probability of the
    end-of-sequence token at each free choice; ``piece_probability``, that of a piece of text that is hard to handle,
    such as CJK characters, instead of a word; ``num_layers``, ``top_k`` and ``num_experts``, the shape of the routed
    experts (0 layers: none are returned); ``context_length``, the limit for prompt plus output in tokens; ``dp_size``,
    how many data-parallel ranks a request may name.

    Speed: ``token_rate`` in tokens per second and request (None: unlimited), ``tokens_per_step`` as with speculative
    decoding, ``prefill_delay`` in seconds before the first token, ``max_running_requests`` in the batch,
    ``max_queued_requests`` in the queue behind it (None: unlimited).

    Wire format: ``incremental`` streams instead of cumulative ones (vLLM: always incremental, this is ignored),
    ``stream_interval`` in tokens, ``skip_tokenizer_init`` (no text; vLLM's ``--tokens-only``), ``shuffle_keys``, a seed
    (None: the engine's own order of keys).

    vLLM's flags, refused for SGLang: ``enable_scale_out`` (without it the token endpoint is disabled, as from 0.30, or
    missing), ``dev_mode`` (pause, abort all, weight versions), ``track_load`` (without it ``/load`` reports 0),
    ``log_stats`` (without it ``/metrics`` has no gauges), ``api_servers``, the number of processes that share the
    connections (an abort ends only requests of the process that gets it),
    ``return_routed_experts`` with every response, ``return_sampling_mask`` (as from 0.32), ``max_logprobs``,
    ``logprobs_mode``, "raw_logprobs" (of the model itself) or "processed_logprobs" (behind temperature and penalties,
    renormalised over the ids that could be drawn).

    Server: ``model_name``; ``api_key``, required as a bearer token; ``base_path`` in front of every path;
    ``weight_version`` at the start; ``workers``, the URLs that ``/workers`` lists (None: itself); ``leave_delay`` in
    seconds from a client's disconnect to the end of its request (None: never, as in some releases); ``send_buffer``,
    the kernel's send buffer in bytes (None: the system's default, megabytes); ``keep_requests``, how many of the last
    HTTP requests are kept; ``faults``, the script of faults (:mod:`streamfold.loopback.faults`).

    Raises:
        ValueError: a setting is out of range, or does not fit the engine or the model.
        OSError: the model's directory cannot be read.
        ImportError: a real model needs an extra; the message names it.
    """

    engine: EngineName = "sglang"
    version: str = ""
    frontend: Frontend = "python"

    model: str = "mock"
    batch_invariant: bool = False
    seed: int = 0
    sampling_seed: int | None = 0
    vocab_size: int = MockTokenizer.SMALLEST
    stop_probability: float = 1 / 256
    piece_probability: float = 1 / 8
    num_layers: int = 4
    top_k: int = 2
    num_experts: int = 16
    context_length: int = 32_768
    dp_size: int = 1

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
    log_stats: bool = True
    api_servers: int = 1
    return_routed_experts: bool = False
    return_sampling_mask: bool = False
    max_logprobs: int = 20
    logprobs_mode: LogprobsMode = "raw_logprobs"

    model_name: str = "streamfold-loopback"

    api_key: str | None = None
    base_path: str = ""
    weight_version: str = "default"
    workers: tuple[str, ...] | None = None
    leave_delay: float | None = 0.0
    send_buffer: int | None = None
    keep_requests: int = 256
    faults: FaultScript | None = None

    def __post_init__(self) -> None:
        self._check_emulation()
        self._take_shape()
        for name in _AT_LEAST_1:
            self._require(name, at_least=1)
        for name in _AT_LEAST_0:
            self._require(name, at_least=0)
        if self.token_rate is not None and self.token_rate < 0:
            self._refuse("token_rate", "at least 0 (0 or None: unlimited)")
        for name in ("stop_probability", "piece_probability"):
            if not 0 <= getattr(self, name) <= 1:
                self._refuse(name, "between 0 and 1")
        if self.top_k > self.num_experts:
            self._refuse("top_k", f"at most num_experts, {self.num_experts}")
        if self.base_path and (not self.base_path.startswith("/") or self.base_path.endswith("/")):
            self._refuse("base_path", "empty or like /api: a slash in front, none at the end")
        if self.faults is not None:
            self.faults.check(self.engine, incremental=self.incremental)
        _ = self.tokenizer  # built now, so that a vocabulary that is too small is refused here

    def _check_emulation(self) -> None:
        if self.engine not in NEWEST:
            self._refuse("engine", f"one of {', '.join(NEWEST)}")
        for f in fields(self):
            if self.engine != "vllm" and f.name in _VLLM_ONLY and getattr(self, f.name) != f.default:
                self._refuse(f.name, f"left out: {self.engine} has no such flag")
        if not self.version:
            object.__setattr__(self, "version", NEWEST[self.engine])  # the class is frozen, and still being made
        if self.frontend not in FRONTENDS:
            self._refuse("frontend", "'python' or 'rust'")
        check_version(self.engine, self.version, incremental=self.incremental)

    def _take_shape(self) -> None:
        """Take vocabulary, routed experts and context length of a model in a directory."""
        path = self.model_path
        if path is None:
            if self.model != "mock":
                self._refuse("model", '"mock" or "hf:" and the path of a directory')
            if self.batch_invariant:
                self._refuse("batch_invariant", "left out: it is for a model of a directory")
            return
        from streamfold.loopback.core.hf.loading import read_shape  # noqa: PLC0415  # an extra that only it needs

        shape = read_shape(path)
        found = {name: getattr(shape, name) for name in ("vocab_size", "num_layers", "top_k", "num_experts")}
        for name, value in found.items():
            if getattr(self, name) not in {getattr(type(self), name), value}:
                self._refuse(name, f"left out: the model has {value}")
        found["context_length"] = min(self.context_length, shape.context_length)
        if self.model_name == type(self).model_name:
            found["model_name"] = path
        for name, value in found.items():
            object.__setattr__(self, name, value)  # the class is frozen, and still being made

    def _require(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < at_least:
            self._refuse(name, f"at least {at_least}")

    def _refuse(self, name: str, wanted: str) -> None:
        msg = f"{name} must be {wanted}, got {getattr(self, name)!r}"
        raise ValueError(msg)

    def seed_of(self, sampling: SamplingParams) -> int | None:
        """The seed of a request; None: the engine draws one when it accepts it."""
        if sampling.sampling_seed is not None:
            return sampling.sampling_seed
        return self.seed if self.sampling_seed is None else None

    @cached_property
    def release(self) -> tuple[int, ...]:
        """The emulated version as numbers: three for SGLang, two for vLLM."""
        return parse_version(self.engine, self.version)

    @property
    def rust(self) -> bool:
        """Whether the engine's Rust frontend answers."""
        return self.frontend == "rust"

    @property
    def model_path(self) -> str | None:
        """The directory of the model; None for the mock one."""
        return self.model.removeprefix(_DIRECTORY) if self.model.startswith(_DIRECTORY) else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; it exists with ``skip_tokenizer_init`` too."""
        path = self.model_path
        if path is None:
            return MockTokenizer(self.vocab_size)
        from streamfold.loopback.core.hf.loading import load_tokenizer  # noqa: PLC0415  # as above

        return load_tokenizer(path)

    def load_model(self) -> CausalLM:
        """Make the model anew, with the weights of the start: each engine has one of its own."""
        path = self.model_path
        if path is not None:
            from streamfold.loopback.core.hf.loading import load_model  # noqa: PLC0415  # as above

            return load_model(path, batch_invariant=self.batch_invariant)
        return MockModel(
            MockTokenizer(self.vocab_size),
            seed=self.seed,
            stop_probability=self.stop_probability,
            piece_probability=self.piece_probability,
            num_layers=self.num_layers,
            top_k=self.top_k,
            num_experts=self.num_experts,
        )
