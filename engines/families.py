"""The table of families: one row each, and nothing imported before it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from turbovit.engines.errors import UnsupportedModelError


@dataclass(frozen=True)
class FamilyRow:
    """Where the parts of one family live, each as ``module:name``.

    Attributes:
        name: what the command line and the manifest call the family.
        architectures: the Hugging Face ``architectures`` entries it serves.
        tower: the `turbovit.export.tower.Tower` subclass.
        preprocessor: the `turbovit.engines.preprocessor.Preprocessor` subclass.
        vision_model: the class that takes the place of LMDeploy's own, and `registry_name` the name it is
            registered under there.
        sample: the function that writes a synthetic checkpoint.
        reference: the `turbovit.benchmarks.reference.Reference` subclass.
    """

    name: str
    architectures: tuple[str, ...]
    tower: str
    preprocessor: str
    vision_model: str
    registry_name: str
    sample: str
    reference: str


# Dense and MoE differ in the language half alone; LMDeploy has one class for both.
_QWEN3_VL = {
    "tower": "turbovit.export.qwen3_vl:Qwen3VLTower",
    "preprocessor": "turbovit.engines.qwen3_vl:Qwen3VLPreprocessor",
    "vision_model": "turbovit.lmdeploy_ext.qwen3_vl:CompiledQwen3VL",
    "registry_name": "Qwen3VLModel",
    "reference": "turbovit.benchmarks.reference_qwen3_vl:Qwen3VLReference",
}

FAMILIES = (
    FamilyRow(
        name="gemma3",
        architectures=("Gemma3ForConditionalGeneration",),
        tower="turbovit.export.gemma3:Gemma3Tower",
        preprocessor="turbovit.engines.gemma3:Gemma3Preprocessor",
        vision_model="turbovit.lmdeploy_ext.gemma3:CompiledGemma3",
        registry_name="Gemma3VisionModel",
        sample="turbovit.export.sample_gemma3:write_sample",
        reference="turbovit.benchmarks.reference_gemma3:Gemma3Reference",
    ),
    FamilyRow(
        name="llama4",
        architectures=("Llama4ForConditionalGeneration",),
        tower="turbovit.export.llama4:Llama4Tower",
        preprocessor="turbovit.engines.llama4:Llama4Preprocessor",
        vision_model="turbovit.lmdeploy_ext.llama4:CompiledLlama4",
        registry_name="LLama4VisionModel",
        sample="turbovit.export.sample_llama4:write_sample",
        reference="turbovit.benchmarks.reference_llama4:Llama4Reference",
    ),
    FamilyRow(
        name="qwen3_vl",
        architectures=("Qwen3VLForConditionalGeneration",),
        sample="turbovit.export.sample_qwen3_vl:write_sample",
        **_QWEN3_VL,
    ),
    FamilyRow(
        name="qwen3_vl_moe",
        architectures=("Qwen3VLMoeForConditionalGeneration",),
        sample="turbovit.export.sample_qwen3_vl:write_moe_sample",
        **_QWEN3_VL,
    ),
    FamilyRow(
        name="deepseek_vl2",
        architectures=("DeepseekVLV2ForCausalLM",),
        tower="turbovit.export.deepseek_vl2:DeepseekVL2Tower",
        preprocessor="turbovit.engines.deepseek_vl2:DeepseekVL2Preprocessor",
        vision_model="turbovit.lmdeploy_ext.deepseek_vl2:CompiledDeepseekVL2",
        registry_name="DeepSeek2VisionModel",
        sample="turbovit.export.sample_deepseek_vl2:write_sample",
        reference="turbovit.benchmarks.reference_deepseek_vl2:DeepseekVL2Reference",
    ),
)


# Architectures that a config names by their language half alone.
_LANGUAGE_HALVES = {"DeepseekV2ForCausalLM": "DeepseekVLV2ForCausalLM"}


def distinct_families() -> list[FamilyRow]:
    """The rows whose towers differ: the first of each (a mixture of experts has the tower of its dense twin)."""
    return list({row.tower: row for row in reversed(FAMILIES)}.values())[::-1]


def family_from_name(name: str) -> FamilyRow:
    """The row called `name`; an `UnsupportedModelError` that lists the names otherwise."""
    for row in FAMILIES:
        if row.name == name:
            return row
    raise UnsupportedModelError(f"unknown family {name!r}; available: {', '.join(row.name for row in FAMILIES)}")


def architecture_from_config(config: Mapping[str, Any]) -> str | None:
    """The name of the architecture that a config.json is of; None where it names none.

    It is the first of its ``architectures``. DeepSeek-VL2's released configs have none: there the language half's
    decides, as in LMDeploy.
    """
    named = _first(config.get("architectures"))
    language = config.get("language_config")
    if named is None and isinstance(language, Mapping) and "vision_config" in config:
        return _LANGUAGE_HALVES.get(_first(language.get("architectures")) or "")
    return named


def family_from_architecture(architecture: str | None) -> FamilyRow:
    """The row that serves `architecture`; an `UnsupportedModelError` that lists them otherwise."""
    for row in FAMILIES:
        if architecture in row.architectures:
            return row
    supported = ", ".join(name for row in FAMILIES for name in row.architectures)
    raise UnsupportedModelError(f"architecture {architecture!r} is not supported; supported: {supported}")


def _first(names: Any) -> str | None:
    """The first of a list of names; None where it is none."""
    return names[0] if isinstance(names, list) and names and isinstance(names[0], str) else None


def load(path: str) -> Any:
    """The object that ``module:name`` names."""
    module, name = path.split(":")
    return getattr(import_module(module), name)
