"""The training sample: one prompt with its response, log-probabilities, loss mask, routed experts and reward.

:class:`Sample` has the fields and semantics of the samples of slime and vime, so that one rollout loop serves all of
them. Write to it with :func:`~streamfold.merge`.
"""

from __future__ import annotations

import base64
import reprlib
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamfold.samples.experts import expert_array, join_experts, kept_rows, padded_rows, signed_experts
from streamfold.samples.log_probs import log_probs_after
from streamfold.samples.observation import append_observation
from streamfold.samples.validation import (
    check_expert_rows,
    check_lengths,
    check_offsets,
    check_uniform,
    generated_before,
)
from streamfold.samples.versions import cover, versions_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from streamfold.engines.base import TokenIds
    from streamfold.samples.experts import ExpertIds

    Int32 = npt.NDArray[np.int32]

__all__ = ["Sample"]


_BESIDE_TOKENS: Final = (
    "loss_mask", "rollout_log_probs", "rollout_top_p_token_ids", "rollout_top_p_token_offsets",
    "rollout_routed_experts",
)  # fmt: skip
_NEXT_LINE: Final = ",\n       "
_SHORT: Final = reprlib.Repr()
_SHORT.maxstring = 80
_STATUS_OF: Final = {"stop": "COMPLETED", "length": "TRUNCATED", "abort": "ABORTED"}


