"""``rollout_data_transport="straw"``: worker processes that lease their prompts, each with our generate function."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from support.host import arguments, installed
from support.host import engine as engines
from support.host.helpers import LIMIT, nowhere
from support.host.leases import LeaseQueue, Plan
from support.host.slime.rollout.data_source import RolloutDataSource
from support.host.slime.rollout.sglang_rollout import GenerateState
from support.host_calls import HOSTS, Status, assert_undisturbed, entry_module, loopback_engine

if TYPE_CHECKING:
    from pathlib import Path

    from streamfold.loopback import Loopback

WORDS = ("the", "of", "and", "to", "in", "is", "that", "it")


def load_weights(engine: Loopback, version: int) -> None:
    """Abort what runs, as before new weights are loaded."""
    if engine.config.engine == "vllm":
        httpx.post(f"{engine.url}/abort_requests", json={}, trust_env=False).raise_for_status()
    body = {"new_version": str(version), "abort_all_requests": True}
    httpx.post(f"{engine.url}/update_weight_version", json=body, trust_env=False).raise_for_status()


@pytest.mark.parametrize("name", HOSTS)
def test_leased_groups_carry_on_in_several_processes_and_finish_as_if_undisturbed(name: str, tmp_path: Path) -> None:
    """Through weight updates, reads from disk into the same samples, and the death of a worker."""
    with (
        installed(name),
        loopback_engine(token_rate=400, stop_probability=1 / 100, seed=3, weight_version="0") as engine,
    ):
        options: dict[str, Any] = {
            "rollout_data_transport": "straw",
            "custom_generate_function_path": f"streamfold.{name}.generate_streaming",
            "rollout_max_response_len": 250,
            "prompt_data": [f" {word} story" for word in WORDS],
            f"{engines.current().name}_enable_deterministic_inference": True,
        }
        args = arguments(engine.url, engine.config, **options)
        plan = Plan(name, engine.url, engine.config.vocab_size, str(tmp_path), slots=2, options=options)
        groups = RolloutDataSource(args).get_samples(len(WORDS))
        with LeaseQueue(plan, groups, doomed=0) as queue:
            queue.start_worker()
            queue.start_worker()
            deadline, version, seen = time.monotonic() + LIMIT, 0, 0
            while 0 not in queue.progressed:
                assert time.monotonic() < deadline
                if (tokens := engine.stats().tokens) > seen + 60:  # several of each request
                    version, seen = version + 1, tokens
                    load_weights(engine, version)
                time.sleep(0.02)
            queue.start_worker()
            queue.wait(LIMIT)
            results = [sample for group in queue.results.values() for sample in group]
        params = GenerateState(args).sampling_params
        for sample in results:
            place = (sample.index or 0) % args.n_samples_per_prompt
            assert_undisturbed(engine, args, sample, {**params, "sampling_seed": args.rollout_seed + place})
            assert sample.reward == 1.0
        assert max(len(sample.weight_versions) for sample in results) > 1
        leases = {vars(sample)["_queue_lease"]["task"]: vars(sample)["_queue_lease"]["number"] for sample in results}
        assert set(leases) == set(queue.results)
        assert max(leases.values()) > len(groups), "the dead worker's groups were leased again"
        assert sum(sample.status is Status.TRUNCATED for sample in results) < len(results)


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("what", ["generate_rollout", "generate_rollout_async", "DataSource"])
def test_what_takes_no_part_in_leases_is_refused_by_name(name: str, what: str) -> None:
    with installed(name):
        args = nowhere(rollout_data_transport="straw")
        ours = getattr(entry_module(), what)
        for more in [()] if what == "DataSource" else [(0, None), (0, None, True)]:
            with pytest.raises(
                ValueError, match=rf"streamfold\.{name}\.{what} takes no part in leases: use {name}'s own"
            ):
                ours(args, *more)
        args.rollout_data_transport = "object-store"
        entry_module().DataSource(args)
