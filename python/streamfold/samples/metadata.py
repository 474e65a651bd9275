"""The keys that streamfold keeps in ``sample.metadata``: counts, flags, and the :class:`TurnState` of a partial sample.

They are saved with the sample, so that another process can resume it: a key never changes its name or meaning. All but
one start with ``streamfold_``, since a dataset and its trainer have names of their own; ``start_rollout_id`` is the
trainers' name, for the trainers' purpose.

================================  ==============================================================================
``streamfold_resumed``            how often the generation was resumed or restarted after a failure
``streamfold_restarted_tokens``   tokens dropped because the sample started again from its prompt or its turn
``streamfold_lost_side_data``     tokens dropped because their top-p ids or routed experts were not received
``streamfold_failures``           how often the generator or the reward of its group raised an error
``streamfold_resumed_penalties``  how often a call continued the response although its sampling has a penalty
                                  (``frequency_penalty``, ``presence_penalty``, ``repetition_penalty``) of which the
                                  engine counts only what that call generates: from there on it is another sample
                                  than that of one call
``streamfold_seconds``            seconds for which the sample was generated, where ``sample_seconds`` limits them
``streamfold_timed_out``          1: the response is TRUNCATED because it reached that limit
``streamfold_call_versions``      ``[version, start, end]`` over the response tokens: the rollout, or weight version of
                                  the pool, in which their call was sent, where ``max_staleness`` limits it
``streamfold_stale_restarts``     how often the sample was restarted because of ``max_staleness``
``start_rollout_id``              the rollout in which the response was started
``streamfold_text_joined``        True: the texts of two calls were concatenated as they are, so that a character
                                  whose tokens were split between the calls may be missing or damaged
``streamfold_corrected_text``     how often the engine's text of a turn was none that it would have shown of the
                                  tokens, so that the decoded text was taken: SGLang repeats characters where an
                                  event brings several tokens
``streamfold_prompt_tokens``      tokens of a prompt with images as the engine counts them, if these are not as many
                                  as the ids that it was sent or that the sample has
``streamfold_unchecked_text``     True: there was no tokenizer to check the text with, and a stream brought several
                                  tokens an event, so that characters may be repeated in it
``streamfold_turn``               ``[tokens, characters]`` of the response before the turn that is being generated
``streamfold_known_text``         characters at the start of the response that are exact. The text behind them was
                                  concatenated, and is decoded again from the token ids when the response is
                                  finished
``streamfold_dp_rank``            ``[rank, dp_size]``: the data-parallel rank whose prefix cache has the sample; another
                                  one is chosen if ``dp_size`` changes or an engine refuses the rank
``streamfold_written``            ``[prompt, tokens, characters, status, limit]``: what the sample was when a call was
                                  last written to it; see :class:`LastWrite`
================================  ==============================================================================

Samples of a group may share one dict. It is copied once, when a sample first enters a rollout, :func:`complete` or a
trainer's generate function (:func:`enter`), and changed in place from then on: a generator that holds the dict sees
what is written here, and keeps what it writes itself.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

    from streamfold._types import SampleLike

__all__ = [
    "CALL_VERSIONS", "DP_RANK", "OWN_KEYS", "PROMPT_TOKENS", "SECONDS", "START_ROLLOUT_ID", "LastWrite", "TurnState",
    "add_counts", "count_of", "enter", "metadata_of", "own_metadata", "remove_keys", "rename_old_keys",
]  # fmt: skip

_PREFIX: Final = "streamfold_"
_COUNTS: Final = (
    "resumed", "restarted_tokens", "lost_side_data", "failures", "resumed_penalties", "corrected_text", "timed_out",
    "stale_restarts",
)  # fmt: skip
PROMPT_TOKENS: Final = f"{_PREFIX}prompt_tokens"
DP_RANK: Final = f"{_PREFIX}dp_rank"
START_ROLLOUT_ID: Final = "start_rollout_id"
CALL_VERSIONS: Final = f"{_PREFIX}call_versions"
SECONDS: Final = f"{_PREFIX}seconds"
_TURN: Final = f"{_PREFIX}turn"
_WRITTEN: Final = f"{_PREFIX}written"
_EXACT_CHARACTERS: Final = f"{_PREFIX}known_text"
_TEXT_JOINED: Final = f"{_PREFIX}text_joined"
_TEXT_UNCHECKED: Final = f"{_PREFIX}unchecked_text"
OWN_KEYS: Final = frozenset(
    {
        CALL_VERSIONS,
        PROMPT_TOKENS,
        DP_RANK,
        SECONDS,
        _TURN,
        _WRITTEN,
        _EXACT_CHARACTERS,
        _TEXT_JOINED,
        _TEXT_UNCHECKED,
        *(f"{_PREFIX}{name}" for name in _COUNTS),
    }
)
# The names of keys in files that were written before all of them had the prefix, and the type of their values.
_OLD_NAMES: Final = {
    "resumed": int, "restarted_tokens": int, "lost_side_data": int, "failures": int, "text_joined": bool,
}  # fmt: skip

# By the id of a sample: a reference to it, and the dict that is its own. Samples need not be hashable.
_own: Final[dict[int, tuple[weakref.ref[Any], dict[str, Any]]]] = {}


@dataclass(frozen=True)
class TurnState:
    """Where the current turn starts in a response, and how much of the response's text is exact.

    A sample has several turns if it is set to PENDING again behind a response: by a tool's answer, for example.

    Attributes:
        tokens: tokens of the response before the turn.
        characters: characters of the response before the turn.
        exact_characters: characters at the start of the response that are exact, as one call sent them or as they were
            decoded as a whole; None: all of them.
        text_joined: whether texts of two calls were concatenated for good.
        text_unchecked: whether characters may be repeated in the text, which there was no tokenizer to check with.
    """

    tokens: int = 0
    characters: int = 0
    exact_characters: int | None = None
    text_joined: bool = False
    text_unchecked: bool = False

    @classmethod
    def of(cls, sample: SampleLike) -> TurnState:
        """Read the state from a sample."""
        metadata = metadata_of(sample)
        tokens, characters = metadata.get(_TURN, (0, 0))
        flags = (bool(metadata.get(key)) for key in (_TEXT_JOINED, _TEXT_UNCHECKED))
        return cls(tokens, characters, metadata.get(_EXACT_CHARACTERS), *flags)

    def save(self, sample: SampleLike) -> None:
        """Write the state to a sample; values that are the default have no key."""
        values: dict[str, Any] = {
            _TURN: [self.tokens, self.characters] if self.tokens or self.characters else None,
            _EXACT_CHARACTERS: self.exact_characters,
            _TEXT_JOINED: self.text_joined or None,
            _TEXT_UNCHECKED: self.text_unchecked or None,
        }
        metadata = own_metadata(sample)
        for key, value in values.items():
            if value is None:
                metadata.pop(key, None)
            else:
                metadata[key] = value


class LastWrite(NamedTuple):
    """What a sample was when a call was last written to it, or before an observation was appended to a new one.

    What stands behind its response belongs to another turn.

    Attributes:
        prompt: tokens before the response.
        tokens: of the response.
        characters: of the response.
        status: its name.
        limit: how many tokens the response may have; None if that is not known.
    """

    prompt: int
    tokens: int
    characters: int
    status: str
    limit: int | None

    @classmethod
    def of(cls, sample: SampleLike) -> LastWrite | None:
        """Read it from a sample; None if no call was written."""
        note = metadata_of(sample).get(_WRITTEN)
        return None if note is None else cls(*note)

    @staticmethod
    def save(sample: SampleLike, *, limit: int | None) -> None:
        """Write down what a sample is now; nothing if it is a prompt alone."""
        if sample.response_length:
            LastWrite.now(sample, limit=limit).store(sample)
        else:
            remove_keys(sample, _WRITTEN)

    @classmethod
    def now(cls, sample: SampleLike, *, limit: int | None) -> LastWrite:
        """What a sample is now."""
        tokens = sample.response_length
        return cls(len(sample.tokens) - tokens, tokens, len(sample.response), sample.status.name, limit)

    def check_prompt(self, sample: SampleLike) -> None:
        """Raise ValueError if tokens were added since then that the response's length does not count."""
        prompt = len(sample.tokens) - sample.response_length
        if self.prompt != prompt:
            raise ValueError(
                f"the sample has {len(sample.tokens)} tokens and a response_length of {sample.response_length}, which "
                f"leaves {prompt} for the prompt, but the prompt had {self.prompt} when a call was last written: "
                "append a tool's tokens with append_observation()"
            )

    def store(self, sample: SampleLike) -> None:
        """Write it to a sample."""
        own_metadata(sample)[_WRITTEN] = list(self)


