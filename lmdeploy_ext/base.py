"""What the compiled vision models share: LMDeploy's steps for both backends.

For TurboMind they encode here, with an `Encoder`. Beside the PyTorch engine they make pixels and prompts alone: the
tower runs in the engine (`turbovit.lmdeploy_ext.pytorch_engine`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from turbovit.engines.bundle import open_bundle
from turbovit.engines.encoder import Encoder, open_encoder, preprocessor_of
from turbovit.engines.errors import InputError
from turbovit.engines.options import check_options
from turbovit.engines.preprocessor import Item, Pixels, Preprocessor
from turbovit.lmdeploy_ext import adapter, media_adapter
from turbovit.lmdeploy_ext.bundle_choice import bundle_folder
from turbovit.lmdeploy_ext.chat_template import NO_TEMPLATE
from turbovit.lmdeploy_ext.conversation import (
    Conversation,
    MediaPart,
    conversation_from_messages,
    raw_prompt,
    refuse_reserved,
    with_markers_applied,
)
from turbovit.lmdeploy_ext.prompt import (
    check_runs,
    pytorch_request,
    refuse_unknown_ids,
    runs_of,
    turbomind_request,
)
from turbovit.lmdeploy_ext.pytorch_engine.adapter import is_beside_compiled_tower
from turbovit.lmdeploy_ext.rendering import Form, Messages, rendered


class CompiledVisionModel:
    """The compiled half of a vision model; `adapter.vision_model_class` puts it in front of LMDeploy's own class.

    Beside a PyTorch engine without a compiled tower, and when LMDeploy loads the whole model (``with_llm``), everything
    is LMDeploy's own.

    Attributes:
        reserved: strings that mark an image's place in the family's prompts; refused in texts.
        placeholders: what stands for a whole image (or video) before it is expanded, by kind; the kinds are those that
            the family takes.
        joins_system_texts: whether the family's chat templates read only the first part of a system message, so that
            all its texts have to be one.
        has_own_format: whether prompts are written without a chat template where the checkpoint has none.
        bundle: the bundle's folder; None looks in ``$TURBOVIT_BUNDLE``, then in the store.
        device: where the engine shall run.
        encoder: on backend turbomind.
    """

    reserved: ClassVar[tuple[str, ...]]
    placeholders: ClassVar[Mapping[str, str]]
    joins_system_texts: ClassVar[bool] = True
    has_own_format: ClassVar[bool] = False

    bundle: str | Path | None = None
    device: str = "auto"
    encoder: Encoder | None = None
    _alone: Preprocessor | None = None

    # Set by LMDeploy's VisionModel.
    model_path: str
    backend: str
    with_llm: bool

    @property
    def preprocessor(self) -> Preprocessor | None:
        """The bundle's; None where everything is LMDeploy's own."""
        return self.encoder.preprocessor if self.encoder else self._alone

    @property
    def compiled(self) -> bool:
        """Whether an engine encodes for this object (and it is not LMDeploy's own class in all it does)."""
        return self.preprocessor is not None

    def build_preprocessor(self, trust_remote_code: bool = False) -> None:
        """Load the processor; beside a PyTorch engine with a compiled tower, open the bundle's preprocessor too.

        Raises:
            BundleError: as `build_model`.
        """
        self.build_own_preprocessor(trust_remote_code)
        if is_beside_compiled_tower():
            self.open_preprocessor()

    def build_own_preprocessor(self, trust_remote_code: bool) -> None:
        """As LMDeploy's class does."""
        super().build_preprocessor(trust_remote_code=trust_remote_code)  # type: ignore[misc]

    def build_model(self, trust_remote_code: bool = False) -> None:
        """Open the bundle of this checkpoint; build it first where ``TURBOVIT_AUTO_BUILD=1`` and there is none.

        Raises:
            BundleError: there is none; gives the command that builds it.
        """
        if self.backend != "turbomind" or self.with_llm:
            super().build_model(trust_remote_code=trust_remote_code)  # type: ignore[misc]
            return
        self.encoder = open_encoder(bundle_folder(self.model_path, self.bundle), device=self.device)

    def open_preprocessor(self) -> None:
        """Make requests from now on for a PyTorch engine that runs the compiled tower."""
        self._alone = preprocessor_of(open_bundle(bundle_folder(self.model_path, self.bundle)))

    def preprocess(self, messages: list[dict], mm_processor_kwargs: Mapping[str, Any] | None = None) -> list[dict]:
        """Append ``role='preprocess'`` with one entry an image, in prompt order.

        Args:
            mm_processor_kwargs: the request's; the preprocessor's `options` say which there are.

        Raises:
            InputError: a message, image or option cannot be used; names it.
        """
        if not self.compiled:
            return super().preprocess(messages)  # type: ignore[misc]
        return self._preprocessed(messages, self._all_pixels(messages, mm_processor_kwargs))

    def forward(self, messages: list[dict], max_batch_size: int = 1) -> list[dict]:
        """Append ``role='forward'`` with one tensor [tokens, hidden] an entry of `preprocess`, in prompt order.

        Args:
            max_batch_size: how many rows (crops, tiles) one engine run may have; changes no result.
        """
        if self.encoder is None:
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

    def to_pytorch(
        self,
        messages: list[dict],
        chat_template: Any,
        tokenizer: Any,
        tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """The PyTorch engine's request: prompt, input_ids and multimodal; raises as `to_turbomind`."""
        if not self.compiled:
            return super().to_pytorch(  # type: ignore[misc]
                messages, chat_template, tokenizer, tools=tools, chat_template_kwargs=chat_template_kwargs, **kwargs
            )
        *own, preprocessed = messages
        prompt = self._prompt(self._conversation(own), chat_template, tools, chat_template_kwargs or {})
        return self._request(prompt, preprocessed["pixels"], tokenizer)

    def has_input_ids(self, messages: list[dict]) -> bool:
        """Whether LMDeploy shall call its own `to_pytorch_with_input_ids`: `to_pytorch` takes token ids too."""
        return not self.compiled and super().has_input_ids(messages)  # type: ignore[misc]

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

    def check_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        chat_template: Any,
        tools: Sequence[Any] | None = None,
        template_options: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Refuse what can be refused before an image is loaded.

        Args:
            options: ``mm_processor_kwargs`` and ``media_io_kwargs`` of the request.

        Raises:
            InputError: a message or option cannot be used, or what the chat template gets holds a reserved string.
        """
        conversation = self._conversation(messages)
        self._check_options(options or {})
        if not self._takes_raw(conversation, chat_template):
            refuse_reserved(conversation, tools, template_options or {}, self.reserved)

    def is_raw(self, chat_template: Any) -> bool:
        """Whether a request with this chat template is the whole prompt as it stands."""
        return adapter.is_raw(chat_template)

    def media_options(
        self, kind: str, conversation: Conversation, mm_processor_kwargs: Mapping[str, Any]
    ) -> Mapping[str, Any]:
        """The preprocessor's options for the images, or videos, of a conversation."""
        return {}

    def entry_tokens(self, runs: Sequence[int]) -> list[int]:
        """Tokens of each of `preprocess`'s entries for an image with these runs: all of them in one entry."""
        return [sum(runs)]

    def request_from_text(self, prompt: str, items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        """The request for a prompt that has one placeholder an image or video."""
        raise NotImplementedError

    def request_from_ids(self, ids: list[int], items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        """The request for token ids that hold the family's placeholders."""
        raise NotImplementedError

    def entries(self, ids: list[int], runs: Sequence[Sequence[int]], pixels: Sequence[Pixels]) -> list[dict[str, Any]]:
        """What the input processor of the family in LMDeploy's PyTorch engine takes; here, one entry an image.

        Args:
            runs: [begin, end) of the runs of placeholder ids in `ids`.
        """
        entries, first = [], 0
        for one in pixels:
            own = runs[first : first + len(one.runs)]
            begin, end = own[0][0], own[-1][1]
            place = {"offset": begin, "image_tokens": end - begin, "image_token_id": ids[begin]}
            entries.append({"pixel_values": one.rows, **place})
            first += len(own)
        return entries

    def request(
        self, prompt: str | None, ids: list[int], tokens: Collection[int], items: Sequence[Any]
    ) -> dict[str, Any]:
        """As `request_from_runs`, where every run of one of `tokens` in `ids` is an image's."""
        return self.request_from_runs(prompt, ids, runs_of(ids, tokens), items)

    def request_from_runs(
        self, prompt: str | None, ids: list[int], runs: list[list[int]], items: Sequence[Any]
    ) -> dict[str, Any]:
        """The backend's request for a prompt that is tokenised, with its placeholders expanded.

        Args:
            runs: [begin, end) of the runs of placeholders in `ids`.
            items: the images in prompt order: encoded on backend turbomind, else pixels.

        Raises:
            InputError: the runs of placeholders are not those of the images.
        """
        check_runs(runs, items)
        if self.backend == "pytorch":
            return pytorch_request(prompt, ids, self.entries(ids, runs, items))
        return turbomind_request(prompt, ids, runs, items)

    def _request(self, prompt: str | list[int], items: Sequence[Item], tokenizer: Any) -> dict[str, Any]:
        if isinstance(prompt, str):
            return self.request_from_text(prompt, items, tokenizer)
        refuse_unknown_ids(prompt, tokenizer)
        return self.request_from_ids(prompt, items, tokenizer)

    def _prompt(
        self, conversation: Conversation, chat_template: Any, tools: Sequence[Any] | None, options: Mapping[str, Any]
    ) -> str | list[int]:
        """The prompt, with one placeholder an image or video; as it stands where it is raw."""
        if self._takes_raw(conversation, chat_template):
            return raw_prompt(conversation)
        refuse_reserved(conversation, tools, options, self.reserved)

        def write(messages: Messages, tools: Sequence[Any] | None) -> str:
            return self._written(messages, chat_template, tools, options)

        return rendered(with_markers_applied(conversation), tools, write, self._form(chat_template))

    def _takes_raw(self, conversation: Conversation, chat_template: Any) -> bool:
        if conversation.has_token_ids or adapter.sent_raw(chat_template):
            return True
        if self.is_raw(chat_template):
            raise InputError(NO_TEMPLATE)
        return False

    def _written(
        self,
        messages: Messages,
        chat_template: Any,
        tools: Sequence[Any] | None,
        options: Mapping[str, Any],
    ) -> str:
        try:
            prompt = chat_template.messages2prompt(messages, tools=tools, **options)
        except Exception as error:  # templates raise TemplateError, KeyError, TypeError and more
            raise InputError(f"the chat template does not take this conversation: {error}") from error
        if not isinstance(prompt, str):
            raise InputError(f"the chat template gives a {type(prompt).__name__} with these options, expected a text")
        return prompt

    def _form(self, chat_template: Any) -> Form:
        takes_parts = adapter.takes_parts(chat_template)
        return Form(self.placeholders, self.reserved, takes_parts, self.joins_system_texts)

    def _all_pixels(self, messages: Sequence[Mapping[str, Any]], mm_processor_kwargs: Any) -> list[Pixels]:
        """Of every image and video, in prompt order."""
        conversation = self._conversation(messages)
        self._check_options({"mm_processor_kwargs": mm_processor_kwargs})
        options = {
            kind: self.media_options(kind, conversation, mm_processor_kwargs or {}) for kind in self.placeholders
        }
        return [self._pixels(part, options[part.kind]) for part in conversation.media]

    def _check_options(self, options: Mapping[str, Any]) -> None:
        assert self.preprocessor is not None
        check_options(options, self.preprocessor.options)

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
        assert self.preprocessor is not None
        return conversation_from_messages(messages, tuple(self.placeholders), self.preprocessor.options)

    def _pixels(self, part: MediaPart, options: Mapping[str, Any]) -> Pixels:
        preprocessor = self.preprocessor
        assert preprocessor is not None
        try:
            if part.kind == "video":
                return preprocessor.pixels_from_video(media_adapter.video_from_part(part), **options)
            return preprocessor.pixels_from_image(part.data, **options)
        except InputError as error:
            raise InputError(f"{part.label}: {error}") from None

    def _fact(self, name: str) -> int:
        assert self.preprocessor is not None
        return self.preprocessor.facts[name]


def _messages(prompt: str | Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
