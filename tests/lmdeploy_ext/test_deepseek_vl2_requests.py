"""Chats through LMDeploy's own ImageEncoder and MultimodalProcessor give the original's ids and logits."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from deepseek_vl2_goldens import CONVERSATIONS, chat, expected_ids
from PIL import Image
from turbomind_deepseek_vl2 import ASSISTANT, BOS, EOS, IMAGE, SMALL, SQUARE, TALL, TOKENS, USER, WIDE, Pair
from turbomind_requests import Message, assistant, image, noise, same, system, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.export.build import build

QUESTION = text("what is it?")
CHATS: dict[str, list[Message]] = {
    "image, then text": [user(image(SMALL), QUESTION)],
    "text, then image": [user(QUESTION, image(WIDE))],
    "image only": [user(image(TALL))],
    "two images side by side": [user(image(WIDE), image(SMALL), QUESTION)],
    "one image twice": [user(image(SQUARE), image(SQUARE))],
    "three images, none cut": [user(image(SMALL), text("\n"), image(WIDE), image(TALL), QUESTION)],
    "three images in three turns": [
        user(image(WIDE)),
        assistant("a dog"),
        user(image(TALL)),
        assistant("a cat"),
        user(image(SQUARE), QUESTION),
    ],
    "text, image, text, image": [user(text("this "), image(WIDE), text(" and that "), image(SMALL))],
    "images in two turns": [user(image(WIDE), QUESTION), assistant("no dog"), user(text("and here?"), image(TALL))],
    "image in the second turn only": [user(QUESTION), assistant([text("yes a dog")]), user(image(SMALL))],
    "text turn after an image": [user(image(SMALL)), assistant(" a dog\n"), {"role": "user", "content": " and? "}],
    "turn without parts": [user(image(SMALL)), assistant([]), user(QUESTION)],
    "two users in a row": [user(image(SMALL)), user(image(WIDE))],
    "an answer first": [assistant("yes"), user(image(SMALL))],
    "system message": [system(" Be brief.\n"), user(image(TALL), QUESTION)],
    "system message in a list": [system([text(" Be brief.\n")]), user(QUESTION, image(SMALL))],
    "answer to continue": [user(image(SMALL), QUESTION), assistant("no it is a")],
    "an empty answer, as the original has it": [user(image(SMALL), QUESTION), assistant("")],
    "texts around": [user(text("\n\n a "), text("  "), image(SMALL), text("\n"), image(WIDE), text(" 日本🙂\t"))],
    "strings of the conversation format": [user(text(f"{ASSISTANT}:{EOS}{USER}: {BOS}"), image(SMALL))],
    "text that looks like an image": [user(text("<|image|> <|image_pad|> <imag e>"), image(SMALL))],
    "a marker too few": [user(text("what is <IMAGE_TOKEN>?"), image(SMALL), image(WIDE))],
    "an image of which nothing is left": [user(image(noise(1, 900, 6)), QUESTION)],
    "a grey image": [user(image(noise(50, 40, 7, channels=1)), QUESTION)],
}
TEXTS: dict[str, list[Message]] = {
    "one message": [{"role": "user", "content": "what is it?"}],
    "several parts": [user(text("what "), text(" is it?"))],
    "no parts": [user()],
    "no content": [{"role": "user"}, assistant(None), user(QUESTION)],
    "several turns": [system("Be brief."), user(QUESTION), assistant("no dog"), user(text("a"), text("b"))],
    "an answer to continue": [user(QUESTION), assistant("yes it is")],
}


@pytest.mark.parametrize("name", CHATS)
def test_a_chat_gives_the_ids_and_logits_of_the_reference(name: str, deepseek_vl2: Pair) -> None:
    deepseek_vl2.assert_proved(CHATS[name])


@pytest.mark.parametrize("name", TEXTS)
def test_a_text_only_request_is_the_references_with_one_bos(name: str, deepseek_vl2: Pair) -> None:
    request = deepseek_vl2.assert_proved(TEXTS[name])
    assert request.keys() == {"prompt", "input_ids"}
    assert request["input_ids"][0] == 0
    assert request["input_ids"].count(0) == 1


@pytest.mark.parametrize("name", ["two images side by side", "three images in three turns", "system message"])
def test_logits_are_the_references_with_mla_too(name: str, deepseek_vl2_mla: Pair) -> None:
    deepseek_vl2_mla.assert_proved(CHATS[name])


def test_a_string_is_a_message(deepseek_vl2: Pair) -> None:
    assert deepseek_vl2.side.request("a ") == deepseek_vl2.side.request([user(text("a "))])


def test_the_prompt_is_the_originals_with_bos(deepseek_vl2: Pair) -> None:
    messages = [system(" Be brief. "), user(image(SMALL), text("\nwho? ")), assistant(" no "), user(text("and? "))]
    assert deepseek_vl2.side.request(messages)["prompt"] == (
        f"{BOS}Be brief.{USER}: {IMAGE}\nwho?\n\n{ASSISTANT}:no{EOS}{USER}: and?\n\n{ASSISTANT}:"
    )


def test_an_answer_is_tokenised_on_its_own(deepseek_vl2: Pair) -> None:
    """The colon before it would merge with it."""
    tokenizer = deepseek_vl2.side.tokenizer.model.model
    colon, answer = (tokenizer.encode(part, add_special_tokens=False) for part in (":", "no"))
    assert tokenizer.encode(":no", add_special_tokens=False) != [*colon, *answer]
    ids = deepseek_vl2.side.request([user(QUESTION), assistant("no"), user(QUESTION)])["input_ids"]
    place = ids.index(tokenizer.convert_tokens_to_ids(ASSISTANT))
    assert ids[place + 1 : place + 4] == [*colon, *answer, tokenizer.eos_token_id]


def test_each_image_is_one_range_and_two_may_touch(deepseek_vl2: Pair) -> None:
    request = deepseek_vl2.side.request([user(image(WIDE), image(TALL))])
    (begin, middle), (again, end) = request["input_embedding_ranges"]
    assert middle == again
    assert (middle - begin, end - middle) == (TOKENS["WIDE"], TOKENS["TALL"])
    assert len(set(request["input_ids"][begin:end])) == 1


def test_three_turns_with_an_image_of_1000x1000_each_are_six_tiles(
    deepseek_vl2: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The original cuts no image of a conversation that holds more than two."""
    runner = deepseek_vl2.side.encoder.model.encoder.runner
    sizes: list[int] = []
    run = runner.run
    monkeypatch.setattr(runner, "run", lambda inputs: (sizes.append(len(inputs["pixels"])), run(inputs))[1])
    turns: list[Message] = []
    for seed in range(3):
        turns += [user(image(noise(1000, 1000, seed)), QUESTION), assistant("a dog")]
    request = deepseek_vl2.side.request(turns[:-1])
    assert [len(tensor) for tensor in request["input_embeddings"]] == [421] * 3
    assert sum(sizes) == 6
    two = deepseek_vl2.side.request(turns[:3])
    assert [len(tensor) for tensor in two["input_embeddings"]] == [14 * 15 + 1 + 42 * 43] * 2


