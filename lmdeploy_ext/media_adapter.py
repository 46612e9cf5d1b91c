"""How LMDeploy loads the images and videos of a request: what is put in its place, seen in lmdeploy 0.18.0.

Requests for compiled models are loaded part by part, in order: their bytes are fetched and their headers checked,
each alone and all together, before the first is decoded. Images are decoded where their pixels are made, one at a time;
videos here, one at a time. Other models get what LMDeploy gives them.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image

from turbovit.engines.encoded_image import EncodedImage, encoded_image
from turbovit.engines.encoded_video import count_frames, encoded_video
from turbovit.engines.errors import InputError
from turbovit.engines.images import array_from_rgb, checked_size, readable_rgb
from turbovit.engines.limits import RequestPixels, check_bytes, check_frames
from turbovit.engines.media_files import is_data_url, parts_of_data_url, read_file
from turbovit.engines.preprocessor import Video
from turbovit.lmdeploy_ext.conversation import MEDIA, MediaPart
from turbovit.lmdeploy_ext.local_media import AllowedMedia, allowed_path, local_path

# As `adapter.PRIVATE_PARTS`.
PRIVATE_PARTS: dict[str, tuple[str, ...]] = {
    "lmdeploy.serve.processors.multimodal:ImageMediaIO.__init__": ("image_mode", "kwargs"),
    "lmdeploy.serve.processors.multimodal:ImageMediaIO.load_bytes": ("data",),
    "lmdeploy.serve.processors.multimodal:VideoMediaIO.__init__": ("image_io", "kwargs"),
    "lmdeploy.serve.processors.multimodal:VideoMediaIO.load_bytes": ("data",),
    "lmdeploy.vl.media.video_loader:VideoLoader.smart_nframes": ("total_frames_num", "num_frames", "fps", "duration"),
    "lmdeploy.serve.processors.multimodal:load_from_url": ("url", "media_io", "allowed_media_domains"),
    "lmdeploy.vl.media.connection:requests.Session.get": ("url",),
    "lmdeploy.serve.processors.multimodal:MultimodalProcessor._parse_multimodal_item": (
        "i",
        "in_messages",
        "out_messages",
        "media_io_kwargs",
        "allowed_media_domains",
    ),
    "lmdeploy.serve.processors.multimodal:MultimodalProcessor.async_parse_multimodal_item": (
        "messages",
        "media_io_kwargs",
        "allowed_media_domains",
    ),
}
_REQUEST = "turbovit_request"  # travels to the loaders among LMDeploy's own media_io_kwargs
_LONGEST = 300  # LMDeploy's own messages can quote whole messages
_JPEG_FRAMES = "video/jpeg"  # how LMDeploy calls a data URL of frames as JPEG files, parted by commas
_JPEG_FRAMES_FPS = 2.0  # and what it takes them to have


@dataclass(frozen=True)
class WaitingVideo:
    """A video whose header was checked.

    Attributes:
        frames: that will be decoded.
        decode: gives them as LMDeploy does: an array or tensor, and metadata.
    """

    width: int
    height: int
    frames: int
    decode: Callable[[], tuple[Any, dict[str, Any]]]


def for_one_request(media_io_kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """LMDeploy's options for the loaders, for one request to a compiled model; they were checked.

    Args:
        media_io_kwargs: by kind; None asks for nothing.
    """
    request = RequestPixels()
    options = dict(media_io_kwargs)
    for kind in MEDIA:
        asked = {name: value for name, value in (options.get(kind) or {}).items() if value is not None}
        options[kind] = {**asked, _REQUEST: request}
    return options


def patch_media_loading() -> None:
    """Replace LMDeploy's loaders, and the steps that call them."""
    from lmdeploy.serve.processors import multimodal
    from lmdeploy.serve.processors.multimodal import MultimodalProcessor

    class StrictImageMediaIO(multimodal.ImageMediaIO):
        """LMDeploy's loader; for compiled models it checks headers, and decodes nothing."""

        def __init__(self, image_mode: str = "RGB", **kwargs: Any) -> None:
            self.strict = isinstance(kwargs.pop(_REQUEST, None), RequestPixels)
            super().__init__(image_mode, **kwargs)

        def load_bytes(self, data: bytes) -> Any:
            return encoded_image(data) if self.strict else super().load_bytes(data)

        def load_data(self, media_type: str, parts: list[bytes]) -> EncodedImage:
            if len(parts) != 1:
                raise InputError("the data URL is not base64: there is a comma in its data")
            return encoded_image(parts[0])

    class StrictVideoMediaIO(multimodal.VideoMediaIO):
        """LMDeploy's loader; for compiled models it checks headers, and gives a `WaitingVideo`."""

        def __init__(self, image_io: Any, **kwargs: Any) -> None:
            self.strict = isinstance(kwargs.pop(_REQUEST, None), RequestPixels)
            super().__init__(image_io, **kwargs)

        def load_bytes(self, data: bytes) -> Any:
            if not self.strict:
                return super().load_bytes(data)
            video = encoded_video(data)
            frames = len(self._asked(video.frames, video.seconds))
            check_frames(frames)

            def decode() -> tuple[Any, dict[str, Any]]:
                there = count_frames(video)
                given, metadata = super(StrictVideoMediaIO, self).load_bytes(video.data)
                # A header's number of frames can be an estimate: what does not exist is not missing.
                asked = self._asked(metadata["total_num_frames"], metadata["duration"])
                expected = sum(index < there for index in asked)
                if len(given) < expected:
                    raise InputError(f"the video is damaged: {len(given)} of {expected} frames were decoded")
                return given, metadata

            return WaitingVideo(video.width, video.height, frames, decode), {}

        def load_data(self, media_type: str, parts: list[bytes]) -> Any:
            if media_type == _JPEG_FRAMES:
                return self._from_frames([encoded_image(part) for part in parts])
            if len(parts) != 1:
                raise InputError("the data URL is not base64: there is a comma in its data")
            return self.load_bytes(parts[0])

        def _asked(self, frames: int, seconds: float) -> list[int]:
            return self.video_loader.smart_nframes(frames, self.num_frames, self.kwargs.get("fps", -1), seconds)[1]

        def _from_frames(self, images: list[EncodedImage]) -> Any:
            check_frames(len(images))
            sizes = {image.size for image in images}
            if len(sizes) > 1:
                raise InputError(f"its frames have {len(sizes)} sizes, expected one")
            ((width, height),) = sizes

            def decode() -> tuple[np.ndarray, dict[str, Any]]:
                frames = np.empty((len(images), height, width, 3), dtype=np.uint8)
                for number, image in enumerate(images):
                    picture = readable_rgb(image)
                    if picture.size != (width, height):
                        raise InputError(f"its frame {number} is turned by its EXIF orientation, expected upright ones")
                    frames[number] = array_from_rgb(picture)
                fps = float(self.kwargs.get("fps", _JPEG_FRAMES_FPS))
                return frames, {"fps": fps, "frames_indices": list(range(len(frames)))}

            return WaitingVideo(width, height, len(images), decode), {}

    parse = MultimodalProcessor._parse_multimodal_item
    parse_all = MultimodalProcessor.async_parse_multimodal_item

    @functools.wraps(parse)
    def parse_naming_errors(
        i: int, in_messages: list[dict], out_messages: list[dict], media_io_kwargs: dict, *args: Any, **kwargs: Any
    ) -> None:
        content = in_messages[i].get("content")
        if not isinstance(content, list):
            return parse(i, in_messages, out_messages, media_io_kwargs, *args, **kwargs)
        request = _request(media_io_kwargs)
        parsed: list[Any] = []
        message = dict(in_messages[i])
        for number, part in enumerate(content, 1):
            single: list[Any] = [None]
            with _named(i, message, number):
                if request is not None:
                    _check_source(part)
                parse(0, [{**message, "content": [part]}], single, media_io_kwargs, *args, **kwargs)
                loaded = single[0]["content"]
                if request is not None:
                    for one in loaded:
                        _count(one, request)
            parsed += loaded
        out_messages[i] = {**message, "content": parsed}
        return None

    @functools.wraps(parse_all)
    async def parse_in_order(
        messages: Any, media_io_kwargs: Any = None, allowed_media_domains: list[str] | None = None
    ) -> list[dict]:
        if _request(media_io_kwargs) is None:
            return await parse_all(messages, media_io_kwargs, allowed_media_domains=allowed_media_domains)

        def load() -> list[dict]:
            loaded: list[Any] = [None] * len(messages)
            for i in range(len(messages)):
                parse_naming_errors(i, messages, loaded, media_io_kwargs, allowed_media_domains)
            return [_with_decoded_videos(i, message) for i, message in enumerate(loaded)]

        return await asyncio.get_running_loop().run_in_executor(None, load)

    patch_url_loading()
    multimodal.ImageMediaIO = StrictImageMediaIO
    multimodal.VideoMediaIO = StrictVideoMediaIO
    MultimodalProcessor._parse_multimodal_item = staticmethod(parse_naming_errors)
    MultimodalProcessor.async_parse_multimodal_item = staticmethod(parse_in_order)


