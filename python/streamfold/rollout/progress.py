"""``ProgressView``: shows a run while it lasts: a bar in a terminal or notebook, elsewhere a log line each 10 s."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from streamfold.client._internal import Totals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from rich.console import Console, RenderableType
    from typing_extensions import Self

__all__ = ["ProgressView", "RunState"]

# Its own name, so that a log can have these lines without all others of level INFO.
_logger = logging.getLogger("streamfold.progress")

_LOG_SECONDS: Final = 10.0
_DRAW_SECONDS: Final = 0.2
_REST: Final = 30  # times what a look has cost: it walks over thousands of calls
_RATE_SECONDS: Final = 10.0  # over which the rate is taken


@dataclass(frozen=True, kw_only=True)
class RunState:
    """What a run has done so far.

    Attributes:
        done: groups, or samples, of the view's total.
        in_flight: groups, or samples, that run.
        tokens: that were received, those of running calls aside.
        calls: those that run.
        counts: further counts by their names; those of 0 are not shown.
    """

    done: int
    in_flight: int
    tokens: int
    calls: Totals = field(default_factory=Totals)
    counts: Mapping[str, int] = field(default_factory=dict)


class _Display(Protocol):
    """Where a view is drawn."""

    def draw(self, done: int, text: str) -> None: ...

    def close(self) -> None: ...


class ProgressView:
    """Shows a run in a terminal or a notebook; elsewhere it logs one line each ten seconds. It needs no thread.

    Args:
        name: of the run, such as ``"rollout 3"``.
        unit: what is counted: ``"groups"``.
        total: how many there will be; None: not known, so that only lines are logged.
        look: gives the state. It is called again after a time in proportion to what it costs.
        draws: whether to draw a bar where one can be. Otherwise lines are logged.
        console: of the terminal; None: standard error.
        is_shown: False: neither a bar nor a line.
    """

    def __init__(
        self,
        name: str,
        unit: str,
        total: int | None,
        look: Callable[[], RunState],
        *,
        draws: bool = True,
        console: Console | None = None,
        is_shown: bool = True,
    ) -> None:
        self._name = name
        self._unit = unit
        self._total = total
        self._look = look
        self._draws = draws and total is not None
        self._console = console
        self._is_shown = is_shown
        self._display: _Display | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._has_logged = False
        self._most_tokens = 0
        self._seen: deque[tuple[float, int]] = deque()  # times, and the tokens that had come

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    def start(self) -> None:
        """Show the run from now on, in the running event loop."""
        if not self._is_shown:
            return
        self._loop = asyncio.get_running_loop()
        self._started_at = self._loop.time()
        state = self._look()
        self._done_before = state.done
        self._seen.append((self._started_at, state.tokens + state.calls.tokens))
        self._display = self._open()
        self._schedule(_LOG_SECONDS if self._display is None else 0.0)

    def stop(self) -> None:
        """Show the end of the run: in the bar, and in the log if anything was logged."""
        if self._timer is None:
            return
        self._timer.cancel()
        self._timer = None
        if self._display is not None:
            self._display.draw(*self._text())
            self._display.close()
        elif self._has_logged:
            self._log()

    def _open(self) -> _Display | None:
        if not self._draws or self._total is None:
            return None
        if (display := _notebook_display()) is not None:
            return _NotebookLine(display, self._name, self._unit, self._total)
        if self._console.is_terminal if self._console is not None else sys.stderr.isatty():
            return _TerminalBar(self._name, self._total, self._console)
        return None

    def _schedule(self, seconds: float) -> None:
        self._timer = self._loop.call_later(seconds, self._show)

    def _show(self) -> None:
        started_at = self._loop.time()
        if self._display is None:
            self._log()
            self._schedule(_LOG_SECONDS)
        else:
            self._display.draw(*self._text())
            self._schedule(max(_DRAW_SECONDS, _REST * (self._loop.time() - started_at)))

    def _log(self) -> None:
        self._has_logged = True
        done, text = self._text()
        of = "" if self._total is None else f" of {self._total}"
        _logger.info("%s: %d%s %s in %s, %s", self._name, done, of, self._unit, _clock(self._seconds), text)

    @property
    def _seconds(self) -> float:
        return self._loop.time() - self._started_at

    def _text(self) -> tuple[int, str]:
        """What is done, and a line about the rest."""
        state = self._look()
        tokens, calls = self._tokens(state), state.calls
        parts = [f"{state.in_flight} in flight", f"{tokens:,} tokens", f"{self._rate(tokens):,.0f}/s"]
        parts += [f"{count:,} {name}" for name, count in state.counts.items() if count]
        if calls.slowest_age is not None:
            parts.append(f"slowest {_clock(calls.slowest_age)} with {calls.slowest_tokens:,} tokens")
        done, left = state.done - self._done_before, (self._total or 0) - state.done
        if done > 0 and left > 0:
            parts.append(f"ETA {_clock(self._seconds / done * left)}")
        return state.done, ", ".join(parts)

    def _tokens(self, state: RunState) -> int:
        """Tokens so far. What a call has brought is for a moment in no count, between its end and its sample."""
        tokens = state.tokens + state.calls.tokens
        if self._total is None:  # a pool counts anew when its metrics are read
            return tokens
        self._most_tokens = max(self._most_tokens, tokens)
        return self._most_tokens

    def _rate(self, tokens: int) -> float:
        """Tokens per second, over the last seconds."""
        now = self._loop.time()
        self._seen.append((now, tokens))
        while len(self._seen) > 2 and self._seen[1][0] <= now - _RATE_SECONDS:
            self._seen.popleft()
        since, before = self._seen[0]
        gained = tokens - before if tokens >= before else tokens  # a pool counts anew when its metrics are read
        return gained / (now - since) if now > since else 0.0


def _clock(seconds: float) -> str:
    """A time as 0:07, or 1:02:07."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


class _TerminalBar:
    """A bar of rich that is only redrawn on request, with a line below it."""

    def __init__(self, name: str, total: int, console: Console | None) -> None:
        from rich import progress  # noqa: PLC0415  # half of what an import of the package costs
        from rich.console import Console  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        line = self._line = Text()

        class Bar(progress.Progress):
            def get_renderables(self) -> Iterable[RenderableType]:
                yield self.make_tasks_table(self.tasks)
                yield line

        self._bar = Bar(
            progress.TextColumn("{task.description}", markup=False),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            console=Console(stderr=True) if console is None else console,
            auto_refresh=False,
        )
        self._task = self._bar.add_task(name, total=total)
        self._bar.start()

    def draw(self, done: int, text: str) -> None:
        self._line.plain = text
        self._bar.update(self._task, completed=done, refresh=True)

    def close(self) -> None:
        self._bar.stop()


class _NotebookLine:
    """A line in the output of a notebook's cell, which is replaced in place. It needs no widgets."""

    def __init__(self, display: Callable[..., Any], name: str, unit: str, total: int) -> None:
        self._prefix = f"{name}: "
        self._suffix = f" of {total} {unit}, "
        self._handle = display({"text/plain": self._prefix}, raw=True, display_id=True)

    def draw(self, done: int, text: str) -> None:
        self._handle.update({"text/plain": f"{self._prefix}{done}{self._suffix}{text}"}, raw=True)

    def close(self) -> None:
        pass


def _notebook_display() -> Callable[..., Any] | None:
    """IPython's ``display``, in the kernel of a notebook; None anywhere else."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is None or getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display  # noqa: PLC0415  # of the notebook

    function: Callable[..., Any] = display
    return function
