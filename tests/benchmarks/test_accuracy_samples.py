"""Samples of the accuracy benchmark: what they hide, and what they force."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks import texts
from benchmarks.quality.tasks import forced, needles
from tests.support.byte_text import byte_text
from vllm_kvretrieval.calibration.forcing import FORCED_TOKENS, ForceTokens
from vllm_kvretrieval.calibration.needles import passkey_in_text
from vllm_kvretrieval.calibration.samples import (
    BLIND_HEAD,
    BLIND_TAIL,
    TokenText,
    blind_positions,
    prompt_length,
)


@pytest.fixture(scope="module")
def text() -> TokenText:
    return byte_text()


@pytest.mark.parametrize(
    "build", [passkey_in_text, needles.passkey_in_sentences, needles.key_value_lookup]
)
def test_needles_are_hidden_from_sinks_and_window(text, build):
    context, count = 4096, 5
    for sample in build(text, context, count):
        prompt = text.tokenizer.decode(sample.prompt)
        assert len(sample.prompt) <= prompt_length(context)
        if build is not needles.key_value_lookup:
            assert len(sample.prompt) == prompt_length(context)
        assert prompt.index(sample.answer) >= BLIND_HEAD - 100  # it may move between paragraphs
        assert prompt.rindex(sample.answer) < len(prompt) - BLIND_TAIL + 100
        assert text.tokenizer.decode(sample.forced).endswith(" is ")
        assert sample.answer_tokens == len(sample.answer)
        assert prompt.endswith("?")


def test_needle_samples_differ_and_are_reproducible(text):
    first = passkey_in_text(text, 4096, 4)
    assert len({sample.answer for sample in first}) == 4
    assert first == passkey_in_text(text, 4096, 4)


def test_second_copy_forces_what_stands_in_the_prompt(text):
    for sample in forced.second_copy(text, 2048, 6):
        passage = sample.forced[2:]
        assert len(passage) == forced.COPY_TOKENS
        place = blind_positions(len(sample.prompt), forced.COPY_TOKENS, forced.COPIES)
        assert passage in [sample.prompt[i : i + forced.COPY_TOKENS] for i in place]
        assert sample.scored == [*range(2 + forced.COPY_CUE, 2 + forced.COPY_TOKENS)]


@pytest.mark.parametrize("build", [forced.turns, forced.alike])
def test_turns_ask_for_what_stands_in_the_prompt(text, build):
    """Each answer stands once in the document, behind what asks for it; none is near its end."""
    samples = build(text, 4096, 3)
    assert len({sample.forced for sample in samples}) == 3
    for sample in samples:
        assert len(sample.prompt) == prompt_length(4096)
        asked = sample.prompt + sample.forced
        answers, document = [], text.tokenizer.decode(sample.prompt)
        for begin, end in sample.turns:
            answer = text.tokenizer.decode(
                asked[len(sample.prompt) + begin - 1 :][: end - begin + 1]
            )
            before = text.tokenizer.decode(asked[: len(sample.prompt) + begin - 1])[-12:]
            assert document.count(before + answer) == 1
            assert BLIND_HEAD <= document.index(answer) < len(document) - BLIND_TAIL
            answers.append(answer)
        assert len(set(answers)) == forced.TURNS
        lengths = {end - begin for begin, end in sample.turns}
        assert lengths == {forced.TURN_TOKENS - forced.COPY_CUE - 1}


def test_novel_forces_its_own_continuation(text):
    prose = "".join(f"{paragraph}\n\n" for paragraph in texts.paragraphs())
    for sample in forced.novel(text, 2048, 3):
        assert text.tokenizer.decode(sample.prompt + sample.forced) in prose


def test_a_long_generation_is_scored_in_parts(text):
    prose = "".join(f"{paragraph}\n\n" for paragraph in texts.paragraphs())
    for sample in forced.generation(text, 768 + forced.GENERATED, 2):
        assert text.tokenizer.decode(sample.prompt + sample.forced) in prose
        assert len(sample.prompt) == prompt_length(768)
        assert sample.scored == [*range(1, len(sample.forced))]
        assert len(sample.scored) == forced.GENERATED
        assert len(sample.turns) == forced.STRETCHES


def test_a_context_without_room_is_refused():
    with pytest.raises(ValueError, match="take a longer context"):
        blind_positions(1200, 80, 4)


def test_forcing_leaves_one_token_then_lets_go():
    processor = ForceTokens(SimpleNamespace(), torch.device("cpu"), False)
    params = SimpleNamespace(extra_args={FORCED_TOKENS: [3, 1]})
    force = processor.new_req_logits_processor(params)
    assert force is not None
    logits = torch.arange(5.0)
    assert force([], logits.clone()).argmax() == 3
    assert force([3], logits.clone()).argmax() == 1
    assert torch.equal(force([3, 1], logits.clone()), logits)
    assert processor.new_req_logits_processor(SimpleNamespace(extra_args=None)) is None
