"""LMDeploy's vision models over a compiled engine. `install()` puts them in place."""

from __future__ import annotations

from turbovit.lmdeploy_ext.plugin import install, load_vision_model

__all__ = ["install", "load_vision_model"]
