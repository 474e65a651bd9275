"""``generate_streaming`` of all trainers: generate one sample, resume it, and write each call's result to it once."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING, Any

from streamfold._core import Experts
from streamfold.errors import StreamTruncated
from streamfold.integrations.base import SampleRequest, router_url
from streamfold.integrations.clients import client_handle
from streamfold.integrations.settings import Settings
from streamfold.samples.completion import CompletionOptions, complete
from streamfold.samples.merging import check_ready
from streamfold.samples.metadata import FINISHED_AS, enter, metadata_of, own_metadata, remove_keys

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.integrations.base import Integration, TrainerSample
    from streamfold.integrations.clients import ClientHandle
    from streamfold.integrations.settings import Args

__all__ = ["client_for", "generate_sample"]


async def generate_sample(
    integration: Integration,
    args: Args,
    sample: TrainerSample,
    sampling_params: Mapping[str, Any],
    *,
    evaluation: bool,
) -> TrainerSample:
    """Generate the response of one sample; see :func:`streamfold.slime.generate_streaming` for arguments and errors."""
    state = integration.rollout_module.GenerateState(args)
    _check(integration, args, sample)
    enter(sample)
    if _restore_status(sample):
        return sample
    _set_prompt_ids(integration, sample, state)
    settings = Settings.of(args)
    handle = await client_for(integration, args, settings, sample)
    handle.stop_ids.update(_eos_ids(state.tokenizer))
    request = SampleRequest(
        args=args,
        sample=sample,
        settings=settings,
        handle=handle,
        headers=_headers(integration, args, sample),
        abort=handle.abort_signal(state),
    )
    params = integration.sampling_params(args, sample, sampling_params, evaluation=evaluation)
    limit = params.get("max_new_tokens")
    budget = None if limit is None else limit - sample.response_length
    with integration.span(sample, "generate", max_new_tokens=budget) as span, handle.watch(request.abort):
        try:
            await _complete(integration, request, params, budget=budget, tokenizer=state.tokenizer, span=span)
        except BaseException as error:
            _settle_status(sample, error)
            if (
                isinstance(error, StreamTruncated)
                and integration.may_abort_without_finish_reason
                and request.abort.is_set()
            ):
                return sample  # the trainer aborted this request
            raise
    return sample


async def client_for(
    integration: Integration, args: Args, settings: Settings, sample: TrainerSample = None
) -> ClientHandle:
    """The running event loop's client for a sample's router; without a sample, for the default one."""
    url = integration.model_router(args, sample, settings)
    if url is None:
        url = router_url(integration.engine_option(args, "router_ip"), integration.engine_option(args, "router_port"))
    return await client_handle(integration.engine, url, settings, _experts(integration, args))


async def _complete(
    integration: Integration,
    request: SampleRequest,
    params: dict[str, Any],
    *,
    budget: int | None,
    tokenizer: Any,  # noqa: ANN401  # the trainer's
    span: object,
) -> None:
    """Send requests until the sample is finished or aborted."""
    sample = request.sample
    extra = await integration.extra_payload(request) if budget is None or budget > 0 else {}
    if extra is None:
        sample.status = type(sample.status).ABORTED
        return
    options = CompletionOptions(
        tokenizer=tokenizer,
        stop_ids=request.handle.stop_ids,
        headers=request.headers,
        extra=extra,
        aborted=request.abort,
        resume_aborts=False,
        resume_penalties=request.settings.resume_penalties,
        on_generation=partial(integration.update_span, span),
    )
    client, resume = request.handle.client, request.settings.resume
    await complete(client, sample, params, resume=resume, options=options, args=request.args)


def _check(integration: Integration, args: Args, sample: TrainerSample) -> None:
    """Raise ValueError for what cannot succeed, before any request leaves."""
    if getattr(args, "use_score_centering", False):
        raise ValueError("use_score_centering needs scores that streaming does not carry: switch one of the two off")
    if getattr(args, "ci_test", False) and not isinstance(sample.prompt, str):
        raise ValueError(f"with ci_test the prompt must be a str, not {type(sample.prompt).__name__}")
    if not hasattr(sample, "append_response_tokens"):
        raise ValueError(
            f"samples of this {integration.package} have no append_response_tokens: a newer release is needed"
        )
    check_ready(sample)


def _set_prompt_ids(integration: Integration, sample: TrainerSample, state: Any) -> None:  # noqa: ANN401
    """Tokenize the prompt as the trainer does, unless the sample has tokens."""
    prepare = integration.rollout_module._prepare_prompt_ids  # noqa: SLF001  # the trainer's
    prompt_ids = prepare(sample, state.tokenizer, state.processor)
    if not sample.tokens:
        sample.tokens = list(prompt_ids)


def _eos_ids(tokenizer: Any) -> tuple[int, ...]:  # noqa: ANN401  # the trainer's
    eos = getattr(tokenizer, "eos_token_id", None)
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (eos,)


def _settle_status(sample: TrainerSample, error: BaseException) -> None:
    """After an error: never leave a sample PENDING, and keep the status of a response that finished nevertheless."""
    statuses = type(sample.status)
    if sample.status is statuses.PENDING:  # nothing could be written
        sample.status = statuses.ABORTED
    if isinstance(error, asyncio.CancelledError) and sample.status is not statuses.ABORTED:
        # The response finished before the abort took effect, but the trainer takes a cancelled sample for partial.
        own_metadata(sample)[FINISHED_AS] = {"at": sample.response_length, "as": sample.status.name}


def _restore_status(sample: TrainerSample) -> bool:
    """Set the status that :func:`_settle_status` kept, if the response has not changed; remove the note."""
    note: dict[str, Any] | None = metadata_of(sample).get(FINISHED_AS)
    if note is None:
        return False
    remove_keys(sample, FINISHED_AS)
    if note["at"] != sample.response_length or not sample.response_length:
        return False
    sample.status = type(sample.status)[note["as"]]
    return True


def _headers(integration: Integration, args: Args, sample: TrainerSample) -> dict[str, str]:
    session = getattr(sample, "session_id", None)
    if session and getattr(args, "router_policy", None) == integration.session_policy:
        return {integration.session_header: session}
    return {}


def _experts(integration: Integration, args: Args) -> Experts | None:
    """The shape of routed experts, if the trainer replays them."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return None
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if layers is None or top_k is None:
        raise ValueError("use_rollout_routing_replay needs args.num_layers and args.moe_router_topk")
    num_experts = getattr(args, "num_experts", None)
    return Experts(layers, top_k, num_experts, integration.experts_dtype(num_experts))
