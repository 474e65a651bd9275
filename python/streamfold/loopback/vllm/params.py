"""Parses and validates the bodies of vLLM's ``/inference/v1/generate`` and ``/v1/completions``.

Types are coerced as in the engine, and error messages are the engine's own. What the HTTP layer rejects raises
MalformedBody, with a status. What only the engine core checks raises InvalidRequest, from :func:`verify`: in a stream
that is an event under HTTP 200. Unknown keys are ignored.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import orjson

from streamfold.loopback.core.request_params import InvalidRequest, MalformedBody, RequestParams, SamplingParams
from streamfold.loopback.vllm.wire import error_object

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.loopback.core.config import Config

__all__ = ["VllmRequestParams", "bad_request", "read_completion", "read_generate", "read_json", "verify"]

# Default max_tokens of a completion, and before 0.22 of any generation.
DEFAULT_TOKENS = 16
_NOT_OFFERED = ("structured_outputs", "bad_words", "allowed_token_ids", "echo", "suffix")
_TRUE, _FALSE = {"true", "yes", "on", "y", "t", "1"}, {"false", "no", "off", "n", "f", "0"}
_NUMBERS = ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty")
_OWN_NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}


@dataclass(frozen=True, kw_only=True)
class VllmRequestParams(RequestParams):
    """Parameters of one generation of vLLM.

    ``shown_rid`` is its id in the response, which several requests may share; ``text``: return the text too;
    ``completion``: write the events of ``/v1/completions``, where ``ids_as_text`` labels tokens by their ids;
    ``biased`` are the ids of its ``logit_bias``; ``dp_rank``: the data-parallel rank that it names.
    """

    shown_rid: str
    usage: bool = False
    continuous_usage: bool = False
    text: bool = False
    completion: bool = False
    ids_as_text: bool = False
    biased: frozenset[int] = frozenset()
    dp_rank: int | None = None


def read_json(content_type: str, raw: bytes) -> dict[str, Any]:
    """Parse a body, which must be a JSON object. Raises MalformedBody."""
    if content_type.partition(";")[0].strip().lower() != "application/json":
        raise MalformedBody(bad_request("Unsupported Media Type: Only 'application/json' is allowed"))
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise _invalid("json_invalid", (error.pos,), f"JSON decode error: {error.msg}") from error
    if not isinstance(body, dict):
        raise _invalid("model_attributes_type", (), "Input should be a valid dictionary")
    return body


def read_generate(body: Mapping[str, Any], config: Config, header_rid: str | None = None) -> VllmRequestParams:
    """Parse a body of ``/inference/v1/generate``. Raises MalformedBody."""
    top = _Fields(body, config)
    prompt = _token_ids(body.get("token_ids"), "token_ids", given="token_ids" in body)
    if not isinstance(given := body.get("sampling_params"), dict):
        raise _invalid("missing", ("sampling_params",), "Field required: an object")
    sampling = _Fields(given, config, "sampling_params")
    returns_text = _returns_text(body, sampling)
    rid = ("" if config.rust else "generate-tokens-") + (header_rid or _rid(body))
    params = _read(top, sampling, prompt, rid, DEFAULT_TOKENS if config.release < (0, 22) else None)
    return replace(params, text=returns_text, logprob_texts=params.logprobs and returns_text)


def _returns_text(body: Mapping[str, Any], sampling: _Fields) -> bool:
    """Parse ``output_mode``; before 0.32, and for the Rust frontend, it is an unknown key."""
    config = sampling.config
    if config.release < (0, 32) or config.rust:
        return False
    mode = body.get("output_mode", "tokens")
    if mode not in {"tokens", "text"}:
        raise _invalid("literal_error", ("output_mode",), "Input should be 'tokens' or 'text'")
    if mode == "text" and (config.skip_tokenizer_init or sampling.flag("detokenize") is False):
        raise _rejected("output_mode 'text' needs a tokenizer, and detokenize to be true")
    return bool(mode == "text")


def read_completion(body: Mapping[str, Any], config: Config, header_rid: str | None = None) -> VllmRequestParams:
    """Parse a body of ``/v1/completions`` with one prompt. Raises MalformedBody."""
    top = _Fields(body, config)
    prompt: Any = body.get("prompt")
    if isinstance(prompt, str):
        prompt = config.tokenizer.encode(prompt)
    elif isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], (list, str)):
        prompt = config.tokenizer.encode(prompt[0]) if isinstance(prompt[0], str) else prompt[0]
    prompt = _token_ids(prompt, "prompt", given="prompt" in body)
    if len(prompt) >= config.context_length:
        raise _rejected(_too_long(len(prompt), config), "input_tokens")
    params = _read(top, top, prompt, f"cmpl-{header_rid or _rid(body)}-0", DEFAULT_TOKENS)
    ids_as_text = bool(top.flag("return_tokens_as_token_ids"))
    return replace(params, text=True, logprob_texts=params.logprobs, completion=True, ids_as_text=ids_as_text)


def verify(params: VllmRequestParams, config: Config) -> None:
    """Check what only the engine core checks. Raises InvalidRequest."""
    size, highest = config.vocab_size, max(params.prompt)
    if params.dp_rank is not None and not 0 <= params.dp_rank < config.dp_size:
        raise InvalidRequest(f"data_parallel_rank {params.dp_rank} is out of range [0, {config.dp_size}).")
    if len(params.prompt) >= config.context_length:
        raise InvalidRequest(_too_long(len(params.prompt), config))
    if highest >= size:
        raise InvalidRequest(f"Token id {highest} is out of vocabulary")
    if params.top_logprobs > max(config.max_logprobs, 1):
        requested, limit = params.top_logprobs, config.max_logprobs
        msg = (
            f"Requested sample logprobs of {requested}, which is greater than max allowed: {limit} "
            f"(parameter=logprobs, value={requested})"
        )
        raise InvalidRequest(msg, "logprobs")
    if beyond := sorted(token for token in params.biased if token >= size):
        raise InvalidRequest(f"token_id(s) {beyond} in logit_bias contain out-of-vocab token ids", "logit_bias")


def bad_request(message: str, param: str | None = None) -> dict[str, Any]:
    """Return the error body of an HTTP 400 for a malformed request."""
    return error_object(message, 400, kind="Bad Request", param=param)


def _invalid(kind: str, where: tuple[str | int, ...], message: str) -> MalformedBody:
    """Return the error of a body that does not match the schema."""
    place = ("body", *where)
    wrong = {"type": kind, "loc": place, "msg": message}
    return MalformedBody(bad_request(f"1 validation error:\n  {wrong}", ".".join(map(str, place))))


def _rejected(message: str, param: str | None = None, status: int = 400) -> MalformedBody:
    return MalformedBody(error_object(message, status, param=param), status)


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
    """The fields of one object of the body, coerced as by the engine's schema."""

    def __init__(self, given: Mapping[str, Any], config: Config, *where: str) -> None:
        self.given = given
        self.config = config
        self._where = where

    def flag(self, key: str) -> bool | None:
        """Return a boolean, in any of its spellings; None if it is missing or null."""
        value = self.given.get(key)
        word = str(value).lower()
        if value is None or isinstance(value, bool):
            return value
        if word not in _TRUE | _FALSE:
            raise self.wrong("bool_parsing", key, "Input should be a valid boolean, unable to interpret input")
        return word in _TRUE

    def whole(self, key: str) -> int | None:
        """Return a whole number, which may be written as a float or a string."""
        value = self.given.get(key)
        return None if value is None else _whole(value, (*self._where, key))

    def number(self, key: str) -> float | None:
        """Return a number."""
        value = self.given.get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
            raise self.wrong("float_type", key, "Input should be a valid number")
        return value

    def wrong(self, kind: str, key: str, message: str) -> MalformedBody:
        """Return the error of a field."""
        return _invalid(kind, (*self._where, key), message)


