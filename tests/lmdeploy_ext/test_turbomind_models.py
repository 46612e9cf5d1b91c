"""What our language half for TurboMind takes is found by looking, at LMDeploy's files and at its binary; anything
else is refused before an engine starts, in one line, by every way to start one."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from turbovit.engines.bundle import Bundle
from turbovit.engines.errors import UnsupportedBackendError
from turbovit.export.samples import write_sample
from turbovit.lmdeploy_ext import adapter, capability, engine_config, install, memory, model_doctor, plugin, serve
from turbovit.lmdeploy_ext.capability import language_findings, own_language_half, turbomind_lacks
from turbovit.lmdeploy_ext.doctor import diagnose
from turbovit.lmdeploy_ext.turbomind_models import NEVER_RUN
from turbovit.lmdeploy_ext.turbomind_models import adapter as turbomind_adapter
from turbovit.lmdeploy_ext.turbomind_models.kernels import Kernels, kernels
from turbovit.lmdeploy_ext.turbomind_models.limits import (
    config_problems,
    dtype_on,
    dtype_problem,
    folded_bytes,
    language_config,
    stored_dtype,
)
from turbovit.lmdeploy_ext.turbomind_models.parts import PARTS, part_problems

ARCHITECTURE = "DeepseekVLV2ForCausalLM"
MODEL = f"a language model for {ARCHITECTURE}"
HALF = "TurboMind language half"
# Of the wheel of lmdeploy 0.18.0, as `nm --demangle` lists its template instances.
ROUTERS = {(8, 2), (8, 8), (64, 4), (64, 8), (128, 8), (160, 8), (256, 8), (512, 10), (2560, 8)}
WHEEL = Kernels(
    routers=frozenset(ROUTERS),
    biased_routers=frozenset({(64, 4), (160, 8)}),
    sums=frozenset({1, 2, 4, 6, 8, 10}),
    head_sizes=frozenset({64, 128, 192, 256, 576}),
)


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint for each language half."""
    folder = tmp_path_factory.mktemp("samples")
    for language in ("mha", "mla", "base"):
        write_sample("deepseek_vl2", folder / language, language=language)
    return {path.name: path for path in folder.iterdir()}


def config_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text())


def changed(config: dict[str, Any], **text: Any) -> dict[str, Any]:
    return {**config, "language_config": {**config["language_config"], **text}}


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_kernels_are_those_of_the_wheel() -> None:
    folder = capability._turbomind_folder()
    assert folder is not None
    assert kernels(folder) == WHEEL


def test_the_kernels_of_another_binary_are_read_too(tmp_path: Path) -> None:
    assert kernels(tmp_path) is None
    names = [b"_ZN9turbomind23MoeGateNoAuxTCKernel_V2ILi72ELi6ELi9E", b"_ZN9turbomind15MoeReduceKernelILi8ELi6ELb1E"]
    (tmp_path / "_turbomind.cpython-311.so").write_bytes(b"\x7fELF\0" + b"\0".join(names) + b"\0")
    assert kernels(tmp_path) == Kernels(frozenset(), frozenset({(72, 6)}), frozenset({6}), frozenset())


@pytest.mark.parametrize("fits", [(64, 6), (64, 8), (72, 6), (160, 8), (512, 10), (8, 6), (4, 1)])
def test_a_softmax_chooses_within_the_smallest_instance_that_holds_its_experts(fits: tuple[int, int]) -> None:
    assert WHEEL.route_by_softmax(*fits)
    assert not WHEEL.route_by_softmax(fits[0], 11)
    assert not WHEEL.route_by_softmax(fits[0] - 1, fits[1])  # logits are read in fours
    assert not WHEEL.route_by_softmax(2564, fits[1])


def test_released_models_are_taken_but_for_the_largest(data: Path) -> None:
    found = {
        name: config_problems(config_of(data / "realdata/deepseek_vl2" / name), WHEEL)
        for name in ("deepseek-vl2-tiny", "deepseek-vl2-small", "deepseek-vl2")
    }
    assert found.pop("deepseek-vl2") == [
        "it chooses 6 of 72 experts with a correction bias; this TurboMind has kernels for 4 of 64 or 8 of 160"
    ]
    assert found == {"deepseek-vl2-tiny": [], "deepseek-vl2-small": []}


