"""streamfold for miles, a fork of slime: what to pass to miles's options.

``--custom-generate-function-path streamfold.miles.generate_streaming``
    Streams each sample: keeps partial responses, retries failures, resumes aborted generations.
``--custom-generate-function-path streamfold.miles.generate_streaming_legacy``
    The same for releases that call ``generate(args, sample, sampling_params)``.

Rollout function, data source, rewards and buffer stay miles's own. Settings (timeouts, retries, limits) are in
:mod:`streamfold.integrations.settings`. miles takes options from generate functions: each setting that one uses is an
option too, such as ``--streamfold-tries``.
"""

from __future__ import annotations

import argparse
import base64
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from streamfold.integrations import generate
from streamfold.integrations.base import Integration, has_items
from streamfold.integrations.settings import SETTINGS
from streamfold.samples import observation
from streamfold.samples.merging import meta_info

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold._core import Generation
    from streamfold.engines.base import TokenIds
    from streamfold.integrations.base import SampleRequest, TrainerSample
    from streamfold.integrations.settings import Args
    from streamfold.samples.options import Extra

__all__ = ["MILES", "append_observation", "generate_streaming", "generate_streaming_legacy", "turn"]


class Miles(Integration):
    """radixark/miles, on SGLang."""

    package = "miles"
    engine: ClassVar[Literal["sglang", "vllm"]] = "sglang"
    session_policy = "consistent_hashing"
    session_header = "X-SMG-Routing-Key"
    seed_param = "sampling_seed"
    sample_method = "update_from_meta_info"
    oldest_release = "a newer release"

    def check(self, args: Args, sample: TrainerSample, sampling_params: Mapping[str, Any], *, evaluation: bool) -> None:
        """Refuse what miles computes of responses that are not streamed, too."""
        super().check(args, sample, sampling_params, evaluation=evaluation)
        if evaluation or args is None:
            return
        if getattr(args, "rollout_top_logprobs_num", 0):
            raise ValueError(
                "rollout_top_logprobs_num needs log-probabilities of candidates, which streaming does not carry: set "
                "it to 0, or generate with miles's own function"
            )
        replays_support = self.find("rollout.generate_utils.sampling_mask", "should_return_sampling_mask")
        if replays_support is not None and replays_support(args, dict(sampling_params)):
            raise ValueError(
                "replay of the sampling support needs the engine's log-probabilities of it, which streaming does not "
                "carry: switch it off (--rollout-top-p 1), or generate with miles's own function"
            )

    def prompt_ids(self, sample: TrainerSample, state: Any) -> list[int]:  # noqa: ANN401  # miles's GenerateState
        """The prompt's ids. With images, miles makes the inputs for training of them in the same step."""
        inputs = getattr(sample, "multimodal_inputs", None) or {}
        lacks_inputs = any(value is not None for value in inputs.values()) and sample.multimodal_train_inputs is None
        if sample.tokens and not lacks_inputs:
            return list(sample.tokens)
        compute = self.module("rollout.generate_utils.generate_endpoint_utils").compute_prompt_ids_from_sample
        return [int(token) for token in compute(state, sample)]

    def headers(self, args: Args, sample: TrainerSample) -> dict[str, str]:
        """The sample's routing key.

        Raises:
            ValueError: the router's policy needs one, and the sample has none.
        """
        policy, key = getattr(args, "sglang_router_policy", None), getattr(sample, "routing_key", None)
        if key:
            return {self.session_header: key}
        if policy in ("consistent_hashing", "manual") and hasattr(sample, "routing_key"):
            raise ValueError(
                f"sglang_router_policy {policy!r} routes by {self.session_header}, but sample {sample.index} has no "
                "routing_key"
            )
        return super().headers(args, sample)

    def sampling_params(
        self, args: Args, sample: TrainerSample, given: Mapping[str, Any], *, evaluation: bool
    ) -> dict[str, Any]:
        """The limit that miles gives: of the response, and of the whole context."""
        del evaluation
        params = dict(given)
        limit = params.get("max_new_tokens", getattr(args, "rollout_max_response_len", None))
        context = getattr(args, "rollout_max_context_len", None)
        if limit is not None and context:
            room = context - (len(sample.tokens) - sample.response_length)
            limit = min(limit, max(room, sample.response_length))
        return params if limit is None else {**params, "max_new_tokens": limit}

    async def extra_payload(self, request: SampleRequest) -> Extra | None:
        """Images and audio with all ids, and the adapter."""
        lora = await self._lora(request)
        if lora is None:
            return None
        media = self._media(request.sample)
        if not media:
            return lora
        return lambda: {**media, **lora, "input_ids": request.sample.tokens}

    def _media(self, sample: TrainerSample) -> dict[str, Any]:
        inputs: Mapping[str, Any] = getattr(sample, "multimodal_inputs", None) or {}
        if has_items(inputs.get("videos")):
            raise NotImplementedError("miles sends no videos to the engine: generate with a function of your own")
        media: dict[str, Any] = {}
        if has_items(inputs.get("images")):
            encode = self.module("utils.processing_utils").encode_image_for_rollout_engine
            media["image_data"] = [encode(image) for image in inputs["images"]]
        if has_items(inputs.get("audios")):
            texts = (base64.b64encode(audio).decode() for audio in inputs["audios"])
            media["audio_data"] = [f"data:audio;base64,{text}" for text in texts]
        return media

    async def _lora(self, request: SampleRequest) -> dict[str, Any] | None:
        """The keys that name the adapter; None: the sample's adapter is not served any more."""
        adapter = getattr(request.sample, "adapter", None)
        if adapter is not None:
            served = await self.module("ray.multi_lora.controller").AdaptersCache().get(adapter.name)
            if served is None:
                return None
            slot_name = self.module("utils.multi_lora").slot_lora_name
            return {"lora_path": slot_name(adapter.slot), "extra_key": f"{adapter.name}:v{served.version}"}
        for module in ("utils.lora", "utils.lora.utils"):
            is_served = self.find(module, "lora_rollout_enabled")
            if is_served is not None:
                return {"lora_path": self.module(module).LORA_ADAPTER_NAME} if is_served(request.args) else {}
        return {}

    def trace_meta(self, generation: Generation) -> dict[str, Any]:
        """All fields of SGLang's ``meta_info``."""
        return {**generation.meta, **meta_info(generation)}


