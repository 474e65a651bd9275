"""Makes ``import slime`` or ``import vime`` find the stand-in inside a block."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

from support.host import engine
from support.host.slime.observability import trace_utils
from support.host.slime.rollout import base_types, data_source, rm_hub, sample_hooks, sglang_rollout
from support.host.slime.rollout.filter_hub import base_types as filter_types
from support.host.slime.utils import async_utils, http_utils, misc, processing_utils, types

if TYPE_CHECKING:
    from collections.abc import Iterator

_MODULES: dict[str, ModuleType] = {
    "rollout.data_source": data_source,
    "rollout.rm_hub": rm_hub,
    "utils.http_utils": http_utils,
    "utils.misc": misc,
    "utils.processing_utils": processing_utils,
    "utils.types": types,
}
# What older slime does not have.
_NEWER: dict[str, ModuleType] = {
    "rollout.base_types": base_types,
    "rollout.filter_hub.base_types": filter_types,
    "rollout.sample_hooks": sample_hooks,
    "utils.async_utils": async_utils,
}


@contextlib.contextmanager
def installed(name: str = "slime", *, new: bool = True) -> Iterator[None]:
    """Make ``import slime``, or ``import vime``, give the stand-in, as long as the block runs.

    Newer slime knows request aborts and keeps its span helpers in ``slime.observability``; older slime only ever aborts
    whole servers and keeps them in ``slime.utils``. It has no classes for what a rollout gives, no hooks for samples
    and no event loop of its own. What the stand-in remembers (its singleton, its HTTP client, its loop, its spans) is
    forgotten before and after.
    """
    if _ours(name):
        msg = f"{name} is imported already: the stand-in must not hide it"
        raise RuntimeError(msg)
    spans_at = "observability.trace_utils" if new else "utils.trace_utils"
    _forget()
    sglang_rollout.knows_request_abort = new
    engine.choose(name)
    modules = {**_MODULES, **(_NEWER if new else {}), spans_at: trace_utils}
    sys.modules.update(_tree(name, {**modules, f"rollout.{engine.current().name}_rollout": sglang_rollout}))
    try:
        yield
    finally:
        for ours in _ours(name):
            del sys.modules[ours]
        _forget()
        engine.choose("slime")


def _ours(package: str) -> list[str]:
    return [name for name in sys.modules if name == package or name.startswith(f"{package}.")]


def _forget() -> None:
    misc.SingletonMeta.forget()
    http_utils.forget_http_client()
    async_utils.forget()
    trace_utils.spans.clear()
    sglang_rollout.tqdm.bars.clear()


def _tree(root: str, modules: dict[str, ModuleType]) -> dict[str, ModuleType]:
    """Hang modules below packages without a directory, so that nothing but them can be imported."""
    tree = {root: _package(root)}
    for path, module in modules.items():
        above = tree[root]
        *packages, name = path.split(".")
        for package in packages:
            full_name = f"{above.__name__}.{package}"
            below = tree.setdefault(full_name, _package(full_name))
            setattr(above, package, below)
            above = below
        setattr(above, name, module)
        tree[f"{above.__name__}.{name}"] = module
    return tree


def _package(name: str) -> ModuleType:
    package = ModuleType(name)
    package.__path__ = []
    return package
