"""The trainer's arguments."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

from streamfold.loopback import Config
from support.host import engine


def arguments(url: str, config: Config | None = None, **settings: Any) -> SimpleNamespace:
    """Give ``args`` for one engine, which is its own router; ``settings`` are further or other attributes.

    Options of the engine are those of the trainer that is installed, slime if none is. The model's shape and vocabulary
    come from ``config``. ``sglang_incremental_streaming_output`` is left out unless it is given, as in older slime. Set
    ``hf_checkpoint`` to ``loopback-vl/512`` for a model that takes images.
    """
    config = config or Config()
    ip, _, port = urlsplit(url).netloc.rpartition(":")
    of_engine = {
        "router_ip": ip,
        "router_port": int(port),
        "model_routers": None,
        "server_concurrency": 512,
        "enable_deterministic_inference": False,
        "dp_size": 1,
    }
    here = engine.current()
    args = SimpleNamespace(
        **{f"{here.name}_{name}": value for name, value in of_engine.items()},
        **{here.speculative: None},
        router_policy=None,
        hf_checkpoint=f"loopback/{config.vocab_size}",
        num_layers=config.num_layers,
        moe_router_topk=config.top_k,
        num_experts=config.num_experts,
        use_rollout_routing_replay=False,
        use_score_centering=False,
        ci_test=False,
        partial_rollout=False,
        mask_offpolicy_in_partial_rollout=False,
        custom_generate_function_path=None,
        custom_rm_path=None,
        group_rm=False,
        dynamic_sampling_filter_path=None,
        rollout_sample_filter_path=None,
        rollout_all_samples_process_path=None,
        rollout_sample_hook_path=None,
        buffer_filter_path=None,
        rollout_global_dataset=True,
        rollout_shuffle=False,
        save=None,
        load=None,
        eval_datasets=[],
        rollout_num_engines=1,
        prompt_data=["the first story", "a second one"],
        n_samples_per_prompt=2,
        rollout_batch_size=2,
        over_sampling_batch_size=2,
        rollout_seed=42,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_top_k=-1,
        rollout_max_response_len=32,
        rollout_stop=None,
        rollout_stop_token_ids=None,
        rollout_skip_special_tokens=True,
    )
    vars(args).update(settings)
    return args
