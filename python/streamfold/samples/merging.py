"""Merge a :class:`~streamfold.Generation` into a sample, ours or a trainer's: one checked, atomic write per call."""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any, Final

from streamfold.samples.appending import append_of
from streamfold.samples.atomic import all_or_nothing
from streamfold.samples.experts import adds_rows, join_experts, kept_experts, kept_rows, signed_experts
from streamfold.samples.indexer import indexer_rows
from streamfold.samples.metadata import LastWrite
from streamfold.samples.sample import Sample
from streamfold.samples.validation import check_expert_rows, check_lengths, check_uniform, generated_before
from streamfold.samples.versions import versions_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold._core import Generation
    from streamfold._types import SampleLike

__all__ = ["check_ready", "merge", "meta_info"]

_SPECULATION: Final = {  # a host's name of a count, and vLLM's names of it, the newer one first
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
    """Append what one call has generated to ``sample``, ours or a host's; checked before anything is changed.

    The status follows from the finish reason. Without one the call was aborted, and the sample is ABORTED. Lists that
    the sample shares with others are replaced, not changed.

    Args:
        sample: PENDING, or ABORTED and resumed. Its ``tokens`` are those that the call was sent; if it has none, the
            generation's ``prompt_token_ids`` become its prompt.
        generation: what the call has generated.
        args: the settings that a host's method needs: ``num_layers`` and ``moe_router_topk`` with routed experts.
        text: used if the generation has none, because the engine runs without a tokenizer.
        trainable: whether the new tokens are trained on. Those that are not are written without log-probabilities.

    Raises:
        ValueError: the generation does not fit the sample, which is unchanged.
    """
    check_ready(sample)
    with all_or_nothing(sample):
        if not sample.tokens and generation.prompt_token_ids is not None:  # the prompt was sent as text
            sample.tokens = generation.prompt_token_ids.tolist()
        _check_fit(sample, generation, args, trainable=trainable)
        _append(sample, generation, args, text, trainable=trainable)
    if generation.finish_reason is None:
        sample.status = type(sample.status).ABORTED
    if trainable and len(generation.token_ids) and (written := LastWrite.of(sample)) is not None:
        LastWrite.save(sample, limit=written.limit)


def _append(
    sample: SampleLike,
    generation: Generation,
    args: Any,  # noqa: ANN401  # the host's own
    text: str | None,
    *,
    trainable: bool,
) -> None:
    """Call the sample's own method."""
    logprobs = generation.logprobs.tolist() if trainable and generation.logprobs is not None else None
    if not len(generation.token_ids) and sample.rollout_log_probs is None and sample.response_length:
        logprobs = None  # an empty list must not stand beside tokens that have no log-probabilities
    append_of(sample)(
        args,
        tokens=generation.token_ids.tolist(),
        log_probs=logprobs,
        trainable=trainable,
        meta_info={**meta_info(generation), **_beside_tokens(sample, generation, args)},
        text=generation.text if generation.text is not None else text or "",
        update_terminal_info=generation.finish_reason is not None,
    )


def check_ready(sample: SampleLike) -> None:
    """Check, before anything is requested, that a sample can be written.

    Raises:
        ValueError: its status is neither PENDING nor ABORTED, or its lengths disagree.
    """
    if sample.status.name not in ("PENDING", "ABORTED"):
        raise ValueError(f"the sample is {sample.status.name}: only PENDING and ABORTED ones can be written")
    check_lengths(sample)


def _check_fit(sample: SampleLike, generation: Generation, args: Any, *, trainable: bool) -> None:  # noqa: ANN401
    before = generated_before(sample)
    more = len(generation.token_ids)
    if trainable:
        for what, kept, new in (
            ("log-probabilities", sample.rollout_log_probs, generation.logprobs),
            ("top-p ids", getattr(sample, "rollout_top_p_token_offsets", None), generation.top_p),
        ):
            check_uniform(what, before=before, has=kept is not None, more=more, gets=new is not None)
    experts = generation.routed_experts
    if experts is None:
        return
    check_expert_rows(experts, _rows_after(sample, generation), kept=kept_rows(sample))
    if not isinstance(sample, Sample):
        shape = tuple(getattr(args, name, None) for name in ("num_layers", "moe_router_topk"))
        if shape != experts.shape[1:]:
            raise ValueError(
                f"routed experts are of shape {experts.shape}, but args have {shape[0]} layers (num_layers) "
                f"of {shape[1]} experts (moe_router_topk)"
            )


def _rows_after(sample: SampleLike, generation: Generation) -> int:
    return max(0, len(sample.tokens) + len(generation.token_ids) - 1)


def _experts(sample: SampleLike, generation: Generation) -> dict[str, Any]:
    """The rows of routed experts that a call adds to the sample's, which stay as they are.

    Hosts' samples get int32, their own type of them, and older ones all rows; ours keep the type on the wire.
    """
    new = generation.routed_experts
    if new is None:
        return {}
    kept = kept_rows(sample)
    if len(new) == _rows_after(sample, generation):  # the engine has sent all rows: those kept are of older weights
        new = new[kept:]
    if not kept:
        return {"routed_experts": new if isinstance(sample, Sample) else signed_experts(new)}
    if not len(new):
        return {}
    if isinstance(sample, Sample):
        return {"routed_experts": new, "routed_experts_start_len": kept}
    new = signed_experts(new)
    if adds_rows(type(sample)):
        return {"routed_experts": new, "routed_experts_start_len": kept}
    return {"routed_experts": join_experts(kept_experts(sample), new)}


def meta_info(generation: Generation) -> dict[str, Any]:
    """Give what the engine reported with a call, without arrays, under the hosts' keys; absent values have no key."""
    reported = generation.meta
    meta: dict[str, Any] = {
        key: value for key, value in reported.items() if key.startswith("spec_") and value is not None
    }
    meta |= _speculation(reported)
    meta["completion_tokens"] = len(generation.token_ids)
    if generation.finish_reason is not None:
        reason = reported.get("finish_reason")  # SGLang's is an object, vLLM's a word
        meta["finish_reason"] = {**(reason if isinstance(reason, dict) else {}), "type": generation.finish_reason}
    versions = versions_of(generation.version_spans)
    latest = {
        "prompt_tokens": generation.prompt_tokens,
        "cached_tokens": generation.cached_tokens,
        "weight_version": versions[-1] if versions else reported.get("weight_version"),
    }
    return meta | {key: value for key, value in latest.items() if value is not None}


def _speculation(reported: Mapping[str, Any]) -> dict[str, int]:
    """The counts of speculative decoding that vLLM, or a patched build of it, reports, under the hosts' names."""
    stats = reported.get("request_spec_decode_stats")
    if not isinstance(stats, dict):
        metrics = reported.get("metrics")
        stats = metrics.get("speculative_decoding") if isinstance(metrics, dict) else None
    if not isinstance(stats, dict):
        return {}
    counts = {name: next((stats[key] for key in keys if key in stats), None) for name, keys in _SPECULATION.items()}
    return {name: count for name, count in counts.items() if isinstance(count, int)}


def _beside_tokens(sample: SampleLike, generation: Generation, args: Any) -> dict[str, Any]:  # noqa: ANN401
    beside = _experts(sample, generation)
    if generation.top_p is not None:
        for key, array in zip(("top_p_token_ids", "top_p_token_offsets"), generation.top_p, strict=True):
            beside[key] = base64.b64encode(array.tobytes()).decode()
    if hasattr(sample, "rollout_indexer_topk"):
        count, layers = len(sample.tokens) + len(generation.token_ids), "rollout_indexer_topk_num_streams"
        rows = indexer_rows(generation.meta, max(0, count - 1), getattr(args, layers, None))
        beside |= {} if rows is None else {"indexer_topk": rows}
    if isinstance(sample, Sample) or not hasattr(sample, "append_response_tokens"):
        beside["version_spans"] = generation.version_spans
    return beside
