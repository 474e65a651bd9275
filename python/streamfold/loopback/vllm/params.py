"""Reads the bodies of ``/inference/v1/generate`` and ``/v1/completions``, as leniently as the engine, and says no.

What the HTTP layer refuses is MalformedBody, with a status. What only the engine itself checks is InvalidRequest, from
:func:`verify`: in a stream it is an event under status 200. Keys that are not known mean nothing.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.core.request_params import Ask, InvalidRequest, MalformedBody, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.loopback.core.config import Config

__all__ = ["VllmAsk", "bad_request", "read_completion", "read_generate", "read_json", "verify"]

# The budget of a completion that tells none, and of any generation in the oldest releases.
DEFAULT_TOKENS = 16
_NOT_OFFERED = ("structured_outputs", "bad_words", "allowed_token_ids", "echo", "suffix")
_TRUE, _FALSE = {"true", "yes", "on", "y", "t", "1"}, {"false", "no", "off", "n", "f", "0"}
_OWN_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


@dataclass(frozen=True, kw_only=True)
class VllmAsk(Ask):
    """One generation that is asked of vLLM.

    ``shown_rid`` is its id as the engine tells it, which several may share; ``text`` asks for the text too,
    ``completion`` for the events of ``/v1/completions``, where ``ids_as_text`` names tokens by their ids. ``biased``
    are the ids of its ``logit_bias``.
    """

    shown_rid: str
    usage: bool = False
    continuous_usage: bool = False
    text: bool = False
    completion: bool = False
    ids_as_text: bool = False
    biased: frozenset[int] = frozenset()


def read_json(config: Config, content_type: str, raw: bytes) -> dict[str, Any]:
    """Read a body that has to be a JSON object. Raises MalformedBody."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise MalformedBody(bad_request(config, "Unsupported Media Type: Only 'application/json' is allowed"))
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _invalid(config, "json_invalid", (error.pos,), f"JSON decode error: {error.msg}") from error
    if not isinstance(body, dict):
        raise _invalid(config, "model_attributes_type", (), "Input should be a valid dictionary")
    return body


def read_generate(body: Mapping[str, Any], config: Config, header_rid: str | None = None) -> VllmAsk:
    """Read what a body of ``/inference/v1/generate`` asks for. Raises MalformedBody."""
    top = _Fields(body, config)
    prompt = _token_ids(body.get("token_ids"), config, "token_ids", given="token_ids" in body)
    if not isinstance(given := body.get("sampling_params"), dict):
        raise _invalid(config, "missing", ("sampling_params",), "Field required: an object")
    mode = body.get("output_mode", "tokens")
    if config.vllm.release < (0, 32) or config.vllm.rust:
        mode = "tokens"  # a key like any other that is not known
    elif mode not in {"tokens", "text"}:
        raise _invalid(config, "literal_error", ("output_mode",), "Input should be 'tokens' or 'text'")
    told = _Fields(given, config, "sampling_params")
    if mode == "text" and (config.skip_tokenizer_init or told.flag("detokenize") is False):
        raise _refused(config, "output_mode 'text' needs a tokenizer, and detokenize to be true")
    rid = config.vllm.prefix + (header_rid or _rid(body, config))
    ask = _ask(top, told, prompt, rid, DEFAULT_TOKENS if config.vllm.release < (0, 22) else None)
    return replace(ask, text=mode == "text", logprob_texts=ask.logprobs and mode == "text")


def read_completion(body: Mapping[str, Any], config: Config, header_rid: str | None = None) -> VllmAsk:
    """Read what a body of ``/v1/completions`` asks for, one prompt. Raises MalformedBody."""
    top = _Fields(body, config)
    prompt: Any = body.get("prompt")
    if isinstance(prompt, str):
        prompt = config.tokenizer.encode(prompt)
    elif isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (list, str)):
        prompt = config.tokenizer.encode(prompt[0]) if isinstance(prompt[0], str) else prompt[0]
    prompt = _token_ids(prompt, config, "prompt", given="prompt" in body)
    if len(prompt) >= config.context_length:
        raise _refused(config, _too_long(len(prompt), config), "input_tokens")
    ask = _ask(top, top, prompt, f"cmpl-{header_rid or _rid(body, config)}-0", DEFAULT_TOKENS)
    ids_as_text = bool(top.flag("return_tokens_as_token_ids"))
    return replace(ask, text=True, logprob_texts=ask.logprobs, completion=True, ids_as_text=ids_as_text)


