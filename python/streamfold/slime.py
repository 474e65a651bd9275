"""streamfold for slime: what to pass to slime's options.

``--custom-generate-function-path streamfold.slime.generate_streaming``
    Streams each sample: keeps partial responses, retries failures, resumes aborted generations.
``--rollout-function-path streamfold.slime.generate_rollout``
    Runs whole rollouts: :mod:`streamfold.integrations.rollout`.
``--rollout-function-path streamfold.slime.generate_rollout_async``
    Fully asynchronous rollouts: :mod:`streamfold.integrations.fully_async`.
``--data-source-path streamfold.slime.DataSource``
    Saves partial groups, and finished ones that no rollout has used yet, with the checkpoint:
    :mod:`streamfold.integrations.data_source`.

They need slime 0.3.1, and work in newer releases, which read the attribute ``abort_mode`` of ``generate_streaming`` and
abort requests one by one, and in older ones, which abort all requests of a server. Settings (timeouts, retries, limits)
are in :mod:`streamfold.integrations.settings`.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Final, Literal

from streamfold.integrations import data_source, fully_async, generate, rollout
from streamfold.integrations.base import Integration, has_items
from streamfold.samples import observation
from streamfold.samples.merging import meta_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold._core import Generation
    from streamfold.engines.base import TokenIds
    from streamfold.integrations.base import SampleRequest, TrainerSample
    from streamfold.integrations.settings import Args
    from streamfold.samples.options import Extra

__all__ = [
    "SLIME", "append_observation", "close_rollout", "generate_rollout", "generate_rollout_async", "generate_streaming",
    "turn",
]  # fmt: skip

_MOST_EXPERTS_IN_UINT8: Final = 256


class Slime(Integration):
    """THUDM/slime, on SGLang."""

    package = "slime"
    engine: ClassVar[Literal["sglang", "vllm"]] = "sglang"
    session_policy = "consistent_hashing"
    session_header = "X-SMG-Routing-Key"
    seed_param = "sampling_seed"
    oldest_release = "slime 0.3.1 or newer"

    def experts_dtype(self, num_experts: int | None) -> Literal["int32", "uint8"]:
        """uint8 up to 256 experts, as slime itself requests them."""
        return "uint8" if num_experts is not None and num_experts <= _MOST_EXPERTS_IN_UINT8 else "int32"

    async def extra_payload(self, request: SampleRequest) -> Extra:
        """Images with their prompt."""
        images: Any = (request.sample.multimodal_inputs or {}).get("images")
        return partial(self._with_images, request.sample, images) if has_items(images) else {}

    def _with_images(self, sample: TrainerSample, images: Sequence[Any]) -> dict[str, Any]:
        """On a first call the prompt is sent as text; a resumed one sends all ids, placeholders included."""
        encode = self.module("utils.processing_utils").encode_image_for_rollout_engine
        encoded = [encode(image) for image in images]
        if sample.response_length:
            return {"image_data": encoded, "input_ids": sample.tokens}
        if not isinstance(sample.prompt, str):
            raise ValueError(f"with images the prompt must be a str, not {type(sample.prompt).__name__}")
        return {"image_data": encoded, "text": sample.prompt}

    def trace_meta(self, generation: Generation) -> dict[str, Any]:
        """All fields of SGLang's ``meta_info``."""
        return {**generation.meta, **meta_info(generation)}


SLIME: Final = Slime()


async def generate_streaming(
    args: Args,
    sample: TrainerSample,
    sampling_params: Mapping[str, Any],
    evaluation: bool = False,  # noqa: FBT001, FBT002  # slime's signature
) -> TrainerSample:
    """Generate the response of one sample, or resume it. Each call's result is written to the sample once.

    Args:
        args: slime's options. Read, never changed.
        sample: slime's, PENDING or ABORTED.
        sampling_params: SGLang's. ``max_new_tokens`` limits the whole response; a resumed call gets what is left of
            it. Read, never changed.
        evaluation: accepted because slime may pass it; evaluation samples are requested in the same way.

    Returns:
        The sample: COMPLETED or TRUNCATED; ABORTED if the engine aborted the request, or slime is aborting.

    Raises:
        StreamfoldError: a call failed, and retries and ``streamfold_resume`` did not help. The sample is ABORTED and
            holds what was received.
        ValueError: an option or the sample is invalid, or the response does not fit the sample.
        asyncio.CancelledError: the task was cancelled. The request has been aborted, and its side data was waited for;
            the sample is ABORTED and holds what was received.

    With top-p replay, tokens cannot be trained on without the ids that sampling could choose from. If a call ends
    before those are received, none of its tokens are written, and ``sample.metadata["streamfold_lost_side_data"]``
    counts them.
    """
    return await generate.generate_sample(SLIME, args, sample, sampling_params, evaluation=evaluation)


