"""Tasks with an answer: a pass key in a novel or among repeated sentences, a value in a list."""

from __future__ import annotations

import random
from itertools import product

from vllm_kvretrieval.calibration.needles import INTRO, QUESTION, ask, key_of, needle_of, sample_of
from vllm_kvretrieval.calibration.samples import Sample, TokenText, blind_positions, prompt_length

_SENTENCES = (
    "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
)
COLOURS = (
    "alpha amber azure bold brave calm cedar clear copper coral crystal dusty early ember fancy "
    "gentle golden grand happy hidden ivory jolly lemon little lunar maple misty noble olive pearl"
).split()
PLACES = (
    "arrow bridge canyon castle cloud falcon forest garden harbor island lantern meadow mirror "
    "mountain ocean orchard palace river rocket shadow spring stone temple tiger tower valley wagon"
).split()


def passkey_in_sentences(text: TokenText, context: int, count: int) -> list[Sample]:
    """Hide a five-digit pass key among sentences that repeat: easy enough for a tiny model."""
    samples = []
    length = prompt_length(context)
    filler = text.encode(_SENTENCES)
    for index in range(count):
        key = key_of(random.Random(f"sentences {context} {index}"))
        needle = text.encode(needle_of(key).strip() + "\n")
        intro = text.prefix + text.encode(INTRO)
        question, lead = ask(text, f"\n\n{QUESTION}", " The pass key is ", key)
        room = length - len(intro) - len(needle) - len(question)
        depth = blind_positions(length, len(needle), count)[index] - len(intro)
        place = depth // len(filler) * len(filler)
        novel = (filler * (room // len(filler) + 1))[:room]
        document = intro + novel[:place] + needle + novel[place:]
        samples.append(sample_of(text, document, question, lead, key))
    return samples


def key_value_lookup(text: TokenText, context: int, count: int) -> list[Sample]:
    """Ask for one value out of a context full of lines "The value of coral-tower is 48213."."""
    samples = []
    length = prompt_length(context)
    for index in range(count):
        rng = random.Random(f"lookup {context} {index}")
        names = ["-".join(pair) for pair in product(COLOURS, PLACES)]
        rng.shuffle(names)
        depth = blind_positions(length, 32, count)[index]
        intro = text.prefix + text.encode("Remember the value of every name in this list.\n\n")
        document, asked = list(intro), ("", "")
        question: list[int] = []
        lead: list[int] = []
        for name in names:
            value = key_of(rng)
            line = text.encode(f"The value of {name} is {value}.\n")
            if not asked[0] and len(document) >= depth:
                asked = (name, value)
                question, lead = ask(
                    text, f"\nWhat is the value of {name}?", f" The value of {name} is ", value
                )
            if asked[0] and len(document) + len(line) + len(question) > length:
                break
            document += line
        samples.append(sample_of(text, document, question, lead, asked[1]))
    return samples
