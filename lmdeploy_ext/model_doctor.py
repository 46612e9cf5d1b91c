"""What this machine and its LMDeploy have of what a model needs: its vision half, its language half, memory."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from turbovit.engines.bundle import Bundle, Engine, open_bundle
from turbovit.engines.commands import build_command, serve_command
from turbovit.engines.errors import TurbovitError
from turbovit.engines.families import FamilyRow, family_from_architecture, load
from turbovit.lmdeploy_ext.bundle_choice import BUNDLE_VARIABLE
from turbovit.lmdeploy_ext.capability import State, language_findings, own_language_half, turbomind_lacks
from turbovit.lmdeploy_ext.chat_template import NO_TEMPLATE
from turbovit.lmdeploy_ext.diagnosis import Diagnosis
from turbovit.lmdeploy_ext.memory import (
    WeightBytes,
    capabilities,
    engine_bytes,
    gpus,
    host_memory,
    text_from_bytes,
    weight_bytes,
)
from turbovit.lmdeploy_ext.pytorch_capability import pytorch_findings, pytorch_refusal
from turbovit.lmdeploy_ext.turbomind_models import NEVER_RUN
from turbovit.lmdeploy_ext.turbomind_models.models import LanguageHalf

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model")
_KV_CACHE_ROOM = 0.9  # of the free memory; what LMDeploy leaves of it becomes KV cache


def diagnose_model(model: str) -> Iterator[Diagnosis]:
    """Look at a checkpoint folder or hub id.

    Raises:
        CheckpointError: there is no such checkpoint.
        UnsupportedModelError: no family serves its architecture.
    """
    from turbovit.export.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(model)
    architecture = str(checkpoint.architecture)
    family = family_from_architecture(architecture)
    yield Diagnosis("model", architecture, "have", f"family {family.name}")
    yield from _chat_template(family, checkpoint.folder)
    bundles: list[Bundle] = []
    yield from _vision_half(model, bundles)
    yield from _turbomind(architecture, checkpoint.config, bool(bundles))
    yield from _pytorch(model, architecture, bool(bundles))
    weights = weight_bytes(checkpoint.folder, load(family.tower).is_checkpoint_vision)
    yield from _memory(model, weights, bundles, _folded_bytes(architecture, checkpoint.config))


def _chat_template(family: FamilyRow, folder: Path) -> Iterator[Diagnosis]:
    what = "chat template"
    if load(family.vision_model).has_own_format:
        yield Diagnosis("model", what, "have", "the conversation format of its original code, where it has no other")
    elif not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        yield Diagnosis("model", what, "unknown", "the files of its tokenizer are not here")
    elif _has_lmdeploy():
        from turbovit.lmdeploy_ext import adapter

        if adapter.has_chat_template(str(folder)):
            yield Diagnosis("model", what, "have")
        else:
            yield Diagnosis("model", what, "missing", NO_TEMPLATE)


def _vision_half(model: str, bundles: list[Bundle]) -> Iterator[Diagnosis]:
    """Fills `bundles` with those that fit, the one that would be served first."""
    section = "vision half"
    try:
        folders = _folders(model)
    except TurbovitError as error:
        yield Diagnosis(section, "vision weights", "missing", str(error))
        return
    yield Diagnosis(section, "vision weights", "have")
    for folder in folders:
        try:
            bundles.append(open_bundle(folder))
        except TurbovitError as error:
            yield Diagnosis(section, f"bundle {folder.name}", "missing", str(error))
    if not bundles:
        yield Diagnosis(section, "bundle in the store", "missing", "no bundle fits its weights", build_command(model))
    for bundle in bundles:
        yield Diagnosis(section, "bundle in the store", "have", str(bundle.path))
        for engine in bundle.manifest.engines:
            state, detail = _engine_here(engine)
            name = f"engine {engine.runtime} {engine.precision}"
            yield Diagnosis(section, name, state, f"{engine.verdict}; {detail}")


def _folders(model: str) -> list[Path]:
    from turbovit.export.plan import find_bundles, require_fit

    named = os.environ.get(BUNDLE_VARIABLE)
    if named is None:
        return find_bundles(model)
    require_fit(model, named)
    return [Path(named)]


def _engine_here(engine: Engine) -> tuple[State, str]:
    """Whether an engine can run on this machine, and where or why not."""
    import torch

    from turbovit.engines.encoder import RUNNERS

    if engine.verdict == "failed":
        return "missing", "its outputs are not the reference's: build it again"
    if engine.runtime not in RUNNERS:
        return "missing", f"this turbovit has no {engine.runtime}"
    reasons = []
    for device in ("cuda", "cpu"):
        runner, place = load(RUNNERS[engine.runtime]), torch.device(device)
        reason = runner.unavailable(place) or runner.misfit(engine, place)
        if reason is None:
            return "have", f"runs on {device} here"
        reasons.append(f"not on {device}: {reason}")
    return "missing", "; ".join(reasons)


def _turbomind(architecture: str, config: Mapping[str, Any], has_bundle: bool) -> Iterator[Diagnosis]:
    section = "TurboMind language half"
    for finding in language_findings(architecture, config):
        yield Diagnosis(section, finding.what, finding.state, finding.detail)
    if not _has_lmdeploy():
        return
    from turbovit.lmdeploy_ext import adapter

    problem = adapter.turbomind_problem()
    yield Diagnosis(section, "TurboMind's CUDA extension", "missing" if problem else "have", problem or "")
    lacks = turbomind_lacks(architecture, config)
    half = own_language_half(architecture)
    if lacks:
        detail = f"{lacks}; its requests are built and checked, its answers are not to be had"
        yield Diagnosis(section, f"{architecture} end to end", "missing", detail)
    elif half is not None:
        yield from _dtypes(half, load(f"{half.limits}:stored_dtype")(config))
        there = {"its CUDA extension": not problem, "a CUDA device": bool(gpus()), "a bundle": has_bundle}
        needed = " and ".join(what for what, is_there in there.items() if not is_there)
        detail = f"it needs {needed} besides" if needed else f"with turbovit's own language half, which {NEVER_RUN}"
        yield Diagnosis(section, f"{architecture} end to end", "missing" if needed else "have", detail)


def _dtypes(half: LanguageHalf, stored: str | None) -> Iterator[Diagnosis]:
    """What TurboMind would compute in on each kind of GPU here."""
    for capability in sorted(capabilities()):
        dtype = load(f"{half.limits}:dtype_on")(capability, "auto", stored)
        problem = load(f"{half.limits}:dtype_problem")(dtype, capability)
        what = f"kernels for compute capability {capability[0]}.{capability[1]}"
        yield Diagnosis("TurboMind language half", what, "missing" if problem else "have", problem or dtype)


def _folded_bytes(architecture: str, config: Mapping[str, Any]) -> int:
    """What TurboMind's form of the language half takes beyond what is stored; 0 where TurboMind does not run it."""
    half = own_language_half(architecture)
    if half is None or turbomind_lacks(architecture, config):
        return 0
    return int(load(f"{half.limits}:folded_bytes")(config))


