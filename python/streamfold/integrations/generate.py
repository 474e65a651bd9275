"""One sample of a trainer, generated: what its adapters' ``generate_streaming`` have in common."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from streamfold._core import Experts
from streamfold.errors import StreamTruncated
from streamfold.integrations import base as hosts
from streamfold.integrations.base import notes_of
from streamfold.samples.completion import CompletionOptions, complete
from streamfold.samples.merging import check_ready
from streamfold.samples.metadata import FINISHED_AS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.integrations.base import Args, Host, HostSample
    from streamfold.samples.completion import Extra

__all__ = ["generate", "seat_of"]


async def generate(
    host: Host, args: Args, sample: HostSample, sampling_params: Mapping[str, Any], *, evaluation: bool
) -> HostSample:
    """Generate the response of one sample, or go on with it, and write what came of each call: once, however it ends.

    See :func:`streamfold.slime.generate_streaming` for arguments, result and errors.
    """
    rollout = host.rollout
    state = rollout.GenerateState(args)
    _check(host, args, sample)
    statuses = type(sample.status)
    ended_as = _noted_end(sample)
    if ended_as is not None:
        sample.status = statuses[ended_as]
        return sample
    prompt_ids = rollout._prepare_prompt_ids(sample, state.tokenizer, state.processor)  # noqa: SLF001  # the host's
    if not sample.tokens:
        sample.tokens = list(prompt_ids)
    seat = await seat_of(host, args, sample)
    eos = getattr(state.tokenizer, "eos_token_id", None)
    seat.ends.update(eos if isinstance(eos, (list, tuple)) else () if eos is None else (eos,))
    params = host.params(args, sample, sampling_params, evaluation=evaluation)
    limit = params.get("max_new_tokens")
    budget = None if limit is None else limit - sample.response_length
    headers = _headers(host, args, sample)
    abort = seat.abort_signal(state)
    with (
        host.span(sample, "generate", max_new_tokens=budget) as span,
        seat.watched(abort),
    ):
        try:
            extra: Extra | None = {}
            if budget is None or budget > 0:
                extra = await host.besides(args, sample, seat, headers, abort)
            if extra is None:
                sample.status = statuses.ABORTED
                return sample
            options = CompletionOptions(
                tokenizer=state.tokenizer,
                stop_ids=seat.ends,
                headers=headers,
                extra=extra,
                aborted=abort,
                resume_aborts=False,
                on_generation=partial(host.describe, span),
            )
            resume = hosts.resume_policy(args)
            await complete(seat.client, sample, params, resume=resume, options=options, args=args)
        except BaseException as error:
            if sample.status is statuses.PENDING:  # nothing could be written
                sample.status = statuses.ABORTED
            if isinstance(error, StreamTruncated) and host.aborts_silently and abort.is_set():
                return sample  # that was the end of a request which the host has aborted
            if isinstance(error, asyncio.CancelledError) and sample.status is not statuses.ABORTED:
                # The engine was faster than the abort, but the host takes the sample for a partial one.
                sample.metadata = {
                    **notes_of(sample),
                    FINISHED_AS: {"at": sample.response_length, "as": sample.status.name},
                }
            raise
    return sample


async def seat_of(host: Host, args: Args, sample: HostSample = None) -> hosts.Seat:
    """Where a sample's calls are made from in the running event loop; without one, those of the usual model."""
    return await hosts.seat(host, args, _router(host, args, sample), _experts(host, args))


def _check(host: Host, args: Args, sample: HostSample) -> None:
    """Refuse what cannot end well before anything is asked for."""
    if getattr(args, "use_score_centering", False):
        raise ValueError("use_score_centering needs scores that a stream does not carry: switch one of the two off")
    if getattr(args, "ci_test", False) and not isinstance(sample.prompt, str):
        raise ValueError(f"with ci_test the prompt must be a str, not {type(sample.prompt).__name__}")
    if not hasattr(sample, "append_response_tokens"):
        raise ValueError(f"samples of this {host.package} have no append_response_tokens: a newer release is needed")
    check_ready(sample)


def _noted_end(sample: HostSample) -> str | None:
    """The status that was noted for the response as it is. The note is taken away, as it holds no longer."""
    notes = notes_of(sample)
    if FINISHED_AS not in notes:
        return None
    sample.metadata = {key: value for key, value in notes.items() if key != FINISHED_AS}
    noted: dict[str, Any] = notes[FINISHED_AS]
    status: str = noted["as"]
    return status if noted["at"] == sample.response_length > 0 else None


def _headers(host: Host, args: Args, sample: HostSample) -> dict[str, str]:
    session = getattr(sample, "session_id", None)
    if session and getattr(args, "router_policy", None) == host.session_policy:
        return {host.session_header: session}
    return {}


def _router(host: Host, args: Args, sample: HostSample) -> str:
    """The address of the router to ask: that of the model that is named, or the only one."""
    model = host.model(args, sample)
    return model[1] if model else hosts.address(host.option(args, "router_ip"), host.option(args, "router_port"))


def _experts(host: Host, args: Args) -> Experts | None:
    if not getattr(args, "use_rollout_routing_replay", False):
        return None
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if layers is None or top_k is None:
        raise ValueError("use_rollout_routing_replay needs args.num_layers and args.moe_router_topk")
    count = getattr(args, "num_experts", None)
    return Experts(layers, top_k, count, host.experts_dtype(count))
