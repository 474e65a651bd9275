"""What an engine generates if nothing ever happens to the request."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from streamfold.loopback.sglang import request as sglang
from streamfold.loopback.vllm import request as vllm

if TYPE_CHECKING:
    from collections.abc import Sequence

    from streamfold.loopback.core.config import Config
    from streamfold.loopback.core.reply import Reply

__all__ = ["undisturbed"]


def undisturbed(
    config: Config, input_ids: Sequence[int], sampling_params: dict[str, Any] | None = None, **body: object
) -> Reply:
    """Generate by itself, without HTTP or a clock: what any cut and resumed generation has to equal.

    ``sampling_params`` are named as on the engine's wire, and ``body`` has further keys of the request's body. Raises
    InvalidRequest.
    """
    generate = vllm.undisturbed if config.engine == "vllm" else sglang.undisturbed
    return generate(config, input_ids, sampling_params, **body)
