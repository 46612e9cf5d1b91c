"""LMDeploy's PyTorch engine, from the request to the logits, on a CPU: its own scheduler, model and kernels (these in
Triton's interpreter) around the compiled tower give the logits of transformers' whole model."""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from turbomind_requests import LOGITS_BOUND, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import chat_from_lmdeploy
from turbovit.engines.families import FAMILIES, family_from_name, load

ROOT = Path(__file__).parents[2]
A, B = noise(60, 50, 0), noise(90, 40, 1)
# Two sequences of one batch, with several images and with none.
CHATS = {
    "gemma3": [[user(text("look"), image(A), image(B))], [user(text("hello"))]],
    "llama4": [[user(text("hello"))], [user(image(A), text("and"), image(B))]],
    "qwen3_vl": [[user(image(A), text("and"), image(B))], [user(text("hello"))]],
    "qwen3_vl_moe": [[user(text("hello"))], [user(image(A), text("and"), image(B))]],
    "deepseek_vl2": [[user(image(A), text("and"), image(B))], [user(text("hello"))]],
}


def checkpoint_for(name: str, tiny: Path, folder: Path) -> Path:
    """As it is; Gemma 3's layers are said in the one way that LMDeploy reads: every n-th sees everything."""
    if name != "gemma3":
        return tiny
    shutil.copytree(tiny, folder / "gemma3")
    path = folder / "gemma3" / "config.json"
    config = json.loads(path.read_text())
    assert config["text_config"]["layer_types"] == ["sliding_attention", "full_attention"]
    config["text_config"] |= {"sliding_window_pattern": 2, "sliding_window": 100}  # fewer than an image's tokens
    path.write_text(json.dumps(config))
    return path.parent


@pytest.mark.slow
@pytest.mark.parametrize("name", [row.name for row in FAMILIES])
def test_a_batch_gives_the_logits_of_the_reference(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    checkpoint = checkpoint_for(name, request.getfixturevalue(f"tiny_{name}"), tmp_path)
    bundle = request.getfixturevalue(f"tiny_{name}_bundle").path
    side = LMDeploySide(checkpoint, bundle, backend="pytorch")
    requests = [side.request(copy.deepcopy(chat)) for chat in CHATS[name]]
    file = tmp_path / "requests.pt"
    torch.save(requests, file)
    child = [sys.executable, ROOT / "tests" / "pytorch_decoder_child.py", checkpoint, bundle, file]
    paths = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(child, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": paths})
    assert result.returncode == 0, result.stderr[-3000:]
    reference = load(family_from_name(name).reference)(checkpoint)
    for chat, got in zip(CHATS[name], torch.load(file.with_suffix(".logits")), strict=True):
        expected = reference.logits(reference.inputs_from_messages(chat_from_lmdeploy(chat)))
        assert float((got - expected).abs().max()) <= LOGITS_BOUND
