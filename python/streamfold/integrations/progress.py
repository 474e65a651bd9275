"""``RolloutProgress``: the log lines and the progress bar of the trainer's own rollout function, beside ours."""

from __future__ import annotations

import contextlib
import logging
from typing import TYPE_CHECKING, Any, Final

from streamfold.rollout.groups import samples_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from streamfold.integrations.base import Integration
    from streamfold.integrations.settings import Args
    from streamfold.rollout.groups import Group

__all__ = ["RolloutProgress"]

_LABEL_CHARACTERS: Final = 100


class RolloutProgress:
    """Shows the first and the last sample of each rollout in the trainer's log, and its bar where that release has one.

    Args:
        integration: the trainer.
        args: its options.
    """

    def __init__(self, integration: Integration, args: Args) -> None:
        # The trainer's own logger, so that its handlers and those who search its log find the lines.
        self._logger = logging.getLogger(f"{integration.package}.rollout.{integration.engine}_rollout")
        self._integration = integration
        self._groups: int = args.rollout_batch_size
        self._samples: int = args.n_samples_per_prompt
        self._bar: Any = None  # the trainer's tqdm; None: no rollout is waited for, or there is no such thing
        self._is_waited_for = False
        self._has_shown_first = False
        self._last: Group | None = None

    @property
    def has_bar(self) -> bool:
        """Whether the trainer's release shows a bar, so that another one would be in its way."""
        return self._make_bar is not None

    @property
    def _make_bar(self) -> Callable[..., Any] | None:
        return getattr(self._integration.rollout_module, "tqdm", None)

    @contextlib.contextmanager
    def shown(self, ready: int = 0) -> Iterator[None]:
        """Show the bar while a rollout is waited for, of which ``ready`` groups are there already."""
        self._is_waited_for, self._has_shown_first, self._last = True, False, None
        if (make_bar := self._make_bar) is not None:
            self._bar = make_bar(total=self._groups * self._samples, desc="Rollout generation")
        self._advance(ready)
        try:
            yield
        finally:
            self._is_waited_for = False
            if self._bar is not None:
                self._bar.close()
                self._bar = None

    def note_finished(self, group: Group) -> None:
        """Log the first group that finishes in a rollout, whatever the filter says about it."""
        if self._is_waited_for and not self._has_shown_first:
            self._has_shown_first = True
            self._log("First rollout sample", group)

    def note_accepted(self, group: Group) -> None:
        """Advance the bar by a group."""
        self._last = group
        self._advance(1)

    def finish(self, groups: list[Group]) -> None:
        """Log the group that finished last of those that the trainer gets; of a pool they are in that order."""
        if not groups:
            return
        if not self._has_shown_first:
            self._log("First rollout sample", groups[0])
        last = next((group for group in groups if group is self._last), groups[-1])
        self._log("Finish rollout", last)

    def _advance(self, groups: int) -> None:
        left = 0 if self._bar is None else self._groups - self._bar.n // self._samples
        if groups := min(groups, left):
            self._bar.update(groups * self._samples)

    def _log(self, what: str, group: Group) -> None:
        sample = samples_of(group)[0]
        text, label = str(sample.prompt) + sample.response, str(sample.label)[:_LABEL_CHARACTERS]
        self._logger.info("%s: %s, label: %s, reward: %s", what, [text], label, sample.reward)
