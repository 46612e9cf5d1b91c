"""A request as LMDeploy makes it: its own ImageEncoder and MultimodalProcessor, without a language engine."""

from __future__ import annotations

import asyncio
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

from turbovit.lmdeploy_ext import install
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE
from turbovit.lmdeploy_ext.engine_config import prepared_engine_config


class LMDeploySide:
    """LMDeploy's request path, from messages to what the engine gets.

    Args:
        backend: ``turbomind`` or ``pytorch``.
    """

    def __init__(self, checkpoint: Path, bundle: Path, backend: str = "turbomind"):
        import torch

        install()
        from lmdeploy.messages import PytorchEngineConfig
        from lmdeploy.model import get_chat_template
        from lmdeploy.serve.processors import MultimodalProcessor
        from lmdeploy.tokenizer import Tokenizer
        from lmdeploy.vl.engine import ImageEncoder

        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, {BUNDLE_VARIABLE: str(bundle)}))
            if not torch.cuda.is_available():
                # LMDeploy asks the driver what is free before it loads a vision model, and whether it has bfloat16.
                stack.enter_context(patch("torch.cuda.mem_get_info", return_value=(0, 0)))
                stack.enter_context(patch("lmdeploy.vl.engine.is_bf16_supported", return_value=True))
            config = prepared_engine_config(str(checkpoint), PytorchEngineConfig()) if backend == "pytorch" else None
            self.encoder = ImageEncoder(str(checkpoint), backend, backend_config=config)
        self.tokenizer = Tokenizer(str(checkpoint))
        self.chat_template = get_chat_template(str(checkpoint))
        self.processor = MultimodalProcessor(
            self.tokenizer, self.chat_template, vl_encoder=self.encoder, backend=backend
        )

    def request(
        self, messages: str | list[dict[str, Any]], do_preprocess: bool = True, **kwargs: Any
    ) -> dict[str, Any]:
        """What LMDeploy would hand to the engine for `messages`."""
        return asyncio.run(self.processor.get_prompt_input(messages, do_preprocess, **kwargs))
