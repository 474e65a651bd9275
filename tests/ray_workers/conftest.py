"""One small Ray for all tests, which leaves nothing behind."""

from __future__ import annotations

import importlib.util
import os
import time
from typing import TYPE_CHECKING

import pytest

from support.paths import ROOT

if TYPE_CHECKING:
    from collections.abc import Iterator

collect_ignore_glob = [
    *([] if importlib.util.find_spec("ray") else ["test_workers.py", "test_reports.py", "test_deaths.py"]),
    *([] if all(map(importlib.util.find_spec, ("ray", "torch", "transformers"))) else ["test_training.py"]),
]


@pytest.fixture(scope="session")
def _ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    import ray  # noqa: PLC0415 - only where it is installed

    from support.ray_jobs import descendants  # noqa: PLC0415

    before = descendants()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_AUTH_MODE", "disabled")  # otherwise it writes a token into the home directory
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]))
        ray.init(
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            configure_logging=False,
            _temp_dir=str(tmp_path_factory.mktemp("r")),
        )
        yield
        ray.shutdown()
    end = time.monotonic() + 30
    while (left := descendants().keys() - before.keys()) and time.monotonic() < end:
        time.sleep(0.05)
    assert not left