def verify(ask: VllmAsk, config: Config) -> None:
    """Check what only the engine checks. Raises InvalidRequest."""
    size, highest = config.vocab_size, max(ask.prompt)
    if len(ask.prompt) >= config.context_length:
        raise InvalidRequest(_too_long(len(ask.prompt), config))
    if highest >= size:
        raise InvalidRequest(f"Token id {highest} is out of vocabulary")
    if ask.top_logprobs > max(config.max_logprobs, 1):
        asked, most = ask.top_logprobs, config.max_logprobs
        msg = (
            f"Requested sample logprobs of {asked}, which is greater than max allowed: {most} "
            f"(parameter=logprobs, value={asked})"
        )
        raise InvalidRequest(msg, "logprobs")
    if beyond := sorted(token for token in ask.biased if token >= size):
        raise InvalidRequest(f"token_id(s) {beyond} in logit_bias contain out-of-vocab token ids", "logit_bias")


def bad_request(config: Config, message: str, param: str | None = None) -> dict[str, Any]:
    """Give the answer to what does not even look like a request."""
    return config.vllm.error(message, 400, kind="Bad Request", param=param)


def _invalid(config: Config, kind: str, where: tuple[str | int, ...], message: str) -> MalformedBody:
    """Make the refusal of a body that does not fit the schema."""
    place = ("body", *where)
    wrong = {"type": kind, "loc": place, "msg": message}
    told = f"1 validation error:\n  {wrong}"
    return MalformedBody(bad_request(config, told, ".".join(map(str, place))))


def _refused(config: Config, message: str, param: str | None = None, status: int = 400) -> MalformedBody:
    return MalformedBody(config.vllm.error(message, status, param=param), status)


def _too_long(length: int, config: Config) -> str:
    limit = config.context_length
    if length == limit:
        return (
            f"The decoder prompt (length {length}) plus the number of requested output tokens (at least 1) is longer "
            f"than the maximum model length of {limit}."
        )
    return (
        f"The decoder prompt (length {length}) is longer than the maximum model length of {limit}. Make sure that "
        "`max_model_len` is no smaller than the number of text tokens."
    )


class _Fields:
    """The fields of an object of the body, read as the engine's schema coerces them."""

    def __init__(self, given: Mapping[str, Any], config: Config, *where: str) -> None:
        self.given = given
        self.config = config
        self._where = where

    def flag(self, key: str) -> bool | None:
        """Give a yes or no, in any of the ways to write it; None if it is not told, or null."""
        value = self.given.get(key)
        word = str(value).lower()
        if value is None or isinstance(value, bool):
            return value
        if word not in _TRUE | _FALSE:
            raise self.wrong("bool_parsing", key, "Input should be a valid boolean, unable to interpret input")
        return word in _TRUE

    def whole(self, key: str) -> int | None:
        """Give a whole number, which may be written as a float or a string."""
        value = self.given.get(key)
        return None if value is None else _whole(value, self.config, (*self._where, key))

    def number(self, key: str) -> float | None:
        """Give a number."""
        value = self.given.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self.wrong("float_type", key, "Input should be a valid number")
        return value

    def wrong(self, kind: str, key: str, message: str) -> MalformedBody:
        """Make the refusal of a field."""
        return _invalid(self.config, kind, (*self._where, key), message)


def _whole(value: object, config: Config, where: tuple[str | int, ...]) -> int:
    try:
        if not isinstance(value, (int, str)) and not (isinstance(value, float) and value.is_integer()):
            raise TypeError
        return int(value)
    except (TypeError, ValueError):
        raise _invalid(config, "int_parsing", where, "Input should be a valid integer") from None


def _token_ids(ids: object, config: Config, key: str, *, given: bool) -> list[int]:
    if not given:
        raise _invalid(config, "missing", (key,), "Field required")
    if not isinstance(ids, list):
        raise _invalid(config, "list_type", (key,), "Input should be a valid list")
    if not ids:
        raise _invalid(config, "too_short", (key,), "List should have at least 1 item after validation, not 0")
    found = [token if type(token) is int else _whole(token, config, (key, place)) for place, token in enumerate(ids)]
    if min(found) < 0:
        raise _invalid(config, "value_error", (key,), f"Value error, {key} must not contain negative values")
    return found


def _rid(body: Mapping[str, Any], config: Config) -> str:
    rid = body.get("request_id")
    if rid is not None and not isinstance(rid, str):
        raise _invalid(config, "string_type", ("request_id",), "Input should be a valid string")
    return rid or uuid.uuid4().hex[:16]


