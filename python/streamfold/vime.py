"""vime's generate function, streamed: ``--custom-generate-function-path streamfold.vime.generate_streaming``.

As :mod:`streamfold.slime` for slime, with vLLM's token endpoint behind it: ``generate_rollout``,
``generate_rollout_async`` and ``DataSource`` are here under the same names. It works in releases of vime that cancel
single requests (they read ``abort_mode``) and in older ones, which abort whole servers, with vLLM 0.20 and newer; from
0.30 on vLLM has to be started with ``--enable-scale-out``.

The engine sends no text: what a call brought is decoded by the trainer's tokenizer, all at once. Prompts with images
are rendered by the server first, see :mod:`streamfold.integrations.multimodal`. Where ``--rollout-top-p`` narrows the
choice, the sampling masks have to come with every token, as the trainer replays them: vLLM is started with them
(``--return-sampling-mask``), they are not asked for.

For its settings see :mod:`streamfold.integrations.base`, and one of its own: ``streamfold_model`` (STREAMFOLD_MODEL)
says which of ``vllm_model_routers`` is asked, if a sample names none in its ``metadata["model_name"]``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from streamfold.integrations import data_source as host_source
from streamfold.integrations import fully_async as host_pool
from streamfold.integrations import generate as host_generate
from streamfold.integrations import multimodal
from streamfold.integrations import rollout as host_rollout
from streamfold.integrations.base import Host, has_any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold._core import Generation
    from streamfold.client.abort_signal import AbortSignal
    from streamfold.integrations.base import Args, HostSample, Seat
    from streamfold.samples.completion import Extra

__all__ = ["VIME", "close_rollout", "generate_rollout", "generate_rollout_async", "generate_streaming"]


class Vime(Host):
    """vllm-project/vime, on vLLM."""

    package = "vime"
    engine = "vllm"
    session_policy = "consistent_hash"
    session_header = "x-session-id"
    seed = "seed"
    aborts_silently = True  # up to vLLM 0.31

    def params(self, args: Args, sample: HostSample, given: Mapping[str, Any], *, evaluation: bool) -> dict[str, Any]:
        """Let masks be missed where they do not come and the trainer needs them; vLLM is not sent this."""
        if evaluation or getattr(args, "rollout_top_p", 1.0) == 1.0 or not hasattr(sample, "rollout_top_p_token_ids"):
            return dict(given)
        return {**given, "custom_params": {**(given.get("custom_params") or {}), "return_top_p_token_ids": True}}

    async def besides(
        self, args: Args, sample: HostSample, seat: Seat, headers: Mapping[str, str], aborted: AbortSignal
    ) -> Extra | None:
        """The model's name, and images as the server renders them."""
        # Of one with a router of its own only the router knows under which name it is served.
        model = {} if self.model(args, sample) else {"model": str(args.hf_checkpoint)}
        messages = self._messages(sample)
        if messages is None:
            return model
        prime = getattr(self.rollout, "prime_encoder", None)
        if prime is not None and not aborted():  # where images have servers of their own
            await prime(args, messages)
        with self.span(sample, "mm_render", **model):
            rendered = await multimodal.render(seat, {**model, "messages": messages}, headers, aborted)
        if rendered is None:
            return None
        prompt_ids = sample.tokens[: len(sample.tokens) - sample.response_length]
        parts = [part for message in messages if isinstance(message["content"], list) for part in message["content"]]
        items = sum(part["type"] != "text" for part in parts)
        body = {**model, **multimodal.body_of(rendered, prompt_ids, items)}
        return lambda: {**body, "token_ids": sample.tokens}

    def _messages(self, sample: HostSample) -> list[dict[str, Any]] | None:
        """The prompt as messages if it holds more than text."""
        given = sample.multimodal_inputs or {}
        media = [key for key in ("images", "videos", "audio") if has_any(given.get(key))]
        if not media:
            return None
        if not isinstance(sample.prompt, str):
            raise ValueError(f"beside {media[0]} the prompt must be a str, not {type(sample.prompt).__name__}")
        build = self.find("utils.processing_utils", "build_multimodal_messages")
        if build is not None:
            messages: list[dict[str, Any]] = build(sample.prompt, {key: given[key] for key in media})
            return messages
        if media != ["images"]:
            raise NotImplementedError(f"this release of vime cannot send {', '.join(media)}: a newer one is needed")
        encode = self.module("utils.processing_utils").encode_image_for_rollout_engine
        images = [{"type": "image_url", "image_url": {"url": encode(image)}} for image in given["images"]]
        return [{"role": "user", "content": [{"type": "text", "text": sample.prompt}, *images]}]

    def traced(self, generation: Generation) -> dict[str, Any]:
        """What the host would have read from a reply that is not streamed."""
        told = generation.meta
        usage = {
            "prompt_tokens": generation.prompt_tokens,
            "completion_tokens": len(generation.token_ids),
            "cached_tokens": generation.cached_tokens,
            "prompt_tokens_details": {"cached_tokens": generation.cached_tokens},
        }
        besides = {key: told[key] for key in ("request_id", "metrics") if told.get(key) is not None}
        return {**besides, "choices": [{"finish_reason": generation.finish_reason}], "usage": usage}


