"""The keys that streamfold keeps in ``sample.metadata``: counts, flags, and the :class:`TurnState` of a partial sample.

They are saved with the sample, so that another process can resume it: a key never changes its name or meaning.

===========================  ===================================================================================
``resumed``                  how often the generation was resumed or restarted after a failure
``restarted_tokens``         tokens dropped because the sample started again from its prompt or its turn
``lost_side_data``           tokens dropped because their top-p ids or routed experts were not received
``failures``                 how often the generator or the reward of its group raised an error
``start_rollout_id``         the rollout in which the response was started
``text_joined``              True: the texts of two calls were concatenated as they are, so that a character whose
                             tokens were split between the calls may be missing or damaged
``streamfold_turn``          ``[tokens, characters]`` of the response before the turn that is being generated
``streamfold_known_text``    characters at the start of the response that are exact. The text behind them was
                             concatenated, and is decoded again from the token ids when the response is finished
``streamfold_ended``         ``{"at": response_length, "as": status}``: the response was finished although its
                             trainer, which cancelled the call, regards it as a partial one
===========================  ===================================================================================
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from streamfold._types import SampleLike

__all__ = ["FINISHED_AS", "START_ROLLOUT_ID", "TurnState", "add_counts", "metadata_of", "remove_keys"]

FINISHED_AS: Final = "streamfold_ended"
START_ROLLOUT_ID: Final = "start_rollout_id"
_TURN: Final = "streamfold_turn"
_EXACT_CHARACTERS: Final = "streamfold_known_text"
_TEXT_JOINED: Final = "text_joined"


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
    """

    tokens: int = 0
    characters: int = 0
    exact_characters: int | None = None
    text_joined: bool = False

    @classmethod
    def of(cls, sample: SampleLike) -> TurnState:
        """Read the state from a sample."""
        metadata = metadata_of(sample)
        tokens, characters = metadata.get(_TURN, (0, 0))
        return cls(tokens, characters, metadata.get(_EXACT_CHARACTERS), bool(metadata.get(_TEXT_JOINED)))

    def save(self, sample: SampleLike) -> None:
        """Write the state to a sample; values that are the default have no key."""
        values: dict[str, Any] = {
            _TURN: [self.tokens, self.characters] if self.tokens or self.characters else None,
            _EXACT_CHARACTERS: self.exact_characters,
            _TEXT_JOINED: self.text_joined or None,
        }
        others = {key: value for key, value in metadata_of(sample).items() if key not in values}
        sample.metadata = {**others, **{key: value for key, value in values.items() if value is not None}}


def metadata_of(sample: SampleLike) -> dict[str, Any]:
    """Give the metadata of a sample; a host's may be None."""
    return sample.metadata or {}


# All of these write a dict of their own: the old one may be shared with other samples.


def add_counts(sample: SampleLike, **counts: int) -> None:
    """Add to the counts in a sample's metadata."""
    metadata = dict(metadata_of(sample))
    for key, count in counts.items():
        before = metadata.get(key)
        metadata[key] = before + count if type(before) is int else count
    sample.metadata = metadata


def remove_keys(sample: SampleLike, *keys: str) -> None:
    """Remove keys from a sample's metadata."""
    sample.metadata = {key: value for key, value in metadata_of(sample).items() if key not in keys}
