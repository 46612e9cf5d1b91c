"""LMDeploy's own models with a compiled tower, beside themselves with their own tower, on the same weights."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from pytorch_engine_steps import EngineSteps
from torch import Tensor
from turbomind_requests import Message, image, noise, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.benchmarks.reference import Reference, chat_from_lmdeploy
from turbovit.engines.encoder import open_encoder
from turbovit.engines.errors import BundleError, InputError
from turbovit.engines.families import FAMILIES, family_from_name, load
from turbovit.lmdeploy_ext.pytorch_engine.qwen3_vl import Qwen3VLTower

BOUND = 1e-5  # relative L2, float32
NAMES = ("gemma3", "llama4", "qwen3_vl", "qwen3_vl_moe")
VISION_HALVES = {
    "gemma3": {"vision_tower", "multi_modal_projector"},
    "llama4": {"vision_model", "multi_modal_projector"},
    "qwen3_vl": {"visual"},
    "qwen3_vl_moe": {"visual"},
}
A, B, C = noise(500, 300, 0), noise(90, 120, 1), noise(300, 290, 2)
QUESTION = text("what is it?")
CHATS: list[list[Message]] = [
    [user(image(A), QUESTION, image(B))],
    [user(QUESTION)],
    [user(text("look: "), image(C))],
]


@dataclass(frozen=True)
class Pair:
    """One checkpoint, its bundle, and what makes its requests; engines are made anew as they keep what they run."""

    name: str
    checkpoint: Path
    bundle: Path
    side: LMDeploySide

    def engine(self, compiled: bool = True, **options: Any) -> EngineSteps:
        return EngineSteps(self.checkpoint, self.bundle if compiled else None, **options)

    def reference(self) -> Reference:
        return load(family_from_name(self.name).reference)(self.checkpoint)

    def requests(self) -> list[dict[str, Any]]:
        return [self.side.request(chat) for chat in CHATS]


@pytest.fixture(scope="module", params=NAMES)
def pair(request: pytest.FixtureRequest) -> Pair:
    checkpoint = request.getfixturevalue(f"tiny_{request.param}")
    bundle = request.getfixturevalue(f"tiny_{request.param}_bundle").path
    return Pair(request.param, checkpoint, bundle, LMDeploySide(checkpoint, bundle, backend="pytorch"))


@pytest.fixture(scope="module")
def reference(pair: Pair) -> Reference:
    return pair.reference()


def parameters(engine: EngineSteps) -> dict[str, Tensor]:
    return dict(engine.model.named_parameters())


def relative(got: Tensor, expected: Tensor) -> float:
    assert got.shape == expected.shape
    return float((got - expected).norm() / expected.norm())


def test_every_architecture_of_the_table_has_a_model() -> None:
    from turbovit.lmdeploy_ext.pytorch_engine.models import COMPILED_HALVES

    assert COMPILED_HALVES.keys() >= {name for row in FAMILIES for name in row.architectures}


def test_the_vision_half_is_not_there_and_all_of_the_language_half_is_loaded(pair: Pair) -> None:
    own, compiled = pair.engine(compiled=False), pair.engine()
    before, after = parameters(own), parameters(compiled)
    gone = before.keys() - after.keys()
    assert after.keys() < before.keys()
    assert {name.split(".")[0] for name in gone} == VISION_HALVES[pair.name]
    assert compiled.not_loaded == own.not_loaded  # nothing, or what no checkpoint has
    for name, parameter in after.items():
        assert torch.equal(parameter, before[name]), name
    saved = sum(before[name].nbytes for name in gone)
    assert saved > 0
    assert sum(p.nbytes for p in before.values()) - sum(p.nbytes for p in after.values()) == saved


def test_vision_weights_that_come_all_the_same_are_passed_over(pair: Pair) -> None:
    engine = pair.engine()
    prefix = sorted(VISION_HALVES[pair.name])[0]
    engine.model.load_weights(iter([(f"{prefix}.something.weight", torch.ones(3))]))


def test_no_tensor_of_the_vision_half_is_ever_made(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even for a moment: the stock classes are not called."""
    from importlib import import_module

    from turbovit.lmdeploy_ext.pytorch_engine.models import model_class

    architecture = next(row.architectures[0] for row in FAMILIES if row.name == pair.name)
    half: Any = model_class(architecture)
    for path in (half.tower, *half.left_out):
        module, name = path.split(":")
        stock = getattr(import_module(f"lmdeploy.pytorch.models.{module}"), name)
        stock = getattr(stock, "__wrapped__", stock)  # Qwen3-VL's is decorated
        monkeypatch.setattr(stock, "__init__", lambda *_, **__: pytest.fail("it was built"))
    pair.engine()
    with pytest.raises(pytest.fail.Exception, match="it was built"):
        pair.engine(compiled=False)


def test_features_of_several_images_in_a_batch_are_the_references(pair: Pair, reference: Reference) -> None:
    """All of one prefill: what the language half gets at the images' places, and its deepstack levels."""
    engine = pair.engine()
    requests = pair.requests()
    for request in requests:
        engine.add(request)
    inputs = engine.prefill()
    assert inputs.input_ids[0].tolist() == [token for request in requests for token in request["input_ids"]]
    given = engine.language_inputs(inputs)
    token = requests[0]["multimodal"][0]["image_token_id"]
    place = inputs.input_ids[0] == token
    expected = [features(reference, chat_from_lmdeploy(chat)) for chat in (CHATS[0], CHATS[2])]
    rows = torch.cat([one for one, _ in expected])
    assert int(place.sum()) == len(rows)
    assert relative(given["inputs_embeds"][0][place], rows) <= BOUND
    own = engine.model.get_input_embeddings()(inputs.input_ids)
    assert torch.equal(given["inputs_embeds"][0][~place], own[0][~place])
    levels = given.get("deepstack_visual_embeds") or []
    for number, level in enumerate(levels):
        assert relative(level, torch.cat([deepstack[number] for _, deepstack in expected])) <= BOUND
    assert len(levels) == (3 if pair.name.startswith("qwen") else 0)


