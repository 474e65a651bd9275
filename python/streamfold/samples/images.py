"""Images of a prompt: the fields of a request that send them, and how long the engine says that such a prompt is."""

from __future__ import annotations

import base64
import io
from typing import TYPE_CHECKING, Any, Final

from streamfold.errors import DecodeError
from streamfold.samples.metadata import PROMPT_TOKENS, metadata_of, own_metadata

if TYPE_CHECKING:
    from streamfold._core import Generation
    from streamfold._types import SampleLike
    from streamfold.engines.base import EngineSpec

__all__ = ["MEDIA_KEYS", "check_prompt_count", "image_fields"]

# Keys of a request that hold images and the like, of any engine.
MEDIA_KEYS: Final = frozenset({"image_data", "video_data", "audio_data", "features", "multi_modal_data"})


def image_fields(sample: SampleLike, engine_spec: EngineSpec) -> dict[str, Any]:
    """The fields of a request that send ``sample.multimodal_inputs``; empty if it has none.

    Images are given as the engine takes them (a URL, a path, base64 or a data URI), as the bytes of a file, or as
    images of Pillow, which are sent as PNG.

    Raises:
        ValueError: the sample has other inputs than images, or one that cannot be sent, or the engine takes none.
    """
    inputs = {kind: items for kind, items in (getattr(sample, "multimodal_inputs", None) or {}).items() if _any(items)}
    if not inputs:
        return {}
    if others := sorted(inputs.keys() - {"images"}):
        raise ValueError(f"multimodal_inputs has {', '.join(others)}: only images can be sent")
    if engine_spec.image_key is None:
        raise ValueError(
            f"the sample has images (multimodal_inputs), which the endpoint of engine={engine_spec.name!r} takes in "
            "another form: give it that with CompletionOptions(extra=...), or use SGLang"
        )
    images = inputs["images"]
    images = [images] if isinstance(images, (str, bytes)) else list(images)
    return {engine_spec.image_key: [_encoded(image, number) for number, image in enumerate(images)]}


def _any(items: Any) -> bool:  # noqa: ANN401  # a list, an array, None
    return items is not None and (not hasattr(items, "__len__") or len(items) > 0)


def _encoded(image: Any, number: int) -> str:  # noqa: ANN401  # a user's
    if isinstance(image, str):
        return image
    if isinstance(image, bytes):
        return base64.b64encode(image).decode()
    if hasattr(image, "save"):
        file = io.BytesIO()
        image.save(file, format="PNG")
        return base64.b64encode(file.getvalue()).decode()
    raise ValueError(
        f'multimodal_inputs["images"][{number}] is a {type(image).__name__}: it must be a str (URL, path, base64 or '
        "data URI), bytes of an image file, or an image of Pillow"
    )


def check_prompt_count(sample: SampleLike, generation: Generation, *, has_media: bool) -> DecodeError | None:
    """Compare the engine's count of the prompt with that of the ids that a call was sent, before it is merged.

    With images the engine may make more ids of those that it is sent. How many it counts for the prompt alone is noted
    in the sample at the first call, if that is another number, and must be the same in each later one.

    Args:
        sample: as it was when the call was sent.
        generation: what the call has generated.
        has_media: whether the request had images, and ids or a text that stand for them.

    Returns:
        The error if the engine counted another prompt; the call's tokens are not those of the sample's prompt.
    """
    sent, before, counted = len(sample.tokens), sample.response_length, generation.prompt_tokens
    if not has_media or counted is None or sent == before:  # otherwise the parser has compared it
        return None
    noted = metadata_of(sample).get(PROMPT_TOKENS)
    if not isinstance(noted, int):
        if before:
            noted = sent - before
        elif counted != sent:
            own_metadata(sample)[PROMPT_TOKENS] = counted
    if not isinstance(noted, int) or counted == noted + before:
        return None
    kind = "the first call" if PROMPT_TOKENS in metadata_of(sample) else "the ids of the sample"
    return DecodeError(
        f"the engine reports a prompt of {counted} tokens, but there are {noted + before}: {noted} of the prompt by "
        f"{kind}, and {before} of the response. Its tokens are dropped: check that each call has the same images",
        kind="length",
        offset=0,
        path="prompt_tokens",
        partial=generation,
    )