VIME: Final = Vime()


async def generate_streaming(
    args: Args,
    sample: HostSample,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,  # noqa: FBT001, FBT002  # the host's signature
) -> HostSample:
    """Generate the response of one sample, or go on with it, and write what came of each call: once, however it ends.

    Args:
        args: the host's settings. Read, never changed.
        sample: the host's, PENDING or ABORTED.
        sampling_params: as the host has them, which are sent under vLLM's names; ``max_new_tokens`` counts the whole
            response, of which a call asks for what is missing. Read, never changed.
        evaluation: whether the sample is not for training: then no sampling masks are needed.

    Returns:
        The sample. COMPLETED, TRUNCATED, or ABORTED if the engine ended the request before its time, or the host is
        aborting.

    Raises:
        StreamfoldError: the call failed, and ``streamfold_resume`` does not go on from there. What had arrived is in
            the sample, which is ABORTED. So it is if the stream ends without a finish reason, unless the host is
            aborting.
        NotImplementedError: the prompt's images cannot be sent to this server.
        ValueError: something asked for makes no sense, or the reply does not fit the sample.
        asyncio.CancelledError: somebody cancelled this. The request has been aborted, and what had arrived is in the
            sample, which is ABORTED. vLLM tells the routed experts of no aborted request: the next call brings those
            of all tokens.
    """
    return await host_generate.generate(VIME, args, sample, sampling_params, evaluation=evaluation)


# Newer vime cancels this task to end the request; older vime does not look here.
vars(generate_streaming)["abort_mode"] = "request"


def generate_rollout(
    args: Args,
    rollout_id: int,
    data_source: Any,  # noqa: ANN401  # the host's, or ours
    evaluation: bool = False,  # noqa: FBT001, FBT002  # the host's signature
) -> Any:  # noqa: ANN401  # the host's class
    """Do one rollout: see :func:`streamfold.integrations.rollout.generate_rollout`."""
    return host_rollout.generate_rollout(VIME, args, rollout_id, data_source, evaluation=evaluation)


def generate_rollout_async(
    args: Args,
    rollout_id: int,
    data_source: Any,  # noqa: ANN401  # the host's, or ours
    evaluation: bool = False,  # noqa: FBT001, FBT002  # the host's signature
) -> Any:  # noqa: ANN401  # the host's class
    """Give the next groups of a pool: see :func:`streamfold.integrations.fully_async.generate_rollout_async`."""
    return host_pool.generate_rollout_async(VIME, args, rollout_id, data_source, evaluation=evaluation)


def close_rollout() -> None:
    """End the pool of :func:`generate_rollout_async`: see :func:`streamfold.integrations.fully_async.close_rollout`."""
    host_pool.close_rollout(VIME)


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a class, which can be made only in the host
    if name == "DataSource":
        return host_source.data_source(VIME)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