@pytest.mark.parametrize("language", ["mha", "mla", "base"])
def test_our_samples_are_taken(language: str, samples: dict[str, Path]) -> None:
    assert config_problems(config_of(samples[language]), WHEEL) == []


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("mla", {"kv_lora_rank": 256}, "a latent of 256 and a rope of 64; TurboMind's attention takes 512 and 64"),
    ("mla", {"kv_lora_rank": 448, "qk_rope_head_dim": 128}, "a latent of 448 and a rope of 128"),
    ("mla", {"q_lora_rank": 1536}, "its q_lora_rank is 1536, expected None"),
    ("mla", {"n_group": 8}, "its n_group is 8, expected None or 1"),
    ("mla", {"topk_method": "group_limited_greedy"}, "chosen by group_limited_greedy with softmax, expected greedy"),
    ("mla", {"scoring_func": "sigmoid"}, "chosen by greedy with sigmoid"),
    ("base", {"scoring_func": "tanh"}, "chosen by noaux_tc with tanh"),
    ("base", {"num_experts_per_tok": 6}, "chooses 6 of 64 experts with a correction bias; .* 4 of 64 or 8 of 160"),
    ("mha", {"moe_intermediate_size": 60}, "moe_intermediate_size is 60; .* multiples of 32"),
    ("mha", {"num_experts_per_tok": 9}, "chooses 9 of 16 experts; .* at most .*8 of 64"),
    ("mha", {"num_experts_per_tok": 5}, "chooses 5 of 16 experts; this TurboMind adds up 1, 2, 4, 6, 8, 10"),
    ("mha", {"n_routed_experts": 18}, "chooses 6 of 18 experts; .* whole fours"),
    ("mha", {"num_attention_heads": 8, "num_key_value_heads": 8}, "heads of 32; .* kernels for 64, 128, 192, 256, 576"),
    ("mha", {"hidden_act": "gelu"}, "its hidden_act is 'gelu', expected 'silu'"),
    ("mha", {"attention_bias": True}, "its attention_bias is True, expected False"),
    ("mha", {"moe_layer_freq": 2}, "its moe_layer_freq is 2, expected 1"),
    ("mha", {"tie_word_embeddings": True}, "its tie_word_embeddings is True"),
    ("mla", {"rope_scaling": {"type": "yarn", "factor": 40.0}}, "its rope is scaled .'yarn'."),
    ("mla", {"quantization_config": {"quant_method": "fp8"}}, "its weights are quantised"),
    ("mla", {"num_attention_heads": "two"}, "its language_config cannot be read: .*num_attention_heads"),
    ("mha", {"num_attention_heads": 0}, "its language_config cannot be read: .*zero"),
    ("mla", {"rope_scaling": {"type": "yarn"}}, "its language_config cannot be read: .*factor"),
]


@pytest.mark.parametrize(("language", "text", "message"), REFUSED)
def test_what_turbomind_cannot_run_is_one_line(
    language: str, text: dict[str, Any], message: str, samples: dict[str, Path]
) -> None:
    (problem,) = config_problems(changed(config_of(samples[language]), **text), WHEEL)
    assert "\n" not in problem
    assert re.search(message, problem)


def test_weights_quantised_at_the_top_of_the_config_are_seen_too(samples: dict[str, Path]) -> None:
    config = {**config_of(samples["mha"]), "quantization_config": {"quant_method": "awq"}}
    assert config_problems(config, WHEEL) == [
        "its weights are quantised; TurboMind's half takes 16-bit and 32-bit ones"
    ]


def test_a_quantisation_of_null_is_none(samples: dict[str, Path]) -> None:
    assert config_problems({**config_of(samples["mha"]), "quantization_config": None}, WHEEL) == []


def test_a_config_without_a_language_half_is_one_line() -> None:
    (problem,) = config_problems({"architectures": [ARCHITECTURE]}, WHEEL)
    assert problem.startswith("its language_config cannot be read: ")


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
def test_the_stored_dtype_has_two_names(name: str) -> None:
    assert stored_dtype({name: "float16"}) == "float16"
    assert stored_dtype({}) is None


def test_dtypes_follow_the_gpu() -> None:
    assert dtype_on((7, 5), "auto", "bfloat16") == dtype_on((7, 5), "bfloat16", None) == "float16"
    assert dtype_on((8, 0), "auto", "float32") == dtype_on((12, 0), "auto", None) == "bfloat16"
    assert dtype_on((9, 0), "auto", "float16") == dtype_on((9, 0), "float16", "bfloat16") == "float16"
    assert "9.0: use --dtype bfloat16" in str(dtype_problem("float16", (9, 0)))
    assert "capability 7.5: use --dtype float16" in str(dtype_problem("bfloat16", (7, 5)))
    for dtype, capability_ in (("float16", (7, 5)), ("float16", (8, 9)), ("bfloat16", (9, 0)), ("float16", (12, 0))):
        assert dtype_problem(dtype, capability_) is None


