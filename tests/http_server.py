"""LMDeploy's real server on loopback, started by the code of `turbovit serve`, with a language engine that records."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import requests
import torch

from turbovit.engines.bundle import Bundle

ANSWER_DIGITS = 4
_ENGINE = "lmdeploy.serve.core.async_engine.AsyncEngine"


@dataclass
class FakeEngine:
    """Takes the place of LMDeploy's engine: the n-th request is kept, and answered with n in four digits.

    Attributes:
        engine_config: as LMDeploy made it.
        requests: what the engine was given, in order of arrival.
    """

    engine_config: Any
    tokenizer: Any
    requests: list[dict[str, Any]] = field(default_factory=list)

    def create_instance(self) -> FakeInstance:
        return FakeInstance(self)

    def start_loop(self) -> bool:
        return True

    def get_schedule_metrics(self) -> None:
        return None

    async def get_health_status(self) -> dict[str, Any]:
        return {"alive": True, "message": "", "schedule_metrics": None}

    def close(self) -> None:
        pass


@dataclass
class FakeInstance:
    """One of the engine's handles."""

    engine: FakeEngine

    async def async_stream_infer(self, session_id: int, input_ids: list[int], **request: Any) -> Any:
        from lmdeploy.messages import EngineOutput, ResponseType

        number = len(self.engine.requests)
        self.engine.requests.append({"input_ids": list(input_ids), **request})
        *first, last = self.engine.tokenizer.encode(f"{number:0{ANSWER_DIGITS}}", add_bos=False)
        for token in first:
            await asyncio.sleep(0)  # so that requests that run at once are mixed
            yield EngineOutput(ResponseType.SUCCESS, [token])
        yield EngineOutput(ResponseType.FINISH, [last])

    async def async_cancel(self, session_id: int) -> None:
        pass

    async def async_end(self, session_id: int) -> None:
        pass


@dataclass(frozen=True)
class Served:
    """A running server."""

    url: str
    model: str
    engine: FakeEngine

    def get(self, path: str) -> requests.Response:
        return requests.get(self.url + path, timeout=60)

    def chat(self, messages: Any, **options: Any) -> requests.Response:
        body = {"model": self.model, "messages": messages, **options}
        return requests.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)

    def generate(self, **body: Any) -> requests.Response:
        return requests.post(f"{self.url}/generate", json=body, timeout=60)

    def answered(self, response: requests.Response) -> dict[str, Any]:
        """What the engine was given for the request that this is the answer to."""
        assert response.status_code == 200, response.text
        body = response.json()
        text = body["choices"][0]["message"]["content"] if "choices" in body else body["text"]
        return self.engine.requests[int(text)]

    def refused(self, response: requests.Response) -> str:
        """The message of a 4xx; the server is alive, and no engine has seen the request."""
        before = len(self.engine.requests)
        assert 400 <= response.status_code < 500, response.text
        assert self.get("/health").status_code == 200
        assert len(self.engine.requests) == before
        return response.json()["message"]


@contextlib.contextmanager
def served(
    model: Path, bundle: Bundle, backend: str = "turbomind", *arguments: str, local_media: Path | None = None
) -> Iterator[Served]:
    """Serve `model` on a free port of loopback until the block ends; `local_media` as `serve` takes it."""
    import uvicorn

    from turbovit.lmdeploy_ext import serve

    started = threading.Event()
    engines: list[FakeEngine] = []
    found: dict[str, Any] = {}

    def run_until_told(app: Any, **options: Any) -> None:
        found["server"] = uvicorn.Server(uvicorn.Config(app, **{**options, "log_level": "warning"}))
        started.set()
        found["server"].run()

    def run() -> None:
        try:
            options = ["--server-name", "127.0.0.1", "--server-port", str(port), "--disable-metrics"]
            options += ["--max-batch-size", "8", *arguments]  # else LMDeploy asks the GPU
            serve.serve(str(model), options, backend=backend, engines=bundle.path, local_media=local_media)
        except BaseException as error:
            found["error"] = error
        finally:
            started.set()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with machine_that_can(engines.append), patch("uvicorn.run", run_until_told):
        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        started.wait(120)
    if "error" in found:
        raise found["error"]
    while not found["server"].started:
        time.sleep(0.02)
    yield Served(f"http://127.0.0.1:{port}", str(model), engines[0])
    found["server"].should_exit = True
    thread.join(30)
    assert not thread.is_alive()


@contextlib.contextmanager
def machine_that_can(keep_engine: Callable[[FakeEngine], None]) -> Iterator[None]:
    """Within, this machine has a GPU, a TurboMind with all language models, and engines that record.

    Args:
        keep_engine: called with every engine that is started.
    """
    from turbovit.lmdeploy_ext import capability, serve

    def build_engine(self: Any, model_path: str, backend_config: Any, **_: Any) -> FakeEngine:
        engine = FakeEngine(backend_config, self.tokenizer)
        keep_engine(engine)
        return engine

    changes = [
        patch.dict(os.environ),  # a server leaves settings behind
        patch.object(capability, "language_findings", lambda *_: (capability.Finding("all", "have"),)),
        patch.object(serve, "_require_device", lambda options: None),
        patch("lmdeploy.turbomind.is_available", lambda: True),
        patch("lmdeploy.turbomind.supported_models.is_supported", lambda *_, **__: True),
        patch("torch.cuda.mem_get_info", lambda *_: (0, 0)),
        *(patch(f"{_ENGINE}.{name}", build_engine) for name in ("_build_turbomind", "_build_pytorch")),
    ]
    with contextlib.ExitStack() as stack:
        for change in changes:
            stack.enter_context(change)
        yield


def assert_same(got: Any, expected: Any) -> None:
    """What the engine got is the offline request, bit by bit; `got` holds LMDeploy's options besides."""
    if isinstance(expected, torch.Tensor):
        assert got.dtype == expected.dtype
        assert torch.equal(got, expected)
    elif isinstance(expected, dict):
        for name, value in expected.items():
            assert_same(got[name], value)
    elif isinstance(expected, list):
        assert len(got) == len(expected)
        for item, value in zip(got, expected, strict=True):
            assert_same(item, value)
    else:
        assert got == expected
