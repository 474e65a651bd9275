"""Reads and checks one line of a file of prompts: :func:`read_prompt`."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypeAlias

import orjson

from streamfold.engines.token_ids import LARGEST_TOKEN, first_invalid
from streamfold.samples.metadata import OWN_KEYS
from streamfold.samples.sample import Sample

__all__ = ["Encode", "numbered_lines", "read_prompt"]

Encode: TypeAlias = Callable[[str | list[dict[str, Any]]], list[int]]
"""Turns a text, or the messages of a chat, into the ids of a prompt."""

_SHOWN_CHARACTERS: Final = 60  # of a value that is refused
# Keys of metadata that the rollout, its journal and completing a sample set.
_RESERVED: Final = OWN_KEYS | {"sampling_params", "arrays"}


def numbered_lines(file: Iterable[bytes]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that are not blank, with their numbers from 1; without a byte order mark at its start."""
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if text.strip():
            yield number, text


def read_prompt(line: bytes, location: str, encode: Encode | None) -> Sample:
    """The sample of a line, without parameters and numbers.

    Args:
        line: a JSON object.
        location: the line's name, for messages.
        encode: turns a prompt without ids into ids; None: the engine gets the text.

    Raises:
        ValueError: it is anything else; the message has the location, the field, its value and what is allowed.
    """
    fields = _read_object(line, location)
    ids, text = fields.pop("input_ids", None), fields.pop("text", None)
    prompt = fields.pop("prompt", text)
    _check_prompt(prompt, ids, location, can_encode=encode is not None)
    if ids is None:
        ids = [] if encode is None else _encoded(prompt, encode, location)
    images = _read_images(fields.pop("image_data", None), location)
    label, metadata = fields.pop("label", None), fields.pop("metadata", None) or {}
    if not isinstance(metadata, dict):
        raise ValueError(f"{location}: metadata must be an object")
    metadata = {**metadata, **fields}
    if reserved := sorted(_RESERVED & metadata.keys()):
        raise ValueError(f"{location}: {', '.join(reserved)} is set by the rollout itself: use another name")
    try:
        orjson.dumps([{"metadata": metadata, "label": label, "prompt": prompt}])  # as the samples hold them
    except TypeError:  # the parser takes more levels than the writer
        raise ValueError(f"{location}: it is nested too deep to be written with its samples") from None
    return Sample(prompt=prompt or "", tokens=ids, multimodal_inputs=images, label=label, metadata=metadata)


def _read_images(images: object, location: str) -> dict[str, Any] | None:
    images = [images] if isinstance(images, str) else images
    if images is None or images == []:
        return None
    if not (isinstance(images, list) and all(isinstance(image, str) and image for image in images)):
        wanted = "a string or a list of them: URLs, paths, base64 or data URIs"
        raise ValueError(f"{location}: image_data must be {wanted}; it is {_shown(images)}")
    return {"images": images}


def _read_object(line: bytes, location: str) -> dict[str, Any]:
    try:
        fields = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"{location} is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ValueError(f'{location}: each line must be an object like {{"prompt": "..."}} or {{"input_ids": [1, 2]}}')
    return fields


def _check_prompt(prompt: object, ids: object, location: str, *, can_encode: bool) -> None:
    """Raise ValueError unless the engine can be given the ids or the prompt of a line."""
    if prompt is not None and not (isinstance(prompt, str) or _is_chat(prompt)):
        wanted = 'a text, or the messages of a chat, such as [{"role": "user", "content": "..."}]'
        without = "" if ids is not None else ": there is neither a prompt (or text) nor input_ids"
        raise ValueError(f"{location}: prompt is {_shown(prompt)}, but it must be {wanted}{without}")
    if ids is not None:
        if not isinstance(ids, list) or not ids:
            raise ValueError(
                f"{location}: input_ids must be a list of at least one integer from 0 to {LARGEST_TOKEN}; "
                f"it is {_shown(ids)}"
            )
        if (place := first_invalid(ids)) is not None:
            value = _shown(ids[place])
            raise ValueError(
                f"{location}: input_ids must be integers from 0 to {LARGEST_TOKEN}; input_ids[{place}] is {value}"
            )
    elif not prompt:
        empty = "" if prompt is None else f"; prompt is {_shown(prompt)}"
        raise ValueError(f"{location}: there is neither a prompt (or text) nor input_ids{empty}")
    elif not can_encode and not isinstance(prompt, str):
        raise ValueError(f"{location}: the messages of a chat need a tokenizer, whose template makes a prompt of them")


def _is_chat(prompt: object) -> bool:
    return isinstance(prompt, list) and all(isinstance(message, dict) for message in prompt)


def _shown(value: object) -> str:
    """A value of a line as it stands there, shortened."""
    text = orjson.dumps(value).decode()
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[:_SHOWN_CHARACTERS]}..."


def _encoded(prompt: Any, encode: Encode, location: str) -> list[int]:  # noqa: ANN401  # a text or messages
    """The ids of a prompt; ValueError with its line for one of which the tokenizer can make none."""
    try:
        return encode(prompt)
    except Exception as error:  # whatever a tokenizer or a chat template raises
        raise ValueError(f"{location}: the tokenizer cannot encode it: {type(error).__name__}: {error}") from error
