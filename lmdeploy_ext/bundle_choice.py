"""Which bundle a model is served from: one that is named, one in the store, or one that is built now."""

from __future__ import annotations

import logging
import os
from pathlib import Path

logger = logging.getLogger("turbovit")

AUTO_BUILD_VARIABLE = "TURBOVIT_AUTO_BUILD"
BUNDLE_VARIABLE = "TURBOVIT_BUNDLE"
COMPILED_VISION_VARIABLE = "TURBOVIT_COMPILED_VISION"  # 0 leaves the vision half to LMDeploy on backend pytorch


def bundle_folder(model: str | Path, bundle: str | Path | None = None) -> Path:
    """The folder of the bundle for a checkpoint.

    Args:
        model: a checkpoint folder or hub id.
        bundle: the bundle's folder; None looks in ``$TURBOVIT_BUNDLE``, then in the store, and builds one there
            where ``TURBOVIT_AUTO_BUILD=1``.

    Raises:
        BundleError: there is none, with the command that builds it; or it was built from another checkpoint.
        CheckpointError, UnsupportedModelError: the checkpoint cannot be used; says why.
    """
    from turbovit.export.plan import find_bundle, no_bundle, require_fit

    given = bundle or os.environ.get(BUNDLE_VARIABLE)
    if given:
        require_fit(model, given)
        return Path(given)
    found = find_bundle(model)
    if found:
        return found
    if os.environ.get(AUTO_BUILD_VARIABLE) == "1":
        from turbovit.export.build import build

        return build(model, report=logger.info).bundle.path
    raise no_bundle(model, f" (or set {AUTO_BUILD_VARIABLE}=1 to build it at the first start)")
