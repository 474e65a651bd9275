"""Functions of users that see each generated sample."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from support.host.slime.utils.misc import load_function

if TYPE_CHECKING:
    from types import SimpleNamespace


async def apply_rollout_sample_hooks(args: SimpleNamespace, value: Any, **options: Any) -> Any:
    """Give each sample to each of ``args.rollout_sample_hook_path``; what a hook returns takes the sample's place."""
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, each, **options) for each in value]
    for path in args.rollout_sample_hook_path or []:
        hook = load_function(path)
        known = {key: options[key] for key in inspect.signature(hook).parameters if key in options}
        made = hook(args, value, **known)
        made = await made if inspect.isawaitable(made) else made
        value = value if made is None else made
    return value
