"""Symptoms in everyday words, and the search of `distcheck explain "WORDS"`. Does not import torch.

A search compares stems of words. Synonyms have the same stem, and rare stems weigh more. The search
also covers causes: their names, descriptions and symptoms.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache

import msgspec

from distcheck.records.causes import causes, read_table

_STOP = """
a about after again all also am an and any are as at be been between but by can could did do does
every for from get gets give given gives got had has have how i if in into is it its just like me my
no not of on one only or our please set should so some than that the their them then there
these they this to too train trained training use used using very was we were what when where which
while why will with without would you your torch pytorch model issue bug error problem question help
wrong
"""
# Words of one row are equal; the first is their common form.
_EQUAL = """
rank ranks gpu gpus device devices worker workers process processes node nodes replica replicas
several multi multiple multigpu more many
differ different differs differently difference mismatch discrepancy inconsistent unequal versus vs
equal identical same duplicate duplicated duplication
resume resuming resumed restart restarting reload reloading restore restoring restored continue
checkpoint checkpoints ckpt checkpointing resume_from_checkpoint
hang hangs stuck freeze freezes frozen timeout deadlock blocked waits timed
jump jumps spike spikes increase increases higher explode explodes rise
drop drops worse lower degrade degrades degradation poor reduced decrease
accuracy performance metric ap map score converge convergence converges
gradient gradients grad grads
seed seeds manual_seed
reproducible reproduce reproducibility reproduced deterministic nondeterministic determinism
data dataset batch batches sample samples
average mean averaged averaging
scale scaled scaling factor multiplied times
sync synchronize synchronized synchronization synced unsynchronized
parameter parameters weight weights
lr learning_rate learningrate
scheduler schedule schedulers
clip clipping clipped clip_grad_norm
accumulation accumulate accumulated accumulating
batchnorm syncbatchnorm syncbn bn
allreduce all_reduce reduction
epoch epochs
large larger bigger big
norm norms
compile compiled compiling
upgrade upgrading update updating updated version
single one_gpu
fast faster quickly early
token tokens
adapter adapters lora peft
"""
_PHRASES = (("learning rate", "lr"), ("batch norm", "batchnorm"), ("all reduce", "allreduce"),
            ("all-reduce", "allreduce"), ("multi-gpu", "multi gpu"), ("cuda", "gpu"))  # fmt: skip
_SHARE = 0.35  # Heuristic: of the weight of the words that a match must have
_MOST_ROWS = 3


class Symptom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A symptom, the commands that examine it, in order, and causes that these commands can
    name.
    """

    text: str
    also: str
    commands: tuple[str, ...] = ("distcheck job -- COMMAND",)
    causes: tuple[str, ...]
    page: str = "jobs.md"


@cache
def symptoms() -> Mapping[str, Symptom]:
    table = read_table("symptoms")
    return {text: msgspec.convert({**one, "text": text}, Symptom) for text, one in table.items()}


def _stem(word: str) -> str:
    for end in ("ations", "ation", "ing", "ies", "ed", "es", "ly", "s", "e"):
        if word.endswith(end) and len(word) - len(end) >= 3:
            return word.removesuffix(end)
    return word


@cache
def _equal() -> Mapping[str, str]:
    rows = [row.split() for row in _EQUAL.strip().splitlines()]
    return {_stem(word): _stem(row[0]) for row in rows for word in row}


def stems(text: str) -> list[str]:
    """Return the stems of a text's words; synonyms have the same stem."""
    text = text.lower()
    for phrase, word in _PHRASES:
        text = text.replace(phrase, word)
    words = re.findall(r"[a-z][a-z0-9]+", text.replace("_", " "))
    found = [_stem(word) for word in words if word not in _STOP.split()]
    return [_equal().get(stem, stem) for stem in found]


@cache
def _documents() -> Mapping[str, Mapping[str, float]]:
    """Return the stems of each symptom and cause by its name, with the weight of the place."""
    found: dict[str, dict[str, float]] = {}
    for one in symptoms().values():
        found[one.text] = {
            **dict.fromkeys(stems(one.also), 1.0),
            **dict.fromkeys(stems(one.text), 2.0),
        }
    for name, cause in causes().items():
        rest = stems(" ".join((cause.what, *cause.when)))
        found[name] = {**dict.fromkeys(rest, 0.7), **dict.fromkeys(stems(name), 1.2)}
    return found


@cache
def _rarity() -> Mapping[str, float]:
    documents = _documents()
    times = Counter(stem for one in documents.values() for stem in one)
    return {stem: math.log(1 + len(documents) / number) for stem, number in times.items()}


def search(words: str) -> tuple[list[Symptom], list[str]]:
    """Return the matching symptoms and causes, best first; empty lists if nothing matches."""
    scores, rarity, table = _scores(words), _rarity(), symptoms()
    unknown = max(rarity.values())
    enough = _SHARE * sum(rarity.get(stem, unknown) for stem in set(stems(words)))
    enough = max(enough, max(scores.values()) / 2, 1e-9)
    close = [name for name, score in scores.items() if score >= enough]
    found = [table[name] for name in close if name in table]
    return found[:_MOST_ROWS], [name for name in close if name not in table][:_MOST_ROWS]


def closest(words: str) -> list[str]:
    """Return the five closest symptoms, compared by letters if no word matches."""
    scores = _scores(words)
    alike = {
        text: SequenceMatcher(None, words.lower(), text.lower()).ratio() for text in symptoms()
    }
    return sorted(alike, key=lambda text: (-scores[text], -alike[text]))[:5]


def _scores(words: str) -> dict[str, float]:
    wanted, rarity = set(stems(words)), _rarity()
    scores = {
        name: sum(place * rarity[stem] for stem, place in one.items() if stem in wanted)
        for name, one in _documents().items()
    }
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))