def _whole(value: object, where: tuple[str | int, ...]) -> int:
    try:
        if not isinstance(value, (int, str)) and not (isinstance(value, float) and value.is_integer()):
            raise TypeError
        return int(value)
    except (TypeError, ValueError):
        raise _invalid("int_parsing", where, "Input should be a valid integer") from None


def _token_ids(ids: object, key: str, *, given: bool) -> list[int]:
    if not given:
        raise _invalid("missing", (key,), "Field required")
    if not isinstance(ids, list):
        raise _invalid("list_type", (key,), "Input should be a valid list")
    if not ids:
        raise _invalid("too_short", (key,), "List should have at least 1 item after validation, not 0")
    found = [token if type(token) is int else _whole(token, (key, place)) for place, token in enumerate(ids)]
    if min(found) < 0:
        raise _invalid("value_error", (key,), f"Value error, {key} must not contain negative values")
    return found


def _rid(body: Mapping[str, Any]) -> str:
    rid = body.get("request_id")
    if rid is not None and not isinstance(rid, str):
        raise _invalid("string_type", ("request_id",), "Input should be a valid string")
    return rid or uuid.uuid4().hex[:16]


def _read(
    top: _Fields, fields: _Fields, prompt: list[int], shown_rid: str, default_tokens: int | None
) -> VllmRequestParams:
    """Parse what both bodies have in common: ``top`` are the body's own fields, ``fields`` those of sampling."""
    config = top.config
    stream = bool(top.flag("stream"))
    _check_model(top)
    sampling, logprobs = _read_sampling(fields, default_tokens), fields.whole("logprobs")
    options = _stream_options(top, stream=stream)
    usage = stream and bool(options.flag("include_usage"))
    bias, extra = _mapping(fields, "logit_bias"), _mapping(fields, "extra_args")
    return VllmRequestParams(
        rid=f"{shown_rid}-{uuid.uuid4().hex[:8]}",
        shown_rid=shown_rid,
        prompt=prompt,
        sampling=sampling,
        seed=config.seed_of(sampling),
        stream=stream,
        logprobs=logprobs is not None,
        top_logprobs=_candidates(logprobs, config),
        null_logprobs_at=frozenset(extra.get("null_logprobs_at", ())),
        sampling_mask=config.return_sampling_mask and config.release >= (0, 32),
        experts=config.return_routed_experts,
        experts_start=(fields.whole("routed_experts_prompt_start") or 0) if config.release >= (0, 22) else 0,
        usage=usage,
        continuous_usage=usage and bool(options.flag("continuous_usage_stats")),
        biased=frozenset(_whole(token, ("logit_bias",)) for token in bias),
        prompt_ids=bool(top.flag("return_token_ids")),
    )