MILES: Final = Miles()


async def generate_streaming(input: Any) -> Any:  # noqa: A002, ANN401  # miles's signature, and its classes
    """Generate the response of one sample, or resume it. Each call's result is written to the sample once.

    Args:
        input: miles's ``GenerateFnInput``: ``state`` (its ``args``, tokenizer and processor; while ``aborted`` is set,
            no request leaves), ``sample`` (PENDING or ABORTED), ``sampling_params`` (SGLang's; ``max_new_tokens``
            limits the whole response, and a resumed call gets what is left of it) and ``evaluation``. Only the sample
            is changed.

    Returns:
        miles's ``GenerateFnOutput`` of the sample: COMPLETED or TRUNCATED; ABORTED if the engine aborted the request,
        miles is aborting, or the sample's adapter is not served any more.

    Raises:
        StreamfoldError: a call failed, and retries and ``streamfold_resume`` did not help. The sample is ABORTED and
            holds what was received.
        ValueError: an option or the sample is invalid, or the response does not fit the sample.
        NotImplementedError: the prompt has videos.
        asyncio.CancelledError: the task was cancelled. The request has been aborted, and its side data was waited for;
            the sample is ABORTED and holds what was received.

    Routed experts and indexer rows come in the stream's last event: ``--sglang-output-store-backend`` is for responses
    that are not streamed, and is not asked for. ``non_generation_time``, ``metadata["lifecycle"]`` and whatever else
    miles keeps in a sample stay as they are.
    """
    sample = await generate.generate_sample(
        MILES, input.args, input.sample, input.sampling_params, evaluation=input.evaluation, state=input.state
    )
    output_type: Any = MILES.module("rollout.base_types").GenerateFnOutput
    return output_type(samples=sample)


async def generate_streaming_legacy(
    args: Args,
    sample: TrainerSample,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,  # noqa: FBT001, FBT002  # miles's signature
) -> TrainerSample:
    """Generate the response of one sample as :func:`generate_streaming` does, for releases without its input.

    Newer ones call it too. They do not hand on their state then, so that an abort is seen when the engine ends the
    request, and not before one is sent.

    Returns:
        The sample.
    """
    return await generate.generate_sample(MILES, args, sample, sampling_params, evaluation=evaluation)


async def turn(input: Any, *, max_new_tokens: int | None = None) -> TrainerSample:  # noqa: A002, ANN401  # as above
    """Generate one turn of ``input.sample``, or what is left of one: for generate functions of your own.

    Between two turns, append what the tool answered with :func:`append_observation`.

    Args:
        input: miles's ``GenerateFnInput``. ``max_new_tokens`` of its ``sampling_params`` limits the whole response, all
            turns and observations.
        max_new_tokens: limits what this turn generates. None: no further limit.

    Returns:
        The sample. COMPLETED: the turn ended by itself. TRUNCATED: a limit was reached. ABORTED: miles is aborting;
        return the sample, and it will be passed to your function again.

    Raises:
        StreamfoldError: as for :func:`generate_streaming`.
        ValueError: as for :func:`generate_streaming`, or tokens were added to the sample in another way than by
            :func:`append_observation`.
    """
    return await generate.generate_sample(
        MILES,
        input.args,
        input.sample,
        input.sampling_params,
        evaluation=input.evaluation,
        max_new_tokens_per_turn=max_new_tokens,
        state=input.state,
    )


def append_observation(args: Args, sample: TrainerSample, token_ids: TokenIds, text: str | None = None) -> bool:
    """Append a tool's answer to miles's sample, as :func:`streamfold.append_observation` does.

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


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add an option for each setting of a generate function; miles calls this with its own parser."""
    group = parser.add_argument_group("streamfold")
    for setting in SETTINGS:
        if setting.scope == "all":
            option = f"--{setting.attribute.replace('_', '-')}"
            group.add_argument(option, default=argparse.SUPPRESS, metavar="VALUE", help=setting.meaning)


for _function in (generate_streaming, generate_streaming_legacy):
    vars(_function)["add_arguments"] = _add_arguments
