"""slime's generate function, streamed: ``--custom-generate-function-path streamfold.slime.generate_streaming``.

What has arrived of a sample is kept however its call ends, and written to it once. It works unchanged in releases of
slime that cancel single requests (they read ``abort_mode``) and in older ones, which abort whole servers.

What stands around it can be had from here too, each by an option of slime's:

- ``--rollout-function-path streamfold.slime.generate_rollout``: whole rollouts, see
  :mod:`streamfold.integrations.rollout`;
- ``--rollout-function-path streamfold.slime.generate_rollout_async``: fully asynchronous ones, see
  :mod:`streamfold.integrations.fully_async`;
- ``--data-source-path streamfold.slime.DataSource``: a buffer that outlives its process, see
  :mod:`streamfold.integrations.data_source`.

For its settings see :mod:`streamfold.integrations.base`, and one of its own: ``streamfold_model`` (STREAMFOLD_MODEL)
says which of ``sglang_model_routers`` is asked, if a sample names none in its ``metadata["model_name"]``.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final, Literal

from streamfold.integrations import data_source as host_source
from streamfold.integrations import fully_async as host_pool
from streamfold.integrations import generate as host_generate
from streamfold.integrations import rollout as host_rollout
from streamfold.integrations.base import Host, has_any
from streamfold.samples.merging import meta_info

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from streamfold._core import Generation
    from streamfold.client.abort_signal import AbortSignal
    from streamfold.integrations.base import Args, HostSample, Seat
    from streamfold.samples.completion import Extra

__all__ = ["SLIME", "close_rollout", "generate_rollout", "generate_rollout_async", "generate_streaming"]

_MOST_EXPERTS_IN_UINT8: Final = 256


class Slime(Host):
    """THUDM/slime, on SGLang."""

    package = "slime"
    engine = "sglang"
    session_policy = "consistent_hashing"
    session_header = "X-SMG-Routing-Key"
    seed = "sampling_seed"

    def experts_dtype(self, count: int | None) -> Literal["int32", "uint8"]:
        """Ask for bytes where they fit, as the host itself does."""
        return "uint8" if count is not None and count <= _MOST_EXPERTS_IN_UINT8 else "int32"

    async def besides(
        self, args: Args, sample: HostSample, seat: Seat, headers: Mapping[str, str], aborted: AbortSignal
    ) -> Extra:
        """Images with their prompt."""
        del args, seat, headers, aborted
        images: Any = (sample.multimodal_inputs or {}).get("images")
        return partial(self._with_images, sample, images) if has_any(images) else {}

    def _with_images(self, sample: HostSample, images: Sequence[Any]) -> dict[str, Any]:
        """Give the prompt's text at first; all ids, placeholders included, to go on with a response."""
        encode = self.module("utils.processing_utils").encode_image_for_rollout_engine
        encoded = [encode(image) for image in images]
        if sample.response_length:
            return {"image_data": encoded, "input_ids": sample.tokens}
        if not isinstance(sample.prompt, str):
            raise ValueError(f"beside images the prompt must be a str, not {type(sample.prompt).__name__}")
        return {"image_data": encoded, "text": sample.prompt}

    def traced(self, generation: Generation) -> dict[str, Any]:
        """Everything that the engine told, flat."""
        return {**generation.meta, **meta_info(generation)}


SLIME: Final = Slime()


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
        sampling_params: as the engine has them; ``max_new_tokens`` counts the whole response, of which a call asks
            for what is missing. Read, never changed.
        evaluation: taken because the host may give it; both kinds are asked alike.

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
    return await host_generate.generate(SLIME, args, sample, sampling_params, evaluation=evaluation)


# Newer slime cancels this task to end the request; older slime does not look here.
vars(generate_streaming)["abort_mode"] = "request"


def generate_rollout(
    args: Args,
    rollout_id: int,
    data_source: Any,  # noqa: ANN401  # the host's, or ours
    evaluation: bool = False,  # noqa: FBT001, FBT002  # the host's signature
) -> Any:  # noqa: ANN401  # the host's class, where it has one
    """Do one rollout: see :func:`streamfold.integrations.rollout.generate_rollout`."""
    return host_rollout.generate_rollout(SLIME, args, rollout_id, data_source, evaluation=evaluation)


def generate_rollout_async(
    args: Args,
    rollout_id: int,
    data_source: Any,  # noqa: ANN401  # the host's, or ours
    evaluation: bool = False,  # noqa: FBT001, FBT002  # the host's signature
) -> Any:  # noqa: ANN401  # the host's class, where it has one
    """Give the next groups of a pool: see :func:`streamfold.integrations.fully_async.generate_rollout_async`."""
    return host_pool.generate_rollout_async(SLIME, args, rollout_id, data_source, evaluation=evaluation)


def close_rollout() -> None:
    """End the pool of :func:`generate_rollout_async`: see :func:`streamfold.integrations.fully_async.close_rollout`."""
    host_pool.close_rollout(SLIME)


def __getattr__(name: str) -> Any:  # noqa: ANN401  # a class, which can be made only in the host
    if name == "DataSource":
        return host_source.data_source(SLIME)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
