"""Settings of streamfold in trainers: ``streamfold_*`` attributes of ``args``, or ``STREAMFOLD_*`` variables.

Set attributes in the file of ``--custom-config-path``, or environment variables of the same names in capitals.
Attributes take precedence. ``none`` (in YAML ``null``) means no limit, where a setting allows that.

:class:`Settings` is the one list of them. ``python -m streamfold.integrations.settings`` prints it as the table of
docs/settings.md, ``python -m streamfold.integrations.settings yaml`` as the ``streamfold.yaml`` of the examples.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import NoneType
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias, TypeVar, get_args, get_origin, get_type_hints

import orjson

from streamfold.client.limits import Limits, Retries, Timeouts
from streamfold.client.urls import bearer
from streamfold.engines.base import PROMPT_KEYS, common_extra
from streamfold.rollout.config import RolloutConfig, Stale
from streamfold.samples.options import Resume, ResumePenalties  # noqa: TC001  # get_type_hints evaluates them

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["SETTINGS", "Args", "Scope", "Setting", "Settings", "config_file", "markdown_table"]

Args: TypeAlias = Any  # the trainer's; releases differ, so what may be missing is read with getattr
Scope: TypeAlias = Literal["all", "rollout", "fully async"]
Value: TypeAlias = Any  # of a setting, before and after it is parsed

T = TypeVar("T")

_WORDS: Final[dict[Any, str]] = {  # what a value must be, by its type
    bool: "true or false",
    int: "a whole number",
    float: "a number of seconds",
    str: "a name",
    dict[str, str]: "an object of names and texts",
    dict[str, Any]: f"a JSON object of request keys, none of {', '.join(sorted(PROMPT_KEYS))}",
}
_NONE: Final = ("none", "null", "")
_FLAGS: Final = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}
_UNSET: Final = object()
_SCOPES: Final[dict[Scope, str]] = {
    "all": "Every function of streamfold",
    "rollout": "generate_rollout and generate_rollout_async",
    "fully async": "generate_rollout_async",
}


def _setting(
    default: T,
    meaning: str,
    *,
    scope: Scope = "all",
    minimum: int | None = None,
    unit: str = "of seconds",
    is_secret: bool = False,
) -> T:
    metadata = {"meaning": meaning, "scope": scope, "minimum": minimum, "unit": unit, "is_secret": is_secret}
    return field(default=default, repr=not is_secret, metadata=metadata)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings, parsed. The field ``tries`` is the attribute ``streamfold_tries``, or ``STREAMFOLD_TRIES``."""

    resume: Resume = _setting(  # noqa: RUF009  # a field specifier
        "continue",
        "after a stream broke off: `continue` from the tokens received, `restart` without them, or `raise`",
    )
    resume_penalties: ResumePenalties = _setting(  # noqa: RUF009  # a field specifier
        "continue",
        "a partial response with penalties, which the engine counts anew in each call: `continue` it, or `restart`",
    )
    tries: int | None = _setting(
        Retries.tries, "requests of a call while no token has been received; also resumes of a sample", minimum=1
    )
    timeout_connect: float | None = _setting(Timeouts.connect, "seconds to open a connection", minimum=0)
    timeout_first_token: float | None = _setting(
        Timeouts.first_token, "seconds from the request to its first token: queue and prefill", minimum=0
    )
    timeout_next_token: float | None = _setting(Timeouts.next_token, "seconds from one token to the next", minimum=0)
    drain: float = _setting(
        Timeouts.drain,
        "seconds that an abort waits for routed experts and top-p ids, which come with the last event",
        minimum=0,
    )
    concurrency: int = _setting(
        Limits.calls, "concurrent requests to each router; each holds one socket (`ulimit -n`)", minimum=1
    )
    max_event_bytes: int = _setting(Limits.max_event_bytes, "bytes of one event; a longer one is an error", minimum=1)
    model: str | None = _setting(
        None,
        "the model of `sglang_model_routers` (`vllm_model_routers`) to use for samples whose "
        '`metadata["model_name"]` names none of them',
    )
    api_key: str | None = _setting(
        None, "bearer token of each request, for engines and routers that require one", is_secret=True
    )
    headers: dict[str, str] | None = _setting(  # noqa: RUF009  # a field specifier
        None, "further headers of each request: names and values (as a variable: a JSON object)", is_secret=True
    )
    extra: dict[str, Any] | None = _setting(  # noqa: RUF009  # a field specifier
        None,
        "further keys of each request, a mapping or JSON text: a LoRA adapter (SGLang `lora_path`, vLLM `model`), "
        "`priority`, `cache_salt`",
    )
    keep_finished: bool = _setting(
        RolloutConfig.keep_finished,
        "finished groups beyond the batch wait for the next rollout; if false they are dropped",
        scope="rollout",
    )
    max_staleness: int | None = _setting(
        RolloutConfig.max_staleness,
        "how many rollouts older than its batch a token may be; a fully asynchronous rollout starts no more groups "
        "than that",
        scope="rollout",
        minimum=0,
    )
    stale: Stale = _setting(  # noqa: RUF009  # a field specifier
        RolloutConfig.stale,
        "tokens that are older are trained on masked (`keep_masked`) or as they are (`keep`), or their group is "
        "dropped (`drop`) or restarted (`restart`)",
        scope="rollout",
    )
    abort_seconds: float = _setting(
        RolloutConfig.abort_seconds,
        "seconds in which the aborted rest of a rollout has to end",
        scope="rollout",
        minimum=0,
    )
    reward_seconds: float = _setting(
        RolloutConfig.reward_seconds,
        "seconds that rewards are waited for at the end of a rollout; later ones are computed in the next rollout",
        scope="rollout",
        minimum=0,
    )
    sample_seconds: float | None = _setting(
        RolloutConfig.sample_seconds,
        "seconds for which one sample is generated, in all rollouts; then it is truncated",
        scope="rollout",
        minimum=0,
    )
    sample_retries: int = _setting(
        RolloutConfig.sample_retries,
        "further tries of a sample whose generate function raised an error of its own",
        scope="rollout",
        minimum=0,
    )
    max_failures: int | None = _setting(
        RolloutConfig.max_failures,
        "groups that may fail in one rollout; they are retried in the next one",
        scope="rollout",
        minimum=0,
    )
    max_failure_rate: float | None = _setting(
        RolloutConfig.max_failure_rate,
        "share of the groups of one rollout that may fail, once 16 were started",
        scope="rollout",
        minimum=0,
        unit="",
    )
    group_tries: int = _setting(
        RolloutConfig.group_tries,
        "rollouts in which a group may fail before it is dropped",
        scope="rollout",
        minimum=1,
    )
    max_groups_drawn: int | None = _setting(
        RolloutConfig.max_groups_drawn,
        "groups taken from the data source in one rollout, which ends with fewer then",
        scope="rollout",
        minimum=1,
    )
    in_flight: int | None = _setting(
        None, "groups in flight; none: what the engines' concurrency has room for", scope="fully async", minimum=1
    )

    @classmethod
    def of(cls, args: Args) -> Settings:
        """Read all settings from a trainer's ``args`` and the environment.

        Raises:
            ValueError: a value has a wrong type or range; the message names the setting.
        """
        return cls(**{setting.name: setting.read(args) for setting in SETTINGS})

    @property
    def timeouts(self) -> Timeouts:
        """Timeouts of a client."""
        return Timeouts(
            connect=self.timeout_connect,
            first_token=self.timeout_first_token,
            next_token=self.timeout_next_token,
            drain=self.drain,
        )

    @property
    def sent_headers(self) -> dict[str, str]:
        """Key and headers as a client sends them, for requests that are made without one."""
        return {**({} if self.api_key is None else {"Authorization": bearer(self.api_key)}), **(self.headers or {})}

    @property
    def limits(self) -> Limits:
        """Limits of a client."""
        return Limits(self.concurrency, self.max_event_bytes)

    @property
    def retries(self) -> Retries:
        """Retries of a client."""
        return Retries(tries=self.tries)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One row of the table: how a setting is named, read and documented.

    Attributes:
        name: the field of :class:`Settings`; ``streamfold_`` before it is the attribute of ``args``.
        kind: ``int``, ``float``, ``bool``, ``str``, ``dict[str, str]``, ``dict[str, Any]``, or a
            ``Literal`` of the allowed words.
        is_optional: whether None is allowed.
        default: used if neither attribute nor variable is set.
        minimum: the smallest number allowed.
        unit: what a ``float`` is a number of.
        scope: the functions that it concerns.
        is_secret: whether the value is never shown.
        meaning: one line for the documentation.
    """

    name: str
    kind: Any
    is_optional: bool
    default: Value
    minimum: int | None
    unit: str
    scope: Scope
    is_secret: bool
    meaning: str

    @cached_property
    def attribute(self) -> str:
        """Its name as an attribute of ``args``."""
        return f"streamfold_{self.name}"

    @cached_property
    def variable(self) -> str:
        """Its name as an environment variable."""
        return self.attribute.upper()

    @property
    def expected(self) -> str:
        """What a value must be, for error messages."""
        words = _WORDS.get(self.kind) or f"one of {', '.join(get_args(self.kind))}"
        words = f"a number {self.unit}".rstrip() if self.kind is float else words
        words = "a text" if self.is_secret and self.kind is str else words
        words += "" if self.minimum is None else f", {self.minimum} or more"
        return f"{words}, or none" if self.is_optional else words

    def read(self, args: Args) -> Value:
        """The value: from ``args``, else from the environment, else the default."""
        value = getattr(args, self.attribute, _UNSET)
        if value is not _UNSET:
            return self._parsed(value, self.attribute)
        value = os.environ.get(self.variable, _UNSET)
        return self.default if value is _UNSET else self._parsed(value, self.variable)

    def shown(self, *, none: str) -> str:
        """The default as text."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return none if self.default is None else f"{self.default:g}" if self.kind is float else str(self.default)

    def _parsed(self, value: Value, source: str) -> Value:
        given = None if isinstance(value, str) and value.lower() in _NONE else value
        if given is None and self.is_optional:
            return None
        try:
            if isinstance(given, bool) and self.kind is not bool:  # YAML's yes is no number
                raise TypeError
            parsed = _PARSERS[Literal if get_origin(self.kind) is Literal else self.kind](given)
            if self.minimum is not None and not self.minimum <= parsed < math.inf:
                raise ValueError
            if get_origin(self.kind) is Literal and parsed not in get_args(self.kind):
                raise ValueError
        except (TypeError, ValueError, KeyError, OverflowError):  # ValueError: JSON's own too
            shown = f"a {type(value).__name__}" if self.is_secret else repr(value)
            raise ValueError(f"{source} must be {self.expected}; not {shown}") from None
        return parsed


