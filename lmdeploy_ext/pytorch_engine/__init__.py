"""The compiled towers inside LMDeploy's PyTorch engine: LMDeploy's own language half, a bundle's vision half.

The switch is LMDeploy's own ``PytorchEngineConfig.custom_module_map``: it travels with the engine's config into
whatever process runs the engine, and the vision model beside it reads the same entry. So the two halves cannot disagree
about what pixels are.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Its folder goes on sys.path of the engine's process, so it holds that file alone.
CUSTOM_MODULE_MAP_FILE = Path(__file__).parent / "module_map" / "turbovit_module_map.py"


def has_compiled_vision(engine_config: Any) -> bool:
    """Whether the engine of a ``PytorchEngineConfig`` runs a compiled tower."""
    return getattr(engine_config, "custom_module_map", None) == str(CUSTOM_MODULE_MAP_FILE)
