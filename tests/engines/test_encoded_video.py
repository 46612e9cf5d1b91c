"""What a video's header says, and every kind of damage that a decoder can notice."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from turbovit.engines.encoded_video import count_frames, encoded_video
from turbovit.engines.errors import InputError
from turbovit.engines.limits import IMAGE_PIXELS

av = pytest.importorskip("av", reason="PyAV is not installed")

FRAMES, FPS, WIDTH, HEIGHT = 40, 10, 160, 96
# container, codec, options of the container: with its index in front, a cut file still opens
KINDS = {
    "mp4": ("mp4", "mpeg4", {}),
    "mp4, index in front": ("mp4", "mpeg4", {"movflags": "faststart"}),
    "mp4 of fragments": ("mp4", "libx264", {"movflags": "frag_keyframe+empty_moov"}),
    "H.264 mp4, index in front": ("mp4", "libx264", {"movflags": "faststart"}),
    "mov": ("mov", "libx264", {}),
    "mkv": ("matroska", "libx264", {}),
    "webm": ("webm", "libvpx-vp9", {}),
    "avi": ("avi", "mjpeg", {}),
    "ts": ("mpegts", "libx264", {}),
}
CUT = [kind for kind in KINDS if kind not in ("ts", "mp4 of fragments")]  # these two end anywhere
DAMAGED = [kind for kind in KINDS if kind != "webm"]  # VP9 takes any bits as pixels


def blocks(frames: int) -> np.ndarray:
    small = np.random.default_rng(0).integers(0, 256, (frames, HEIGHT // 16, WIDTH // 16, 3), np.uint8)
    return small.repeat(16, axis=1).repeat(16, axis=2)


@pytest.fixture(scope="module")
def videos(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("videos")
    return {kind: written(folder / "video", *KINDS[kind]) for kind in KINDS}


def written(path: Path, container: str, codec: str, options: dict[str, str]) -> bytes:
    with av.open(str(path), "w", format=container, options=options) as output:
        stream = output.add_stream(codec, rate=FPS)
        stream.width, stream.height, stream.bit_rate = WIDTH, HEIGHT, 2_000_000
        stream.codec_context.thread_count = 1  # the same bytes on every machine
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        for frame in blocks(FRAMES):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return path.read_bytes()


@pytest.mark.parametrize("kind", KINDS)
def test_a_whole_video_is_taken(kind: str, videos: dict[str, bytes]) -> None:
    video = encoded_video(videos[kind])
    assert (video.width, video.height, video.fps) == (WIDTH, HEIGHT, FPS)
    if kind != "mp4 of fragments":
        assert abs(video.frames - FRAMES) <= 1
    assert count_frames(video) == FRAMES


@pytest.mark.parametrize("kind", CUT)
@pytest.mark.parametrize("part", [0.5, 0.8])
def test_a_cut_video_is_refused(kind: str, part: float, videos: dict[str, bytes]) -> None:
    data = videos[kind]
    with pytest.raises(InputError, match=r"the video is (cut short|damaged)"):
        count_frames(encoded_video(data[: int(len(data) * part)]))


@pytest.mark.parametrize("kind", DAMAGED)
@pytest.mark.parametrize("place", [0.2, 0.4, 0.6])
@pytest.mark.parametrize("junk", ["zeros", "noise"])
def test_a_damaged_stretch_is_refused(kind: str, place: float, junk: str, videos: dict[str, bytes]) -> None:
    data = bytearray(videos[kind])
    begin, length = int(len(data) * place), len(data) // 5  # several frames: within one, some decoders take any bits
    data[begin : begin + length] = bytes(length) if junk == "zeros" else np.random.default_rng(1).bytes(length)
    with pytest.raises(InputError, match="the video is"):
        count_frames(encoded_video(bytes(data)))


@pytest.mark.parametrize("data", [b"", b"secret", bytes(1000), b"\0\0\0\x18ftypmp42secret"])
def test_what_is_no_video_is_refused_and_not_quoted(data: bytes) -> None:
    with pytest.raises(InputError, match=r"empty|no known format|holds no video") as refusal:
        encoded_video(data)
    assert "secret" not in str(refusal.value)


@pytest.mark.parametrize("kind", ["a picture", "a recording that goes on"])
def test_what_does_not_say_how_long_it_lasts_is_refused(kind: str) -> None:
    data = BytesIO()
    if kind == "a picture":
        Image.fromarray(blocks(1)[0]).save(data, "PNG")
    else:
        data = written_to_a_pipe()
    with pytest.raises(InputError, match="does not say how many frames it has or how long it lasts"):
        encoded_video(data.getvalue())


def written_to_a_pipe() -> BytesIO:
    """A WebM as browsers record it: what writes it cannot go back to its header."""
    data = BytesIO()

    class Pipe:
        def write(self, piece: bytes) -> int:
            return data.write(piece)

    with av.open(Pipe(), "w", format="webm") as output:
        stream = output.add_stream("libvpx-vp9", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for frame in blocks(4):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return data


def test_an_unknown_codec_is_refused(videos: dict[str, bytes]) -> None:
    """Also where damage makes it one."""
    data = videos["H.264 mp4, index in front"]
    with pytest.raises(InputError, match="of a codec that is not known here"):
        encoded_video(data.replace(b"avc1", b"zzzz"))


def test_sound_alone_is_no_video() -> None:
    buffer = BytesIO()
    with av.open(buffer, "w", format="wav") as output:
        stream = output.add_stream("pcm_s16le", rate=8000, layout="mono")
        sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
        sound.sample_rate = 8000
        output.mux(stream.encode(sound))
    with pytest.raises(InputError, match="holds no video"):
        encoded_video(buffer.getvalue())


def test_large_frames_are_refused_from_the_header(videos: dict[str, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(IMAGE_PIXELS.variable, "1000")
    with pytest.raises(InputError, match="160x96 = 15360 pixels, at most 1000"):
        encoded_video(videos["mp4"])


def test_a_video_with_longer_sound_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "video.mkv"
    with av.open(str(path), "w") as output:
        stream = output.add_stream("libx264", rate=FPS)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        audio = output.add_stream("pcm_s16le", rate=8000, layout="mono")
        for frame in blocks(10):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
        for number in range(20):  # two seconds
            sound = av.AudioFrame.from_ndarray(np.zeros((1, 800), np.int16), format="s16", layout="mono")
            sound.sample_rate, sound.pts = 8000, 800 * number
            output.mux(audio.encode(sound))
    assert count_frames(encoded_video(path.read_bytes())) == 10
