"""Limits on a whole request, the same by every entry, and which local files a request may name."""

from __future__ import annotations

import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from http_server import Served, served
from PIL import Image, ImageFile
from turbomind_qwen3_vl import Pair, frames_from_seed, video, write_video
from turbomind_requests import Message, assistant, data_url, file_bytes, image_url, noise, same, text, user

from turbovit.benchmarks.lmdeploy_side import LMDeploySide
from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import open_encoder
from turbovit.engines.errors import InputError
from turbovit.engines.limits import FRAMES, IMAGE_PIXELS, MEDIA_BYTES
from turbovit.engines.preprocessor import Video
from turbovit.lmdeploy_ext.local_media import AllowedMedia, allowed_path, local_path

REQUEST_PIXELS = "TURBOVIT_MAX_REQUEST_PIXELS"
Refused = Callable[[list[Message]], str]


@pytest.fixture(scope="module")
def closed_server(tiny_qwen3_vl: Path, tiny_qwen3_vl_bundle: Bundle) -> Iterator[Served]:
    """A server whose requests may name no local file."""
    with served(tiny_qwen3_vl, tiny_qwen3_vl_bundle) as server:
        yield server


@pytest.fixture(scope="module", params=["pipeline", "server"])
def refused(request: pytest.FixtureRequest) -> Refused:
    """Sends messages to Qwen3-VL, and gives the words of the refusal; the next request works."""
    good = [user(image_url(data_url(file_bytes(noise(32, 32, 0)))))]
    if request.param == "server":
        server: Served = request.getfixturevalue("closed_server")

        def by_server(messages: list[Message]) -> str:
            words = server.refused(server.chat(messages))
            server.answered(server.chat(good))
            return words

        return by_server
    side: LMDeploySide = request.getfixturevalue("qwen3_vl").side

    def by_pipeline(messages: list[Message]) -> str:
        with pytest.raises(InputError) as refusal:
            side.request(messages)
        side.request(good)
        return str(refusal.value)

    return by_pipeline


def blank(side: int) -> dict[str, Any]:
    return image_url(data_url(file_bytes(Image.new("1", (side, side)))))


def video_url(data: bytes, kind: str = "mp4") -> dict[str, Any]:
    return video(data_url(data).replace("image/png", f"video/{kind}"))


@pytest.fixture
def _decodes_no_large_image(monkeypatch: pytest.MonkeyPatch) -> None:
    load = ImageFile.ImageFile.load

    def checked(self: Any) -> Any:
        assert self.size[0] < 1000, "decoded"
        return load(self)

    monkeypatch.setattr(ImageFile.ImageFile, "load", checked)


@pytest.mark.usefixtures("_decodes_no_large_image")
def test_eight_large_images_are_refused_from_their_headers(refused: Refused) -> None:
    five = [user(*[blank(9400)] * 2), assistant("yes"), user(text("and?"), *[blank(9400)] * 6)]
    assert refused(five) == (
        f"message 2 (user), image 3: with this one (9400x9400) the request has {5 * 9400**2} pixels, at most "
        f"{4 * IMAGE_PIXELS.default} are allowed for all its images and videos: send fewer or smaller ones, or set "
        f"{REQUEST_PIXELS}"
    )


