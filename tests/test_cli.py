"""The command line: what it prints, its exit codes, and that bad input is one line and leaves nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from turbovit import cli
from turbovit.engines.bundle import Bundle
from turbovit.engines.errors import BundleError
from turbovit.export.build import build


@dataclass(frozen=True)
class Result:
    """What a command did."""

    code: int
    out: str
    err: str


Command = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Command:
    """Run `turbovit` with arguments, in this process."""

    def command(*arguments: object) -> Result:
        monkeypatch.setattr(sys, "argv", ["turbovit", *map(str, arguments)])
        monkeypatch.setattr(cli.out, "file", sys.stdout)
        monkeypatch.setattr(cli.err, "file", sys.stderr)
        capfd.readouterr()
        try:
            cli.main()
            code = 0
        except SystemExit as end:
            code = int(end.code or 0)
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return command


@pytest.fixture
def picture(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(3).integers(0, 256, (40, 60, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "picture.png")
    return tmp_path / "picture.png"


def refused(result: Result) -> str:
    """The one error line of a command that was refused."""
    lines = [line for line in result.err.splitlines() if line.startswith("error: ")]
    assert result.code == 2, result
    assert len(lines) == 1, result.err
    assert "Traceback" not in result.err
    assert result.err.rstrip().endswith(lines[0])
    return lines[0]


def test_builds_once_then_says_that_it_is_up_to_date(run: Command, tiny_gemma3: Path, tmp_path: Path) -> None:
    first = run("build", tiny_gemma3, "-o", tmp_path / "bundle")
    second = run("build", tiny_gemma3, "-o", tmp_path / "bundle")
    assert (first.code, second.code) == (0, 0)
    assert f"built {tmp_path / 'bundle'}" in first.out
    assert "passed" in first.out
    assert "exporting to ONNX" in first.err
    assert "up to date" in second.out
    assert "exporting" not in second.err


def test_build_prints_json_and_nothing_else(run: Command, tiny_gemma3: Path, tmp_path: Path) -> None:
    result = run("build", tiny_gemma3, "-o", tmp_path / "bundle", "--max-images", 3, "--json")
    report = json.loads(result.out)
    assert report["bundle"] == str(tmp_path / "bundle")
    assert report["new"] == ["model.fp32.multihead.onnx"]
    assert report["manifest"]["limits"] == {"images": 3}
    assert result.err == ""


def test_sample_then_build_then_encode_by_the_models_name(run: Command, tmp_path: Path, picture: Path) -> None:
    assert run("sample", "gemma3", tmp_path / "model", "--seed", 5).code == 0
    assert run("build", tmp_path / "model").code == 0
    result = run("encode", tmp_path / "model", picture, picture, "-o", tmp_path / "features.npz", "--json")
    report = json.loads(result.out)
    assert [(row["tokens"], row["hidden"]) for row in report["images"]] == [(256, 64)] * 2
    arrays = np.load(tmp_path / "features.npz")
    assert arrays["image_0"].shape == (256, 64)
    assert np.array_equal(arrays["image_0"], arrays["image_1"])


def test_encode_says_where_it_ran(run: Command, tiny_gemma3_bundle: Bundle, picture: Path) -> None:
    result = run("encode", tiny_gemma3_bundle.path, picture, "--runtime", "onnxruntime", "--device", "cpu")
    assert result.code == 0
    assert "picture.png" in result.out
    assert "onnxruntime" in result.out


def test_inspect_shows_certificate_and_limits(run: Command, tiny_gemma3_bundle: Bundle) -> None:
    text = run("inspect", tiny_gemma3_bundle.path).out
    assert "onnxruntime fp32 (multihead attention): passed" in text
    assert "8 images in one run" in text
    manifest = json.loads(run("inspect", tiny_gemma3_bundle.path, "--json").out)
    assert manifest["family"] == "gemma3"


def test_verify_runs_the_engines_and_fails_on_a_wrong_one(
    run: Command, tiny_gemma3_bundle: Bundle, tmp_path: Path
) -> None:
    good = run("verify", tiny_gemma3_bundle.path, "--json")
    assert good.code == 0
    assert [engine["verdict"] for engine in json.loads(good.out)] == ["passed"]
    changed = shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "changed")
    _replace_reference(changed)
    bad = run("verify", changed)
    assert bad.code == 1
    assert "failed" in bad.out


def test_a_bit_that_a_program_flips_is_found_by_every_opening(
    run: Command, tiny_gemma3_bundle: Bundle, tmp_path: Path, picture: Path
) -> None:
    bundle = shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "flipped")
    assert run("encode", bundle, picture).code == 0  # now the index knows the files
    _flip_a_bit(bundle / "weights.fp32.bin")
    for command in (["encode", bundle, picture], ["verify", bundle], ["encode", bundle, picture], ["inspect", bundle]):
        assert "weights.fp32.bin is damaged: sha256 " in refused(run(*command))


def test_what_verify_finds_rotten_is_never_opened_again(
    run: Command,
    tiny_gemma3: Path,
    tiny_gemma3_bundle: Bundle,
    tmp_path: Path,
    picture: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from turbovit.engines import store
    from turbovit.engines.encoder import open_encoder
    from turbovit.lmdeploy_ext import load_vision_model
    from turbovit.lmdeploy_ext.doctor import diagnose

    bundle = shutil.copytree(tiny_gemma3_bundle.path, tmp_path / "rotten")
    assert run("encode", bundle, picture).code == 0
    as_written = {path: store._fingerprint(path) for path in bundle.rglob("*") if path.is_file()}
    rest = store._fingerprint
    monkeypatch.setattr(store, "_fingerprint", lambda path: as_written.get(path) or rest(path))
    names = ("weights.fp32.bin", "reference.safetensors")
    for name in names:  # nothing is written, as far as anyone sees
        _flip_a_bit(bundle / name)
    for command in (["verify", bundle], ["encode", bundle, picture]):
        line = refused(run(*command))
        assert all(name in line for name in names)
    for entry in (open_encoder, lambda path: load_vision_model(tiny_gemma3, bundle=path)):
        with pytest.raises(BundleError, match="is damaged: sha256 "):
            entry(bundle)
    monkeypatch.setenv("TURBOVIT_BUNDLE", str(bundle))
    assert any("is damaged: sha256 " in finding.detail for finding in diagnose(str(tiny_gemma3)))
    for name, still in zip(names, (True, False), strict=True):  # one repaired is not enough
        shutil.copy(tiny_gemma3_bundle.path / name, bundle)
        del as_written[bundle / name]
        assert (run("encode", bundle, picture).code == 2) == still
    assert run("verify", bundle).code == 0
    assert run("encode", bundle, picture).code == 0


def test_verify_encodes_an_image_with_what_runs_here(run: Command, tiny_gemma3: Path, tmp_path: Path) -> None:
    model = shutil.copytree(tiny_gemma3, tmp_path / "model")
    bundle = build(model, tmp_path / "bundle", runtimes=()).bundle
    without = run("verify", bundle.path)
    assert without.code == 1  # there is nothing that could pass
    assert "encoding an image with torch" in without.err
    shutil.rmtree(model)
    gone = run("verify", bundle.path)
    assert gone.code == 1
    assert "no image was encoded: no engine of it runs here, and the reference tower neither" in gone.err
    whole = run("verify", build(tiny_gemma3, tmp_path / "whole").bundle.path)
    assert whole.code == 0
    assert "encoding an image with onnxruntime" in whole.err


def test_nothing_to_do_is_no_error(run: Command, tiny_gemma3: Path, tiny_gemma3_bundle: Bundle) -> None:
    result = run("build", tiny_gemma3, "-o", tiny_gemma3_bundle.path)
    assert result.code == 0
    assert result.out.startswith("up to date, nothing to do:")


def test_doctor_names_what_turbomind_lacks(run: Command, tiny_gemma3: Path) -> None:
    result = run("doctor", tiny_gemma3, "--json")
    findings = {(row["section"], row["what"]): row["state"] for row in json.loads(result.out)}
    assert result.code == 0
    assert findings["model", "Gemma3ForConditionalGeneration"] == "have"
    language = "TurboMind language half"
    assert findings[language, "a language model for Gemma3ForConditionalGeneration"] == "missing"
    assert findings[language, "norms behind attention and feed-forward"] == "missing"
    assert findings[language, "features from Python at prompt positions"] == "have"
    assert run("doctor").code == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["build", "{tmp}/nowhere"], "there is no folder"),
        (["build", "not-an-id"], "no hub id"),
        (["build", "{model}", "--precision", "fp17"], "unknown precision 'fp17'"),
        (["build", "{model}", "--runtime", "abacus"], "unknown runtime 'abacus'"),
        (["build", "{model}", "--max-images", "0"], "at least 1"),
        (["build", "{model}", "--max-pixels", "9"], "no limit 'pixels'"),
        (["build", "{model}", "-o", "{bundle}", "--max-images", "2"], "holds another bundle"),
        (["sample", "gemma4", "{tmp}/x"], "unknown family 'gemma4'"),
        (["sample", "gemma3", "{tmp}/x", "--size", "vast"], "vast"),
        (["sample", "gemma3", "{model}"], "not empty"),
        (["verify", "{tmp}"], "not a turbovit bundle"),
        (["verify", "{bundle}", "--runtime", "tensorrt"], "no engine for 'tensorrt'"),
        (["inspect", "{tmp}"], "not a turbovit bundle"),
        (["encode", "{bundle}", "{tmp}/nothing.png"], "nothing.png"),
        (["encode", "{bundle}", "{text}"], "no known format"),
        (["encode", "{bundle}", "{text}", "--device", "abacus"], "unknown device 'abacus'"),
        (["encode", "{bundle}", "{text}", "--runtime", "abacus"], "unknown runtime 'abacus'"),
        (["doctor", "{tmp}/nowhere"], "there is no folder"),
        (["serve", "{tmp}/nowhere"], "there is no folder"),
        (["serve", "{model}", "--backend", "turbomind", "--tp", "2"], "it lacks a language model for Gemma3For"),
        (["serve", "{model}", "--backend", "abacus"], "unknown backend 'abacus'"),
        (["serve", "{model}", "--nonsense", "3"], "unrecognized arguments: --nonsense 3"),
        (["serve", "{model}", "--tp", "two"], "invalid int value: 'two'"),
        (["serve", "--tp", "2", "{model}"], "MODEL comes before the options of LMDeploy's server"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    run: Command, tiny_gemma3: Path, tiny_gemma3_bundle: Bundle, tmp_path: Path, arguments: list[str], message: str
) -> None:
    (tmp_path / "text.png").write_text("no picture")
    before = _listing(tmp_path)
    places = {"tmp": tmp_path, "model": tiny_gemma3, "bundle": tiny_gemma3_bundle.path, "text": tmp_path / "text.png"}
    line = refused(run(*(argument.format(**places) for argument in arguments)))
    assert message in line
    assert _listing(tmp_path) == before


@pytest.mark.parametrize("damage", ["architecture", "missing", "extra", "shape"])
def test_a_damaged_checkpoint_is_refused_and_nothing_is_written(
    run: Command, tiny_gemma3: Path, tmp_path: Path, damage: str
) -> None:
    model = shutil.copytree(tiny_gemma3, tmp_path / "model")
    if damage == "architecture":
        config = json.loads((model / "config.json").read_text()) | {"architectures": ["BertModel"]}
        (model / "config.json").write_text(json.dumps(config))
    else:
        tensors = load_file(model / "model.safetensors")
        name = "multi_modal_projector.mm_soft_emb_norm.weight"
        if damage == "missing":
            del tensors[name]
        elif damage == "extra":
            tensors["vision_tower.surprise"] = tensors[name].clone()
        else:
            tensors[name] = tensors[name][1:].clone()
        save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    line = refused(run("build", model, "-o", tmp_path / "out" / "bundle"))
    expected = {"architecture": "BertModel", "missing": "1 missing", "extra": "1 unknown", "shape": "of another shape"}
    assert expected[damage] in line
    assert not (tmp_path / "out").exists()


def test_an_unreadable_image_writes_no_features(
    run: Command, tiny_gemma3_bundle: Bundle, tmp_path: Path, picture: Path
) -> None:
    picture.with_name("cut.png").write_bytes(picture.read_bytes()[:-900])
    bundle = tiny_gemma3_bundle.path
    line = refused(run("encode", bundle, picture, picture.with_name("cut.png"), "-o", tmp_path / "f.npz"))
    assert "damaged or cut short" in line
    assert not (tmp_path / "f.npz").exists()


def test_features_that_cannot_be_written_are_one_line(
    run: Command, tiny_gemma3_bundle: Bundle, tmp_path: Path, picture: Path
) -> None:
    line = refused(run("encode", tiny_gemma3_bundle.path, picture, "-o", tmp_path / "nowhere" / "f.npz"))
    assert "cannot be written" in line


def test_text_in_errors_is_printed_as_it_is(run: Command, tmp_path: Path) -> None:
    assert ":0: [red]x[/]" in refused(run("doctor", ":0: [red]x[/]"))


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "turbovit", "--debug", "inspect", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert "Traceback" in result.stderr
    assert "BundleError" in result.stderr


def test_unknown_options_are_bad_usage(run: Command) -> None:
    assert run("build").code == 2
    assert run("--nonsense").code == 2
    assert run("--help").code == 0


def _listing(folder: Path) -> list[str]:
    return sorted(path.as_posix() for path in folder.rglob("*"))


def _flip_a_bit(path: Path) -> None:
    """In place, with the modification time kept."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(before.st_size // 2)
        byte = file.read(1)[0]
        file.seek(before.st_size // 2)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _replace_reference(folder: Path) -> None:
    """Turn the reference outputs of a bundle around, and make the manifest fit."""
    from dataclasses import replace

    from turbovit.engines.bundle import FileEntry, read_manifest, write_manifest
    from turbovit.engines.store import file_sha256

    manifest = read_manifest(folder)
    path = folder / manifest.reference
    tensors = {name: -value if ".output." in name else value for name, value in load_file(path).items()}
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(tensors, path, metadata=metadata)
    entry = FileEntry(path.stat().st_size, file_sha256(path))
    write_manifest(folder, replace(manifest, files=manifest.files | {manifest.reference: entry}))