def metadata_of(sample: SampleLike) -> Mapping[str, Any]:
    """Give the metadata of a sample, to be read; a host's may be None."""
    return sample.metadata or {}


def enter(sample: SampleLike) -> None:
    """Give a sample a metadata dict of its own, if it has none yet: the given one may be shared with other samples."""
    if sample.metadata is not None:
        own_metadata(sample)


def own_metadata(sample: SampleLike) -> dict[str, Any]:
    """Give the metadata of a sample, to be changed in place. It is copied if this sample has not entered yet."""
    key, metadata = id(sample), sample.metadata
    known = _own.get(key)
    if known is not None and known[0]() is sample and known[1] is metadata:
        return known[1]
    own: dict[str, Any] = {} if metadata is None else copy.copy(metadata)
    sample.metadata = own
    with contextlib.suppress(TypeError):  # a sample without weak references: copied again by the next change
        _own[key] = weakref.ref(sample, lambda _: _own.pop(key, None)), own
    return own


def count_of(sample: SampleLike, name: str) -> int:
    """Give a count from a sample's metadata, by its name without the prefix."""
    count = metadata_of(sample).get(f"{_PREFIX}{name}")
    return count if type(count) is int else 0


def add_counts(sample: SampleLike, **counts: int) -> None:
    """Add to the counts in a sample's metadata, whose names are given without the prefix."""
    metadata = own_metadata(sample)
    for name, count in counts.items():
        metadata[f"{_PREFIX}{name}"] = count_of(sample, name) + count


def remove_keys(sample: SampleLike, *keys: str) -> None:
    """Remove keys from a sample's metadata."""
    metadata = own_metadata(sample)
    for key in keys:
        metadata.pop(key, None)


def rename_old_keys(metadata: Any, *, others: Container[str] = ()) -> Any:  # noqa: ANN401  # what a file holds
    """Give the metadata of a file that was written before all keys had their prefix, under today's names.

    Args:
        metadata: of one sample; what is not a dict is returned as it is.
        others: keys that are not streamfold's in this sample.
    """
    if not isinstance(metadata, dict):
        return metadata
    return {
        f"{_PREFIX}{key}" if type(value) is _OLD_NAMES.get(key) and key not in others else key: value
        for key, value in metadata.items()
    }
