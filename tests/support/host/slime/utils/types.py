"""The trainer's sample."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from support.host import engine
from support.host.slime.utils.misc import decode_int32_meta_array

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import SimpleNamespace

    import numpy.typing as npt


class _Counts:
    """Numbers that are added up over the calls of a sample, each read from one key of the metadata."""

    _KEYS: ClassVar[Mapping[str, str]]  # our name -> the engine's

    def add(self, meta_info: Mapping[str, Any]) -> None:
        # A key that is there with None for a value is a TypeError, in the trainer too.
        for name, key in self._KEYS.items():
            setattr(self, name, getattr(self, name) + meta_info.get(key, 0))

    def to_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self._KEYS}


@dataclass
class SpecInfo(_Counts):
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    _KEYS: ClassVar = {
        "spec_accept_token_num": "spec_accept_token_num",
        "spec_draft_token_num": "spec_draft_token_num",
        "spec_verify_ct": "spec_verify_ct",
        "completion_token_num": "completion_tokens",
    }


@dataclass
class PrefixCacheInfo(_Counts):
    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    _KEYS: ClassVar = {"cached_tokens": "cached_tokens", "total_prompt_tokens": "prompt_tokens"}


@dataclass
class Sample:
    """One prompt with its response, and all that a trainer needs of them."""

    class Status(Enum):
        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_topk_token_ids: npt.NDArray[np.int32] | None = None  # of score centering, as the next one
    rollout_topk_log_probs: npt.NDArray[np.float32] | None = None
    rollout_top_p_token_ids: npt.NDArray[np.int32] | None = None
    rollout_top_p_token_offsets: npt.NDArray[np.int32] | None = None
    rollout_top_p_log_probs: npt.NDArray[np.float32] | None = None
    rollout_routed_experts: npt.NDArray[np.int32] | None = None
    remove_sample: bool = False
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: Any = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        return {
            **self.__dict__,
            "status": self.status.value,
            "spec_info": self.spec_info.to_dict(),
            "prefix_cache_info": self.prefix_cache_info.to_dict(),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Build a sample; what is no field of it becomes an attribute."""
        values = {
            **data,
            "status": cls.Status(data["status"]),
            "spec_info": SpecInfo(**data.get("spec_info", {})),
            "prefix_cache_info": PrefixCacheInfo(**data.get("prefix_cache_info", {})),
        }
        known = {f.name for f in fields(cls)}
        sample = cls(**{key: value for key, value in values.items() if key in known})
        sample.__dict__.update(values)
        return sample

    def append_response_tokens(
        self,
        args: SimpleNamespace | None = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append the tokens of one call. Lists are extended in place, and only then are lengths compared.

        Tokens that are not trainable, those of a tool, come without logprobs and without arrays. Raises ValueError,
        after which the sample is invalid.
        """
        new = [int(token) for token in tokens or []]
        logprobs = None if log_probs is None else [float(value) for value in log_probs]
        if new and trainable != (logprobs is not None):
            msg = "logprobs are for trainable tokens, and trainable tokens need them"
            raise ValueError(msg)
        if new and not trainable:
            logprobs = [0.0] * len(new)
        self._extend(new, logprobs, text or "", trainable=trainable)
        meta = meta_info or {}
        self._append_top_p(new, meta, trainable=trainable)
        self._set_routed_experts(args, meta)
        if update_terminal_info and meta.get("finish_reason"):
            self._set_terminal_info(args, meta)
        self._check_lengths()

    def _extend(self, new: list[int], logprobs: list[float] | None, text: str, *, trainable: bool) -> None:
        before = self.response_length
        self.response += text
        if new:
            self.tokens += new
            self.response_length += len(new)
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            self.loss_mask += [int(trainable)] * len(new)
        if logprobs is not None:
            if self.rollout_log_probs is None:
                if before and trainable:
                    msg = f"the {before} tokens before have no logprobs"
                    raise ValueError(msg)
                self.rollout_log_probs = [0.0] * before
            self.rollout_log_probs += logprobs

    def _append_top_p(self, new: list[int], meta: Mapping[str, Any], *, trainable: bool) -> None:
        ids = decode_int32_meta_array(meta, "top_p_token_ids", "top_p_kept_token_ids")
        offsets = decode_int32_meta_array(meta, "top_p_token_offsets", "top_p_kept_token_offsets")
        if not new:
            return
        if ids is None and offsets is None:
            if trainable or self.rollout_top_p_token_offsets is None:
                return
            ids, offsets = np.zeros(0, np.int32), np.zeros(len(new) + 1, np.int32)
        if ids is None or offsets is None:
            msg = "top-p ids and offsets come together"
            raise ValueError(msg)
        if len(offsets) != len(new) + 1 or offsets[0] != 0 or offsets[-1] != len(ids):
            msg = f"{len(offsets)} top-p offsets do not fit {len(new)} tokens with {len(ids)} ids"
            raise ValueError(msg)
        if self.rollout_top_p_token_ids is None or self.rollout_top_p_token_offsets is None:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = ids, offsets
        else:
            base = self.rollout_top_p_token_offsets
            self.rollout_top_p_token_ids = np.concatenate([self.rollout_top_p_token_ids, ids])
            self.rollout_top_p_token_offsets = np.concatenate([base, offsets[1:] + base[-1]])

    def _set_routed_experts(self, args: SimpleNamespace | None, meta: Mapping[str, Any]) -> None:
        flat = decode_int32_meta_array(meta, "routed_experts")
        if flat is None:
            return
        if args is None:
            msg = "routed experts cannot be shaped without args"
            raise ValueError(msg)
        start = int(meta.get("routed_experts_start_len") or 0)
        shape = (max(0, len(self.tokens) - 1 - start), args.num_layers, args.moe_router_topk)
        if start < 0 or flat.size != shape[0] * shape[1] * shape[2]:
            msg = f"{flat.size} routed experts from {start} on do not fit {shape}, of {len(self.tokens)} tokens"
            raise ValueError(msg)
        rows = flat.reshape(shape)
        if start:
            kept = self.rollout_routed_experts
            if kept is None or len(kept) < start:
                msg = f"routed experts from {start} on, but those before are missing"
                raise ValueError(msg)
            rows = np.concatenate([kept[:start], rows])
        self.rollout_routed_experts = rows

    def _set_terminal_info(self, args: SimpleNamespace | None, meta: Mapping[str, Any]) -> None:
        if getattr(args, engine.current().speculative, None):
            self.spec_info.add(meta)
        self.prefix_cache_info.add(meta)
        if "weight_version" in meta:
            self.weight_versions.append(meta["weight_version"])
        match meta["finish_reason"]["type"]:
            case "stop":
                self.status = self.Status.COMPLETED
            case "length":
                self.status = self.Status.TRUNCATED
            case "abort":
                self.status = self.Status.ABORTED

    def _check_lengths(self) -> None:
        names = ("loss_mask", "rollout_log_probs", "rollout_topk_token_ids", "rollout_topk_log_probs")
        found = {name: getattr(self, name) for name in names}
        lengths = {name: len(values) for name, values in found.items() if values is not None}
        if self.rollout_top_p_token_offsets is not None:
            lengths["rollout_top_p_token_offsets, less one,"] = len(self.rollout_top_p_token_offsets) - 1
        for name, length in lengths.items():
            if length != self.response_length:
                msg = f"{name} number {length} for a response of {self.response_length} tokens"
                raise ValueError(msg)
