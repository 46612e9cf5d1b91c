"""Greedy answers of LMDeploy's TurboMind, run in this process: its own checks end the process, so run it in a child."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

_ENGINE: dict[str, Any] = {
    "devices": [0],
    "device_num": 1,
    "session_len": 2048,
    "max_batch_size": 8,
    "max_prefill_token_num": 2048,
    "cache_max_entry_count": 0.2,
    "enable_metrics": False,
}


@dataclass(frozen=True)
class Asked:
    """A request, and how it is to be answered.

    Attributes:
        request: as `to_turbomind` returns it.
        cancel_after: tokens after which the caller gives up.
    """

    request: Mapping[str, Any]
    new_tokens: int = 6
    stop_token_ids: tuple[int, ...] = ()
    cancel_after: int | None = None


@dataclass(frozen=True)
class Answer:
    """What TurboMind made of a request.

    Attributes:
        tokens: those that it chose.
        status: the name of an ``lmdeploy.messages.ResponseType``.
        logits: [tokens of prompt and answer but the last, vocabulary], float32.
    """

    tokens: list[int]
    status: str
    logits: Tensor


class TurboMindSide:
    """An engine over a checkpoint, with turbovit's language half where there is none of LMDeploy's.

    Args:
        checkpoint: a folder.
        options: of ``TurbomindEngineConfig``, beside those of a small engine on one GPU.
    """

    def __init__(self, checkpoint: Path, **options: Any):
        from turbovit.lmdeploy_ext import install

        install()
        from lmdeploy.messages import TurbomindEngineConfig
        from lmdeploy.turbomind import TurboMind

        config = TurbomindEngineConfig(**{**_ENGINE, **options})
        self._engine = TurboMind(str(checkpoint), engine_config=config)

    def __enter__(self) -> TurboMindSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.close()  # it must be gone before the interpreter is

    def answers(self, batch: Sequence[Asked]) -> list[Answer]:
        """To requests that are sent at once."""

        async def together() -> list[Answer]:
            return await asyncio.gather(*(self._answer(number, asked) for number, asked in enumerate(batch, 1)))

        return asyncio.run(together())

    async def _answer(self, number: int, asked: Asked) -> Answer:
        from lmdeploy.messages import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=asked.new_tokens,
            top_k=1,
            stop_token_ids=list(asked.stop_token_ids) or None,
            output_logits="all",
        )
        instance = self._engine.create_instance()
        tokens: list[int] = []
        output: Any = None
        async for output in instance.async_stream_infer(
            number,
            asked.request["input_ids"],
            input_embeddings=asked.request.get("input_embeddings"),
            input_embedding_ranges=asked.request.get("input_embedding_ranges"),
            gen_config=config,
            stream_output=True,
        ):
            tokens += output.token_ids
            if asked.cancel_after is not None and len(tokens) >= asked.cancel_after:
                await instance.async_cancel(number)
        if output is None or output.logits is None:
            raise RuntimeError(f"request {number} got no answer, its tokens so far: {tokens}")
        return Answer(tokens, output.status.name, output.logits.float().clone())
