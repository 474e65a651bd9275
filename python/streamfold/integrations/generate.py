"""``generate_streaming`` of all trainers: generate one sample, resume it, and write each call's result to it once."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from streamfold._core import Experts
from streamfold.errors import StreamTruncated
from streamfold.integrations.base import SampleRequest, router_url
from streamfold.integrations.clients import client_handle
from streamfold.integrations.settings import Settings
from streamfold.samples.completion import complete
from streamfold.samples.merging import check_ready
from streamfold.samples.metadata import LastWrite, enter
from streamfold.samples.options import CompletionOptions
from streamfold.samples.status import is_finished
from streamfold.samples.turn import open_turn

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.integrations.base import Integration, TrainerSample
    from streamfold.integrations.clients import ClientHandle
    from streamfold.integrations.settings import Args

__all__ = ["client_for", "generate_sample"]

State: TypeAlias = Any  # the trainer's GenerateState


async def generate_sample(
    integration: Integration,
    args: Args,
    sample: TrainerSample,
    sampling_params: Mapping[str, Any],
    *,
    evaluation: bool = False,
    max_new_tokens_per_turn: int | None = None,
    state: State = None,
) -> TrainerSample:
    """Generate the response of one sample, or a turn of it.

    See :func:`streamfold.slime.generate_streaming` and :func:`streamfold.slime.turn` for errors.

    Args:
        integration: the trainer.
        args: its options.
        sample: its sample.
        sampling_params: of the whole response.
        evaluation: whether the sample is not for training.
        max_new_tokens_per_turn: limits what a turn generates; None: no such limit.
        state: the trainer's ``GenerateState``; None: the one that it keeps for the process.
    """
    integration.check(args, sample, sampling_params, evaluation=evaluation)
    params = integration.sampling_params(args, sample, sampling_params, evaluation=evaluation)
    open_turn(sample, params.get("max_new_tokens"))
    if is_finished(sample) and LastWrite.of(sample) is not None:
        return sample
    check_ready(sample)
    if args is None:  # as tests of a trainer's contracts call
        return _without_request(sample, sampling_params)
    enter(sample)
    if state is None:
        state = integration.rollout_module.GenerateState(args)
    _set_prompt_ids(integration, sample, state)
    # Again: what a prompt leaves of a context is known once it has ids.
    params = integration.sampling_params(args, sample, sampling_params, evaluation=evaluation)
    limit = params.get("max_new_tokens")
    settings = Settings.of(args)
    handle = await client_for(integration, args, settings, sample)
    tokenizer = getattr(state, "tokenizer", None)
    handle.stop_ids.update(_eos_ids(tokenizer))
    request = SampleRequest(
        args=args,
        sample=sample,
        settings=settings,
        handle=handle,
        headers=integration.headers(args, sample),
        abort=handle.abort_signal(state),
    )
    budget = None if limit is None else limit - sample.response_length
    with (
        integration.span(sample, f"{integration.engine}_generate", max_new_tokens=budget) as span,
        handle.watch(request.abort),
    ):
        try:
            await _complete(
                integration,
                request,
                params,
                budgets=(budget, max_new_tokens_per_turn),
                tokenizer=tokenizer,
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
        indexer_topk=bool(getattr(request.args, "use_rollout_indexer_replay", False)),
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


def _set_prompt_ids(integration: Integration, sample: TrainerSample, state: State) -> None:
    """Tokenize the prompt as the trainer does, unless the sample has tokens.

    Raises:
        ValueError: there is neither a tokenizer nor tokens.
    """
    if not sample.tokens and getattr(state, "tokenizer", None) is None:
        raise ValueError("the trainer's GenerateState has no tokenizer, and the sample has no tokens: one is needed")
    prompt_ids = integration.prompt_ids(sample, state)
    if not sample.tokens:
        sample.tokens = list(prompt_ids)


def _without_request(sample: TrainerSample, sampling_params: Mapping[str, Any]) -> TrainerSample:
    """What can be answered without the trainer's options: a response that has all tokens that it may have.

    Raises:
        ValueError: a request is needed.
    """
    if sample.response_length != sampling_params.get("max_new_tokens"):
        raise ValueError("args is None, and a request needs the router's address: pass the trainer's options")
    sample.status = type(sample.status).TRUNCATED
    return sample


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


def _experts(integration: Integration, args: Args) -> Experts | None:
    """The shape of routed experts, if the trainer replays them."""
    if not getattr(args, "use_rollout_routing_replay", False):
        return None
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if layers is None or top_k is None:
        raise ValueError("use_rollout_routing_replay needs args.num_layers and args.moe_router_topk")
    num_experts = getattr(args, "num_experts", None)
    return Experts(layers, top_k, num_experts, integration.experts_dtype(num_experts))