@functools.cache  # both `patch_media_loading` and a server without compiled vision want it
def patch_url_loading() -> None:
    """Local files by the server's rule, regular ones alone; data URLs of compiled models by ours; bounded downloads."""
    from lmdeploy.serve.processors import multimodal
    from lmdeploy.vl.media import connection

    fetch = multimodal.load_from_url

    class Requests:
        """What LMDeploy uses of requests."""

        class Session(connection.requests.Session):
            """Reads no more than a file may have."""

            def get(self, url: Any, **kwargs: Any) -> Any:
                response = super().get(url, stream=True, **kwargs)
                response.raw = _Bounded(response.raw)
                return response

    @functools.wraps(fetch)
    def load_from_url(url: str, media_io: Any, allowed_media_domains: list[str] | None = None) -> Any:
        strict = getattr(media_io, "strict", False)
        if strict and is_data_url(url):
            return media_io.load_data(*parts_of_data_url(url))
        path = local_path(url)
        if path is not None:
            path = allowed_path(path, allowed_media_domains)
            # What was checked is what is read: LMDeploy itself would cut a path at # or ?.
            if strict or isinstance(allowed_media_domains, AllowedMedia):
                return media_io.load_bytes(_file_of(url, path))
        return fetch(url, media_io, allowed_media_domains)

    multimodal.load_from_url = load_from_url
    connection.requests = Requests


