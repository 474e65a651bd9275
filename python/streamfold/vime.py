"""streamfold for vime, slime's counterpart for vLLM: what to pass to vime's options.

``--custom-generate-function-path streamfold.vime.generate_streaming``
    Streams each sample: keeps partial responses, retries failures, resumes aborted generations.
``--rollout-function-path streamfold.vime.generate_rollout``
    Runs whole rollouts: :mod:`streamfold.integrations.rollout`.
``--rollout-function-path streamfold.vime.generate_rollout_async``
    Fully asynchronous rollouts: :mod:`streamfold.integrations.fully_async`.
``--data-source-path streamfold.vime.DataSource``
    Saves partial groups, and finished ones that no rollout has used yet, with the checkpoint:
    :mod:`streamfold.integrations.data_source`.

They work in newer releases of vime, which read the attribute ``abort_mode`` of ``generate_streaming`` and abort
requests one by one, and in older ones, which abort all requests of a server. Settings (timeouts, retries, limits) are
in :mod:`streamfold.integrations.settings`.

The engine is vLLM 0.20 or newer with its token endpoint ``/inference/v1/generate``; vLLM 0.30 and newer must be
started with ``--enable-scale-out``. The endpoint sends no text: vime's tokenizer decodes the ids when a request has
ended. Prompts with images are sent to vLLM's render endpoint first, see :mod:`streamfold.integrations.multimodal`. With
``--rollout-top-p`` other than 1, vLLM must be started with ``--return-sampling-mask``: vime replays the mask of every
token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from streamfold.integrations import data_source, fully_async, generate, multimodal, rollout
from streamfold.integrations.base import Integration, has_items
from streamfold.samples import observation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold._core import Generation
    from streamfold.engines.base import TokenIds
    from streamfold.integrations.base import SampleRequest, TrainerSample
    from streamfold.integrations.settings import Args
    from streamfold.samples.options import Extra

__all__ = [
    "VIME", "append_observation", "close_rollout", "generate_rollout", "generate_rollout_async", "generate_streaming",
    "turn",
]  # fmt: skip


class Vime(Integration):
    """vllm-project/vime, on vLLM."""

    package = "vime"
    engine: ClassVar[Literal["sglang", "vllm"]] = "vllm"
    session_policy = "consistent_hash"
    session_header = "x-session-id"
    seed_param = "seed"
    oldest_release = "a newer release"
    may_abort_without_finish_reason = True  # vLLM 0.31 and older

    def sampling_params(
        self, args: Args, sample: TrainerSample, given: Mapping[str, Any], *, evaluation: bool
    ) -> dict[str, Any]:
        """Require sampling masks if the trainer replays them; vLLM is not sent ``custom_params``."""
        if evaluation or getattr(args, "rollout_top_p", 1.0) == 1.0 or not hasattr(sample, "rollout_top_p_token_ids"):
            return dict(given)
        return {**given, "custom_params": {**(given.get("custom_params") or {}), "return_top_p_token_ids": True}}

    async def extra_payload(self, request: SampleRequest) -> Extra | None:
        """The model's name, and images as the server renders them."""
        # A model with a router of its own is served under a name that only that router knows.
        has_own_router = self.model_router(request.args, request.sample, request.settings) is not None
        model = {} if has_own_router else {"model": str(request.args.hf_checkpoint)}
        if (named := (request.settings.extra or {}).get("model")) is not None:  # a LoRA adapter
            model = {"model": named}
        messages = self._messages(request.sample)
        return model if messages is None else await self._rendered(request, model, messages)

    async def _rendered(
        self, request: SampleRequest, model: dict[str, str], messages: list[dict[str, Any]]
    ) -> Extra | None:
        """The rendered prompt, its placeholders moved to where they are in the trainer's ids."""
        sample = request.sample
        prime = getattr(self.rollout_module, "prime_encoder", None)
        if prime is not None and not request.abort.is_set():  # for encoders on servers of their own
            await prime(request.args, messages)
        with self.span(sample, "vllm_mm_render", **model):
            rendered = await multimodal.render(request, {**model, "messages": messages})
        if rendered is None:
            return None
        prompt_ids = sample.tokens[: len(sample.tokens) - sample.response_length]
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        items = sum(part["type"] != "text" for part in parts)
        body = {**model, **multimodal.token_request(rendered, prompt_ids, items)}
        return lambda: {**body, "token_ids": sample.tokens}

    def _messages(self, sample: TrainerSample) -> list[dict[str, Any]] | None:
        """The prompt as chat messages if it has images, videos or audio; None: it is text alone."""
        inputs = sample.multimodal_inputs or {}
        media = [key for key in ("images", "videos", "audio") if has_items(inputs.get(key))]
        if not media:
            return None
        if not isinstance(sample.prompt, str):
            raise ValueError(f"with {media[0]} the prompt must be a str, not {type(sample.prompt).__name__}")
        build = self.find("utils.processing_utils", "build_multimodal_messages")
        if build is not None:
            messages: list[dict[str, Any]] = build(sample.prompt, {key: inputs[key] for key in media})
            return messages
        if media != ["images"]:
            raise NotImplementedError(f"this release of vime cannot send {', '.join(media)}: a newer one is needed")
        encode = self.module("utils.processing_utils").encode_image_for_rollout_engine
        images = [{"type": "image_url", "image_url": {"url": encode(image)}} for image in inputs["images"]]
        return [{"role": "user", "content": [{"type": "text", "text": sample.prompt}, *images]}]

    def trace_meta(self, generation: Generation) -> dict[str, Any]:
        """The fields of a response that is not streamed, which the trainer's helper expects."""
        meta = generation.meta
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": len(generation.token_ids),
            "cached_tokens": generation.cached_tokens,
            "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        }
        others = {key: meta[key] for key in ("request_id", "metrics") if meta.get(key) is not None}
        return {**others, "choices": [{"finish_reason": generation.finish_reason}], "usage": usage}


