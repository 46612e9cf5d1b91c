"""Synthetic DeepSeek-VL2 checkpoints: taken by our tower, the reference and LMDeploy as released ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_vl2_goldens import CHECKPOINT
from safetensors.torch import load_file
from tower_checks import read, tower_from

from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference
from turbovit.engines.errors import UnsupportedModelError
from turbovit.export import sample_deepseek_vl2, samples
from turbovit.export.checkpoint import SINGLE
from turbovit.export.deepseek_vl2 import DeepseekVL2Tower
from turbovit.export.sample_deepseek_vl2 import write_sample

BOS, EOS, PAD = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜▁pad▁｜>"  # noqa: RUF001
FILES = {"config.json", "processor_config.json", "special_tokens_map.json", "tokenizer.json", "tokenizer_config.json"}


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, tuple[int, ...]]]:
    """Everything of the full size but the weights, and their shapes."""
    folder, shapes = tmp_path_factory.mktemp("full"), {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample_deepseek_vl2, "save_tensors", lambda _, given, make, **__: shapes.update(given))
        write_sample(folder, "full", 0)
    return folder, shapes


def test_the_files_are_those_of_a_release(tiny_deepseek_vl2: Path) -> None:
    assert {path.name for path in tiny_deepseek_vl2.iterdir()} == FILES | {SINGLE}


def test_the_seed_decides_the_weights_and_nothing_else(tiny_deepseek_vl2: Path, tmp_path: Path) -> None:
    for name, seed in (("same", 0), ("other", 1)):
        (tmp_path / name).mkdir()
        write_sample(tmp_path / name, "tiny", seed)
        assert all((tmp_path / name / file).read_bytes() == (tiny_deepseek_vl2 / file).read_bytes() for file in FILES)
    mine, same, other = (
        load_file(folder / SINGLE) for folder in (tiny_deepseek_vl2, *sorted(tmp_path.glob("*"))[::-1])
    )
    assert all(torch.equal(mine[name], same[name]) for name in mine)
    assert not any(torch.equal(mine[name], other[name]) for name in mine)


@pytest.mark.parametrize(("fixture", "mla"), [("tiny_deepseek_vl2", False), ("small_deepseek_vl2", True)])
def test_names_are_the_originals(fixture: str, mla: bool, request: pytest.FixtureRequest, data: Path) -> None:
    folder = request.getfixturevalue(fixture)
    golden = read(data / f"golden/deepseek_vl2/ckpt/deepseek-vl2-golden-{'mla' if mla else 'mha'}/weights_list.json")
    names = set(load_file(folder / SINGLE))
    layers = read(folder / "config.json")["vision_config"]["layers"]

    def known(name: str) -> bool:
        block = int(name.split(".")[2]) if name.startswith("vision.blocks.") else 0
        expert = int(name.split("experts.")[1].split(".")[0]) if ".experts." in name else 0
        return block < 2 and expert < 4

    assert {name for name in names if known(name)} == {name for name in golden if known(name)}
    assert len([name for name in names if name.startswith("vision.blocks.")]) == 12 * layers


def test_the_full_size_has_the_released_tensors(full: tuple[Path, dict[str, Any]], data: Path) -> None:
    folder, shapes = full
    released = data / "realdata/deepseek_vl2/deepseek-vl2"
    vision = {name: tuple(shape) for name, shape in read(released / "vision_tensors.shapes.json").items()}
    assert {name: shape for name, shape in shapes.items() if not name.startswith("language.")} == vision

    def known(name: str) -> bool:
        return name.startswith("language.") and not any(f".layers.{layer}." in name for layer in range(2, 30))

    index = {name for name in read(released / "model.safetensors.index.json")["weight_map"] if known(name)}
    experts = {name for name in index if any(f".experts.{expert}." in name for expert in range(4, 72))}
    assert {name for name in shapes if known(name)} == index - experts
    config, given = read(folder / "config.json"), read(released / "config.json")
    assert config["vision_config"] == given["vision_config"]
    assert config["projector_config"] == given["projector_config"]
    assert config["candidate_resolutions"] == given["candidate_resolutions"]
    assert read(folder / "processor_config.json") == read(released / "processor_config.json")
    for name in ("topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor"):
        assert config["language_config"][name] == given["language_config"][name]


def test_the_tiny_size_has_the_language_half_of_the_released_tiny(tiny_deepseek_vl2: Path, data: Path) -> None:
    text = read(tiny_deepseek_vl2 / "config.json")["language_config"]
    given = read(data / "realdata/deepseek_vl2/deepseek-vl2-tiny/config.json")["language_config"]
    assert text.keys() == given.keys()
    for name in ("use_mla", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "topk_method"):
        assert text[name] == given[name]


def test_settings_are_those_of_the_original_on_any_machine(tiny_deepseek_vl2: Path) -> None:
    config, golden = read(tiny_deepseek_vl2 / "config.json"), read(CHECKPOINT / "config.json")
    assert config.keys() == golden.keys() | {"transformers_version"}
    assert config["candidate_resolutions"] == golden["candidate_resolutions"]
    mine, theirs = (read(folder / "processor_config.json") for folder in (tiny_deepseek_vl2, CHECKPOINT))
    assert mine == theirs


def test_our_tower_takes_every_size(full: tuple[Path, dict[str, Any]], small_deepseek_vl2: Path) -> None:
    assert tower_from(DeepseekVL2Tower, small_deepseek_vl2).spec.hidden == 288
    config = read(full[0] / "config.json")
    spec = DeepseekVL2Tower.spec_from_config(config, DeepseekVL2Tower.image_processor(full[0]))
    assert (spec.hidden, spec.heads, spec.out) == (1152, 16, 2560)
    assert "heads" not in config["vision_config"]


def test_features_tell_images_and_places_apart(tiny_deepseek_vl2: Path) -> None:
    tower = tower_from(DeepseekVL2Tower, tiny_deepseek_vl2)
    generator = torch.Generator().manual_seed(0)
    view = torch.randint(0, 256, (1, 3, 384, 384), generator=generator).to(torch.uint8)
    features = tower.run({"pixels": torch.cat([view, view.flip(3), 255 - view])})["features"]
    assert features.std() > 0.3
    for other in features[1:]:
        assert (other - features[0]).norm() > 0.3 * features[0].norm()
    tower.position.data.zero_()
    assert (tower.run({"pixels": view})["features"] - features[:1]).norm() > 0.1 * features[0].norm()


def test_logits_depend_on_every_view_and_on_the_rows_between(tiny_deepseek_vl2: Path) -> None:
    reference = DeepseekVL2Reference(tiny_deepseek_vl2)
    generator = torch.Generator().manual_seed(0)
    inputs = dict(reference.inputs_from_prompt("a", []))
    image = torch.full((617,), reference.image_id)
    inputs["input_ids"] = torch.cat([torch.tensor([0]), image, inputs["input_ids"][0, 1:]])[None]
    inputs["images_seq_mask"] = inputs["input_ids"][0] == reference.image_id
    inputs["images_spatial_crop"] = torch.tensor([[2, 1]])
    inputs["pixels"] = torch.randint(0, 256, (3, 3, 384, 384), generator=generator).to(torch.uint8)
    logits = reference.logits(inputs)[-1]
    for view in range(3):
        pixels = inputs["pixels"].clone()
        pixels[view] = 127
        assert (reference.logits({**inputs, "pixels": pixels})[-1] - logits).abs().max() > 1e-3
    reference.newline = reference.newline + 1
    assert (reference.logits(inputs)[-1] - logits).abs().max() > 1e-3


def test_the_tokenizer_is_built_as_the_released_one(tiny_deepseek_vl2: Path, data: Path) -> None:
    mine, released = (
        read(folder / "tokenizer.json") for folder in (tiny_deepseek_vl2, data / "realdata/deepseek_vl2/deepseek-vl2")
    )
    patterns = [
        [split["pattern"]["Regex"] for split in one["pre_tokenizer"]["pretokenizers"] if "pattern" in split]
        for one in (mine, released)
    ]
    written = {"\r": r"\r", "\n": r"\n", '"': r"\""}  # the same, as an escape
    released_patterns = ["".join(written.get(letter, letter) for letter in pattern) for pattern in patterns[1]]
    assert patterns[0] == released_patterns
    assert [one["pre_tokenizer"]["pretokenizers"][-1]["type"] for one in (mine, released)] == ["ByteLevel"] * 2
    added = {token["content"]: token["id"] for token in mine["added_tokens"]}
    theirs = {token["content"]: token["id"] for token in released["added_tokens"]}
    assert {token: added[token] for token in (BOS, EOS, PAD)} == {BOS: 0, EOS: 1, PAD: 2}
    last = [token for token in theirs if theirs[token] >= 128815]
    assert [added[token] - added["<image>"] for token in last] == [theirs[token] - 128815 for token in last]


@pytest.mark.parametrize("text", ["", " a  b\n\n", "naïve 日本🙂\t", "<image>x", "12345 yes:no ..\n\n"])
def test_text_comes_back_as_it_went_in(text: str, tiny_deepseek_vl2: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny_deepseek_vl2)
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer(text)["input_ids"] == ids  # BOS is not the tokenizer's to add, in transformers 5


def test_experts_chosen_in_other_ways_are_beyond_the_reference(full: tuple[Path, dict[str, Any]]) -> None:
    from turbovit.benchmarks.reference_deepseek_vl2 import _language

    text = read(full[0] / "config.json")["language_config"]
    for other in ({"topk_method": "group_limited_greedy"}, {"scoring_func": "softmax"}):
        with pytest.raises(NotImplementedError, match=r"choose no experts so"):
            _language({**text, **other}, {})


@pytest.mark.parametrize("language", ["mha", "mla", "base"])
def test_a_language_half_for_turbomind_is_as_released_but_tiny(language: str, tmp_path: Path, data: Path) -> None:
    """Released configs leave entries to the code; ours name them, so only what a released one names is compared."""
    from turbovit.lmdeploy_ext.turbomind_models.limits import LATENT, ROPE, language_config

    write_sample(tmp_path, "tiny", 0, language=language)
    name = {"mha": "deepseek-vl2-tiny", "mla": "deepseek-vl2-small", "base": "deepseek-vl2"}[language]
    text, given = (language_config(read(folder / "config.json")) for folder in (tmp_path, released(data, name)))
    kinds = ("use_mla", "q_lora_rank", "topk_method", "scoring_func", "norm_topk_prob", "routed_scaling_factor")
    kinds += ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "n_group", "first_k_dense_replace")
    assert {kind: getattr(text, kind) for kind in kinds} == {kind: getattr(given, kind) for kind in kinds}
    assert not text.use_mla or (text.kv_lora_rank, text.qk_rope_head_dim, text.v_head_dim) == (LATENT, ROPE, 128)
    assert text.use_mla or text.hidden_size // text.num_attention_heads == 128
    tensors = load_file(tmp_path / SINGLE)
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert read(tmp_path / "config.json")["torch_dtype"] == "bfloat16"
    assert sum(tensor.nbytes for tensor in tensors.values()) < 16e6


def test_an_unknown_language_half_is_refused(tmp_path: Path) -> None:
    for family, message in (("deepseek_vl2", "available: mha, mla, base"), ("gemma3", "gemma3 has one language half")):
        with pytest.raises(UnsupportedModelError, match=message):
            samples.write_sample(family, tmp_path / "x", language="mqa")
    assert not (tmp_path / "x").exists()


def released(data: Path, name: str) -> Path:
    return data / "realdata/deepseek_vl2" / name