def test_the_limit_of_a_request_follows_that_of_an_image(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    chat = [user(*[blank(32)] * 5)]
    monkeypatch.setenv(IMAGE_PIXELS.variable, "1024")
    assert "image 5: with this one (32x32) the request has 5120 pixels, at most 4096" in refused(chat)
    monkeypatch.setenv(REQUEST_PIXELS, "2048")
    assert "image 3: with this one (32x32) the request has 3072 pixels, at most 2048" in refused(chat)


@pytest.mark.parametrize("value", ["many", "0", "-1", ""])
def test_a_limit_that_is_no_number_is_named(value: str, qwen3_vl: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(REQUEST_PIXELS, value)
    with pytest.raises(InputError, match=f"{REQUEST_PIXELS}={value!r} is not a positive number of pixels"):
        qwen3_vl.side.request([user(blank(32))])


def test_frames_count_as_pixels_of_the_request(
    refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    film = write_video(tmp_path / "a.mp4", 64, 32, 8, 2, 0).read_bytes()
    monkeypatch.setenv(REQUEST_PIXELS, str(1024 + 64 * 32 * 8 - 1))
    words = refused([user(blank(32), video_url(film))])
    assert f"message 0 (user), video 1: with this one (64x32 x 8 frames) the request has {1024 + 64 * 32 * 8}" in words
    monkeypatch.setenv(FRAMES.variable, "7")
    assert "video 1: the video has 8 frames to look at, at most 7 are allowed" in refused([user(video_url(film))])
    jpeg = ",".join(data_url(file_bytes(noise(32, 32, seed), "JPEG")).split(",")[1] for seed in range(8))
    frames = video(f"data:video/jpeg;base64,{jpeg}")
    assert "video 1: the video has 8 frames to look at, at most 7 are allowed" in refused([user(frames)])


def test_a_long_video_is_counted_by_the_frames_that_are_looked_at(
    qwen3_vl: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    film = write_video(tmp_path / "a.mp4", 64, 32, 40, 10, 0)
    monkeypatch.setenv(FRAMES.variable, "8")
    qwen3_vl.side.request([user(video(film))], media_io_kwargs={"video": {"num_frames": 8}})
    qwen3_vl.side.request([user(video(film))], media_io_kwargs={"video": {"fps": 2}})
    with pytest.raises(InputError, match="32 frames to look at, at most 8"):
        qwen3_vl.side.request([user(video(film))])


def test_a_file_of_too_many_bytes_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MEDIA_BYTES.variable, "5000")
    large = image_url(data_url(file_bytes(noise(64, 64, 0))))
    assert re.search(r"image 1: the file has \d+ bytes, at most 5000 are allowed", refused([user(large)]))


def test_a_video_that_is_cut_or_damaged_is_refused(refused: Refused, tmp_path: Path) -> None:
    av = pytest.importorskip("av", reason="PyAV is not installed")
    path = tmp_path / "a.mp4"
    with av.open(str(path), "w", options={"movflags": "faststart"}) as output:
        stream = output.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = 128, 96, "yuv420p"
        for frame in frames_from_seed(128, 96, 40, 0):
            output.mux(stream.encode(av.VideoFrame.from_ndarray(np.ascontiguousarray(frame), format="rgb24")))
        output.mux(stream.encode())
    data = path.read_bytes()
    middle = len(data) // 2
    damaged = data[:middle] + np.random.default_rng(0).bytes(4000) + data[middle + 4000 :]
    for bad, words in ((data[:middle], "the video is"), (damaged, "the video is damaged"), (b"", "the video is empty")):
        assert f"message 0 (user), video 1: {words}" in refused([user(video_url(bad), text("what is it?"))])


@pytest.mark.parametrize("count", [1, 3])
def test_the_python_api_counts_likewise(
    count: int, tiny_qwen3_vl_bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder = open_encoder(tiny_qwen3_vl_bundle, device="cpu")
    noise(32, 32, 0).save(tmp_path / "a.png")
    film = Video(np.zeros((4, 32, 32, 3), np.uint8), 2.0, (0, 1, 2, 3))
    items = [noise(32, 32, 1), tmp_path / "a.png", np.zeros((32, 32, 3), np.uint8), film][-count:]
    pixels = [1024, 1024, 1024, 4096][-count:]
    monkeypatch.setenv(REQUEST_PIXELS, str(sum(pixels)))
    assert len(encoder.encode(items)) == count
    monkeypatch.setenv(REQUEST_PIXELS, str(sum(pixels) - 1))
    with pytest.raises(InputError, match=rf"^video {count} of {count}: with this one \(32x32 x 4 frames\)"):
        encoder.encode(items)
    monkeypatch.setenv(FRAMES.variable, "3")
    with pytest.raises(InputError, match=rf"^video {count} of {count}: the video has 4 frames"):
        encoder.encode(items)
    encoder.close()


LOCAL = [
    "/etc/passwd",
    "file:///etc/passwd",
    "/dev/zero",
    "file:///dev/zero",
    "/nowhere/at/all.png",
    "a.png",
    "x" * 9999,
]


@pytest.mark.parametrize("url", LOCAL)
def test_a_server_reads_no_local_file_unless_it_is_told_to(url: str, closed_server: Served) -> None:
    for kind, part in (("image", image_url(url)), ("video", video(url)), ("image", {"type": "image", "image": url})):
        words = closed_server.refused(closed_server.chat([user(part)]))
        assert words.startswith(
            f"message 0 (user), {kind} 1: it is neither an http nor a data URL, and this server reads"
        )
        assert "--allowed-local-media-path DIR" in words
    prompt = "<|vision_start|><|image_pad|><|vision_end|>"
    assert "reads no local files" in closed_server.refused(closed_server.generate(prompt=prompt, image_data=url))


@pytest.mark.parametrize("data", ["/etc/passwd", "file:///etc/passwd", data_url(b"x"), "/dev/zero", ["/etc/passwd"], 5])
def test_image_data_are_never_a_path(data: Any, refused: Refused) -> None:
    for given in (data, {"data": data}, {"url": data}):
        part = {"type": "image_data", "image_data": given}
        words = refused([user(part)])
        assert words.startswith("message 0 (user), image 1: its source is a ")
        assert "etc" not in words


@pytest.mark.parametrize("source", [5, ["secret"], {"a": "secret"}, None, "", True])
@pytest.mark.parametrize("kind", ["image_url", "image", "video_url", "video"])
def test_a_source_that_is_no_url_is_refused_and_not_quoted(kind: str, source: Any, refused: Refused) -> None:
    found = f"a {type(source).__name__}" if source else "missing or empty"
    for given in (source, {"url": source}):
        words = refused([user({"type": kind, kind: given})])
        # a dict that is the source itself would be one of options
        problem = " has 'a', which" if given == {"a": "secret"} else f": its source is {found}, expected "
        assert words.startswith(f"message 0 (user), {kind.split('_')[0]} 1{problem}")
        assert "secret" not in words


def test_a_pipe_is_refused_at_once(tmp_path: Path, qwen3_vl: Pair) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for part in (image_url(str(pipe)), image_url(pipe.as_uri()), video(pipe)):
        with pytest.raises(InputError, match="it is a pipe, expected a regular file"):
            qwen3_vl.side.request([user(part)])


def test_links_and_dots_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    inside, outside = tmp_path / "media", tmp_path / "media-secret"
    inside.mkdir()
    outside.mkdir()
    for folder in (inside, outside):
        (folder / "a.png").write_bytes(b"x")
    (inside / "good").symlink_to(inside / "a.png")
    (inside / "bad").symlink_to(outside / "a.png")
    (inside / "folder").symlink_to(outside)
    (tmp_path / "linked").symlink_to(inside)
    for allowed in (AllowedMedia((), inside), AllowedMedia((), tmp_path / "linked")):
        for good in ("a.png", "good", "../media/a.png", "missing.png"):
            assert allowed_path(str(inside / good), allowed).startswith(f"{inside}/")
        for bad in ("bad", "folder/a.png", "../media-secret/a.png", "../missing.png", "/etc/passwd", "a\0b", "folder"):
            with pytest.raises(InputError, match="names no file in the folder") as refusal:
                allowed_path(str(inside / bad), allowed)
            assert "secret" not in str(refusal.value)
    assert allowed_path("/etc/passwd", None) == "/etc/passwd"
    assert allowed_path("/etc/passwd", ["example.com"]) == "/etc/passwd"


def test_other_models_of_a_server_read_what_was_checked(tmp_path: Path, qwen3_vl: Pair) -> None:
    """LMDeploy cuts a path at # and ?, and opens what is left of it."""
    from lmdeploy.serve.processors import multimodal
    from lmdeploy.vl.media.image import ImageMediaIO

    inside, secret = tmp_path / "media", tmp_path / "secret.png"
    inside.mkdir()
    noise(32, 32, 0).save(inside / "a#b.png")
    noise(16, 16, 1).save(secret)
    os.mkfifo(inside / "pipe")
    rule, other = AllowedMedia((), inside), ImageMediaIO()
    urls = [str(inside / "a#b.png"), (inside / "a#b.png").as_uri()]
    for url in [*urls, *(f"{secret}{sign}/../media/a#b.png" for sign in "#?\n")]:
        assert multimodal.load_from_url(url, other, rule).size == (32, 32)
    with pytest.raises(InputError, match="it is a pipe, expected a regular file"):
        multimodal.load_from_url(str(inside / "pipe"), other, rule)


def test_paths_are_told_from_urls() -> None:
    assert local_path("/a b.png") == local_path("file:///a%20b.png") == "/a b.png"
    assert local_path("/a%20b#c?d.png") == "/a%20b#c?d.png"
    for url in ("http://x/a.png", "HTTPS://x/a.png", "data:image/png;base64,AA=="):
        assert local_path(url) is None


def test_the_rule_travels_to_processes_that_serve() -> None:
    rule = AllowedMedia(["example.com"], Path("/media"))
    script = (
        "import pickle, sys; rule = pickle.loads(sys.stdin.buffer.read());"
        "from lmdeploy.serve.processors import multimodal;"
        "print(rule, rule.folder, hasattr(multimodal.load_from_url, '__wrapped__'))"
    )
    result = subprocess.run([sys.executable, "-c", script], input=pickle.dumps(rule), capture_output=True, timeout=120)
    printed = result.stdout.decode().splitlines()[-1:]
    assert printed == ["['example.com'] /media True"], result.stderr.decode()


class Endless(BaseHTTPRequestHandler):
    """Answers with one picture, or with zeros for ever."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        if self.path == "/good.png":
            self.wfile.write(file_bytes(noise(32, 32, 0)))
            return
        with suppress(ConnectionError):
            while True:
                self.wfile.write(bytes(1 << 16))

    def log_message(self, *args: Any) -> None:
        pass


def test_a_download_ends_at_the_limit_on_bytes(qwen3_vl: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmdeploy.vl.media.connection._is_safe_url", lambda url: (True, ""))  # of this machine
    monkeypatch.setenv(MEDIA_BYTES.variable, str(1 << 20))
    with ThreadingHTTPServer(("127.0.0.1", 0), Endless) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        request = qwen3_vl.side.request([user(image_url(f"{url}/good.png"))])
        for part, kind in ((image_url(f"{url}/endless.png"), "image"), (video(f"{url}/endless.mp4"), "video")):
            with pytest.raises(InputError, match=rf"{kind} 1: the file has \d+ bytes, at most {1 << 20} are allowed"):
                qwen3_vl.side.request([user(part)])
        server.shutdown()
    assert same(request, qwen3_vl.side.request([user(image_url(data_url(file_bytes(noise(32, 32, 0)))))]))