def video_from_part(part: MediaPart) -> Video:
    """A video as LMDeploy's loaders give it: frames and ``video_metadata``; the preprocessor checks them."""
    frames, metadata = part.data, part.params.get("video_metadata") or {}
    if isinstance(frames, torch.Tensor):  # of torchvision or, channels first, torchcodec
        frames = (frames.movedim(1, 3) if frames.ndim == 4 and frames.shape[3] != 3 else frames).numpy()
    indices = metadata.get("frames_indices")
    if indices is None and isinstance(frames, np.ndarray):
        indices = range(len(frames))
    return Video(frames, metadata.get("fps"), tuple(int(index) for index in (() if indices is None else indices)))


class _Bounded:
    """A response's body, as requests reads it, that ends where `check_bytes` says so."""

    def __init__(self, raw: Any):
        self._raw = raw

    def stream(self, *args: Any, **kwargs: Any) -> Iterator[bytes]:
        size = 0
        for chunk in self._raw.stream(*args, **kwargs):
            size += len(chunk)
            check_bytes(size)
            yield chunk

    def __getattr__(self, name: str) -> Any:
        return getattr(self._raw, name)


def _file_of(url: str, path: str) -> bytes:
    try:
        return read_file(path)
    except InputError as error:
        if path != url:  # it was a file URL
            raise
        raise InputError(f"it is no http, data or file URL, and as a path: {error}") from None


def _request(media_io_kwargs: Any) -> RequestPixels | None:
    image = media_io_kwargs.get("image") if isinstance(media_io_kwargs, dict) else None
    found = image.get(_REQUEST) if isinstance(image, dict) else None
    return found if isinstance(found, RequestPixels) else None


def _check_source(part: Any) -> None:
    """Image data are a picture and never a path; all else is a URL or path, or a picture in a pipeline."""
    kind = part.get("type")
    if kind == "text":
        return
    given = part.get(kind)
    source = (given.get("url") or given.get("data")) if isinstance(given, dict) else given
    expected: tuple[type, ...] = (str, Image.Image)
    words = "a URL, a data URL or a path"
    if kind == "image_data":
        expected, words = (
            (Image.Image, np.ndarray),
            "a PIL image or uint8 array (a URL or path goes into an 'image_url')",
        )
    elif kind.startswith("video"):
        expected = (str,)
    empty = source is None or (isinstance(source, str) and not source)
    if empty or not isinstance(source, expected):
        found = "missing or empty" if empty else f"a {type(source).__name__}"
        raise InputError(f"its source is {found}, expected {words}")


def _count(part: Mapping[str, Any], request: RequestPixels) -> None:
    data = part.get("data")
    if isinstance(data, WaitingVideo):
        request.add(data.width, data.height, data.frames)
    elif part.get("type") in MEDIA and data is not None:
        request.add(*checked_size(data))


def _with_decoded_videos(index: int, message: dict) -> dict:
    if not isinstance(message.get("content"), list):
        return message
    parts = []
    for number, part in enumerate(message["content"], 1):
        if isinstance(part, dict) and isinstance(part.get("data"), WaitingVideo):
            with _named(index, message, number):
                frames, metadata = part["data"].decode()
            part = {**part, "data": frames, "video_metadata": metadata}
        parts.append(part)
    return {**message, "content": parts}


@contextmanager
def _named(index: int, message: Mapping[str, Any], number: int) -> Iterator[None]:
    """Errors within name the message, and the part by its place among those of its kind."""
    try:
        yield
    except Exception as error:  # loaders raise ValueError, OSError, requests and PIL errors
        where = f"message {index} ({message.get('role')}), {_part_label(message['content'], number)}"
        raise InputError(f"{where}: {_one_line(error)}") from error


def _part_label(content: list[Any], number: int) -> str:
    """``image 2`` for the second image of a message, ``part 3`` for its third part that is no image or video."""
    types = [str(part.get("type")) if isinstance(part, dict) else type(part).__name__ for part in content[:number]]
    for kind in MEDIA:
        if types[-1].startswith(kind):
            return f"{kind} {sum(given.startswith(kind) for given in types)}"
    return f"part {number} ({types[-1]})"


def _one_line(error: Exception) -> str:
    line = " ".join(str(error).split()) or type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