def test_what_was_said_before_changes_no_later_request(deepseek_vl2: Pair) -> None:
    first = deepseek_vl2.side.request(CHATS["image, then text"])
    deepseek_vl2.side.request(CHATS["three images, none cut"])
    assert same(deepseek_vl2.side.request(CHATS["image, then text"]), first)


def test_messages_stay_as_they_were(deepseek_vl2: Pair) -> None:
    messages = CHATS["three images in three turns"]
    before = copy.deepcopy(messages)
    deepseek_vl2.side.request(messages)
    assert messages == before


@pytest.fixture(scope="module")
def golden_side(data: Path, tmp_path_factory: pytest.TempPathFactory) -> LMDeploySide:
    checkpoint = data / "golden/deepseek_vl2/ckpt/deepseek-vl2-golden-mha"
    bundle = build(checkpoint, tmp_path_factory.mktemp("bundles") / "golden").bundle
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("lmdeploy.vl.engine.is_bf16_supported", lambda device: True)  # else it asks the driver
        return LMDeploySide(checkpoint, bundle.path)


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_golden_conversation_gives_the_originals_ids_and_features(
    name: str, golden_side: LMDeploySide, data: Path
) -> None:
    import numpy as np

    folder, golden = data / "golden/deepseek_vl2", CONVERSATIONS[name]
    pictures = {picture: Image.open(folder / f"images/{picture}.png") for picture in golden["images"]}
    messages = chat(golden, pictures)
    with np.load(folder / f"golden/{name}.npz") as stored:
        ids = stored["input_ids"].tolist()
        features = [torch.from_numpy(stored[f"feat_{number}"]) for number in range(len(pictures))]
    assert ids == expected_ids(golden)
    for said in (messages, messages[:-1]):  # the original ends with an empty answer, LMDeploy with the question
        request = golden_side.request(said)
        assert request["input_ids"] == ids
        assert request.get("input_embedding_ranges", []) == golden["image_ranges"]
        assert request["prompt"] == f"{BOS}{golden['sft_format']}"
    for found, expected in zip(request.get("input_embeddings", []), features, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_a_golden_conversation_gives_the_originals_ids_without_the_data(
    name: str, deepseek_vl2: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tokenizer and images of its sizes: ids depend on nothing else."""
    from deepseek_vl2_goldens import CHECKPOINT
    from lmdeploy.tokenizer import Tokenizer

    golden = CONVERSATIONS[name]
    sizes = dict(zip(golden["images"], golden["image_sizes"], strict=True))
    pictures = {picture: Image.new("RGB", tuple(size)) for picture, size in sizes.items()}
    monkeypatch.setattr(deepseek_vl2.side.processor, "tokenizer", Tokenizer(str(CHECKPOINT)))
    request = deepseek_vl2.side.request(chat(golden, pictures))
    assert request["input_ids"] == expected_ids(golden)
    assert request.get("input_embedding_ranges", []) == golden["image_ranges"]


def test_in_a_folder_called_deepseek_vl2_it_is_the_same(deepseek_vl2: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy.model import MODELS, BaseChatTemplate, get_chat_template

    assert type(deepseek_vl2.side.chat_template) is BaseChatTemplate
    assert type(get_chat_template("/nowhere/deepseek-vl2-tiny")) is MODELS.get("deepseek-vl2")
    for name in ("images in two turns", "system message"):
        expected = deepseek_vl2.side.request(CHATS[name])
        with monkeypatch.context() as patch:
            patch.setattr(deepseek_vl2.side.processor, "chat_template", MODELS.get("deepseek-vl2")(stop_words=["x"]))
            assert same(deepseek_vl2.side.request(CHATS[name]), expected)


def test_a_template_that_a_user_chose_is_left_to_it(deepseek_vl2: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmdeploy.model import MODELS, BaseChatTemplate

    messages: list[Any] = [system("Be brief."), user(text("a "), image(SMALL), text(" b")), assistant("c")]
    for template, prompt in (
        (MODELS.get("vicuna")(), f"Be brief. USER: a {IMAGE} b ASSISTANT: c"),
        (BaseChatTemplate(user="[u]", eoh="[/u]", assistant="[a]", eoa="[/a]"), f"Be brief.[u]a {IMAGE} b[/u][a]c"),
        (MODELS.get("deepseek-vl2")(user="U "), f"Be brief.U a {IMAGE} b\n\n{ASSISTANT}: c"),
    ):
        monkeypatch.setattr(deepseek_vl2.side.processor, "chat_template", template)
        by_hand = deepseek_vl2.side.request([user(text(prompt), image(SMALL))], do_preprocess=False)
        assert same(deepseek_vl2.side.request(messages), by_hand)
        assert by_hand["input_ids"].count(0) == 1
