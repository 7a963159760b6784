"""The design: which models run which task. docs/evidence.md says which question each of them answers."""

from collections.abc import Sequence

from benchmarks.study.images import Images
from benchmarks.study.tasks import Copying, Recall, Sum, Task
from benchmarks.study.text import Distant, Language
from benchmarks.study.variants import VARIANTS, family

LEARNING_RATES = (1e-3, 3e-3, 1e-2)
GRID_SEED = 0  # of the runs that choose a learning rate, and of no other

_ELSEWHERE = ("axial", "linear-conv", "gate-selective-add", "block-selective-add")
_DELTA = [name for name in VARIANTS if name.startswith(("block-erase", "block-tied", "block-feature"))]
_HYBRIDS = ["block-hybrid", "block-hybrid-first"]
_ALL = [name for name in VARIANTS if not name.startswith(_ELSEWHERE)]
_BLOCKS = ["block", "block-quarter", "block-plain", "block-softmax", "block-softmax-quarter"]
_RECALL = ["linear-conv", "gate-conv", "gate-rope-conv", "gate-selective-conv"]
_MAPS = ["linear-conv-relu2", "linear-conv-hedgehog", "linear-conv-taylor2"]
_PARTS = [name for name in VARIANTS if name.startswith("gate-rope+")]
_STATE = ["softmax-rope", "gate-selective-add", "gate-selective", "gate-rope"]
_STATE += ["block", "block-quarter", "block-plain", "block-selective-add"]
_STATE += ["block-erase-2", *(name for name in _DELTA if name != "block-erase-2")]
_DISTANT = ["softmax-rope", "gate-rope", "hybrid", "linear-conv", "gate-conv", "gate-rope-conv", *_BLOCKS]
_COPY = ["softmax-rope", "gate-rope", "gate-rope-conv", "gate-conv", *_BLOCKS, *_DELTA, *_HYBRIDS]

# The first model of a family is the one with which the family's learning rate is chosen.
PLAN: list[tuple[Task, list[str]]] = [
    (Language("language"), _ALL),
    (
        Recall("recall-256", heads=16, head_dim=4),
        [
            *_RECALL,
            *_MAPS,
            "block",
            "block-quarter",
            "block-plain",
            *_DELTA,
            "gated-deltanet",
            "gated-deltanet+init",
        ],
    ),
    (Recall("recall-512", heads=8, head_dim=8), _RECALL),
    (Recall("recall-1024"), ["softmax-rope", "gate-rope", *_RECALL, *_PARTS, *_BLOCKS, "eq19+init"]),
    (Sum("parity", vocab_size=2, modulus=2), _STATE),
    (Sum("modulo-3", vocab_size=3, modulus=3), _STATE),
    (Copying("copying"), _COPY),
    (Distant("distant"), _DISTANT),
    (Images("images"), ["eq19", "linear", "axial", "axial-before"]),
]
# Only where it is asked for by name: it takes longer than all of the others together.
LONG = (
    Language("language-long", heads=8, head_dim=32, length=1024, rows=4, steps=300, layers=4, test_rows=16),
    ["softmax-rope", "gate-rope", "block", "block-quarter", "block-softmax", "mamba-2"],
)


def chosen(only: Sequence[str], scale: float) -> list[tuple[Task, list[str]]]:
    """The tasks and models to run: all, or those named; a name is that of a task or of a model.

    Raises:
        ValueError: an unknown name; scale not positive.
    """
    if not scale > 0:
        raise ValueError(f"scale={scale}: expected a positive number")
    plan = [*PLAN, *([LONG] if LONG[0].name in only else [])]
    tasks = {task.name for task, _ in [*PLAN, LONG]} & set(only)
    models = set(VARIANTS) & set(only)
    if unknown := sorted(set(only) - tasks - models):
        names = ", ".join([*(task.name for task, _ in [*PLAN, LONG]), *VARIANTS])
        raise ValueError(f"only: got {unknown}, expected names of {names}")
    return [
        (task.scaled(scale), [name for name in names if not models or name in models])
        for task, names in plan
        if not tasks or task.name in tasks
    ]


def representatives(task: Task, names: Sequence[str]) -> dict[str, str]:
    """By family the model that chooses its learning rate: the first of the whole plan, whatever is run."""
    every = next(models for other, models in [*PLAN, LONG] if other.name == task.name)
    first: dict[str, str] = {}
    for name in every:
        first.setdefault(family(name), name)
    return {family(name): first[family(name)] for name in names}
