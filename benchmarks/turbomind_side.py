"""Greedy answers of LMDeploy's TurboMind, run in this process: its own checks end the process, so run it in a child."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from turbovit.engines.errors import RuntimeUnavailableError

_ENGINE: dict[str, Any] = {
    "devices": [0],
    "device_num": 1,
    "session_len": 2048,
    "max_batch_size": 8,
    "max_prefill_token_num": 2048,
    "cache_max_entry_count": 0.2,
    "enable_metrics": False,
}
_SESSIONS = itertools.count(1)  # the engine may still hold one whose last token has been seen


@dataclass(frozen=True)
class Request:
    """One prompt for a greedy answer.

    Attributes:
        input_embeddings: [rows, hidden] each, at the ranges [begin, end) of `input_ids`.
        logits: whether to give those of all tokens but the last.
        cancel_after: tokens after which the caller gives up.
        generation: more of ``GenerationConfig``.
    """

    input_ids: list[int]
    input_embeddings: list[Tensor] | None = None
    input_embedding_ranges: list[list[int]] | None = None
    max_new_tokens: int = 8
    stop_token_ids: tuple[int, ...] = ()
    logits: bool = False
    cancel_after: int | None = None
    generation: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, request: Mapping[str, Any], **options: Any) -> Request:
        """A request as `to_turbomind` returns it."""
        rows, ranges = request.get("input_embeddings"), request.get("input_embedding_ranges")
        return cls(list(request["input_ids"]), rows, ranges, **options)


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
    logits: Tensor | None = None


class TurboMindSide:
    """An engine over a checkpoint.

    Args:
        checkpoint: a folder.
        options: of ``TurbomindEngineConfig``, beside those of a small engine on one GPU.

    Raises:
        RuntimeUnavailableError: TurboMind's extension is not there.
    """

    def __init__(self, checkpoint: Path, **options: Any):
        from lmdeploy import turbomind
        from lmdeploy.messages import TurbomindEngineConfig

        if not turbomind.is_available():
            raise RuntimeUnavailableError("TurboMind's extension did not import: no CUDA driver?") from (
                turbomind._import_error
            )
        config = TurbomindEngineConfig(**{**_ENGINE, **options})
        self._engine = turbomind.TurboMind(str(checkpoint), engine_config=config)

    def __enter__(self) -> TurboMindSide:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.close()  # it must be gone before the interpreter is

    def answers(self, batch: Sequence[Request]) -> list[Answer]:
        """To requests that are sent at once."""

        async def together() -> list[Answer]:
            return await asyncio.gather(*map(self._answer, batch))

        return asyncio.run(together())

    async def _answer(self, request: Request) -> Answer:
        from lmdeploy.messages import GenerationConfig

        config = GenerationConfig(
            max_new_tokens=request.max_new_tokens,
            stop_token_ids=list(request.stop_token_ids) or None,
            output_logits="all" if request.logits else None,
            **{"top_k": 1, **request.generation},
        )
        instance, session = self._engine.create_instance(), next(_SESSIONS)
        tokens: list[int] = []
        output: Any = None
        async for output in instance.async_stream_infer(
            session,
            request.input_ids,
            input_embeddings=request.input_embeddings,
            input_embedding_ranges=request.input_embedding_ranges,
            gen_config=config,
            stream_output=True,
        ):
            tokens += output.token_ids
            if request.cancel_after is not None and len(tokens) >= request.cancel_after:
                await instance.async_cancel(session)
        if output is None:
            raise RuntimeError(f"a request of {len(request.input_ids)} tokens got no answer")
        logits = None if output.logits is None else output.logits.float().cpu().clone()
        return Answer(tokens, output.status.name, logits)