def _check_model(top: _Fields) -> None:
    model, served = top.given.get("model"), top.config.model_name
    if model and model != served:
        raise _rejected(f"The model `{model}` does not exist. Valid aliases: {served}.", "model", 404)


def _stream_options(top: _Fields, *, stream: bool) -> _Fields:
    options = top.given.get("stream_options")
    if options is not None and not isinstance(options, dict):
        raise top.wrong("model_attributes_type", "stream_options", "Input should be a valid dictionary")
    if options and not stream and top.config.rust:
        raise _rejected("stream_options is only for streams: set stream to true", "stream_options")
    return _Fields(options or {}, top.config, "stream_options")


def _mapping(fields: _Fields, key: str) -> dict[Any, Any]:
    value = fields.given.get(key) or {}
    if not isinstance(value, dict):
        raise fields.wrong("dict_type", key, "Not an object")
    return value


def _candidates(logprobs: int | None, config: Config) -> int:
    """Return the number of candidates per token; -1 is the whole vocabulary, which ``verify`` usually rejects."""
    if logprobs is None:
        return 0
    return config.vocab_size if logprobs < 0 else max(logprobs, 1)


def _read_sampling(fields: _Fields, default_tokens: int | None) -> SamplingParams:
    """Parse the sampling parameters. Raises MalformedBody."""
    given, config = fields.given, fields.config
    _check_keys(fields)
    values: dict[str, Any] = {key: fields.number(key) for key in _NUMBERS}
    for key in ("max_tokens", "min_tokens", "top_k", "n", "seed", "stream_interval"):
        values[_OWN_NAMES.get(key, key)] = fields.whole(key)
    values["ignore_eos"] = fields.flag("ignore_eos")
    values["no_stop_trim"] = fields.flag("include_stop_str_in_output")
    values["skip_special_tokens"] = fields.flag("skip_special_tokens")
    values = {key: value for key, value in values.items() if value is not None}
    values.setdefault("max_new_tokens", None if "max_tokens" in given else default_tokens)
    if config.release < (0, 27):
        values.pop("stream_interval", None)
    values["stop"] = _stop_strings(fields)
    ids = given.get("stop_token_ids") or ()
    values["stop_token_ids"] = frozenset(_whole(token, ("sampling_params", "stop_token_ids")) for token in ids)
    sampling = SamplingParams(**values)
    _check_sampling(sampling)
    return sampling


def _check_keys(fields: _Fields) -> None:
    given = fields.given
    for key in _NOT_OFFERED:
        if given.get(key):
            raise _rejected(f"the loopback engine does not offer {key}: leave it out", key)
    for key in ("temperature", "top_p", "top_k", "min_p", "n", "ignore_eos", "min_tokens"):
        if key in given and given[key] is None:
            raise fields.wrong("none_forbidden", key, "Input should not be null")


def _stop_strings(fields: _Fields) -> tuple[str, ...]:
    config = fields.config
    given = fields.given.get("stop") or ()
    stop = (given,) if isinstance(given, str) else tuple(given)
    if not all(isinstance(text, str) and text for text in stop):
        raise _rejected("stop must hold strings, and no empty one", "stop")
    if stop and (config.skip_tokenizer_init or fields.flag("detokenize") is False):
        if not config.skip_tokenizer_init or config.release >= (0, 31):
            raise _rejected("stop strings need a tokenizer, and detokenize to be true")
        return ()  # before 0.31 they are ignored, without an error
    return stop


def _check_sampling(params: SamplingParams) -> None:
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
            raise _rejected(f"{key} must be {wanted}, got {value}.", key)