VIME: Final = Vime()


async def generate_streaming(
    args: Args,
    sample: TrainerSample,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,  # noqa: FBT001, FBT002  # vime's signature
) -> TrainerSample:
    """Generate the response of one sample, or resume it. Each call's result is written to the sample once.

    Args:
        args: vime's options. Read, never changed.
        sample: vime's, PENDING or ABORTED.
        sampling_params: vime's; sent under vLLM's names. ``max_new_tokens`` limits the whole response; a resumed call
            gets what is left of it. Read, never changed.
        evaluation: whether the sample is not for training: then no sampling masks are required.

    Returns:
        The sample: COMPLETED or TRUNCATED; ABORTED if the engine aborted the request, or vime is aborting.

    Raises:
        StreamfoldError: a call failed, and retries and ``streamfold_resume`` did not help. The sample is ABORTED and
            holds what was received. A stream without a finish reason is such a failure, unless vime is aborting.
        NotImplementedError: the prompt's images cannot be sent to this server.
        ValueError: an option or the sample is invalid, or the response does not fit the sample.
        asyncio.CancelledError: the task was cancelled. The request has been aborted; the sample is ABORTED and holds
            what was received. vLLM sends no routed experts for aborted requests: the next call returns those of their
            tokens too.
    """
    return await generate.generate_sample(VIME, args, sample, sampling_params, evaluation=evaluation)


# Newer vime cancels this task to abort the request; older vime does not read this.
vars(generate_streaming)["abort_mode"] = "request"


async def turn(
    args: Args,
    sample: TrainerSample,
    sampling_params: Mapping[str, Any],
    *,
    max_new_tokens: int | None = None,
) -> TrainerSample:
    """Generate one turn of a sample, or what is left of one that was aborted: for generate functions of your own.

    It uses the client of the running event loop, as :func:`generate_streaming` does. Between two turns, append what the
    tool answered with :func:`append_observation`. Set ``abort_mode = "request"`` on your function, so that vime aborts
    its requests one by one, by cancelling it; without that, vime aborts everything that the engines run.

    Args:
        args: vime's options. Read, never changed.
        sample: vime's.
        sampling_params: vLLM's. ``max_new_tokens`` limits the whole response, all turns and observations. Read, never
            changed.
        max_new_tokens: limits what this turn generates. None: no further limit.

    Returns:
        The sample. COMPLETED: the turn ended by itself. TRUNCATED: a limit was reached. ABORTED: vime is aborting;
        return the sample, and it will be passed to your function again.

    Raises:
        StreamfoldError: as for :func:`generate_streaming`.
        ValueError: as for :func:`generate_streaming`, or tokens were added to the sample in another way than by
            :func:`append_observation` or the sample's own ``append_response_tokens``.
        asyncio.CancelledError: vime is aborting. Let it propagate: what was received is in the sample.
    """
    return await generate.generate_sample(VIME, args, sample, sampling_params, max_new_tokens_per_turn=max_new_tokens)


