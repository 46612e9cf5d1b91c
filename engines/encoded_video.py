"""A video as a file holds it: what its header says, and whether all of it decodes. PyAV (FFmpeg) looks at it.

The loaders that make frames of it conceal what is damaged, and stop without a word where the file does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BytesIO
from typing import TYPE_CHECKING

from turbovit.engines.errors import InputError, RuntimeUnavailableError
from turbovit.engines.limits import check_image_size

if TYPE_CHECKING:
    from av.container import InputContainer

_SLACK = 0.5  # seconds: the last packet of some formats does not say how long it lasts
_MICROSECONDS = 1_000_000  # of FFmpeg's clock for a whole file
# All that a file holds, whatever part of it an editor chose to show.
_WHOLE_FILE = {"ignore_editlist": "1"}
_STRICT = {"err_detect": "explode"}  # an error where the decoder would conceal damage


@dataclass(frozen=True)
class EncodedVideo:
    """A video that is not decoded yet.

    Attributes:
        frames: as its header says, or by duration and rate where it does not.
        fps: frames a second; 0 where the header does not say.
    """

    data: bytes = field(repr=False)
    width: int
    height: int
    frames: int
    fps: float

    @property
    def seconds(self) -> float:
        """How long it lasts; 0 where that is not known."""
        return self.frames / self.fps if self.fps else 0.0


def encoded_video(data: bytes) -> EncodedVideo:
    """Read a video's header.

    Raises:
        InputError: it is empty, no video, or its frames are too large; quotes nothing of the data.
        RuntimeUnavailableError: PyAV is not installed.
    """
    if not data:
        raise InputError("the video is empty (0 bytes)")
    with _opened(data) as container:
        stream = container.streams.video[0]
        if stream.codec_context is None:
            raise InputError("the video is damaged, or of a codec that is not known here")
        fps = float(stream.average_rate or stream.guessed_rate or 0)
        seconds = (container.duration or 0) / _MICROSECONDS
        check_image_size((stream.width, stream.height))
        frames = stream.frames or round(seconds * fps)
        if frames < 1:
            raise InputError(
                "the video's header does not say how many frames it has or how long it lasts, as that of a recording "
                "that was never finished, or of a picture: write the file anew (ffmpeg -i OLD -c copy NEW)"
            )
        return EncodedVideo(data, stream.width, stream.height, frames, fps)


def count_frames(video: EncodedVideo) -> int:
    """Decode a video to its end, keeping nothing, and say how many frames it has.

    Raises:
        InputError: it is cut short, or a stretch of it is damaged.
    """
    frames, packets, end = 0, 0, 0.0
    with _opened(video.data) as container:
        stream = container.streams.video[0]
        stream.codec_context.options = _STRICT
        stream.thread_type = "AUTO"
        for packet in container.demux():
            if packet.is_corrupt:
                raise InputError(f"the video is damaged after {frames} frames")
            if packet.pts is not None and packet.time_base is not None:
                end = max(end, float((packet.pts + (packet.duration or 0)) * packet.time_base))
            if packet.stream is not stream:
                continue
            packets += packet.size > 0
            for frame in stream.decode(packet):
                if frame.is_corrupt:
                    raise InputError(f"the video is damaged at its frame {frames}")
                frames += 1
        begin = (container.start_time or 0) / _MICROSECONDS
        missing = (container.duration or 0) / _MICROSECONDS - (end - begin)
        unfinished = container.format.name == "gif" and not video.data.rstrip(b"\0").endswith(b";")
        if packets < stream.frames or missing > _SLACK or unfinished:
            raise InputError(f"the video is cut short: it ends after {frames} frames")
    return frames


@contextmanager
def _opened(data: bytes) -> Iterator[InputContainer]:
    try:
        import av
    except ImportError:
        raise RuntimeUnavailableError(
            "videos are checked with PyAV, which is not here: pip install 'turbovit[lmdeploy]'"
        ) from None
    try:
        with av.open(BytesIO(data), options=_WHOLE_FILE) as container:
            if not container.streams.video:
                raise InputError("the file holds no video")
            yield container
    except (av.FFmpegError, ValueError) as error:  # what its header names may be out of all range
        if isinstance(error, InputError):
            raise
        raise InputError(f"the video is damaged, cut short or in no known format ({type(error).__name__})") from None
