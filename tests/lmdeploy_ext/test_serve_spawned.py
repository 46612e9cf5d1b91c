"""What was put in place here is in place in the process that LMDeploy spawns for its PyTorch engine."""

from __future__ import annotations

import copy
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_child import Report, SwappedEngine

from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import open_encoder
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE
from turbovit.lmdeploy_ext.engine_config import prepared_engine_config
from turbovit.lmdeploy_ext.pytorch_engine import CUSTOM_MODULE_MAP_FILE


@pytest.fixture
def config(tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, monkeypatch: pytest.MonkeyPatch) -> Any:
    from lmdeploy import PytorchEngineConfig

    monkeypatch.setenv(BUNDLE_VARIABLE, str(tiny_gemma3_bundle.path))
    return prepared_engine_config(str(tiny_gemma3), PytorchEngineConfig(session_len=99, max_batch_size=4))


@pytest.mark.slow
def test_lmdeploys_spawned_engine_builds_the_compiled_model(
    config: Any, tiny_gemma3: Path, tiny_gemma3_bundle: Bundle
) -> None:
    from lmdeploy.pytorch.engine.mp_engine import build_mp_engine

    config.enable_mp_engine = True
    engine = build_mp_engine("mp", str(tiny_gemma3), config, speculative_config=SwappedEngine())
    try:
        found = engine.engine_config
    finally:
        engine.close()
    assert isinstance(found, Report), found.trace
    assert found.process != os.getpid()
    assert found.config_class == "CompiledVisionEngineConfig"
    assert found.enable_mp_engine is False  # LMDeploy turned it off there: it is the engine's process
    assert found.vision_class == "turbovit.lmdeploy_ext.gemma3"
    assert found.workers_get_the_map
    assert found.model_class == "turbovit.lmdeploy_ext.pytorch_engine.models.Gemma3ForConditionalGeneration"
    assert found.vision_parameters == []
    pixels = torch.arange(3 * 896 * 896).remainder(251).to(torch.uint8).view(1, 3, 896, 896)
    expected = open_encoder(tiny_gemma3_bundle, device="cpu").run_rows(pixels, None)["features"]
    np.testing.assert_allclose(found.features, expected.numpy(), atol=1e-6)


@pytest.mark.slow
def test_unpickling_the_config_puts_turbovit_in_place(config: Any, tmp_path: Path) -> None:
    """In a process that has imported nothing, and has no setting of ours, as a worker on another machine."""
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(config))
    script = f"""
import os, pickle
config = pickle.load(open({str(tmp_path / "config.pickle")!r}, "rb"))
from turbovit.lmdeploy_ext import plugin
bundle = os.environ["{BUNDLE_VARIABLE}"]
print(type(config).__name__, plugin._installed, config.session_len, config.custom_module_map, bundle)
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TURBOVIT_")}
    result = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    expected = f"CompiledVisionEngineConfig True 99 {CUSTOM_MODULE_MAP_FILE} {os.environ[BUNDLE_VARIABLE]}"
    assert result.stdout.split("\n")[-2] == expected


def test_the_config_is_copied_and_printed_as_lmdeploys(config: Any) -> None:
    from lmdeploy import PytorchEngineConfig

    assert isinstance(config, PytorchEngineConfig)
    twin = copy.deepcopy(config)
    assert type(twin) is type(config)
    assert vars(twin) == vars(config)
    assert "session_len=99" in repr(config)
    assert vars(config) == {
        **vars(PytorchEngineConfig(session_len=99, max_batch_size=4)),
        "custom_module_map": str(CUSTOM_MODULE_MAP_FILE),
    }