# Newer slime cancels this task to abort the request; older slime does not read this.
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
    tool answered with :func:`append_observation`. Set ``abort_mode = "request"`` on your function, so that slime aborts
    its requests one by one, by cancelling it; without that, slime aborts everything that the engines run.

    Args:
        args: slime's options. Read, never changed.
        sample: slime's.
        sampling_params: SGLang's. ``max_new_tokens`` limits the whole response, all turns and observations. Read, never
            changed.
        max_new_tokens: limits what this turn generates. None: no further limit.

    Returns:
        The sample. COMPLETED: the turn ended by itself. TRUNCATED: a limit was reached. ABORTED: slime is aborting;
        return the sample, and it will be passed to your function again.

    Raises:
        StreamfoldError: as for :func:`generate_streaming`.
        ValueError: as for :func:`generate_streaming`, or tokens were added to the sample in another way than by
            :func:`append_observation` or the sample's own ``append_response_tokens``.
        asyncio.CancelledError: slime is aborting. Let it propagate: what was received is in the sample.
    """
    return await generate.generate_sample(SLIME, args, sample, sampling_params, max_new_tokens_per_turn=max_new_tokens)


def append_observation(args: Args, sample: TrainerSample, token_ids: TokenIds, text: str | None = None) -> bool:
    """Append a tool's answer to slime's sample, as :func:`streamfold.append_observation` does.

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
    data_source: Any,  # noqa: ANN401  # slime's, or ours
    evaluation: bool = False,  # noqa: FBT001, FBT002  # slime's signature
) -> Any:  # noqa: ANN401  # slime's class, where it has one
    """Run one rollout, in the trainer's event loop if it has one, else in a new one.

    Args:
        args: the trainer's options. Read, never changed.
        rollout_id: the number of the rollout.
        data_source: slime's, or ``streamfold.slime.DataSource``, which loses no group in a crash.
        evaluation: generate the evaluation sets instead, with slime's ``eval_rollout``.

    Returns:
        ``RolloutFnTrainOutput`` with ``rollout_batch_size`` groups, sorted, and metrics; for an evaluation
        ``RolloutFnEvalOutput``. Older releases have no such classes: the groups, or the evaluation's data.

    Raises:
        StreamfoldError: too many groups failed. All groups have been returned to the data source.
        Exception: what the data source, a filter, or an evaluation raised. All groups have been returned too.
        ValueError: a setting is invalid, or ``rollout_data_transport`` is ``"straw"``.
    """
    return rollout.generate_rollout(SLIME, args, rollout_id, data_source, evaluation=evaluation)


def generate_rollout_async(
    args: Args,
    rollout_id: int,
    data_source: Any,  # noqa: ANN401  # slime's, or ours
    evaluation: bool = False,  # noqa: FBT001, FBT002  # slime's signature
) -> Any:  # noqa: ANN401  # slime's class, where it has one
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
    return fully_async.generate_rollout_async(SLIME, args, rollout_id, data_source, evaluation=evaluation)


def close_rollout() -> None:
    """Stop :func:`generate_rollout_async`: abort, and return all groups to their data source.

    The thread ends too. Calling it again does nothing.
    """
    fully_async.close_rollout(SLIME)


def __getattr__(name: str) -> Any:  # noqa: ANN401  # DataSource subclasses slime's class, so slime must be installed
    if name == "DataSource":
        return data_source.data_source_class(SLIME)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