def _ask(
    top: _Fields,
    told: _Fields,
    prompt: list[int],
    shown_rid: str,
    default_tokens: int | None,
) -> VllmAsk:
    """Put together what both bodies have in common: ``top`` are the body's own fields, ``told`` those of sampling."""
    config = top.config
    stream = bool(top.flag("stream"))
    model = top.given.get("model")
    if model and model != config.model_name:
        message = f"The model `{model}` does not exist. Valid aliases: {config.model_name}."
        raise _refused(config, message, "model", 404)
    params, logprobs = _params(told, default_tokens), told.whole("logprobs")
    options = top.given.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise top.wrong("model_attributes_type", "stream_options", "Input should be a valid dictionary")
    if options and not stream and config.vllm.rust:
        raise _refused(config, "stream_options is only for streams: set stream to true", "stream_options")
    options = _Fields(options or {}, config, "stream_options")
    usage = stream and bool(options.flag("include_usage"))
    bias, extra = told.given.get("logit_bias") or {}, told.given.get("extra_args") or {}
    if not isinstance(bias, dict) or not isinstance(extra, dict):
        raise told.wrong("dict_type", "extra_args" if isinstance(bias, dict) else "logit_bias", "Not an object")
    return VllmAsk(
        rid=f"{shown_rid}-{uuid.uuid4().hex[:8]}",
        shown_rid=shown_rid,
        prompt=prompt,
        params=params,
        seed=config.seed if params.sampling_seed is None else params.sampling_seed,
        stream=stream,
        logprobs=logprobs is not None,
        # -1 is the whole vocabulary, which no server allows that has not raised its limit.
        top_logprobs=0 if logprobs is None else config.vocab_size if logprobs < 0 else max(logprobs, 1),
        null_logprobs_at=frozenset(extra.get("null_logprobs_at", ())),
        sampling_mask=config.return_sampling_mask and config.vllm.release >= (0, 32),
        experts=config.return_routed_experts,
        experts_start=(told.whole("routed_experts_prompt_start") or 0) if config.vllm.release >= (0, 22) else 0,
        usage=usage,
        continuous_usage=usage and bool(options.flag("continuous_usage_stats")),
        biased=frozenset(_whole(token, config, ("logit_bias",)) for token in bias),
        prompt_ids=bool(top.flag("return_token_ids")),
    )


def _params(told: _Fields, default_tokens: int | None) -> SamplingParams:
    given, config = told.given, told.config
    for key in _NOT_OFFERED:
        if given.get(key):
            raise _refused(config, f"the loopback engine does not offer {key}: leave it out", key)
    for key in ("temperature", "top_p", "top_k", "min_p", "n", "ignore_eos", "min_tokens"):
        if key in given and given[key] is None:
            raise told.wrong("none_forbidden", key, "Input should not be null")
    values: dict[str, Any] = {key: told.number(key) for key in ("temperature", "top_p", "min_p")}
    for key in ("max_tokens", "min_tokens", "top_k", "n", "seed", "stream_interval"):
        values[_OWN_NAMES.get(key, key)] = told.whole(key)
    values["ignore_eos"] = told.flag("ignore_eos")
    values["no_stop_trim"] = told.flag("include_stop_str_in_output")
    values["skip_special_tokens"] = told.flag("skip_special_tokens")
    values = {key: value for key, value in values.items() if value is not None}
    values.setdefault("max_new_tokens", None if "max_tokens" in given else default_tokens)
    if config.vllm.release < (0, 27):
        values.pop("stream_interval", None)
    stop, ids = given.get("stop") or (), given.get("stop_token_ids") or ()
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise _refused(config, "stop must hold strings, and no empty one", "stop")
    if stop and (config.skip_tokenizer_init or told.flag("detokenize") is False):
        if not config.skip_tokenizer_init or config.vllm.release >= (0, 31):
            raise _refused(config, "stop strings need a tokenizer, and detokenize to be true")
        stop = ()  # ignored, and nobody told
    values["stop"] = stop
    values["stop_token_ids"] = frozenset(_whole(token, config, ("sampling_params", "stop_token_ids")) for token in ids)
    params = SamplingParams(**values)
    _check(params, config)
    return params


def _check(params: SamplingParams, config: Config) -> None:
    most = params.max_new_tokens
    for key, wanted, fits in (
        ("temperature", "non-negative", params.temperature >= 0),
        ("top_p", "in (0, 1]", 0 < params.top_p <= 1),
        ("top_k", "0 (disable), -1 (disable) or at least 1", params.top_k >= -1),
        ("min_p", "in [0, 1]", 0 <= params.min_p <= 1),
        ("max_tokens", "at least 1", most is None or most >= 1),
        ("min_tokens", f"from 0 to max_tokens={most}", 0 <= params.min_new_tokens <= (most or params.min_new_tokens)),
        ("stream_interval", "at least 1", params.stream_interval is None or params.stream_interval >= 1),
        ("n", "1: the loopback engine gives one answer to a request", params.n == 1),
    ):
        if not fits:
            value = getattr(params, _OWN_NAMES.get(key, key))
            raise _refused(config, f"{key} must be {wanted}, got {value}.", key)
