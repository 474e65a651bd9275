"""Parses and validates the body of SGLang's ``POST /generate``, with the engine's own error messages.

What the HTTP layer rejects raises :class:`MalformedBody`, an HTTP 400. What is rejected later raises
:class:`InvalidRequest`: in a stream that is an event, because the response has started.
"""

from __future__ import annotations

import uuid
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from streamfold.loopback.core.request_params import (
    EngineFault,
    InvalidRequest,
    MalformedBody,
    RequestParams,
    SamplingParams,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from streamfold.loopback.core.config import Config

__all__ = ["EXPERTS_DTYPES", "bad_request", "check_body", "read_generate"]

# Placeholder tokens that one image adds in front of the prompt.
IMAGE_TOKENS = 16

_NO_EFFECT = {"logit_bias", "spaces_between_special_tokens"}
_NOT_OFFERED = {"stop_regex", "json_schema", "regex", "ebnf", "structural_tag", "beam_width"}
_SAMPLING_KEYS = {f.name for f in fields(SamplingParams)}
_TYPES: dict[str, tuple[type, ...]] = {
    "stream": (bool,),
    "rid": (str, list),
    "text": (str, list),
    "input_ids": (list,),
    "sampling_params": (dict,),
    "return_logprob": (bool,),
    "logprob_start_len": (int,),
    "top_logprobs_num": (int,),
    "return_text_in_logprobs": (bool,),
    "return_routed_experts": (bool,),
    "routed_experts_start_len": (int,),
    "routed_experts_dtype": (str,),
    "return_prompt_token_ids": (bool,),
    "return_sampling_mask": (bool,),
}
EXPERTS_DTYPES = {"int32": "<i4", "uint8": "u1", "uint16": "<u2"}


def _read_sampling(given: Mapping[str, Any], config: Config) -> SamplingParams:
    """Parse ``sampling_params``. Raises InvalidRequest, or EngineFault where the release fails.

    ``custom_params`` may contain ``return_top_p_token_ids``, and ``null_logprobs_at``: positions in the output whose
    logprob is sent as null, as after a NaN. ``logit_bias`` is accepted without effect.
    """
    values = {key: value for key, value in given.items() if value is not None or key == "max_new_tokens"}
    _check_keys(values, config)
    values = {key: value for key, value in values.items() if key in _SAMPLING_KEYS}
    stop = values.get("stop", ())
    try:
        values["stop"] = tuple(text for text in ((stop,) if isinstance(stop, str) else stop) if text)
        values["stop_token_ids"] = frozenset(values.get("stop_token_ids", ()))
        sampling = SamplingParams(**values)
        _check_sampling(sampling)
    except TypeError as error:
        raise InvalidRequest(str(error)) from error
    return sampling


def _check_keys(values: Mapping[str, Any], config: Config) -> None:
    for key in values:
        if key in _NOT_OFFERED:
            msg = f"the loopback engine does not offer {key}: leave it out"
            raise InvalidRequest(msg)
        if key not in _SAMPLING_KEYS | _NO_EFFECT:
            msg = f"unknown sampling parameter {key!r}"
            # From 0.5.22 on it was refused with status 400.
            raise EngineFault(msg) if config.release < (0, 5, 16) else InvalidRequest(msg)


def _check_sampling(params: SamplingParams) -> None:
    if not all(isinstance(text, str) for text in params.stop):
        msg = f"stop must be a string or a list of strings, got {params.stop!r}."
    elif not isinstance(params.custom_params, dict):
        msg = f"custom_params must be an object, got {params.custom_params!r}."
    elif not isinstance(params.custom_params.get("null_logprobs_at", []), list):
        msg = "custom_params.null_logprobs_at must be a list of positions in the output."
    elif params.max_new_tokens is not None and params.max_new_tokens < 0:
        msg = f"max_new_tokens must be at least 0, got {params.max_new_tokens}."
    elif params.min_new_tokens < 0 or params.min_new_tokens > (params.max_new_tokens or params.min_new_tokens):
        msg = f"min_new_tokens must be in [0, max_new_tokens({params.max_new_tokens})], got {params.min_new_tokens}."
    elif params.temperature < 0:
        msg = f"temperature must be non-negative, got {params.temperature}."
    elif not 0 < params.top_p <= 1:
        msg = f"top_p must be in (0, 1], got {params.top_p}."
    elif params.top_k < 1 and params.top_k != -1:
        msg = f"top_k must be -1 (disable) or at least 1, got {params.top_k}."
    elif not 0 <= params.min_p <= 1:
        msg = f"min_p must be in [0, 1], got {params.min_p}."
    elif params.stream_interval is not None and params.stream_interval < 1:
        msg = f"stream_interval must be at least 1, got {params.stream_interval}."
    elif params.n < 1:
        msg = f"n must be at least 1, got {params.n}."
    else:
        return
    raise InvalidRequest(msg)


def check_body(body: object, config: Config) -> dict[str, Any]:
    """Check what the HTTP layer checks before anything is sent. Raises MalformedBody."""
    if not isinstance(body, dict):
        raise MalformedBody(bad_request(config, "the body must be a JSON object"))
    _check_types(body, config)
    _check_entries(body, config)
    if config.release >= (0, 5, 22):
        _check_sampling_schema(body.get("sampling_params") or {})
    return body


def _check_types(body: Mapping[str, Any], config: Config) -> None:
    for key, types in _TYPES.items():
        value = body.get(key)
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            wanted = " or ".join(t.__name__ for t in types)
            raise MalformedBody(bad_request(config, f"{key} must be {wanted}, got {type(value).__name__}"))


def _check_entries(body: Mapping[str, Any], config: Config) -> None:
    for key, kinds in (("rid", (str,)), ("text", (str,)), ("input_ids", (int, list))):
        entries = body.get(key)
        if isinstance(entries, list) and not any(all(isinstance(entry, kind) for entry in entries) for kind in kinds):
            raise MalformedBody(bad_request(config, f"{key} has entries of a wrong type"))


def _check_sampling_schema(given: Mapping[str, Any]) -> None:
    known = _SAMPLING_KEYS | _NO_EFFECT | _NOT_OFFERED
    for key, value in given.items():
        if key not in known:
            raise MalformedBody({"error": f"unknown field `{key}`, expected one of {', '.join(sorted(known))}"})
        if not _scalar_fits(key, value):
            raise MalformedBody({"error": f"invalid type for `{key}`: {value!r}"})


def bad_request(config: Config, message: str) -> dict[str, Any]:
    """Return the error body of an HTTP 400 for a malformed request."""
    if config.rust:
        return {"error": {"message": message, "code": 400}}
    return {"object": "error", "message": message, "type": "Bad Request", "param": None, "code": 400}


def _scalar_fits(key: str, value: object) -> bool:
    if value is None or key not in SamplingParams.__dataclass_fields__:
        return True
    kind = SamplingParams.__dataclass_fields__[key].type
    if kind == "bool":
        return isinstance(value, bool)
    if kind in {"int", "int | None"}:
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "float":
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    return True


def read_generate(body: Mapping[str, Any], config: Config) -> list[RequestParams]:
    """Parse a checked body: one generation, or several with an index each. Raises InvalidRequest."""
    _check_rank(body, config)
    sampling = _read_sampling(body.get("sampling_params") or {}, config)
    if sampling.stop and config.skip_tokenizer_init:
        msg = "stop strings need a tokenizer, and the engine was started without (skip_tokenizer_init)"
        raise InvalidRequest(msg)
    prompts, batched = _prompts(body, config)
    shared = _shared_params(body, sampling, config)
    rids = _rids(body.get("rid"), len(prompts), batched=batched)
    for prompt in prompts:
        _check_prompt(prompt, sampling, config)
    found = []
    for prompt, rid in zip(prompts, rids, strict=True):
        found += _outputs(replace(shared, rid=rid, prompt=prompt))
    return _numbered(found) if batched or sampling.n > 1 else found


def _check_rank(body: Mapping[str, Any], config: Config) -> None:
    rank = body.get("routed_dp_rank", body.get("data_parallel_rank"))
    if rank is not None and not 0 <= rank < config.dp_size:
        msg = f"routed_dp_rank={rank} out of range [0, {config.dp_size})"
        raise InvalidRequest(msg)


def _outputs(params: RequestParams) -> list[RequestParams]:
    """Return the ``n`` generations of one prompt; if there are several, none has the rid that the client sent."""
    n = params.sampling.n
    seeds = [None if params.seed is None else params.seed + i for i in range(n)]
    return [replace(params, rid=params.rid if n == 1 else uuid.uuid4().hex, seed=seed) for seed in seeds]


def _numbered(generations: list[RequestParams]) -> list[RequestParams]:
    return [replace(params, index=index) for index, params in enumerate(generations)]


def _shared_params(body: Mapping[str, Any], sampling: SamplingParams, config: Config) -> RequestParams:
    """Parse what all generations of a body have in common; ``rid`` and ``prompt`` are left empty."""
    dtype = body.get("routed_experts_dtype") or "int32"
    if dtype not in EXPERTS_DTYPES:
        msg = f"routed_experts_dtype must be one of {', '.join(EXPERTS_DTYPES)}, got {dtype!r}"
        raise InvalidRequest(msg)
    return RequestParams(
        rid="",
        prompt=[],
        sampling=sampling,
        seed=config.seed_of(sampling),
        stream=bool(body.get("stream")),
        logprobs=bool(body.get("return_logprob")),
        logprob_start=_or(body.get("logprob_start_len"), -1),
        top_logprobs=_or(body.get("top_logprobs_num"), 0),
        logprob_texts=bool(body.get("return_text_in_logprobs")),
        null_logprobs_at=frozenset(sampling.custom_params.get("null_logprobs_at", ())),
        top_p=bool(sampling.custom_params.get("return_top_p_token_ids")),
        experts=bool(body.get("return_routed_experts")),
        experts_start=_or(body.get("routed_experts_start_len"), 0),
        experts_dtype=dtype,
        prompt_ids=bool(body.get("return_prompt_token_ids")),
        sampling_mask=bool(body.get("return_sampling_mask")),
    )


def _or(value: int | None, default: int) -> int:
    return default if value is None else value


def _prompts(body: Mapping[str, Any], config: Config) -> tuple[list[list[int]], bool]:
    ids: Any = body.get("input_ids")
    text: Any = body.get("text")
    if ids is None and text is None:
        msg = "Either text or input_ids should be provided."
        raise InvalidRequest(msg)
    if ids is not None and text is not None and config.rust:
        msg = "validation failed: text and input_ids exclude each other"
        raise InvalidRequest(msg)
    if ids is not None:
        batched = bool(ids) and isinstance(ids[0], list)
        prompts = ids if batched else [ids]
    elif config.skip_tokenizer_init:
        msg = "an engine started with skip_tokenizer_init takes input_ids, not text"
        raise InvalidRequest(msg)
    else:
        batched = isinstance(text, list)
        prompts = [config.tokenizer.encode(part) for part in (text if batched else [text])]
    if not prompts:
        msg = "The batch is empty."
        raise InvalidRequest(msg)
    images = body.get("image_data")
    if images:
        # An image adds placeholder tokens to the prompt. Ids that contain the placeholders already, those of a resumed
        # response, are left as they are.
        image = config.tokenizer.image_token_id
        if image is None:
            msg = "the model takes no images"
            raise InvalidRequest(msg)
        pads = [image] * (IMAGE_TOKENS * (len(images) if isinstance(images, list) else 1))
        prompts = [prompt if prompt[: len(pads)] == pads else pads + prompt for prompt in prompts]
    return prompts, batched


def _rids(given: str | list[str] | None, count: int, *, batched: bool) -> list[str]:
    if given is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(given, list):
        if len(given) != count:
            msg = f"rid has {len(given)} entries for {count} prompts"
            raise InvalidRequest(msg)
        return given
    return [f"{given}_{i}" for i in range(count)] if batched else [given]


def _check_prompt(prompt: list[int], params: SamplingParams, config: Config) -> None:
    if not prompt:
        msg = "validation failed: input_ids cannot be empty" if config.rust else "input_ids cannot be empty."
        raise InvalidRequest(msg)
    if not all(isinstance(token, int) and 0 <= token < config.vocab_size for token in prompt):
        msg = f"input_ids must be integers from 0 to {config.vocab_size - 1}."
        raise InvalidRequest(msg)
    limit = config.context_length
    if len(prompt) >= limit:
        msg = f"The input ({len(prompt)} tokens) is longer than the model's context length ({limit} tokens)."
        raise InvalidRequest(msg)
    wanted = params.max_new_tokens or 0
    if len(prompt) + wanted > limit:
        msg = (
            f"{len(prompt)} tokens of input and {wanted} of output exceed the model's context length "
            f"({limit} tokens): ask for fewer."
        )
        raise InvalidRequest(msg)
