"""Append an observation, the answer of a tool or an environment, to a sample that its own tokens do not train."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamfold.engines.token_ids import token_array
from streamfold.samples.appending import append_of
from streamfold.samples.atomic import all_or_nothing
from streamfold.samples.metadata import LastWrite
from streamfold.samples.reset import end_before_observations
from streamfold.samples.validation import check_lengths

if TYPE_CHECKING:
    from streamfold._types import SampleLike
    from streamfold.engines.base import TokenIds

__all__ = ["append_observation"]


def append_observation(
    sample: SampleLike,
    token_ids: TokenIds,
    text: str | None = None,
    *,
    args: Any = None,  # noqa: ANN401  # the host's own
) -> bool:
    """Append the answer of a tool or an environment to the response of ``sample``, ours or a host's.

    The tokens get a loss mask of 0, a log-probability of 0.0 as a placeholder if the response has log-probabilities,
    and no top-p ids; no version span covers them, and their rows of routed experts come with the next call. The status
    becomes PENDING, whatever it was: the next :func:`~streamfold.complete` generates another turn.

    A sample never ends with an observation: if no token could be generated behind it, because of the limit of the last
    call's response, nothing is appended, other observations behind that call are removed, and the status is TRUNCATED.

    Args:
        sample: of any status but FAILED.
        token_ids: ``[n]``, as the model is to read them, with the chat template's tokens around the answer.
        text: of these tokens; None: the text of the response stays as it is.
        args: the settings that a host's method needs.

    Returns:
        Whether it was appended.

    Raises:
        ValueError: there are no ids, one is no id, or the lengths of the sample disagree. The sample is unchanged.
    """
    ids = token_array(token_ids).tolist()
    statuses = type(sample.status)
    if sample.status.name == "FAILED":
        raise ValueError("the sample is FAILED: restart it before anything is appended")
    if not ids:
        raise ValueError("the observation has no token_ids: a turn begins behind at least one")
    check_lengths(sample)
    written = LastWrite.of(sample)
    if written is not None:
        written.check_prompt(sample)
        if written.limit is not None and sample.response_length + len(ids) >= written.limit:
            end_before_observations(sample, written)
            return False
    start = LastWrite.now(sample, limit=None) if written is None else written
    with all_or_nothing(sample):
        append_of(sample)(
            args,
            tokens=ids,
            log_probs=None,
            trainable=False,
            meta_info={},
            text=text or "",
            update_terminal_info=False,
        )
    start.store(sample)
    sample.status = statuses["PENDING"]
    return True