def test_model_inputs_are_lmdeploys_own_but_for_the_pixels(pair: Pair) -> None:
    """For the same ids, the stock model is given its own kind of pixels."""
    requests = pair.requests()
    made = {}
    for compiled in (False, True):
        engine = pair.engine(compiled=compiled)
        for request in requests:
            engine.add(request if compiled else with_float_pixels(request))
        made[compiled] = engine.model_inputs(engine.prefill())
    own, ours = made[False], made[True]
    assert own.keys() == ours.keys()
    differ = {"pixel_values", "vis_pos_emb", "pos_embeds", "attn_metadata"}
    for name in own.keys() - differ:
        if isinstance(own[name], Tensor):
            assert torch.equal(own[name], ours[name]), name
        else:
            assert own[name] == ours[name], name
    assert ours["pixel_values"].shape == own["pixel_values"].shape
    assert ours["pixel_values"].dtype == torch.uint8
    assert own["pixel_values"].dtype == torch.float32


def test_prefill_in_chunks_gives_each_image_once_in_its_chunk(pair: Pair) -> None:
    requests = [pair.side.request([user(image(B), text("one " * 40), image(C), text("two " * 60), image(B))])]
    whole, cut = pair.engine(), pair.engine(max_prefill=320)
    whole.add(requests[0])
    expected = whole.language_inputs(whole.prefill())
    cut.add(requests[0])
    parts, ids, images = [], [], 0
    for inputs in cut.chunks():
        ids += inputs.input_ids[0].tolist()
        given = cut.language_inputs(inputs)
        images += given.get("visual_pos_masks") is not None or inputs.vision_inputs is not None
        embeds = given.get("inputs_embeds")
        parts.append(cut.model.get_input_embeddings()(inputs.input_ids) if embeds is None else embeds)
    assert ids == requests[0]["input_ids"]
    assert len(parts) >= 2
    assert images >= 2
    assert torch.allclose(torch.cat(parts, dim=1), expected["inputs_embeds"], atol=1e-5)


def test_an_engine_that_does_not_fit_the_checkpoint_is_refused(pair: Pair, request: pytest.FixtureRequest) -> None:
    other = "gemma3" if pair.name != "gemma3" else "llama4"
    bundle = request.getfixturevalue(f"tiny_{other}_bundle").path
    with pytest.raises(BundleError, match="was built from"):
        EngineSteps(pair.checkpoint, bundle)


def test_pixels_of_lmdeploys_own_preprocessing_are_refused(pair: Pair) -> None:
    engine = pair.engine()
    with pytest.raises(InputError, match=r"got pixel_values of torch.float32, expected torch.uint8: call .*install"):
        engine.add(with_float_pixels(pair.requests()[0]))


def with_float_pixels(request: dict[str, Any]) -> dict[str, Any]:
    entries = [
        {**entry, **{name: (entry[name] / 255 - 0.5) / 0.5 for name in entry if name.startswith("pixel_values")}}
        for entry in request.get("multimodal", [])
    ]
    return {**request, "multimodal": entries} if entries else request


def features(reference: Any, chat: Any) -> tuple[Tensor, list[Tensor]]:
    """transformers' own features [tokens, hidden] of a chat's images, and its deepstack levels."""
    inputs = reference.inputs_from_messages(chat)
    with torch.inference_mode():
        pixels = inputs["pixel_values"].float()
        if "image_grid_thw" in inputs:
            output = reference.model.model.get_image_features(pixels, inputs["image_grid_thw"], return_dict=True)
            return torch.cat(output.pooler_output), [torch.cat(level) for level in output.deepstack_features]
        if hasattr(reference.model, "multi_modal_projector"):  # Llama 4
            output = reference.model.get_image_features(pixels, return_dict=True).last_hidden_state
            return reference.model.multi_modal_projector(output.flatten(0, 1)), []
        output = reference.model.model.get_image_features(pixels, return_dict=True)
        return output.pooler_output.flatten(0, 1), []


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_pixels_come_through_the_models_dtype_unchanged(dtype: torch.dtype, tiny_qwen3_vl_bundle: Any) -> None:
    """LMDeploy casts Qwen3-VL's patches before its tower; features come back in that dtype."""
    encoder = open_encoder(tiny_qwen3_vl_bundle, device="cpu")
    patches = torch.arange(24 * 1536).remainder(256).to(torch.uint8).view(24, 1536)
    grids = torch.tensor([[1, 4, 4], [2, 2, 2]])
    exact = Qwen3VLTower(encoder, torch.float32)(patches, torch.empty(0), None, grids)
    cast = Qwen3VLTower(encoder, dtype)(patches.to(dtype), torch.empty(0), None, grids)
    for expected, got in zip([exact[0], *exact[1]], [cast[0], *cast[1]], strict=True):
        assert got.shape == (6, encoder.manifest.facts["hidden"])
        assert torch.equal(got, expected.to(dtype))
