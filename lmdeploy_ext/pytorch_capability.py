"""What the installed LMDeploy's PyTorch engine has of a family's language half, read from its files."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from turbovit.lmdeploy_ext.capability import Finding, lmdeploy_folder, state_of

HOOK = "a place for model classes that are not LMDeploy's (custom_module_map)"


@dataclass(frozen=True)
class Need:
    """Something that a language half needs.

    Attributes:
        what: in words.
        architecture: whose file is looked at.
        signs: names of which at least one would be there if it had this.
    """

    what: str
    architecture: str
    signs: tuple[str, ...]


_GEMMA3, _LLAMA4 = "Gemma3ForConditionalGeneration", "Llama4ForConditionalGeneration"
_QWEN3_VL, _QWEN3_VL_MOE = "Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"
_QWEN3_VL_NEEDS = (  # the file of the MoE imports these parts from that of the dense one
    Need("three-axis rope positions (mrope)", _QWEN3_VL, ("mrope_position_ids",)),
    Need("deepstack levels", _QWEN3_VL, ("deepstack_visual_embeds",)),
)
NEEDS: dict[str, tuple[Need, ...]] = {
    _GEMMA3: (
        Need("norms behind attention and feed-forward", "Gemma3ForCausalLM", ("post_feedforward_layernorm",)),
        Need("attention in both directions within an image", _GEMMA3, ("prepare_attn_masks",)),
    ),
    _LLAMA4: (
        Need("layers without rope between", _LLAMA4, ("use_rope", "no_rope_layers")),
        Need("experts whose input is scaled by the router", _LLAMA4, ("input_weight", "router_scores")),
        Need("attention in chunks, for prompts longer than one chunk (8192)", _LLAMA4, ("attention_chunk_size",)),
    ),
    _QWEN3_VL: _QWEN3_VL_NEEDS,
    _QWEN3_VL_MOE: _QWEN3_VL_NEEDS,
    "DeepseekVLV2ForCausalLM": (),
}


def pytorch_findings(architecture: str) -> tuple[Finding, ...]:
    """What the installed PyTorch engine has for `architecture`.

    First whether it has a language model for it at all, then whether a class of ours can take its place; without
    LMDeploy all are ``unknown``.
    """
    folder = _lmdeploy_folder()
    model, needs = f"a language model for {architecture}", NEEDS.get(architecture, ())
    if folder is None:
        return tuple(Finding(what, "unknown") for what in (model, HOOK, *(need.what for need in needs)))
    modules = _module_map(folder)
    return (
        Finding(model, state_of(architecture in modules)),
        Finding(HOOK, state_of(_has_hook(folder))),
        *(
            Finding(need.what, state_of(_has_sign(folder, modules.get(need.architecture), need.signs)))
            for need in needs
        ),
    )


def pytorch_refusal(architecture: str) -> str | None:
    """Why the PyTorch engine cannot run an architecture with a compiled vision tower; None where it can."""
    missing = [finding.what for finding in pytorch_findings(architecture)[:2] if finding.state != "have"]
    if not missing:
        return None
    return f"the installed LMDeploy's PyTorch engine cannot run {architecture}: it lacks {'; '.join(missing)}."


@cache
def _lmdeploy_folder() -> Path | None:
    return lmdeploy_folder("pytorch/models/module_map.py")


@cache
def _module_map(folder: Path) -> dict[str, str]:
    """The entries of ``MODULE_MAP.update({...})``: architecture to the name of the file that has its class."""
    tree = ast.parse((folder / "pytorch" / "models" / "module_map.py").read_text(encoding="utf-8"))
    updates = (node for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_map_update(node.func))
    return dict(entry for update in updates for entry in _entries(update))


def _is_map_update(function: ast.expr) -> bool:
    return ast.unparse(function) == "MODULE_MAP.update"


def _entries(update: ast.Call) -> Iterator[tuple[str, str]]:
    for argument in update.args:
        if isinstance(argument, ast.Dict):
            for key, value in zip(argument.keys, argument.values, strict=True):
                if isinstance(key, ast.Constant):  # the value is f'{FOLDER}.file.Class'
                    yield str(key.value), ast.unparse(value).strip("'\"").split(".")[-2]


def _has_hook(folder: Path) -> bool:
    config, models = folder / "messages.py", folder / "pytorch" / "models" / "patch.py"
    return "custom_module_map:" in config.read_text(
        encoding="utf-8"
    ) and "def update_custom_module_map" in models.read_text(encoding="utf-8")


def _has_sign(folder: Path, module: str | None, signs: tuple[str, ...]) -> bool:
    file = folder / "pytorch" / "models" / f"{module}.py"
    return file.is_file() and any(sign in file.read_text(encoding="utf-8") for sign in signs)