def test_folding_adds_what_the_folded_weights_have_more(data: Path, samples: dict[str, Path]) -> None:
    """2048 wide, 16 heads: queries of 576 in place of 192, outputs from 576 in place of 128, 512 to 256 a head less."""
    small = config_of(data / "realdata/deepseek_vl2/deepseek-vl2-small")
    assert folded_bytes(small) == 2 * 27 * (2048 * 16 * (576 - 192 + 576 - 128) - 16 * 512 * 256)
    assert folded_bytes(config_of(samples["mha"])) == 0


def test_the_installed_lmdeploy_has_the_parts() -> None:
    folder = capability._turbomind_folder()
    assert folder is not None
    assert part_problems(folder) == []


@pytest.mark.parametrize("path", PARTS)
def test_each_part_that_is_gone_or_takes_others_is_named_and_refused(path: str, turbomind_copy: Path) -> None:
    file, name = path.split(":")
    source, short = (turbomind_copy / file).read_text(), name.split(".")[-1]
    head = f"def {short}("
    for changed_, problem in (
        (source.replace(head, f"def another_{short}("), f"{path} is gone"),
        (source.replace(head, f"{head}another, "), f"{path} takes (another, "),
    ):
        (turbomind_copy / file).write_text(changed_)
        found = [line for line in part_problems(turbomind_copy) if line.startswith(path)]
        assert len(found) == 1
        assert found[0].startswith(problem)
        assert language_findings(ARCHITECTURE)[0].state == "missing"
        assert "turbovit's own does not fit this LMDeploy: " in str(turbomind_lacks(ARCHITECTURE))


def test_a_field_that_the_extension_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import lmdeploy.turbomind

    structs = {name: SimpleNamespace(**dict.fromkeys(fields)) for name, fields in turbomind_adapter._FIELDS.items()}
    monkeypatch.setattr(lmdeploy.turbomind, "_tm", SimpleNamespace(**structs))
    assert turbomind_adapter.field_problems() == []
    del structs["MoeConfig"].routed_scale
    assert turbomind_adapter.field_problems() == ["this TurboMind's MoeConfig has no routed_scale"]


def test_an_lmdeploy_that_learns_it_comes_first(turbomind_copy: Path) -> None:
    file = turbomind_copy / "supported_models.py"
    source, entry = file.read_text(), "SUPPORTED_ARCHS = dict("
    file.write_text(source.replace(entry, f"{entry}{ARCHITECTURE}='deepseek-vl2', "))
    assert own_language_half(ARCHITECTURE) is None
    assert language_findings(ARCHITECTURE)[0] == capability.Finding(MODEL, "have")
    file.write_text(source.replace(entry, f"{entry}DeepseekV2ForCausalLM='deepseek-v2', "))
    assert "LMDeploy has a DeepseekV2ForCausalLM of its own" in language_findings(ARCHITECTURE)[0].detail


def test_nothing_of_the_extension_is_imported_where_it_cannot_be() -> None:
    script = """
import lmdeploy.turbomind, sys
lmdeploy.turbomind._tm = None
from turbovit.lmdeploy_ext import install
install()
print([name for name in sys.modules if name.startswith("lmdeploy.turbomind.")])
"""
    child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    assert child.returncode == 0, child.stderr
    assert child.stdout.splitlines()[-1] == "[]"


def test_a_pipeline_says_that_turbomind_cannot_be_loaded(samples: dict[str, Path], monkeypatch: Any) -> None:
    import lmdeploy

    install()
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: "libcuda.so.1 is missing")
    with pytest.raises(
        UnsupportedBackendError, match=r"libcuda\.so\.1 is missing\. The other route is .*PytorchEngine"
    ):
        lmdeploy.pipeline(str(samples["mha"]))
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: None)
    assert plugin.turbomind_start_refusal(ARCHITECTURE, config_of(samples["mha"])) is None


def test_serve_takes_turbomind_where_it_can_and_the_other_engine_where_not(
    samples: dict[str, Path], tmp_path: Path
) -> None:
    lines: list[str] = []
    config = config_of(samples["mla"])
    assert serve._backend(ARCHITECTURE, config, None, True, lines.append) == "turbomind"
    refused = changed(config, n_group=8)
    assert serve._backend(ARCHITECTURE, refused, None, True, lines.append) == "pytorch"
    assert lines[0] == "backend: turbomind"
    assert "backend: pytorch (the installed LMDeploy's TurboMind cannot run" in lines[1]
    assert "its n_group is 8, expected None or 1" in lines[1]
    with pytest.raises(UnsupportedBackendError, match=r"its n_group is 8.*--backend pytorch") as error:
        serve.serve(str(write_config(tmp_path, refused)), [], backend="turbomind")
    assert error.value.exit_code == 2
    assert isinstance(error.value, ValueError)