def _pytorch(model: str, architecture: str, has_bundle: bool) -> Iterator[Diagnosis]:
    section = "PyTorch language half"
    yield from (Diagnosis(section, finding.what, finding.state) for finding in pytorch_findings(architecture))
    here = gpus()
    names = ", ".join(gpu.name for gpu in here) or "torch sees none; LMDeploy's PyTorch engine needs one"
    yield Diagnosis(section, "CUDA device", "have" if here else "missing", names)
    if not _has_lmdeploy():
        return
    there = {"a CUDA device": bool(here), "a bundle": has_bundle}
    lacks = " and ".join(what for what, is_there in there.items() if not is_there)
    problem = pytorch_refusal(architecture) or (f"it needs {lacks} besides" if lacks else None)
    if problem:
        yield Diagnosis(section, f"{architecture} end to end", "missing", problem)
    else:
        detail = "with the compiled vision tower, which has never run on a GPU"
        yield Diagnosis(section, f"{architecture} end to end", "have", detail)


def _has_lmdeploy() -> bool:
    return importlib.util.find_spec("lmdeploy") is not None


def _memory(model: str, weights: WeightBytes | None, bundles: list[Bundle], folded: int = 0) -> Iterator[Diagnosis]:
    engines = [engine_bytes(bundle, engine) for bundle in bundles[:1] for engine in bundle.manifest.engines]
    vision = max(engines, default=weights.vision if weights else 0)
    available, total = host_memory()
    free = f"{text_from_bytes(available)} of {text_from_bytes(total)} are free"
    state: State = "unknown" if not vision else "have" if vision < available else "missing"
    detail = f"needs {text_from_bytes(vision)} for the engine's weights, and what a run takes; {free}"
    yield Diagnosis("memory", "this machine's, for the vision half on a CPU", state, detail)
    what = "the GPU's, for both halves"
    if weights is None:
        yield Diagnosis("memory", what, "unknown", "the weights of the language half are not here")
        return
    language = weights.language + folded
    stored = f"language half {text_from_bytes(weights.language)} as stored"
    added = f" and {text_from_bytes(folded)} that TurboMind's form of its attention adds" if folded else ""
    parts = f"{stored}{added}, vision engine {text_from_bytes(vision)}"
    needs = f"needs {text_from_bytes(language + vision)} ({parts}), and room for the KV cache"
    here = gpus()
    if not here:
        yield Diagnosis("memory", what, "missing", f"{needs}; there is no GPU here")
        return
    there = ", ".join(f"{text_from_bytes(gpu.free)} of {text_from_bytes(gpu.total)} free on {gpu.name}" for gpu in here)
    spread = _tensor_parallel(language, vision, [gpu.free for gpu in here])
    command = serve_command(model, spread) if spread and bundles else ""
    yield Diagnosis("memory", what, "have" if spread else "missing", f"{needs}; {there}", command)


def _tensor_parallel(language: int, vision: int, free: list[int]) -> int | None:
    """Over how many GPUs the language half has to be spread, each with a vision engine; None where too few."""
    for count in (2**power for power in range(len(free).bit_length())):
        if count <= len(free) and language / count + vision < _KV_CACHE_ROOM * min(free[:count]):
            return count
    return None
