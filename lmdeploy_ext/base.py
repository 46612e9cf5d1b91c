"""What the compiled vision models share: LMDeploy's steps for backend turbomind, over an `Encoder`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from turbovit.engines.encoder import Encoder, open_encoder
from turbovit.engines.errors import InputError
from turbovit.engines.preprocessor import Encoded, Pixels
from turbovit.lmdeploy_ext import adapter
from turbovit.lmdeploy_ext.conversation import (
    Conversation,
    MediaPart,
    conversation_from_messages,
    raw_prompt,
    refuse_reserved,
    with_markers_applied,
)
from turbovit.lmdeploy_ext.prompt import refuse_unknown_ids, template_messages

logger = logging.getLogger("turbovit")

AUTO_BUILD_VARIABLE = "TURBOVIT_AUTO_BUILD"
BUNDLE_VARIABLE = "TURBOVIT_BUNDLE"


class CompiledVisionModel:
    """The compiled half of a vision model; `adapter.vision_model_class` puts it in front of LMDeploy's own class.

    On backend pytorch, and when LMDeploy loads the whole model (``with_llm``), everything is LMDeploy's own.

    Attributes:
        reserved: strings that mark an image's place in the family's prompts; refused in texts.
        placeholders: what stands for a whole image (or video) before it is expanded, by kind; the kinds are those that
            the family takes.
        joins_system_texts: whether the family's chat templates read only the first part of a system message, so that
            all its texts have to be one.
        bundle: the bundle's folder; None looks in ``$TURBOVIT_BUNDLE``, then in the store.
        device: where the engine shall run.
    """

    reserved: ClassVar[tuple[str, ...]]
    placeholders: ClassVar[Mapping[str, str]]
    joins_system_texts: ClassVar[bool] = True

    bundle: str | Path | None = None
    device: str = "auto"
    encoder: Encoder

    # Set by LMDeploy's VisionModel.
    model_path: str
    backend: str
    with_llm: bool

    @property
    def compiled(self) -> bool:
        """Whether this object encodes with an engine (and is not LMDeploy's own class in all it does)."""
        return hasattr(self, "encoder")

    def build_model(self, trust_remote_code: bool = False) -> None:
        """Open the bundle of this checkpoint; build it first where ``TURBOVIT_AUTO_BUILD=1`` and there is none.

        Raises:
            BundleError: there is none; gives the command that builds it.
        """
        if self.backend != "turbomind" or self.with_llm:
            super().build_model(trust_remote_code=trust_remote_code)  # type: ignore[misc]
            return
        self.encoder = open_encoder(self._bundle_folder(), device=self.device)

    def preprocess(self, messages: list[dict]) -> list[dict]:
        """Append ``role='preprocess'`` with one entry an image, in prompt order.

        Raises:
            InputError: a message or image cannot be used; names it.
        """
        if not self.compiled:
            return super().preprocess(messages)  # type: ignore[misc]
        conversation = self._conversation(messages)
        options = self.image_options(conversation)
        return self._preprocessed(messages, [self._pixels(part, options) for part in conversation.media])

    def forward(self, messages: list[dict], max_batch_size: int = 1) -> list[dict]:
        """Append ``role='forward'`` with one tensor [tokens, hidden] an entry of `preprocess`, in prompt order.

        Args:
            max_batch_size: how many rows (crops, tiles) one engine run may have; changes no result.
        """
        if not self.compiled:
            return super().forward(messages, max_batch_size)  # type: ignore[misc]
        encoded = self.encoder.encode_pixels(messages[-1]["pixels"], max_batch_size)
        features = [part for one in encoded for part in one.features.split(self.entry_tokens(one.runs))]
        messages.append({"role": "forward", "content": features, "encoded": encoded})
        return messages

    def to_turbomind(
        self,
        messages: list[dict],
        chat_template: Any,
        tokenizer: Any,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """TurboMind's request: prompt, input_ids, input_embeddings and input_embedding_ranges.

        Raises:
            InputError: a text holds a reserved string, the chat template takes no such conversation, or a raw
                prompt's placeholders are not its images'.
        """
        if not self.compiled:
            return super().to_turbomind(  # type: ignore[misc]
                messages, chat_template, tokenizer, tools=tools, chat_template_kwargs=chat_template_kwargs, **kwargs
            )
        *own, _, forwarded = messages
        prompt = self._prompt(self._conversation(own), chat_template, tools, chat_template_kwargs or {})
        return self._request(prompt, forwarded["encoded"], tokenizer)

    def text_request(
        self,
        prompt: str | Sequence[Mapping[str, Any]],
        chat_template: Any,
        tokenizer: Any,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
    ) -> dict[str, Any]:
        """As `to_turbomind`, for a string or messages without images, which LMDeploy shows to no vision model."""
        conversation = self._conversation(_messages(prompt))
        return self._request(self._prompt(conversation, chat_template, tools, options), (), tokenizer)

    def check_messages(self, messages: Sequence[Mapping[str, Any]], chat_template: Any) -> None:
        """Refuse what can be refused before an image is loaded.

        Raises:
            InputError: a message cannot be used, or a text holds a reserved string.
        """
        conversation = self._conversation(messages)
        if not self.is_raw(chat_template):
            refuse_reserved(conversation, self.reserved)

    def is_raw(self, chat_template: Any) -> bool:
        """Whether a request with this chat template is the whole prompt as it stands."""
        return adapter.is_raw(chat_template)

    def image_options(self, conversation: Conversation) -> Mapping[str, Any]:
        """The preprocessor's options for the images of a conversation."""
        return {}

    def entry_tokens(self, runs: Sequence[int]) -> list[int]:
        """Tokens of each of `preprocess`'s entries for an image with these runs: all of them in one entry."""
        return [sum(runs)]

    def request_from_text(self, prompt: str, encoded: Sequence[Encoded], tokenizer: Any) -> dict[str, Any]:
        """The request for a prompt that has one placeholder an image or video."""
        raise NotImplementedError

    def request_from_ids(self, ids: list[int], encoded: Sequence[Encoded], tokenizer: Any) -> dict[str, Any]:
        """The request for token ids that hold the family's placeholders."""
        raise NotImplementedError

    def _request(self, prompt: str | list[int], encoded: Sequence[Encoded], tokenizer: Any) -> dict[str, Any]:
        if isinstance(prompt, str):
            return self.request_from_text(prompt, encoded, tokenizer)
        refuse_unknown_ids(prompt, tokenizer)
        return self.request_from_ids(prompt, encoded, tokenizer)

    def _prompt(
        self, conversation: Conversation, chat_template: Any, tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> str | list[int]:
        """The prompt, with one placeholder an image or video; as it stands where it is raw."""
        if self.is_raw(chat_template) or conversation.has_token_ids:
            return raw_prompt(conversation)
        refuse_reserved(conversation, self.reserved)
        messages = self._template_messages(conversation, chat_template)
        try:
            return chat_template.messages2prompt(messages, tools=tools, **options)
        except Exception as error:  # templates raise TemplateError, KeyError, TypeError and more
            raise InputError(f"the chat template does not take this conversation: {error}") from error

    def _template_messages(self, conversation: Conversation, chat_template: Any) -> list[dict[str, Any]]:
        placeholders = None if adapter.takes_parts(chat_template) else self.placeholders
        return template_messages(with_markers_applied(conversation), placeholders, self.joins_system_texts)

    def _preprocessed(self, messages: list[dict], pixels: Sequence[Pixels]) -> list[dict]:
        entries = []
        for one in pixels:
            tokens = self.entry_tokens(one.runs)
            entries += [
                {"pixels": rows, "image_tokens": number}
                for rows, number in zip(one.rows.chunk(len(tokens)), tokens, strict=True)
            ]
        messages.append({"role": "preprocess", "content": entries, "pixels": pixels})
        return messages

    def _conversation(self, messages: Sequence[Mapping[str, Any]]) -> Conversation:
        return conversation_from_messages(messages, tuple(self.placeholders))

    def _pixels(self, part: MediaPart, options: Mapping[str, Any] | None = None) -> Pixels:
        preprocessor = self.encoder.preprocessor
        try:
            if part.kind == "video":
                return preprocessor.pixels_from_video(adapter.video_from_part(part), **(options or {}))
            return preprocessor.pixels_from_image(part.data, **(options or {}))
        except InputError as error:
            raise InputError(f"{part.label}: {error}") from None

    def _fact(self, name: str) -> int:
        return self.encoder.manifest.facts[name]

    def _bundle_folder(self) -> Path:
        from turbovit.export.plan import find_bundle, no_bundle, require_fit

        given = self.bundle or os.environ.get(BUNDLE_VARIABLE)
        if given:
            require_fit(self.model_path, given)
            return Path(given)
        found = find_bundle(self.model_path)
        if found:
            return found
        if os.environ.get(AUTO_BUILD_VARIABLE) == "1":
            from turbovit.export.build import build

            return build(self.model_path, report=logger.info).bundle.path
        raise no_bundle(self.model_path, f" (or set {AUTO_BUILD_VARIABLE}=1 to build it at the first start)")


def _messages(prompt: str | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