def append_observation(args: Args, sample: TrainerSample, token_ids: TokenIds, text: str | None = None) -> bool:
    """Append a tool's answer to vime's sample, as :func:`streamfold.append_observation` does.

    Args:
        args: the trainer's options, for the sample's own method.
        sample: of any status but FAILED; it becomes PENDING.
        token_ids: ``[n]``, as the model is to read them, with the chat template's tokens around the answer.
        text: of these tokens; None: the text of the response stays as it is.

    Returns:
        Whether it was appended; False: no token could be generated behind it, and the sample is TRUNCATED.

    Raises:
        ValueError: there are no ids, one is no id, or the lengths of the sample disagree. The sample is unchanged.
    """
    return observation.append_observation(sample, token_ids, text, args=args)


def generate_rollout(
    args: Args,
    rollout_id: int,
    data_source: Any,  # noqa: ANN401  # vime's, or ours
    evaluation: bool = False,  # noqa: FBT001, FBT002  # vime's signature
) -> Any:  # noqa: ANN401  # vime's class
    """Run one rollout, in the trainer's event loop if it has one, else in a new one.

    Args:
        args: the trainer's options. Read, never changed.
        rollout_id: the number of the rollout.
        data_source: vime's, or ``streamfold.vime.DataSource``, which loses no group in a crash.
        evaluation: generate the evaluation sets instead, with vime's ``eval_rollout``.

    Returns:
        ``RolloutFnTrainOutput`` with ``rollout_batch_size`` groups, sorted, and metrics; for an evaluation
        ``RolloutFnEvalOutput``. Older releases have no such classes: the groups, or the evaluation's data.

    Raises:
        StreamfoldError: too many groups failed. All groups have been returned to the data source.
        Exception: what the data source, a filter, or an evaluation raised. All groups have been returned too.
        ValueError: a setting is invalid, or ``rollout_data_transport`` is ``"straw"``.
    """
    return rollout.generate_rollout(VIME, args, rollout_id, data_source, evaluation=evaluation)


def generate_rollout_async(
    args: Args,
    rollout_id: int,
    data_source: Any,  # noqa: ANN401  # vime's, or ours
    evaluation: bool = False,  # noqa: FBT001, FBT002  # vime's signature
) -> Any:  # noqa: ANN401  # vime's class
    """Return the next ``rollout_batch_size`` finished groups, or evaluate beside those in flight.

    The first call starts a thread with an event loop, in which groups stay in flight while the trainer trains, and in
    which the data source is called. :func:`close_rollout` ends both, and so does the end of the process.

    Args:
        args: the trainer's options, those of the first call. Read, never changed.
        rollout_id: the number of the rollout.
        data_source: as for :func:`generate_rollout`. If it is not that of the last call, everything in flight is
            returned to the last call's first.
        evaluation: as for :func:`generate_rollout`.

    Returns:
        As :func:`generate_rollout`, the groups in the order in which they finished.

    Raises:
        StreamfoldError: too many groups failed since the last call. All groups have been returned to the data source,
            and the next call starts anew.
        Exception: what the data source, a filter, or an evaluation raised; the same applies.
        ValueError: a setting is invalid, or ``rollout_data_transport`` is ``"straw"``.
    """
    return fully_async.generate_rollout_async(VIME, args, rollout_id, data_source, evaluation=evaluation)


def close_rollout() -> None:
    """Stop :func:`generate_rollout_async`: abort, and return all groups to their data source.

    The thread ends too. Calling it again does nothing.
    """
    fully_async.close_rollout(VIME)


def __getattr__(name: str) -> Any:  # noqa: ANN401  # DataSource subclasses vime's class, so vime must be installed
    if name == "DataSource":
        return data_source.data_source_class(VIME)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
