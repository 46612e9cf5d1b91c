"""Compiled vision encoders for LMDeploy.

The public names load lazily: ``import turbovit`` alone pulls in neither torch nor a runtime.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from turbovit.engines.account import complete_account

if TYPE_CHECKING:
    from turbovit.engines.bundle import open_bundle
    from turbovit.engines.encoder import Encoded, Encoder, open_encoder
    from turbovit.export.build import build

__version__ = "0.1.0"
__all__ = ["Encoded", "Encoder", "__version__", "build", "open_bundle", "open_encoder"]

_LAZY = {
    "Encoded": "turbovit.engines.encoder",
    "Encoder": "turbovit.engines.encoder",
    "build": "turbovit.export.build",
    "open_bundle": "turbovit.engines.bundle",
    "open_encoder": "turbovit.engines.encoder",
}

complete_account()  # before any library asks


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'turbovit' has no attribute {name!r}; it has {', '.join(__all__)}")