@dataclass(eq=False)
class Sample:
    """A prompt and its response, finished or partial.

    Samples are compared by identity, and hashable: two samples of one prompt are two samples.

    Attributes:
        group_index: number of the prompt.
        index: number of the sample among those of all prompts.
        prompt: text, or chat messages.
        tokens: ids of the prompt, then of the response.
        multimodal_inputs: inputs other than text, as ``{"images": [...]}``; each image a str as SGLang takes it (URL,
            path, base64, data URI), the bytes of a file, or an image of Pillow.
        response: text of the response.
        response_length: number of response tokens: the last ones of ``tokens``.
        label: the expected answer, for the reward function.
        reward: what the reward function returned.
        loss_mask: ``[response_length]``, 1 for each token that is trained on, otherwise 0; None: all 1.
        rollout_log_probs: ``[response_length]``; None: not requested.
        rollout_top_p_token_ids: int32 ``[m]``, the ids that top-p sampling kept, token after token.
        rollout_top_p_token_offsets: int32 ``[response_length + 1]``, where the ids of each token start.
        rollout_routed_experts: int32, uint8 or uint16, as the engine sent them: ``[len(tokens) - 1, num_layers,
            top_k]``. Every slot of a padded row is -1, in the unsigned types 255 or 65535.
        weight_versions: the weight versions of each call that the engine finished, in order.
        version_spans: ``(version, start, end)`` over the response tokens, half-open, in order. They cover all that
            were generated; the version is None where the engine reported none.
        prompt_tokens: number of prompt tokens that the engine reported, summed over the calls.
        cached_tokens: those of them that were in its prefix cache, summed over the calls.
        status: PENDING until a call is written.
        metadata: notes of any kind. The keys of streamfold itself are listed in ``streamfold/samples/metadata.py``.
        generate_function_path: a generate function for this sample alone.
        session_id: by which a router keeps the calls of one conversation on one worker.
        remove_sample: whether to leave it out of training.
    """

    class Status(str, Enum):
        """PENDING, finished (COMPLETED by a stop, TRUNCATED by length), partial (ABORTED), or FAILED in a generator."""

        PENDING = "pending"
        COMPLETED = "completed"
        TRUNCATED = "truncated"
        ABORTED = "aborted"
        FAILED = "failed"

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    rollout_top_p_token_ids: Int32 | None = None
    rollout_top_p_token_offsets: Int32 | None = None
    rollout_routed_experts: ExpertIds | None = None
    weight_versions: list[str] = field(default_factory=list)
    version_spans: list[tuple[str | None, int, int]] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    session_id: str | None = None
    remove_sample: bool = False

    def __repr__(self) -> str:
        """At most three lines for a sample of any size: of lists and arrays only the shapes."""
        prompt, reward = len(self.tokens) - self.response_length, " ".join(_SHORT.repr(self.reward).split())
        shapes = {name: _shape_of(values) for name in _BESIDE_TOKENS if (values := getattr(self, name)) is not None}
        tokens = f"{prompt} prompt + {self.response_length} response"
        lines = [
            f"index={self.index}, status={self.status.name}, tokens={tokens}, reward={reward}",
            ", ".join(f"{name}={shape}" for name, shape in shapes.items()),
            f"response={_SHORT.repr(self.response)}",
        ]
        return f"{type(self).__name__}({_NEXT_LINE.join(line for line in lines if line)})"

    def append_response_tokens(
        self,
        args: Any = None,  # noqa: ANN401, ARG002  # a trainer's settings
        *,
        tokens: Sequence[int] = (),
        log_probs: Sequence[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Extend the response by what one call has generated, or by a tool's answer; atomically.

        Args:
            args: ignored; trainers pass their settings.
            tokens: ``[n]``, the new ids.
            log_probs: ``[n]``.
            trainable: whether the new tokens are trained on. Those that are not, a tool's, may have neither
                log-probabilities nor top-p ids: behind tokens that have them they get 0.0 and no ids.
            meta_info: what else the engine reported: ``routed_experts`` of all tokens but the last, without the first
                ``routed_experts_start_len`` rows, which stay as they are; ``top_p_token_ids`` and
                ``top_p_token_offsets`` of the new ones, ``finish_reason``, ``weight_version``, ``version_spans`` over
                the new tokens, counts. Without spans the versions of tokens that are trained on count as not known.
            text: of the new tokens.
            update_terminal_info: whether a ``finish_reason`` in ``meta_info`` decides the status.

        Raises:
            ValueError: lengths or shapes disagree; the message names both numbers. The sample is unchanged.
        """
        meta = meta_info or {}
        self.check()
        before, more = self.response_length, len(tokens)
        all_log_probs = log_probs_after(self, log_probs, more, trainable=trainable)
        top_p = _top_p_after(self, meta, more, trainable=trainable)
        experts = _experts_after(self, meta, more)
        mask = self.loss_mask if self.loss_mask is not None else [1] * before
        reason = meta.get("finish_reason") if update_terminal_info else None
        status = None if reason is None else _status_of(reason)

        self.tokens = [*self.tokens, *tokens]
        self.response += text or ""
        self.response_length = before + more
        self.loss_mask = [*mask, *[int(trainable)] * more]
        self.rollout_log_probs = all_log_probs
        self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = top_p
        self.rollout_routed_experts = experts
        spans = meta.get("version_spans", ())
        moved = [(version, before + start, before + end) for version, start, end in spans]
        self.version_spans = cover([*self.version_spans, *moved], self.loss_mask)
        if status is None:
            return
        self.status = self.Status[status]
        versions = versions_of(spans) or ([meta["weight_version"]] if "weight_version" in meta else [])
        self.weight_versions = [*self.weight_versions, *versions]
        self.prompt_tokens += meta.get("prompt_tokens", 0)
        self.cached_tokens += meta.get("cached_tokens", 0)

    def append_observation(self, token_ids: TokenIds, text: str | None = None) -> bool:
        """Append a tool's answer: see :func:`streamfold.append_observation`."""
        return append_observation(self, token_ids, text)

    def check(self) -> None:
        """Check that all lengths agree with the number of tokens.

        Raises:
            ValueError: two of them disagree; the message names both.
        """
        check_lengths(self)

    @property
    def padded_rows(self) -> int:
        """Number of rows of routed experts that the engine padded: it has no experts for their tokens."""
        experts = self.rollout_routed_experts
        return 0 if experts is None else int(padded_rows(experts).sum())

    def to_dict(self) -> dict[str, Any]:
        """Give every field as JSON has it: arrays as lists, the status as its value; padded rows of experts are -1."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        if self.rollout_routed_experts is not None:
            values["rollout_routed_experts"] = signed_experts(self.rollout_routed_experts)
        plain = {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}
        return {**plain, "status": self.status.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """Make a sample of the result of :meth:`to_dict`.

        Raises:
            ValueError: a key is not a field, the status is unknown, or lengths disagree.
        """
        known = {item.name for item in fields(cls)}
        if unknown := sorted(data.keys() - known):
            raise ValueError(f"a sample has no {', '.join(unknown)}")
        values = dict(data)
        for name in ("rollout_top_p_token_ids", "rollout_top_p_token_offsets"):
            if values.get(name) is not None:
                values[name] = np.asarray(values[name], np.int32)
        if values.get("rollout_routed_experts") is not None:
            values["rollout_routed_experts"] = expert_array(values["rollout_routed_experts"])
        values["version_spans"] = [(version, start, end) for version, start, end in values.get("version_spans", [])]
        sample = cls(**{**values, "status": cls.Status(values.get("status", "pending"))})
        sample.check()
        return sample


def _shape_of(values: Any) -> list[int]:  # noqa: ANN401  # a list or an array
    return list(getattr(values, "shape", None) or [len(values)])


def _status_of(reason: Any) -> str:  # noqa: ANN401  # SGLang's is an object, a host's may be a word
    kind = reason.get("type") if isinstance(reason, dict) else reason
    if kind not in _STATUS_OF:
        raise ValueError(f"the finish reason is {reason!r}: its type must be one of {', '.join(_STATUS_OF)}")
    return _STATUS_OF[kind]


def _top_p_after(
    sample: Sample, meta: Mapping[str, Any], more: int, *, trainable: bool
) -> tuple[Int32 | None, Int32 | None]:
    kept_ids, kept = sample.rollout_top_p_token_ids, sample.rollout_top_p_token_offsets
    if not more:
        return kept_ids, kept
    ids = _int32(meta.get("top_p_token_ids", meta.get("top_p_kept_token_ids")))
    offsets = _int32(meta.get("top_p_token_offsets", meta.get("top_p_kept_token_offsets")))
    if (ids is None) != (offsets is None):
        raise ValueError("top-p ids and offsets go together: one of the two is missing")
    if ids is None and not trainable and kept is not None:
        ids, offsets = np.empty(0, np.int32), np.zeros(more + 1, np.int32)
    before = generated_before(sample)
    has, gets = kept is not None, offsets is not None
    check_uniform("top-p ids", before=before, has=has, more=more, gets=gets)
    if ids is None or offsets is None:
        return None, None
    check_offsets("top_p_token_offsets", offsets, len(ids), more)
    if kept_ids is None or kept is None:
        return ids, np.concatenate([np.zeros(sample.response_length, np.int32), offsets])
    return np.concatenate([kept_ids, ids]), np.concatenate([kept, offsets[1:] + kept[-1]])


def _experts_after(sample: Sample, meta: Mapping[str, Any], more: int) -> ExpertIds | None:
    kept = sample.rollout_routed_experts
    if (given := meta.get("routed_experts")) is None:
        return kept
    experts, start = expert_array(given), meta.get("routed_experts_start_len") or 0
    if start < 0 or start > kept_rows(sample):
        raise ValueError(f"routed_experts_start_len is {start}, but the sample has {kept_rows(sample)} rows of experts")
    check_expert_rows(experts, max(0, len(sample.tokens) + more - 1) - start)
    return experts if not start or kept is None else join_experts(kept[:start], experts)


def _int32(value: Any) -> Int32 | None:  # noqa: ANN401  # base64, bytes, a list or an array
    if value is None:
        return None
    if isinstance(value, str):
        value = base64.b64decode(value, validate=True)
    # A bytearray, so that the array is writable.
    return np.frombuffer(bytearray(value), np.int32) if isinstance(value, bytes) else np.array(value, np.int32)
