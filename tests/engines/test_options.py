"""Options in Python: each family's `encode` takes those of its table, and refuses others with what there is."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from PIL import Image

from turbovit.engines.bundle import Bundle
from turbovit.engines.encoder import open_encoder
from turbovit.engines.errors import InputError
from turbovit.engines.families import FamilyRow, distinct_families, load
from turbovit.engines.options import ENCODE, LABELS

PICTURE = Image.new("RGB", (40, 30), (9, 8, 7))


@pytest.fixture(params=distinct_families(), ids=lambda row: row.name)
def row(request: pytest.FixtureRequest) -> FamilyRow:
    return request.param


def test_the_table_has_what_the_preprocessor_takes(row: FamilyRow) -> None:
    preprocessor = load(row.preprocessor)
    _, _, *taken = inspect.signature(preprocessor.pixels_from_image).parameters.values()
    assert [one.name for one in taken] == [one.path[1] for one in preprocessor.options if one.path[0] == ENCODE]
    assert preprocessor.options[: len(LABELS)] == LABELS
    paths = [option.path for option in preprocessor.options]
    assert len(paths) == len(set(paths))
    assert all(option.kind.accepts(option.example) for option in preprocessor.options)


@pytest.mark.parametrize("options", [{"max_pixels": 5}, {"do_pan_and_scan": 1}, {"cropping": "no"}, {"detail": "low"}])
def test_what_the_family_does_not_have_is_refused(
    options: dict[str, Any], row: FamilyRow, request: pytest.FixtureRequest
) -> None:
    bundle: Bundle = request.getfixturevalue(f"tiny_{row.name}_bundle")
    encoder = open_encoder(bundle, device="cpu")
    with pytest.raises(
        InputError, match=r"^encode(\['\w+'\] is .*, expected true or false| has '\w+', which )"
    ) as refusal:
        encoder.encode([PICTURE], **options)
    known = [option for option in encoder.preprocessor.options if option.path == (ENCODE, *options)]
    assert ("expected" in str(refusal.value)) == bool(known)


def test_none_is_the_default(row: FamilyRow, request: pytest.FixtureRequest) -> None:
    encoder = open_encoder(request.getfixturevalue(f"tiny_{row.name}_bundle"), device="cpu")
    (usual,) = encoder.encode([PICTURE])
    (result,) = encoder.encode([PICTURE], unknown=None)
    assert result.features.equal(usual.features)


def test_gemma3_cuts_crops_where_it_is_told_to(tiny_gemma3_bundle: Bundle) -> None:
    encoder = open_encoder(tiny_gemma3_bundle, device="cpu")
    picture = PICTURE.resize((900, 300))
    runs = [len(encoder.encode([picture], do_pan_and_scan=value)[0].runs) for value in (False, True, None)]
    assert runs == [1, 4, 1]
