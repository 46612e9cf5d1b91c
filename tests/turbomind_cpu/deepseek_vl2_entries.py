"""Run in a child of `rig.Rig`: DeepSeek-VL2 through LMDeploy's own entries, each started after starts that fail."""

from __future__ import annotations

import base64
import io
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import requests

from turbovit.benchmarks.turbomind_answers import Messages, Subject, conversations
from turbovit.benchmarks.turbomind_side import Answer, TurboMindSide

LANGUAGE, NEW_TOKENS, PORT = "mla", 6, 23765
ENGINE = {"session_len": 2048, "max_batch_size": 4, "cache_max_entry_count": 0.2, "enable_metrics": False}
CHATS = ("text", "one image", "images in two turns")


def main(folder: str, results: str) -> None:
    found: dict[str, Any] = {}
    subject = Subject.made(LANGUAGE, Path(folder))
    os.environ["TURBOVIT_BUNDLE"] = str(Path(folder) / f"{LANGUAGE}-bundle")
    chats = {name: conversations()[name] for name in CHATS}
    found["failed starts"] = dict(failed_starts(subject.checkpoint, Path(folder)))
    found["pipeline"] = through_pipeline(subject, chats)
    found["server"] = through_server(subject, chats)
    Path(results).write_text(json.dumps(found))


def failed_starts(checkpoint: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """What each start that cannot work raises; the process lives on."""
    import lmdeploy
    from lmdeploy.archs import autoget_backend

    refused = changed(checkpoint, folder / "refused", lambda config: config["language_config"].update(n_group=8))
    yield "pipeline", raised(lambda: lmdeploy.pipeline(str(refused)))
    yield "engine", raised(lambda: TurboMindSide(refused))
    yield "quantised", raised(lambda: TurboMindSide(checkpoint, model_format="awq"))
    broken = Path(shutil.copytree(checkpoint, folder / "broken"))
    without(broken / "model.safetensors", "language.model.norm.weight")
    yield "tensor missing", raised(lambda: TurboMindSide(broken))
    text = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "torch_dtype": "bfloat16"}
    lite = changed(checkpoint, folder / "lite", lambda config: (config.clear(), config.update(text)))
    yield "V2-Lite", raised(lambda: TurboMindSide(lite))
    yield "V2-Lite's backend", autoget_backend(str(lite))
    named = {"architectures": ["DeepseekVLV2ForCausalLM"]}  # as transformers writes it where a model is saved again
    saved = changed(checkpoint, folder / "saved", lambda config: config.update(named))
    yield "saved again's backend", autoget_backend(str(saved))


def raised(start: Callable[[], Any]) -> str:
    try:
        start()
    except Exception as error:
        return f"{'ValueError' if isinstance(error, ValueError) else type(error).__name__}: {error}"
    return "nothing"


def changed(checkpoint: Path, folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def without(file: Path, name: str) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(file)
    del tensors[name]
    save_file(tensors, file, {"format": "pt"})


def through_pipeline(subject: Subject, chats: dict[str, Messages]) -> dict[str, Any]:
    import lmdeploy

    config = lmdeploy.TurbomindEngineConfig(**ENGINE, enable_prefix_caching=True)
    pipe = lmdeploy.pipeline(str(subject.checkpoint), backend_config=config)
    options = lmdeploy.GenerationConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True, output_logits="all")
    try:
        answers = pipe(list(chats.values()), gen_config=options)
        cases = {}
        for (name, chat), answer in zip(chats.items(), answers, strict=True):
            case = subject.compare(name, chat, Answer(answer.token_ids, answer.finish_reason, answer.logits.float()))
            text = subject.side.tokenizer.decode(answer.token_ids)
            cases[name] = {"passed": case.passed, "decoded": text, "figures": str(case)}
        return {
            "cases": cases,
            "engine": type(pipe.async_engine.engine).__name__,
            "dtype": pipe.backend_config.dtype,
            "prefix caching": pipe.backend_config.enable_prefix_caching,
        }
    finally:
        pipe.close()


def through_server(subject: Subject, chats: dict[str, Messages]) -> dict[str, Any]:
    """LMDeploy's real server, started as `turbovit serve` does, with no backend named; it ends by SIGINT."""
    from turbovit.lmdeploy_ext import serve

    found: dict[str, Any] = {"lines": []}
    client = threading.Thread(target=ask, args=(str(subject.checkpoint), chats, found), daemon=True)
    options = {"server-name": "127.0.0.1", "server-port": PORT, "session-len": 2048, "max-batch-size": 4}
    options |= {"cache-max-entry-count": 0.2}
    line = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    client.start()
    serve.serve(str(subject.checkpoint), [*line, "--disable-metrics"], report=found["lines"].append)
    client.join(60)
    return found


def ask(model: str, chats: dict[str, Messages], found: dict[str, Any]) -> None:
    url = f"http://127.0.0.1:{PORT}"
    try:
        with waiting():
            while True:
                try:
                    requests.get(f"{url}/health", timeout=5)
                    break
                except requests.ConnectionError:
                    time.sleep(0.1)
        for name, chat in chats.items():
            body = {"model": model, "messages": [over_http(message) for message in chat], "max_tokens": NEW_TOKENS}
            body |= {"top_k": 1, "ignore_eos": True}
            whole = requests.post(f"{url}/v1/chat/completions", json=body, timeout=120)
            streamed = requests.post(f"{url}/v1/chat/completions", json={**body, "stream": True}, timeout=120)
            pieces = [json.loads(line[5:]) for line in streamed.text.splitlines() if line.startswith("data: {")]
            texts = [choice["delta"].get("content") or "" for piece in pieces for choice in piece["choices"]]
            text = whole.json()["choices"][0]["message"]["content"] if whole.ok else whole.text
            found[name] = {"text": text, "streamed": "".join(texts), "pieces": sum(map(bool, texts))}
    except Exception as error:
        found["error"] = repr(error)
    finally:
        os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def waiting(seconds: float = 120) -> Iterator[None]:
    timer = threading.Timer(seconds, lambda: os.kill(os.getpid(), signal.SIGINT))
    timer.start()
    yield
    timer.cancel()


def over_http(message: dict[str, Any]) -> dict[str, Any]:
    parts = message["content"]
    return message if isinstance(parts, str) else {**message, "content": [part_over_http(part) for part in parts]}


def part_over_http(part: dict[str, Any]) -> dict[str, Any]:
    if part["type"] == "text":
        return part
    file = io.BytesIO()
    part["image_data"]["data"].save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
