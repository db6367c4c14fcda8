"""Symptoms in everyday words, and the search of `distcheck explain "WORDS"`. Does not import torch.

A search compares stems of words. Synonyms have the same stem, and rare stems weigh more. The search
also covers causes: their names, descriptions and symptoms.
"""

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping
from difflib import SequenceMatcher
from functools import cache

import msgspec

from distcheck.records.causes import causes, read_table

_STOP = """
a about across actually after again all also always am an and any are as at be been between bug but
by can correctly could did do does doesn don during error even ever every expected fail failed
failing fails for from get gets give given gives got had has have help how i if in into is issue it
its just like me model my never no not observe observed of on one only or other others our out
please problem properly pytorch question really see seen sees set setting settings should so some
still than that the their them then there these they this to too torch train trained training tries
try trying under unexpected use used using very via was we well were what when where which while why
will with without work working works would wrong you your
"""
# Words of one row are equal; the first is their common form.
_EQUAL = """
rank ranks gpu gpus device devices worker workers process processes node nodes replica replicas
rank several multi multiple multigpu more many distributed ddp dp distributeddataparallel
differ different differs differently difference mismatch discrepancy inconsistent unequal versus vs
equal identical same duplicate duplicated duplication distinct diverse diversity twice repeated
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
scale scaled scaling factor multiply multiplied times
sync synchronize synchronized synchronization synced unsynchronized
parameter parameters param params weight weights
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
random randomness np numpy rng
augmentation augmentations augment transforms
sum sums summed summing
diverge diverges diverged drift drifts
"""
_PHRASES = tuple(
    (phrase, word)
    for word, phrases in {
        "lr": ("learning rate",), "batchnorm": ("batch norm",), "parallel": ("parallelism",),
        "allreduce": ("all reduce", "all-reduce"), "ddp": ("data parallel", "data-parallel"),
        "multi gpu": ("multi-gpu", ">1 gpu"), "single gpu": ("one gpu", "1 gpu"),
        "timeout": ("timing out", "timed out", "times out", "time out"),
        "activation": ("utils.checkpoint", "activation checkpoint", "gradient checkpoint"),
    }.items()
    for phrase in phrases
)  # fmt: skip
# Three numbers, or two after the name of a library, are a release.
_RELEASE = re.compile(
    r"\b((torch|transformers|cuda|nccl|accelerate|lightning|deepspeed)\W{0,3}\d+\.\d+|v?\d+\.\d+\.\d+)\b"
)
_SHARE = 0.25  # Heuristic: of the weight of the words that a match must have
_LEAST = 2  # Heuristic: different words that a match must have, if there are as many
_MOST_ROWS = 3


class Symptom(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A symptom, the commands that examine it, in order, and causes that they can name."""

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
    return re.sub(r"(?<=\w{3})(ations?|[ae]nces?|ness|ing|ies|ed|es|ly|(?<!s)s|e)$", "", word)


@cache
def _equal() -> Mapping[str, str]:
    rows = [row.split() for row in _EQUAL.strip().splitlines()]
    return {_stem(word): _stem(row[0]) for row in rows for word in row}


def stems(text: str) -> list[str]:
    """Return the stems of a text's words; synonyms have the same stem."""
    text = text.lower().replace("_", " ")
    for phrase, word in _PHRASES:
        text = text.replace(phrase, word)
    text = _RELEASE.sub(" version ", text)
    words = re.findall(r"[a-z]{4,}(?=\d\b)|[a-z][a-z0-9]+", text)
    found = [_stem(word) for word in words if word not in _STOP.split()]
    return [_equal().get(stem, stem) for stem in found]


@cache
def _documents() -> Mapping[str, Mapping[str, float]]:
    """Return the stems of each symptom and cause by its name, with the weight of the place."""
    found: dict[str, dict[str, float]] = {}
    for one in symptoms().values():
        found[one.text] = {
            **dict.fromkeys(stems(one.also), 1.0),
            **dict.fromkeys(stems(one.text), 1.5),
        }
    for name, cause in causes().items():
        rest = stems(" ".join((cause.what, *cause.when)))
        found[name] = {**dict.fromkeys(rest, 0.7), **dict.fromkeys(stems(name), 1.2)}
    return found


@cache
def _rarity() -> Mapping[str, float]:
    """Return the rarity of each stem among symptoms, and among causes if no symptom has it."""
    found: dict[str, float] = {}
    for table in (causes(), symptoms()):
        times = Counter(stem for name in table for stem in _documents()[name])
        found |= {stem: math.log(1 + len(table) / number) for stem, number in times.items()}
    return found


def search_symptoms(words: str) -> tuple[list[Symptom], list[str]]:
    """Return the matching symptoms and causes, best first; empty lists if nothing matches."""
    scores, rarity, table = _scores(words), _rarity(), symptoms()
    unknown = statistics.fmean(rarity.values())
    enough = _SHARE * sum(rarity.get(stem, unknown) for stem in set(stems(words)))
    enough = max(enough, max(scores.values()) / 2, 1e-9)
    close = [name for name, score in scores.items() if score >= enough]
    found = [table[name] for name in close if name in table]
    return found[:_MOST_ROWS], [name for name in close if name not in table][:_MOST_ROWS]


def closest_symptoms(words: str) -> list[str]:
    """Return the five closest symptoms, compared by letters if no word matches."""
    scores = _scores(words)
    alike = {
        text: SequenceMatcher(None, words.lower(), text.lower()).ratio() for text in symptoms()
    }
    return sorted(alike, key=lambda text: (-scores[text], -alike[text]))[:5]


def _scores(words: str) -> dict[str, float]:
    wanted, rarity = set(stems(words)), _rarity()
    least = min(_LEAST, len(wanted))
    scores = {
        name: sum(one[stem] * rarity[stem] for stem in found) if len(found) >= least else 0.0
        for name, one in _documents().items()
        for found in [wanted & one.keys()]
    }
    return dict(sorted(scores.items(), key=lambda pair: -pair[1]))
