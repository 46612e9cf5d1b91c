"""A checkpoint without a chat template: its conversations would be joined without a sign of who said what."""

from __future__ import annotations

import os
from pathlib import Path

from turbovit.engines.families import load
from turbovit.lmdeploy_ext.bundle_choice import COMPILED_VISION_VARIABLE

NO_TEMPLATE = (
    "this checkpoint has no chat template that LMDeploy can use, and without one the turns of a conversation run into "
    "each other: put the chat_template.jinja of the model that it was made from beside its tokenizer, or name a "
    "template with --chat-template (chat_template_config in a pipeline)"
)


def template_refusal(model: str | Path) -> str | None:
    """What is said of a checkpoint that LMDeploy found no chat template for; None where it needs none.

    It needs none where its family writes conversations itself, or where LMDeploy has the vision half.
    """
    from turbovit.lmdeploy_ext.engine_config import served_family

    family = served_family(model)
    off = os.environ.get(COMPILED_VISION_VARIABLE) == "0"
    if off or family is None or load(family.vision_model).has_own_format:
        return None
    return f"{model}: {NO_TEMPLATE}"
