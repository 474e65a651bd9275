"""Reads options of the command line that are more than a word or a number."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NamedTuple, NoReturn, cast

from streamfold._core import Experts
from streamfold.client.fields import with_fields
from streamfold.client.limits import Timeouts
from streamfold.engines.base import common_extra
from streamfold.engines.detect import ENGINES

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamfold._types import Tokenizer
    from streamfold.cli.prompts import Encode
    from streamfold.rollout.callbacks import RewardFunction

__all__ = [
    "EXPERTS_HELP", "TokenizerOption", "experts_option", "extra_option", "headers_option", "params_option",
    "reward_option", "timeouts_option", "tokenizer_option",
]  # fmt: skip

EXPERTS_HELP: Final = "Format: LAYERS,TOP_K[,EXPERTS[,DTYPE]], such as 48,8,128,uint8."


class TokenizerOption(NamedTuple):
    """What ``--tokenizer`` gives.

    Attributes:
        decoder: turns ids into text; None: there is no tokenizer.
        encode: turns a text, or the messages of a chat, into the ids of a prompt.
        stop_ids: tokens that end a response.
    """

    decoder: Tokenizer | None
    encode: Encode | None
    stop_ids: list[int]


def experts_option(text: str | None) -> Experts | None:
    """Read LAYERS,TOP_K[,EXPERTS[,DTYPE]].

    Raises:
        ValueError: the text is anything else.
    """
    if text is None:
        return None
    parts = text.split(",")
    try:
        numbers = [int(part) for part in parts[:3]]
        return Experts(*numbers, *parts[3:])  # type: ignore[arg-type]  # it checks the dtype itself
    except (TypeError, ValueError) as error:
        raise ValueError(f"--experts {text} is not LAYERS,TOP_K[,EXPERTS[,DTYPE]] ({error})") from None


def timeouts_option(**texts: str | None) -> Timeouts:
    """Read a number of seconds, or ``none``, of each option; None: the default.

    Args:
        **texts: by the names of the fields of :class:`~streamfold.Timeouts`.

    Raises:
        ValueError: a text is anything else; the message names the option.
    """
    given: dict[str, float | None] = {}
    for name, text in texts.items():
        if text is None:
            continue
        option = f"--timeout-{name.replace('_', '-')}"
        try:
            given[name] = None if text == "none" else float(text)
            Timeouts(**{name: given[name]})  # type: ignore[arg-type]  # None for drain is refused there
        except ValueError:
            wanted = "a number of seconds, 0 or more" + ("" if name == "drain" else ", or none for no limit")
            raise ValueError(f"{option} must be {wanted}; not {text}") from None
    return Timeouts(**given)  # type: ignore[arg-type]


def reward_option(text: str | None) -> RewardFunction | None:
    """Import MODULE:FUNCTION, from the current folder too.

    Raises:
        ValueError: there is no such function; the message says what is missing.
    """
    if text is None:
        return None
    module_name, sign, name = text.partition(":")
    if not (sign and module_name and name):
        raise ValueError(f"--reward {text} is not MODULE:FUNCTION, such as rewards:exact_match")
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # for good: the function may import what lies beside it when it is called
    try:
        module = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # a user's module
        raise ValueError(f"--reward {text}: {type(error).__name__}: {error}") from error
    function: Any = module
    for part in name.split("."):
        function = getattr(function, part, None)
    if not callable(function):
        what = "has no" if function is None else "cannot be called:"
        raise ValueError(f"--reward {text}: {module_name} {what} {name}")
    return cast("RewardFunction", function)


def params_option(text: str | None) -> dict[str, Any]:
    """Read a JSON object of sampling parameters.

    Raises:
        ValueError: the text is anything else.
    """
    return _json_object("--sampling-params", text, such_as='{"min_p": 0.1}')


def extra_option(text: str | None, engine: str) -> dict[str, Any]:
    """Read a JSON object of further keys of each request to an engine, which may be ``"auto"``.

    Raises:
        ValueError: the text is anything else, or holds a key that may not be set.
    """
    extra = _json_object("--extra", text, such_as='{"lora_path": "math"}')
    try:
        return common_extra(extra, ENGINES[engine]() if engine in ENGINES else None)
    except ValueError as error:
        raise ValueError(f"--extra: {error}") from None


def headers_option(texts: Sequence[str]) -> dict[str, str]:
    """Read NAME=VALUE of each header.

    Raises:
        ValueError: a text is anything else, or a header that cannot be sent.
    """
    headers: dict[str, str] = {}
    for text in texts:
        name, sign, value = text.partition("=")
        if not sign:
            raise ValueError(f"--header {text} is not NAME=VALUE")
        try:
            with_fields((), {name: value})
        except ValueError as error:
            raise ValueError(f"--header {text}: {error}") from None
        headers[name] = value
    return headers


def _json_object(option: str, text: str | None, *, such_as: str) -> dict[str, Any]:
    try:
        value = json.loads(text or "{}", parse_constant=_refuse_constant)
    except ValueError as error:
        raise ValueError(f"{option} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{option} must be a JSON object, such as {such_as}")
    return value


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not valid JSON: use a finite number")  # but Python's json reads NaN and Infinity


def tokenizer_option(name: str | None) -> TokenizerOption:
    """Load a tokenizer of transformers, by name or folder.

    Raises:
        ValueError: transformers is not installed, there is no such tokenizer, or it cannot be loaded.
    """
    if name is None:
        return TokenizerOption(None, None, [])
    try:
        transformers = importlib.import_module("transformers")  # slow, and only needed here
    except ImportError:
        raise ValueError("--tokenizer needs transformers: pip install transformers") from None
    if name.startswith(("/", "./", "../")) and not Path(name).exists():
        raise ValueError(f"--tokenizer {name}: there is no such folder")  # the hub would take it for a name
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
    except Exception as error:  # whatever transformers and the hub raise
        raise ValueError(f"--tokenizer {name} cannot be loaded: {type(error).__name__}: {error}") from error

    def encode(prompt: str | list[dict[str, Any]]) -> list[int]:
        if isinstance(prompt, str):
            return list(tokenizer.encode(prompt))
        text = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))

    return TokenizerOption(tokenizer, encode, [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id])
