"""The design: which models run which task.

docs/evidence_tables.md describes the tasks and the models, and docs/evidence.md says which questions they answer.
"""

import fnmatch
from collections.abc import Sequence

from benchmarks.study import peers
from benchmarks.study.images import Images
from benchmarks.study.mad import Compression, FuzzyRecall, InContextRecall, Memorization, SelectiveCopying
from benchmarks.study.shakespeare import Shakespeare
from benchmarks.study.tasks import Copying, LongCopying, Recall, Task
from benchmarks.study.text import Distant, Doubled, EqualTime, Language, Larger
from benchmarks.study.tracking import Arithmetic, Brackets, Parity
from benchmarks.study.variants import VARIANTS, family

GRID_SEED = 0  # of the runs that choose a learning rate, and of no other

_BLOCKS = ["block-all-rotated", "block", "block-unrotated", "block-softmax-all-rotated", "block-softmax"]
_PARTS = [name for name in VARIANTS if name.startswith("gate-rope+")]
_OF_SPREAD = [
    name for name in VARIANTS if name.startswith("spread-")
]  # with other maps, and without rotation
_CHANGES = ["block-identity", "block-no-conv", "block-no-skip"]
_DELTA = ["block-erase", "block-erase-elu", "block-erase-elu-half", "block-erase-2-elu"]
_KIMI = ["block-kimi", "block-kimi-large"]
_HYBRIDS = ["block-hybrid", "block-hybrid-first"]
_DELTA_PEERS = ["gated-deltanet", "kimi-linear"]

# The first model of a family is the one with which the family's learning rate is chosen.
PLAN: list[tuple[Task, list[str]]] = [
    (
        Language("language"),
        [
            *("softmax-rope", "eq19", "linear", "rope-before", "eq19-normalizer"),
            *("spread", "retnet", "learned", *_OF_SPREAD, "gate-rope", "gate", *_PARTS),
            *("softmax-rope+init", "eq19+init", "spread+init", *_BLOCKS, *_CHANGES),
            *("block-mixers-all-rotated", "block-mixers", "block-hybrid", "block-feature", *_DELTA),
            *("block-erase-elu-unrotated", "block-tied-2", "block-feature-tied-2", "block-feature-erase-2"),
            *(name for name in peers.PEERS if name != "gpt-2"),  # it cannot read beyond the trained length
        ],
    ),
    (EqualTime("language-equal-time"), ["block"]),
    (
        Recall("recall-256", heads=16, head_dim=4),
        [
            *("block-all-rotated", "block", "block-unrotated", "block-feature", "block-hybrid"),
            *(*_DELTA, *_KIMI, "block-feature-erase-2", "mamba-2", *_DELTA_PEERS, "block-softmax"),
        ],
    ),
    (Recall("recall-1024"), ["softmax-rope", "gate-rope", *_PARTS, *_BLOCKS, "eq19+init"]),
    (
        Copying("copying"),
        [
            *("softmax-rope", *_BLOCKS, *_HYBRIDS, "block-feature", *_DELTA, *_KIMI, "block-kimi-slow"),
            *("mamba-2", *_DELTA_PEERS),
        ],
    ),
    (LongCopying("copying-1800"), ["block", "block-hybrid-first"]),
    (Distant("distant"), ["softmax-rope", *_BLOCKS, "block-hybrid", "block-erase-elu", "mamba-2"]),
    (Images("images"), ["eq19", "linear", "axial", "axial-before"]),
]
_ROTATION_AND_ERASE = ["block-unrotated", "block-all-rotated", "block-selective-add"]
_ROTATION_AND_ERASE += ["block-tied-2-unrotated", "block-tied-2-selective-add"]
_MAD = ["softmax-rope+init", "eq19+init", "block", "block-feature", "block-selective-add", "block-hybrid"]
_MAD += ["block-erase-elu", "gated-deltanet"]
# Only where they are asked for by name: they take longer than all of the others together.
_LARGER = ["block-all-rotated", "block", "block-softmax-all-rotated", "mamba-2", "gated-deltanet"]
LONG: list[tuple[Task, list[str]]] = [
    (Larger("language-long"), _LARGER),
    (Doubled("language-long-600"), _LARGER[1:]),
    (Parity("track-parity"), _ROTATION_AND_ERASE),
    (Arithmetic("track-arithmetic"), _ROTATION_AND_ERASE),
    (Brackets("track-brackets"), _ROTATION_AND_ERASE),
    (Shakespeare("shakespeare-64"), ["gpt-2", "block"]),
    (Shakespeare("shakespeare-512", length=512, rows=2, steps=1500), ["gpt-2", "softmax-rope"]),
    (Shakespeare("shakespeare-512-equal-time", length=512, rows=2, steps=2110), ["block"]),
    (Compression("mad-compress"), _MAD),
    (FuzzyRecall("mad-fuzzy-recall"), _MAD),
    (InContextRecall("mad-recall"), _MAD),
    (Memorization("mad-memorize"), _MAD),
    (InContextRecall("mad-noisy-recall", vocab_size=32, noise=0.2, noise_symbols=16), _MAD),
    (SelectiveCopying("mad-copy"), _MAD),
]


def chosen(only: Sequence[str], scale: float) -> list[tuple[Task, list[str]]]:
    """The tasks and models to run: all, or those with these names, in which * stands for anything.

    Raises:
        ValueError: an unknown name; scale not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale={scale}: expected a positive number")
    every = [*(task.name for task, _ in [*PLAN, *LONG]), *VARIANTS]
    if unknown := sorted(pattern for pattern in only if not fnmatch.filter(every, pattern)):
        raise ValueError(f"only: got {unknown}, expected names of {', '.join(every)}")
    named = {name for pattern in only for name in fnmatch.filter(every, pattern)}
    models, tasks = named & set(VARIANTS), named - set(VARIANTS)
    plan = [*PLAN, *((task, names) for task, names in LONG if task.name in tasks)]
    return [
        (task.scaled(scale), [name for name in names if not models or name in models])
        for task, names in plan
        if not tasks or task.name in tasks
    ]


def representatives(task: Task, names: Sequence[str]) -> dict[str, str]:
    """By family the model that chooses its learning rate: the first of the whole plan, whatever is run."""
    name = task.rate_task().name
    every = next(models for other, models in [*PLAN, *LONG] if other.name == name)
    first: dict[str, str] = {}
    for name in every:
        first.setdefault(family(name), name)
    return {family(name): first[family(name)] for name in names}
