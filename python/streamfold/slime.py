"""slime's generate function, streamed: ``--custom-generate-function-path streamfold.slime.generate_streaming``.

What has arrived of a sample is kept however its call ends, and written to it once. It works unchanged in releases of
slime that cancel single requests (they read ``abort_mode``) and in older ones, which abort whole servers.

What stands around it can be had from here too, each by an option of slime's:

- ``--rollout-function-path streamfold.slime.generate_rollout``: whole rollouts, see :mod:`streamfold.slime_rollout`;
- ``--rollout-function-path streamfold.slime.generate_rollout_async``: fully asynchronous ones, see
  :mod:`streamfold.slime_pool`;
- ``--data-source-path streamfold.slime.DataSource``: a buffer that outlives its process, see
  :mod:`streamfold.slime_source`.

For its settings see :mod:`streamfold.hosts`, and one of its own: ``streamfold_model`` (STREAMFOLD_MODEL) says which of
``sglang_model_routers`` is asked, if a sample names none in its ``metadata["model_name"]``.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from streamfold import hosts
from streamfold._core import Experts
from streamfold.resume import complete
from streamfold.sample import check_ready, meta_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from contextlib import AbstractContextManager
    from types import ModuleType

    from streamfold._core import Generation
    from streamfold.hosts import Args

__all__ = ["generate_streaming", "seat_of"]

# The host's own. Its releases differ: what may be missing is read with getattr.
_Sample: TypeAlias = Any

_SPANS_AT: Final = ("slime.observability.trace_utils", "slime.utils.trace_utils")  # newer and older releases
_MOST_EXPERTS_IN_UINT8: Final = 256
_ENDED: Final = "streamfold_ended"
# Found where they are when somebody asks: they need what stands here.
_ELSEWHERE: Final = {
    "generate_rollout": "slime_rollout",
    "generate_rollout_async": "slime_pool",
    "close_rollout": "slime_pool",
    "DataSource": "slime_source",
}


def __getattr__(name: str) -> Any:  # noqa: ANN401  # functions and a class
    if name not in _ELSEWHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"streamfold.{_ELSEWHERE[name]}"), name)


async def generate_streaming(
    args: Args,
    sample: _Sample,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,  # noqa: ARG001, FBT001, FBT002  # the host's signature; both kinds are asked alike
) -> _Sample:
    """Generate the response of one sample, or go on with it, and write what came of each call: once, however it ends.

    Args:
        args: the host's settings. Read, never changed.
        sample: the host's, PENDING or ABORTED.
        sampling_params: as the engine has them; ``max_new_tokens`` counts the whole response, of which a call asks
            for what is missing. Read, never changed.
        evaluation: taken because the host may give it.

    Returns:
        The sample. COMPLETED, TRUNCATED, or ABORTED if the engine ended the request before its time, or the host is
        aborting.

    Raises:
        StreamfoldError: the call failed, and ``streamfold_resume`` does not go on from there. What had arrived is in
            the sample, which is ABORTED.
        ValueError: something asked for makes no sense, or the reply does not fit the sample.
        asyncio.CancelledError: somebody cancelled this. The request has been aborted, its side data waited for, and
            what had arrived is in the sample, which is ABORTED.

    With top-p replay on, tokens are of no use without the ids they were chosen from. If a call is cut before those
    come, nothing of it is written, and ``sample.metadata["lost_side_data"]`` counts its tokens.
    """
    from slime.rollout.sglang_rollout import (  # type: ignore[import-not-found]  # noqa: PLC0415  # only in the host
        GenerateState,
        _prepare_prompt_ids,
    )

    state = GenerateState(args)
    _check(args, sample)
    statuses = type(sample.status)
    ended_as = _noted_end(sample)
    if ended_as is not None:
        sample.status = statuses[ended_as]
        return sample
    prompt_ids = _prepare_prompt_ids(sample, state.tokenizer, state.processor)
    if not sample.tokens:
        sample.tokens = list(prompt_ids)
    seat = await seat_of(args, sample)
    eos = getattr(state.tokenizer, "eos_token_id", None)
    if eos is not None:
        seat.ends.add(eos)
    images = (sample.multimodal_inputs or {}).get("images")
    trace = _trace()
    with _span(trace, sample, sampling_params) as span, seat.watched(lambda: state.aborted):
        try:
            await complete(
                seat.client,
                sample,
                sampling_params,
                resume=hosts.resume_policy(args),
                args=args,
                tokenizer=state.tokenizer,
                stop_ids=seat.ends,
                headers=_headers(args, sample),
                extra=partial(_with_images, sample, images) if images else None,
                aborted=lambda: state.aborted,
                resume_aborts=False,
                on_generation=partial(_describe, trace, span),
            )
        except BaseException as error:
            if sample.status is statuses.PENDING:  # nothing could be written
                sample.status = statuses.ABORTED
            if isinstance(error, asyncio.CancelledError) and sample.status is not statuses.ABORTED:
                # The engine was faster than the abort, but the host takes the sample for a partial one.
                sample.metadata = {**_notes(sample), _ENDED: {"at": sample.response_length, "as": sample.status.name}}
            raise
    return sample


# Newer slime cancels this task to end the request; older slime does not look here.
vars(generate_streaming)["abort_mode"] = "request"


async def seat_of(args: Args, sample: _Sample = None) -> hosts.Seat:
    """Where a sample's calls are made from in the running event loop; without one, those of the usual model."""
    return await hosts.seat(args, _router(args, sample), _experts(args))


