"""What DeepSeek-VL2's original code gave: a small part of it beside the tests, all of it in the test data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

FOLDER = Path(__file__).with_name("golden") / "deepseek_vl2"
CHECKPOINT = FOLDER / "checkpoint"  # without weights
GREY = FOLDER / "gray500x333.png"
CONVERSATIONS: dict[str, dict[str, Any]] = json.loads((FOLDER / "conversations.json").read_text())["conversations"]
IMAGE_ID: int = json.loads((FOLDER / "conversations.json").read_text())["image_token_id"]
RESOLUTIONS: list[list[int]] = json.loads((FOLDER / "resolutions.json").read_text())["rows"]
RELEASED = ("deepseek-vl2-tiny", "deepseek-vl2-small", "deepseek-vl2")


def digest(tensor: Tensor) -> str:
    """sha256 of a tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def expected_ids(golden: Mapping[str, Any]) -> list[int]:
    """A conversation's ids: its texts' with the images' runs between."""
    ids = list(golden["text_ids"])
    for begin, end in golden["image_ranges"]:
        ids[begin:begin] = [IMAGE_ID] * (end - begin)
    return ids


def chat(golden: Mapping[str, Any], pictures: Mapping[str, Any]) -> list[Any]:
    """A conversation as LMDeploy takes it; `pictures` by name."""
    messages = []
    for turn in golden["conversation"]:
        names = iter(turn.get("images", ()))
        first, *others = turn["content"].split("<image>")
        parts: list[Any] = [{"type": "text", "text": first}] if first else []
        for piece in others:
            parts.append({"type": "image_data", "image_data": {"data": pictures[next(names)]}})
            parts.append({"type": "text", "text": piece})
        role = {"<|User|>": "user", "<|Assistant|>": "assistant"}[turn["role"]]
        messages.append({"role": role, "content": parts})
    return messages
