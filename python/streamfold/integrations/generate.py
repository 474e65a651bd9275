"""``generate_streaming`` of all trainers: generate one sample, resume it, and write each call's result to it once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from streamfold._core import Experts
from streamfold.errors import StreamTruncated
from streamfold.integrations.base import SampleRequest, router_url
from streamfold.integrations.clients import client_handle
from streamfold.integrations.settings import Settings
from streamfold.samples.completion import CompletionOptions, complete
from streamfold.samples.merging import check_ready
from streamfold.samples.metadata import LastWrite, enter
from streamfold.samples.status import is_finished
from streamfold.samples.turn import open_turn

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
    evaluation: bool = False,
    max_new_tokens_per_turn: int | None = None,
) -> TrainerSample:
    """Generate the response of one sample, or a turn of it.

    See :func:`streamfold.slime.generate_streaming` and :func:`streamfold.slime.turn` for arguments and errors.
    """
    state = integration.rollout_module.GenerateState(args)
    params = integration.sampling_params(args, sample, sampling_params, evaluation=evaluation)
    limit = params.get("max_new_tokens")
    open_turn(sample, limit)
    if is_finished(sample) and LastWrite.of(sample) is not None:
        return sample
    _check(integration, args, sample)
    enter(sample)
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
    budget = None if limit is None else limit - sample.response_length
    with integration.span(sample, "generate", max_new_tokens=budget) as span, handle.watch(request.abort):
        try:
            await _complete(
                integration,
                request,
                params,
                budgets=(budget, max_new_tokens_per_turn),
                tokenizer=state.tokenizer,
                span=span,
            )
        except BaseException as error:
            _settle_status(sample)
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
    budgets: tuple[int | None, int | None],
    tokenizer: Any,  # noqa: ANN401  # the trainer's
    span: object,
) -> None:
    """Send requests until the sample is finished or aborted.

    ``budgets`` are the tokens left of the response, and those of a turn; None: no limit.
    """
    sample, (budget, per_turn) = request.sample, budgets
    extra = await integration.extra_payload(request) if budget is None or budget > 0 else {}
    if extra is None:
        sample.status = type(sample.status).ABORTED
        return
    options = CompletionOptions(
        tokenizer=tokenizer,
        stop_ids=request.handle.stop_ids,
        headers=request.headers,
        routing_header=None,  # by the trainer's router_policy alone
        extra=extra,
        aborted=request.abort,
        resume_aborts=False,
        resume_penalties=request.settings.resume_penalties,
        on_generation=partial(integration.update_span, span),
    )
    client, resume = request.handle.client, request.settings.resume
    await complete(
        client,
        sample,
        params,
        resume=resume,
        options=options,
        max_new_tokens_per_turn=per_turn,
        args=request.args,
    )


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


def _settle_status(sample: TrainerSample) -> None:
    """After an error: never leave a sample PENDING. What finished nevertheless keeps its status."""
    statuses = type(sample.status)
    if sample.status is statuses.PENDING:  # nothing could be written
        sample.status = statuses.ABORTED


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
