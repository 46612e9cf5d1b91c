"""What the installed LMDeploy can do with a family, found by looking at it and never by its version number."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from turbovit.engines.families import load
from turbovit.lmdeploy_ext.turbomind_models import NEVER_RUN
from turbovit.lmdeploy_ext.turbomind_models.kernels import kernels
from turbovit.lmdeploy_ext.turbomind_models.models import LANGUAGE_HALVES, LanguageHalf
from turbovit.lmdeploy_ext.turbomind_models.parts import part_problems

State = Literal["have", "missing", "unknown"]


@dataclass(frozen=True)
class Need:
    """Something that an architecture needs of TurboMind's language half.

    Attributes:
        what: in words.
        signs: names of which at least one would be there if it had this.
        where: ``source``: in its models and builders; ``request``: among the names that it reads of a request.
    """

    what: str
    signs: tuple[str, ...]
    where: Literal["source", "request"] = "source"


@dataclass(frozen=True)
class Finding:
    """A need, whether it is met, and what there is to say about that."""

    what: str
    state: State
    detail: str = ""


_QWEN3_VL = (
    Need("three-axis rope positions (mrope) from Python", ("mrope_position_ids",), "request"),
    Need("deepstack levels from Python", ("deepstack_embeds",), "request"),
)
NEEDS: dict[str, tuple[Need, ...]] = {
    "Gemma3ForConditionalGeneration": (
        Need("norms behind attention and feed-forward", ("post_feedforward_layernorm", "post_ffn_norm")),
        Need("attention in both directions within an image", ("bidirectional", "token_type_ids")),
        Need("a rope for each kind of layer", ("rope_local_base_freq", "local_rope")),
        Need("GeGLU", ("'gelu'", "geglu", "gelu_pytorch_tanh")),
    ),
    "Llama4ForConditionalGeneration": (
        Need("attention in chunks", ("attention_chunk_size",)),
        Need("layers without rope", ("no_rope_layers", "use_rope")),
        Need("experts whose input is scaled by the router", ("scale_input", "router_scale_input", "input_scale_moe")),
    ),
    "DeepseekVLV2ForCausalLM": (
        Need("attention over a compressed latent (MLA)", ("kv_lora_rank",)),
        Need("shared experts beside the routed ones", ("n_shared_experts",)),
    ),
    "Qwen3VLForConditionalGeneration": _QWEN3_VL,
    "Qwen3VLMoeForConditionalGeneration": _QWEN3_VL,
}


def language_findings(architecture: str, config: Mapping[str, Any] | None = None) -> tuple[Finding, ...]:
    """What the installed TurboMind has of the language half of `architecture`.

    The first finding is whether it has a language model for it at all, LMDeploy's own or ours; without LMDeploy all
    are ``unknown``.

    Args:
        config: a checkpoint's; given, what it asks for is looked at too, where the language model is ours.
    """
    folder = _turbomind_folder()
    embeddings = "features from Python at prompt positions"
    needs = NEEDS.get(architecture, ())
    if folder is None:
        model = f"a language model for {architecture}"
        return tuple(Finding(what, "unknown") for what in (model, embeddings, *(need.what for need in needs)))
    request = _request_names(folder)
    has_embeddings = {"input_embeddings", "input_embedding_ranges"} <= request
    places = {"source": _sources(folder), "request": request}
    return (
        _language_model(architecture, folder),
        Finding(embeddings, state_of(has_embeddings)),
        *(Finding(need.what, state_of(any(sign in places[need.where] for sign in need.signs))) for need in needs),
        *(_config_findings(architecture, config, folder) if config is not None else ()),
    )


def own_language_half(architecture: str) -> LanguageHalf | None:
    """Our language half that TurboMind runs for `architecture`; None where LMDeploy has one, or there is none."""
    folder = _turbomind_folder()
    has_own = folder is not None and architecture in _supported_architectures(folder)
    return None if has_own else LANGUAGE_HALVES.get(architecture)


def turbomind_refusal(architecture: str, config: Mapping[str, Any] | None = None) -> str | None:
    """Why TurboMind cannot run a model that turbovit serves, and what can; None where it can, or the architecture is
    none of ours."""
    lacks = turbomind_lacks(architecture, config)
    if lacks is None:
        return None
    return (
        f"{lacks}. What runs is the vision half, and requests for a TurboMind that has the rest (load_vision_model); "
        f"answers come from LMDeploy's PyTorch engine, with the same compiled vision tower: "
        f"pipeline(..., backend_config=PytorchEngineConfig()) or turbovit serve ... --backend pytorch"
    )


def turbomind_lacks(architecture: str, config: Mapping[str, Any] | None = None) -> str | None:
    """What of the language half the installed TurboMind lacks, in a sentence; None where nothing, or not ours."""
    if architecture not in NEEDS:
        return None
    missing = [finding for finding in language_findings(architecture, config) if finding.state != "have"]
    if not missing:
        return None
    named = (f"{finding.what} ({finding.detail})" if finding.detail else finding.what for finding in missing)
    return f"the installed LMDeploy's TurboMind cannot run {architecture}: it lacks {'; '.join(named)}"


def _language_model(architecture: str, folder: Path) -> Finding:
    what, half = f"a language model for {architecture}", own_language_half(architecture)
    supported = _supported_architectures(folder)
    if half is None:
        return Finding(what, state_of(architecture in supported))
    problems = part_problems(folder)
    if half.key in supported:
        problems = [f"LMDeploy has a {half.key} of its own"]
    if problems:
        return Finding(what, "missing", f"turbovit's own does not fit this LMDeploy: {'; '.join(problems)}")
    return Finding(what, "have", f"turbovit's own: {NEVER_RUN}")


def _config_findings(architecture: str, config: Mapping[str, Any], folder: Path) -> tuple[Finding, ...]:
    half = own_language_half(architecture)
    if half is None:
        return ()
    problems = load(f"{half.limits}:config_problems")(config, kernels(folder))
    return (Finding("what this model's config asks for", state_of(not problems), "; ".join(problems)),)


def state_of(there: bool) -> State:
    """What a look at the installed LMDeploy says."""
    return "have" if there else "missing"


def lmdeploy_folder(file: str) -> Path | None:
    """Where the installed LMDeploy lies, if it has `file`; found without importing it, which would load CUDA code."""
    spec = importlib.util.find_spec("lmdeploy")
    if spec is None or not spec.submodule_search_locations:
        return None
    folder = Path(spec.submodule_search_locations[0])
    return folder if (folder / file).is_file() else None


@cache
def _turbomind_folder() -> Path | None:
    folder = lmdeploy_folder("turbomind/supported_models.py")
    return folder and folder / "turbomind"


def _supported_architectures(folder: Path) -> set[str]:
    """The keywords of ``SUPPORTED_ARCHS = dict(...)``."""
    for node in ast.walk(ast.parse((folder / "supported_models.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and any(
            getattr(target, "id", "") == "SUPPORTED_ARCHS" for target in node.targets
        ):
            if isinstance(node.value, ast.Call):
                return {keyword.arg for keyword in node.value.keywords if keyword.arg}
            if isinstance(node.value, ast.Dict):
                return {str(key.value) for key in node.value.keys if isinstance(key, ast.Constant)}
    return set()


def _request_names(folder: Path) -> set[str]:
    """What ``TurboMindInstance.prepare_inputs`` reads: its parameters, and the keys of what they hold."""
    for node in ast.walk(ast.parse((folder / "turbomind.py").read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef) and node.name == "prepare_inputs":
            inside = list(ast.walk(node))
            keys = {str(part.value) for part in inside if isinstance(part, ast.Constant)}
            return keys | {part.arg for part in inside if isinstance(part, ast.arg)}
    return set()


@cache
def _sources(folder: Path) -> str:
    files = sorted(path for sub in ("models", "builders") for path in (folder / sub).glob("*.py"))
    return "\n".join(path.read_text(encoding="utf-8") for path in files)
