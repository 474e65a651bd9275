"""The sample of miles, as ``miles.utils.types`` has it, and what the newest one adds to it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import SimpleNamespace

    import numpy as np
    import numpy.typing as npt

STATUS_OF = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}


@dataclass
class SpecInfo:
    spec_accept_token_num: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)


@dataclass
class AdapterRef:
    name: str
    slot: int


@dataclass
class Sample:
    """One prompt with its response. It has no method to append tokens: generate functions write its fields."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[Any] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: npt.NDArray[np.int32] | None = None
    rollout_indexer_topk: npt.NDArray[np.int32] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    adapter: AdapterRef | None = None
    reward_spec: Any = None
    routing_key: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def update_from_meta_info(self, args: SimpleNamespace, meta_info: Mapping[str, Any]) -> None:
        """Take what a request reports at its end; the tokens are there already."""
        if args.sglang_speculative_algorithm:
            self.spec_info.add(meta_info)
        self.prefix_cache_info.add(meta_info)
        self._add_versions(meta_info)
        self.status = self.Status[STATUS_OF[meta_info["finish_reason"]["type"]]]

    def _add_versions(self, meta_info: Mapping[str, Any]) -> None:
        if "weight_version" in meta_info:
            self.weight_versions.append(meta_info["weight_version"])

    def validate(self) -> None:
        """What miles checks before it trains on a sample."""
        for values in (self.loss_mask, self.rollout_log_probs):
            assert values is None or len(values) == self.response_length
        for rows in (self.rollout_routed_experts, self.rollout_indexer_topk):
            assert rows is None or len(rows) == len(self.tokens) - 1


@dataclass(frozen=True)
class WeightVersionSpan:
    version: str
    abs_start: int
    abs_end: int


@dataclass
class WeightVersionsPerCall:
    """The versions of one call; positions are those of the sample's tokens."""

    spans: list[WeightVersionSpan] = field(default_factory=list)


@dataclass
class SampleWithSpans(Sample):
    """The newest release's: it keeps the spans of each call, which it places by the number of log-probabilities."""

    def _add_versions(self, meta_info: Mapping[str, Any]) -> None:
        count = len(meta_info.get("output_token_logprobs") or [])
        if (told := meta_info.get("weight_versions")) is not None:
            spans = [(span["version"], span["start"], span["end"]) for span in told]
            assert all(end <= count for _, _, end in spans)
        elif meta_info.get("weight_version") is not None:
            assert count or not meta_info.get("completion_tokens")
            spans = [(meta_info["weight_version"], 0, count)]
        else:
            spans = []
        first = len(self.tokens) - count
        placed = [WeightVersionSpan(label, first + start, first + end) for label, start, end in spans if start < end]
        self.weight_versions.append(WeightVersionsPerCall(placed))

    def validate(self) -> None:
        super().validate()
        end = 0
        for call in self.weight_versions:
            for span in call.spans:
                assert end <= span.abs_start < span.abs_end <= len(self.tokens)
                end = span.abs_end