def _whole_number(value: Value) -> int:
    number = int(value)
    if not isinstance(value, str) and number != value:  # a fraction of any type
        raise ValueError
    return number


def _extra(value: Value) -> dict[str, Any]:
    keys = orjson.loads(value) if isinstance(value, str) else value
    if not isinstance(keys, Mapping):
        raise TypeError
    return common_extra(keys)


def _text(value: Value) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def _headers(value: Value) -> dict[str, str]:
    headers = orjson.loads(value) if isinstance(value, str) else dict(value)
    if not isinstance(headers, dict):
        raise TypeError
    return {_text(name): _text(text) for name, text in headers.items()}


_PARSERS: Final[dict[Any, Callable[[Value], Value]]] = {
    int: _whole_number,
    float: float,
    bool: lambda value: _FLAGS[str(value).lower()],
    str: _text,
    dict[str, str]: _headers,
    dict[str, Any]: _extra,
    Literal: _text,
}


def _table() -> tuple[Setting, ...]:
    hints = get_type_hints(Settings)
    rows = []
    for each in fields(Settings):
        kinds = get_args(hints[each.name])
        is_optional = NoneType in kinds
        kind = next(kind for kind in kinds if kind is not NoneType) if is_optional else hints[each.name]
        rows.append(Setting(name=each.name, kind=kind, is_optional=is_optional, default=each.default, **each.metadata))
    return tuple(rows)


SETTINGS: Final = _table()


def markdown_table() -> str:
    """The table of docs/settings.md."""
    rows = [("setting", "default", "used by", "meaning"), ("---",) * 4]
    rows += [(f"`{row.attribute}`", row.shown(none="none"), row.scope, row.meaning) for row in SETTINGS]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def config_file(*scopes: Scope) -> str:
    """A YAML file for ``--custom-config-path`` that gives every setting of these scopes, or of all, its default."""
    parts = []
    for scope, title in _SCOPES.items():
        if scopes and scope not in scopes:
            continue
        lines = [(f"{row.attribute}: {row.shown(none='null')}", row.meaning) for row in SETTINGS if row.scope == scope]
        width = max(len(line) for line, _ in lines)
        parts.append(f"# {title}\n" + "".join(f"{line:<{width}}  # {meaning}\n" for line, meaning in lines))
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(config_file() if sys.argv[1:] == ["yaml"] else markdown_table())
