"""The table of language halves: one row each, and nothing imported before it is needed."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LanguageHalf:
    """One of our language halves for TurboMind.

    Attributes:
        key: what LMDeploy calls the architecture.
        model_type: of the configs that it is for, as others have the same key.
        name: in TurboMind's registry of source models.
        source_model: the class that goes in front of TurboMind's `TextModel`, as ``module:name``.
        limits: the module that says what it takes (`config_problems`, `dtype_on`, `dtype_problem`, `folded_bytes`).
    """

    key: str
    model_type: str
    name: str
    source_model: str
    limits: str


_PACKAGE = "turbovit.lmdeploy_ext.turbomind_models"
# By the architecture's name in the table of families.
LANGUAGE_HALVES = {
    "DeepseekVLV2ForCausalLM": LanguageHalf(
        key="DeepseekV2ForCausalLM",
        model_type="deepseek_vl_v2",
        name="turbovit-deepseek-vl2",
        source_model=f"{_PACKAGE}.deepseek_vl2:DeepseekVL2Language",
        limits=f"{_PACKAGE}.limits",
    )
}