def _noted_end(sample: _Sample) -> str | None:
    """The status that was noted for the response as it is. The note is taken away, as it holds no longer."""
    notes = _notes(sample)
    if _ENDED not in notes:
        return None
    sample.metadata = {key: value for key, value in notes.items() if key != _ENDED}
    noted: dict[str, Any] = notes[_ENDED]
    status: str = noted["as"]
    return status if noted["at"] == sample.response_length > 0 else None


# What is asked for.


def _check(args: Args, sample: _Sample) -> None:
    """Refuse what cannot end well before anything is asked for."""
    if getattr(args, "use_score_centering", False):
        raise ValueError("use_score_centering needs scores that a stream does not carry: switch one of the two off")
    if getattr(args, "ci_test", False) and not isinstance(sample.prompt, str):
        raise ValueError(f"with ci_test the prompt must be a str, not {type(sample.prompt).__name__}")
    check_ready(sample)


def _with_images(sample: _Sample, images: Sequence[Any]) -> dict[str, Any]:
    """Images with their prompt: its text at first; all ids, placeholders included, to go on with a response."""
    from slime.utils.processing_utils import (  # type: ignore[import-not-found]  # noqa: PLC0415
        encode_image_for_rollout_engine,
    )

    encoded = [encode_image_for_rollout_engine(image) for image in images]
    if sample.response_length:
        return {"image_data": encoded, "input_ids": sample.tokens}
    if not isinstance(sample.prompt, str):
        raise ValueError(f"beside images the prompt must be a str, not {type(sample.prompt).__name__}")
    return {"image_data": encoded, "text": sample.prompt}


def _headers(args: Args, sample: _Sample) -> dict[str, str]:
    session = getattr(sample, "session_id", None)
    if session and getattr(args, "router_policy", None) == "consistent_hashing":
        return {"X-SMG-Routing-Key": session}
    return {}


def _router(args: Args, sample: _Sample) -> str:
    """The address of the router to ask: that of the model that is named, or the only one."""
    routers = getattr(args, "sglang_model_routers", None)
    name = _notes(sample).get("model_name") or hosts.setting(args, "model", None)
    if routers and name:
        if name not in routers:
            raise ValueError(f"no router for the model {name!r}; sglang_model_routers has {', '.join(routers)}")
        host, port = routers[name]
    else:
        host, port = args.sglang_router_ip, args.sglang_router_port
    return hosts.address(host, port)


def _experts(args: Args) -> Experts | None:
    if not getattr(args, "use_rollout_routing_replay", False):
        return None
    layers, top_k = getattr(args, "num_layers", None), getattr(args, "moe_router_topk", None)
    if layers is None or top_k is None:
        raise ValueError("use_rollout_routing_replay needs args.num_layers and args.moe_router_topk")
    count = getattr(args, "num_experts", None)
    small = count is not None and count <= _MOST_EXPERTS_IN_UINT8
    return Experts(layers, top_k, count, "uint8" if small else "int32")


def _notes(sample: _Sample) -> dict[str, Any]:
    """The sample's metadata, which may be shared: replace it, never change it."""
    return getattr(sample, "metadata", None) or {}


# The host's spans.


def _trace() -> ModuleType | None:
    """The host's module of span helpers, None if it has none."""
    for name in _SPANS_AT:
        with contextlib.suppress(ModuleNotFoundError):
            return importlib.import_module(name)
    return None


def _span(trace: ModuleType | None, sample: _Sample, sampling_params: Mapping[str, Any]) -> AbstractContextManager[Any]:
    if trace is None:
        return contextlib.nullcontext()
    limit = sampling_params.get("max_new_tokens")
    budget = None if limit is None else limit - sample.response_length
    span: AbstractContextManager[Any] = trace.trace_span(sample, "sglang_generate", attrs={"max_new_tokens": budget})
    return span


def _describe(trace: ModuleType | None, span: object, generation: Generation) -> None:
    build, update = getattr(trace, "build_sglang_meta_trace_attrs", None), getattr(span, "update", None)
    if build is not None and update is not None and generation.finish_reason is not None:
        update(build({**generation.meta, **meta_info(generation)}))
