"""The bounds on DeepSeek-VL2's logits are sharp: each mistake in our language half misses the overall one."""

from __future__ import annotations

import pytest
import torch
from turbomind_cpu.agreement import BOUND, agreement
from turbomind_cpu.rig import Answer, Job, Request, Rig

from turbovit.benchmarks.agreement import Agreement
from turbovit.benchmarks.reference_deepseek_vl2 import DeepseekVL2Reference
from turbovit.export.samples import write_sample

RIGHT = ""
# By language half: the mistakes in it.
CONTROLS = {
    "mha": (RIGHT, "no_rope_reordering", "no_shared_expert", "gate_and_up_swapped", "experts_reversed"),
    "mla": (
        *(RIGHT, "wrong_softmax_scale", "output_projection_padded_behind", "rope_of_latents_reordered"),
        "no_shared_expert",
    ),
    "base": (RIGHT, "no_correction_bias", "experts_reversed", "no_shared_expert"),
}
NAMES = [(language, name) for language, names in CONTROLS.items() for name in names]
PROMPT = torch.randint(3, 900, (37,), generator=torch.Generator().manual_seed(1)).tolist()


@pytest.fixture(scope="module")
def found(cpu_rig: Rig, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Agreement]:
    folder = tmp_path_factory.mktemp("controls")
    for language in CONTROLS:
        write_sample("deepseek_vl2", folder / language, language=language)
    controls = "turbomind_cpu.deepseek_vl2_controls:"
    asked = [[Request(PROMPT, logits=True)]]
    jobs = [Job(folder / language, asked, within=f"{controls}{name}" if name else None) for language, name in NAMES]
    answers = cpu_rig.generate(jobs, prepare=["turbovit.lmdeploy_ext.plugin:install"])
    references = {language: DeepseekVL2Reference(folder / language) for language in CONTROLS}
    return {
        (language, name): compared(references[language], rounds[0][0])
        for (language, name), rounds in zip(NAMES, answers, strict=True)
    }


def compared(reference: DeepseekVL2Reference, answer: Answer) -> Agreement:
    ids = torch.tensor([[*PROMPT, *answer.tokens[:-1]]])
    with torch.inference_mode():
        expected = reference.language(ids).logits[0]
    return agreement(answer, expected)


@pytest.mark.parametrize(("language", "name"), NAMES)
def test_a_mistake_misses_the_bound_and_its_absence_does_not(
    language: str, name: str, found: dict[tuple[str, str], Agreement]
) -> None:
    if name == RIGHT:
        assert found[language, name].holds, found[language, name]
    else:
        assert found[language, name].overall > 1.5 * BOUND
