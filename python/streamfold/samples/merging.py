"""One checked write per call: merges a :class:`~streamfold.Generation` into a sample, ours or a trainer's."""

from __future__ import annotations

import base64
import copy
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from streamfold.samples.sample import Sample
from streamfold.samples.validation import check_expert_rows, check_lengths, check_uniform

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt

    from streamfold._core import Generation
    from streamfold._types import SampleLike

    Int32 = npt.NDArray[np.int32]

__all__ = ["check_ready", "merge", "meta_info"]

# What hosts' methods change in place, lists and counters.
_IN_PLACE: Final = ("tokens", "loss_mask", "rollout_log_probs", "weight_versions", "spec_info", "prefix_cache_info")
_SPECULATION: Final = {  # a host's name, and vLLM's, the newer one first
    "spec_accept_token_num": ("num_accepted_draft_tokens", "num_accepted_tokens"),
    "spec_draft_token_num": ("num_draft_tokens",),
    "spec_verify_ct": ("num_spec_steps", "num_verify_steps"),
}


def merge(
    sample: SampleLike,
    generation: Generation,
    args: Any = None,  # noqa: ANN401  # the host's own
    *,
    text: str | None = None,
    trainable: bool = True,
) -> None:
    """Write what one call brought to ``sample``, ours or a host's: one write, checked before it touches anything.

    The status follows from the finish reason; without one the call was cut, and the sample is ABORTED. Lists that the
    sample shares with others are replaced, not changed.

    Args:
        sample: PENDING, or ABORTED and gone on with. Its ``tokens`` are those that the call was asked with.
        generation: what the call brought.
        args: handed to the host's method; a host's sample needs ``num_layers`` and ``moe_router_topk`` of it to take
            routed experts.
        text: used where the generation has none: the engine ran without a tokenizer.
        trainable: whether the new tokens are trained on. Those that are not go without log-probabilities.

    Raises:
        ValueError: the two do not fit; nothing has been written.
    """
    check_ready(sample)
    _check_fit(sample, generation, args, trainable=trainable)
    before = sample.response_length
    as_it_was = dict(vars(sample))
    try:
        _append(sample, generation, args, text, trainable=trainable)
    except BaseException:  # a host's method may raise anything, after it has changed the sample
        vars(sample).update(as_it_was)
        raise
    if generation.finish_reason is None:
        sample.status = type(sample.status).ABORTED
    if isinstance(sample, Sample):
        moved = [(version, before + start, before + end) for version, start, end in generation.version_spans]
        sample.version_spans = _joined([*sample.version_spans, *moved])


def _append(
    sample: SampleLike,
    generation: Generation,
    args: Any,  # noqa: ANN401  # the host's own
    text: str | None,
    *,
    trainable: bool,
) -> None:
    """Call the sample's own method, on copies of the lists that it may change in place."""
    for name in _IN_PLACE:
        if (shared := getattr(sample, name, None)) is not None:
            setattr(sample, name, copy.copy(shared))
    logprobs = generation.logprobs.tolist() if trainable and generation.logprobs is not None else None
    if not len(generation.token_ids) and sample.rollout_log_probs is None and sample.response_length:
        logprobs = None  # an empty list must not stand beside tokens that have no log-probabilities
    sample.append_response_tokens(
        args,
        tokens=generation.token_ids.tolist(),
        log_probs=logprobs,
        trainable=trainable,
        meta_info={**meta_info(generation), **_arrays(sample, generation)},
        text=generation.text if generation.text is not None else text or "",
        update_terminal_info=generation.finish_reason is not None,
    )


def check_ready(sample: SampleLike) -> None:
    """Check that a sample can be gone on with, before anything is asked for it.

    Raises:
        ValueError: its status is neither PENDING nor ABORTED, or what it holds is not of one length.
    """
    if sample.status.name not in ("PENDING", "ABORTED"):
        raise ValueError(f"the sample is {sample.status.name}: only a pending or aborted one can be gone on with")
    check_lengths(sample)


def _check_fit(sample: SampleLike, generation: Generation, args: Any, *, trainable: bool) -> None:  # noqa: ANN401
    before, more = sample.response_length, len(generation.token_ids)
    if trainable:
        for what, kept, new in (
            ("log-probabilities", sample.rollout_log_probs, generation.logprobs),
            ("top-p ids", getattr(sample, "rollout_top_p_token_offsets", None), generation.top_p),
        ):
            check_uniform(what, before=before, has=kept is not None, more=more, gets=new is not None)
    experts = _whole_experts(sample, generation)
    if experts is not None and not isinstance(sample, Sample):
        shape = tuple(getattr(args, name, None) for name in ("num_layers", "moe_router_topk"))
        if shape != experts.shape[1:]:
            raise ValueError(
                f"routed experts are of shape {experts.shape}, but args tell {shape[0]} layers (num_layers) "
                f"of {shape[1]} experts (moe_router_topk)"
            )


def _whole_experts(sample: SampleLike, generation: Generation) -> Int32 | None:
    """The rows of all tokens but the last: those of the generation, or those kept and then those."""
    new = generation.routed_experts
    if new is None:
        return None
    rows = max(0, len(sample.tokens) + len(generation.token_ids) - 1)
    kept = getattr(sample, "rollout_routed_experts", None)
    check_expert_rows(new, rows, kept=0 if kept is None else len(kept))
    experts = new.astype(np.int32, copy=False)
    return experts if len(new) == rows else np.concatenate([np.asarray(kept, np.int32), experts])


def meta_info(generation: Generation) -> dict[str, Any]:
    """What the engine told of a call, under the hosts' keys and without arrays; what it did not tell is left out."""
    told = generation.meta
    meta: dict[str, Any] = {key: value for key, value in told.items() if key.startswith("spec_") and value is not None}
    meta |= _speculation(told)
    meta["completion_tokens"] = len(generation.token_ids)
    if generation.finish_reason is not None:
        reason = told.get("finish_reason")  # SGLang's is an object, vLLM's a word
        meta["finish_reason"] = {**(reason if isinstance(reason, dict) else {}), "type": generation.finish_reason}
    version = generation.version_spans[-1][0] if generation.version_spans else told.get("weight_version")
    latest = {
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "weight_version": version,
    }
    return meta | {key: value for key, value in latest.items() if value is not None}


def _speculation(told: Mapping[str, Any]) -> dict[str, int]:
    """The counts of speculative decoding that vLLM tells, or a patched build of it, under the hosts' names."""
    stats = told.get("request_spec_decode_stats")
    if not isinstance(stats, dict):
        metrics = told.get("metrics")
        stats = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(stats, dict):
        return {}
    counts = {name: next((stats[key] for key in keys if key in stats), None) for name, keys in _SPECULATION.items()}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def _arrays(sample: SampleLike, generation: Generation) -> dict[str, Any]:
    experts = _whole_experts(sample, generation)
    arrays: dict[str, Any] = {} if experts is None else {"routed_experts": experts}
    if generation.top_p is not None:
        for key, array in zip(("top_p_token_ids", "top_p_token_offsets"), generation.top_p, strict=True):
            arrays[key] = base64.b64encode(array.tobytes()).decode()
    return arrays


def _joined(spans: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Spans with equal neighbours made one."""
    joined: list[tuple[str, int, int]] = []
    for version, start, end in spans:
        if joined and joined[-1][0] == version and joined[-1][2] == start:
            joined[-1] = (version, joined[-1][1], end)
        else:
            joined.append((version, start, end))
    return joined