@pytest.mark.parametrize(("capability_", "dtype", "refused"), [((9, 0), "float16", True), ((9, 0), "auto", False)])
def test_a_start_says_what_has_never_run_and_refuses_a_dtype(
    capability_: tuple[int, int], dtype: str, refused: bool, samples: dict[str, Path], monkeypatch: Any, caplog: Any
) -> None:
    from lmdeploy.messages import TurbomindEngineConfig

    monkeypatch.setattr(engine_config, "capabilities", lambda devices: {capability_})
    config = TurbomindEngineConfig(dtype=dtype)
    with caplog.at_level(logging.WARNING, "turbovit"):
        if refused:
            with pytest.raises(UnsupportedBackendError, match=r"no float16 kernels for experts.*--dtype bfloat16"):
                engine_config.prepared_engine_config(str(samples["mha"]), config)
            return
        assert engine_config.prepared_engine_config(str(samples["mha"]), config) is config
    (record,) = caplog.records
    assert NEVER_RUN in record.getMessage()
    assert "--backend pytorch" in record.getMessage()


def test_a_start_of_another_family_says_nothing(tiny_gemma3: Path, caplog: Any) -> None:
    from lmdeploy.messages import TurbomindEngineConfig

    with caplog.at_level(logging.WARNING, "turbovit"):
        engine_config.prepared_engine_config(str(tiny_gemma3), TurbomindEngineConfig())
    assert not caplog.records


def lines_of(model: Path) -> dict[tuple[str, str], Any]:
    return {(line.section, line.what): line for line in diagnose(str(model))}


def test_the_doctor_says_whose_half_it_is_and_what_is_needed_besides(
    samples: dict[str, Path], monkeypatch: Any
) -> None:
    monkeypatch.setattr(model_doctor, "gpus", list)
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: "libcuda.so.1 is missing")
    found = lines_of(samples["mla"])
    assert found[HALF, MODEL].detail == f"turbovit's own: {NEVER_RUN}"
    assert found[HALF, "what this model's config asks for"].state == "have"
    end = found[HALF, f"{ARCHITECTURE} end to end"]
    assert (end.state, end.detail) == ("missing", "it needs its CUDA extension and a CUDA device and a bundle besides")
    added = memory.text_from_bytes(folded_bytes(config_of(samples["mla"])))
    detail = found["memory", "the GPU's, for both halves"].detail
    assert f"as stored and {added} that TurboMind's form of its attention adds" in detail


def test_the_doctor_says_that_all_is_there_and_the_dtype(
    samples: dict[str, Path], tiny_deepseek_vl2_bundle: Bundle, monkeypatch: Any
) -> None:
    monkeypatch.setattr(model_doctor, "gpus", lambda: [memory.GpuMemory("a GPU", 1 << 40, 1 << 40)])
    monkeypatch.setattr(model_doctor, "capabilities", lambda: {(7, 5), (9, 0)})
    monkeypatch.setattr(adapter, "turbomind_problem", lambda: None)
    lines = model_doctor._turbomind(ARCHITECTURE, config_of(samples["mha"]), has_bundle=True)
    found = {line.what: line for line in lines}
    assert found["kernels for compute capability 7.5"].detail == "float16"
    assert found["kernels for compute capability 9.0"].detail == "bfloat16"
    end = found[f"{ARCHITECTURE} end to end"]
    assert (end.state, end.detail) == ("have", f"with turbovit's own language half, which {NEVER_RUN}")


def test_the_doctor_says_what_of_a_model_turbomind_cannot_run(samples: dict[str, Path], tmp_path: Path) -> None:
    config = changed(config_of(samples["base"]), n_routed_experts=72, num_experts_per_tok=6)
    found = {line.what: line for line in model_doctor._turbomind(ARCHITECTURE, config, has_bundle=True)}
    assert found["what this model's config asks for"].state == "missing"
    assert "chooses 6 of 72 experts" in found["what this model's config asks for"].detail
    assert found[f"{ARCHITECTURE} end to end"].state == "missing"
    assert model_doctor._folded_bytes(ARCHITECTURE, config) == 0


def test_defaults_come_from_the_originals_code(data: Path) -> None:
    text = language_config(config_of(data / "realdata/deepseek_vl2/deepseek-vl2"))
    assert (text.num_attention_heads, text.num_hidden_layers, text.kv_lora_rank, text.v_head_dim) == (32, 30, 512, 128)
