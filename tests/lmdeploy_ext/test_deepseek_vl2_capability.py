"""LMDeploy loads DeepSeek-VL2's config as objects and our class for it; what TurboMind lacks is said and refused."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
from deepseek_vl2_goldens import CHECKPOINT, RELEASED

from turbovit.engines.bundle import Bundle
from turbovit.engines.errors import UnsupportedBackendError
from turbovit.engines.families import family_from_name
from turbovit.lmdeploy_ext import adapter, install, load_vision_model
from turbovit.lmdeploy_ext.capability import Finding, language_findings, turbomind_refusal
from turbovit.lmdeploy_ext.deepseek_vl2_config import DeepseekVL2LanguageConfig, DeepseekVLV2Config
from turbovit.lmdeploy_ext.turbomind_models import NEVER_RUN

ARCHITECTURE = "DeepseekVLV2ForCausalLM"


def config_of(folder: Path) -> Any:
    from lmdeploy.archs import get_model_arch

    install()
    return get_model_arch(str(folder))[1]


def test_a_config_is_of_objects_with_the_originals_defaults() -> None:
    config = config_of(CHECKPOINT)
    assert type(config) is DeepseekVLV2Config
    language, vision, projector = config.language_config, config.vision_config, config.projector_config
    assert config.architectures is None  # LMDeploy's PyTorch engine knows it by this
    assert (language.use_mla, language.kv_lora_rank, language.head_dim) == (False, None, 128)
    assert (language.scoring_func, language.moe_layer_freq) == ("softmax", 1)
    assert language.get("architectures") == ["DeepseekV2ForCausalLM"]
    assert language.get("nothing", 5) == 5
    assert (vision.heads, vision.width, vision.image_size) == (2, 144, 384)
    assert (projector.projector_type, projector.depth, projector.n_embed) == ("downsample_mlp_gelu", 2, 256)
    silent = DeepseekVL2LanguageConfig()
    assert (silent.num_hidden_layers, silent.num_attention_heads, silent.head_dim, silent.use_mla) == (30, 32, 64, True)


def test_a_config_survives_a_dict_and_another_process() -> None:
    config = config_of(CHECKPOINT)
    assert pickle.loads(pickle.dumps(config)).to_dict() == config.to_dict()
    again = DeepseekVLV2Config(**config.to_dict())
    assert again.to_dict() == config.to_dict()
    assert type(again.language_config) is DeepseekVL2LanguageConfig
    assert isinstance(DeepseekVLV2Config().language_config, DeepseekVL2LanguageConfig)


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_load(name: str, data: Path) -> None:
    config = config_of(data / "realdata/deepseek_vl2" / name)
    given = json.loads((data / "realdata/deepseek_vl2" / name / "config.json").read_text())
    loaded = config.language_config.to_dict()
    renamed = {"torch_dtype", "auto_map", "architectures"}
    assert {key: loaded[key] for key in given["language_config"] if key not in renamed} == {
        key: value for key, value in given["language_config"].items() if key not in renamed
    }
    assert config.vision_config.heads == 16


def test_lmdeploys_pytorch_engine_builds_its_config_of_the_one_without_mla() -> None:
    """That of MLA asks the driver, so it needs a GPU."""
    from lmdeploy.pytorch.configurations.deepseek_vl2 import DeepseekVLV2ModelConfigBuilder

    built = DeepseekVLV2ModelConfigBuilder.build(config_of(CHECKPOINT), str(CHECKPOINT))
    assert (built.hidden_size, built.num_layers, built.head_dim, built.num_key_value_heads) == (256, 2, 128, 2)


def test_the_class_stands_in_the_place_of_lmdeploys(tiny_deepseek_vl2: Path) -> None:
    from lmdeploy.archs import check_vl_llm
    from lmdeploy.vl.model.base import VISION_MODELS

    config = config_of(tiny_deepseek_vl2)
    ours = adapter.vision_model_class(family_from_name("deepseek_vl2"))
    # LMDeploy takes the first, and others behind it cannot take a config that names no architecture.
    assert next(module for module in VISION_MODELS.module_dict.values() if module.match(config)) is ours
    assert ours._turbomind_native_vision is False  # LMDeploy then turns prefix caching off
    assert check_vl_llm("turbomind", config.to_dict())


def test_the_folder_may_be_called_anything(
    tiny_deepseek_vl2: Path, tiny_deepseek_vl2_bundle: Bundle, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(tiny_deepseek_vl2, tmp_path / "x"))
    assert load_vision_model(folder, bundle=tiny_deepseek_vl2_bundle.path).compiled


def test_the_language_half_is_ours_and_nothing_is_missing() -> None:
    model, *others = language_findings(ARCHITECTURE)
    assert model == Finding(f"a language model for {ARCHITECTURE}", "have", f"turbovit's own: {NEVER_RUN}")
    assert {finding.state for finding in others} == {"have"}
    assert turbomind_refusal(ARCHITECTURE) is None


def test_a_pipeline_refuses_at_the_start_what_turbomind_has_no_kernels_for(tiny_deepseek_vl2: Path) -> None:
    import lmdeploy

    install()
    for config in (None, lmdeploy.TurbomindEngineConfig(tp=1)):
        with pytest.raises(UnsupportedBackendError, match=r"cannot run DeepseekVLV2.*heads of 32.*PytorchEngineConfig"):
            lmdeploy.pipeline(str(tiny_deepseek_vl2), backend_config=config)


def test_a_text_model_of_the_same_language_half_is_not_refused(tmp_path: Path) -> None:
    """LMDeploy calls both DeepseekV2ForCausalLM."""
    from lmdeploy.archs import autoget_backend

    install()
    text = {"architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2"}
    (tmp_path / "config.json").write_text(json.dumps(text))
    assert autoget_backend(str(tmp_path)) == "pytorch"
