"""Chats that every tokenizer and chat template of Gemma 3 must take as the reference does."""

from __future__ import annotations

from typing import Any

from turbomind_requests import Message, assistant, image, noise, system, text, user

A, B, C = noise(300, 200, 0), noise(123, 457, 1), noise(64, 64, 2)
QUESTION = text("what is it?")

CHATS: dict[str, list[Message]] = {
    "image, then text": [user(image(A), QUESTION)],
    "text, then image": [user(QUESTION, image(A))],
    "two images": [user(image(A), image(B), QUESTION)],
    "three images between texts": [user(image(A), text("and"), image(B), text("or"), image(C))],
    "text, image, text, image": [user(text("this "), image(A), text(" and that "), image(B))],
    "one image twice": [user(image(A), image(A), QUESTION)],
    "image only": [user(image(A))],
    "several texts in a row": [user(text("one"), text("two "), image(A), text(" three"), text("four"))],
    "images in two turns": [user(image(A), QUESTION), assistant("a dog"), user(text("and here?"), image(B))],
    "image in the second turn only": [user(QUESTION), assistant([text("a dog")]), user(image(B))],
    "turn as a string": [user(image(A)), assistant("a dog"), {"role": "user", "content": " and? "}],
    "turn without parts": [user(image(A)), assistant([]), user(QUESTION)],
    "system message": [system(" Be brief.\n"), user(image(A), QUESTION)],
    "system message in a list": [system([text(" Be brief.\n")]), user(QUESTION, image(A))],
    "system message, two turns": [system("Be brief."), user(image(A)), assistant("a dog"), user(image(B))],
    "answer to continue": [user(image(A), QUESTION), assistant("it is a ")],
    "answer to continue, in parts": [user(image(A), QUESTION), assistant([text("it is"), text("a dog \n")])],
    "answer of a tool": [user(QUESTION), {"role": "tool", "content": [text("seen:"), image(A)]}, user(QUESTION)],
    "answer that calls a tool": [user(image(A)), {"role": "assistant", "content": None}, user(QUESTION)],
    "text begins with newlines": [user(image(A), text("\n\n\nthe dog"))],
    "text ends with newlines": [user(text("the dog\n\n"), image(A))],
    "newlines between images": [user(image(A), text("\n"), image(B), text(" \n "))],
    "spaces around texts": [user(text("  the dog   "), image(A), text("   the  cat  "))],
    "text without letters": [user(text("🙂 é 日本\t"), image(A), text("<"))],
    "strings of the chat template": [user(text("<end_of_turn>\n<start_of_turn>model\n<bos>"), image(A))],
    "text that looks like an image": [user(text("<image> <|image_pad|> <start_of_imag"), image(A))],
    "image 1 high": [user(image(noise(500, 1, 3)), QUESTION)],
    "image 1 wide": [user(image(noise(1, 333, 4)), QUESTION)],
    "image of one pixel": [user(image(noise(1, 1, 5)), QUESTION)],
    "image of odd size": [user(image(noise(897, 895, 6)), QUESTION)],
    "grey image": [user(image(noise(50, 40, 7, channels=1)), QUESTION)],
}
TEXTS: dict[str, Any] = {
    "a string": " what is\nit? ",
    "an empty string": "",
    "a string with BOS": "<bos>what is it?",
    "one message": [{"role": "user", "content": "what is it?"}],
    "one part": [user(QUESTION)],
    "several parts": [user(text("what "), text(" is it?"))],
    "no parts": [user()],
    "no content": [{"role": "user"}, assistant(None), user(QUESTION)],
    "several turns": [system("Be brief."), user(QUESTION), assistant("a dog"), user(text("a"), text("b"))],
    "an answer to continue": [user(QUESTION), assistant("it is")],
}
