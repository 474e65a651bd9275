"""Makes ``import miles`` find the stand-in inside a block."""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from streamfold.loopback import Config
from support.host.slime.utils.misc import SingletonMeta
from support.host.slime.utils.processing_utils import encode_image_for_rollout_engine
from support.miles import rollout, types

if TYPE_CHECKING:
    from collections.abc import Iterator

LORA = "miles_lora"


class AdaptersCache:
    """The adapters that are served, by name."""

    served: dict[str, SimpleNamespace] = {}  # noqa: RUF012  # of the class, as a singleton's

    async def get(self, name: str) -> SimpleNamespace | None:
        return self.served.get(name)


def _modules() -> dict[str, dict[str, Any]]:
    return {
        "rollout.base_types": {
            "GenerateFnInput": rollout.GenerateFnInput,
            "GenerateFnOutput": rollout.GenerateFnOutput,
        },
        "rollout.sglang_rollout": {"GenerateState": rollout.LegacyGenerateState},
        "rollout.generate_utils.generate_endpoint_utils": {
            "compute_prompt_ids_from_sample": rollout.compute_prompt_ids_from_sample
        },
        "utils.types": {"Sample": types.Sample},
        "utils.misc": {"load_function": rollout.load_function},
        "utils.processing_utils": {"encode_image_for_rollout_engine": encode_image_for_rollout_engine},
        "utils.lora": {
            "LORA_ADAPTER_NAME": LORA,
            "lora_rollout_enabled": lambda args: args.lora_rank > 0 and not args.lora_train_only,
        },
        "utils.multi_lora": {"slot_lora_name": lambda slot: f"slot_{slot}"},
        "ray.multi_lora.controller": {"AdaptersCache": AdaptersCache},
    }


@contextlib.contextmanager
def installed(**more: dict[str, Any]) -> Iterator[None]:
    """Make ``import miles`` give the stand-in. ``more`` are further modules, dots written as two underscores."""
    if any(name.partition(".")[0] == "miles" for name in sys.modules):
        msg = "miles is imported already: the stand-in must not hide it"
        raise RuntimeError(msg)
    SingletonMeta.forget()
    AdaptersCache.served = {}
    for path, names in {**_modules(), **{path.replace("__", "."): names for path, names in more.items()}}.items():
        _add(f"miles.{path}", names)
    try:
        yield
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] == "miles"]:
            del sys.modules[name]
        SingletonMeta.forget()


def _add(full_name: str, names: dict[str, Any]) -> None:
    above, _, name = full_name.rpartition(".")
    if above and above not in sys.modules:
        _add(above, {})
    module = ModuleType(full_name)
    module.__path__ = []
    vars(module).update(names)
    sys.modules[full_name] = module
    if above:
        setattr(sys.modules[above], name, module)


def arguments(url: str, config: Config | None = None, **settings: Any) -> SimpleNamespace:
    """Give ``args`` for one engine, which is its own router; ``settings`` are further or other attributes."""
    config = config or Config()
    host, _, port = urlsplit(url).netloc.rpartition(":")
    return SimpleNamespace(
        **{
            "sglang_router_ip": host,
            "sglang_router_port": int(port),
            "sglang_router_policy": None,
            "sglang_model_routers": None,
            "sglang_speculative_algorithm": None,
            "hf_checkpoint": f"loopback/{config.vocab_size}",
            "num_layers": config.num_layers,
            "moe_router_topk": config.top_k,
            "num_experts": config.num_experts,
            "use_rollout_routing_replay": False,
            "use_rollout_indexer_replay": False,
            "rollout_max_response_len": 32,
            "rollout_max_context_len": None,
            "custom_generate_function_path": "streamfold.miles.generate_streaming",
            "partial_rollout": False,
            "mask_offpolicy_in_partial_rollout": False,
            "lora_rank": 0,
            "lora_train_only": False,
            "streamfold_tries": 1,
            **settings,
        }
    )
