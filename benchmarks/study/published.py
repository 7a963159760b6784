"""Results that others published on the study's tasks: shares of 1, or nats. They used other sizes and more steps."""

_MAMBA3 = (
    "Mamba-3 without rotation",
    "Mamba-3 with RoPE",
    "Mamba-3",
    "Gated DeltaNet with a gate in (0, 2)",
)
_MAD = ("transformer", "Multihead Hyena", "DeltaNet", "Mamba", "GLA")

# By task: who -> the first of the task's results
PUBLISHED: dict[str, dict[str, float]] = {
    # nanoGPT's README, over 20 random batches of the validation part
    "shakespeare-64": {"nanoGPT": 1.88},
    # arXiv 2603.15569
    "track-parity": dict(zip(_MAMBA3, (0.023, 0.016, 1.0, 1.0))),
    "track-arithmetic": dict(zip(_MAMBA3, (0.015, 0.207, 0.985, 0.993))),
    "track-brackets": dict(zip(_MAMBA3, (0.007, 0.026, 0.878, 0.935))),
    # arXiv 2406.06484, the mean over MAD's difficulties
    "mad-compress": dict(zip(_MAD, (0.516, 0.448, 0.422, 0.527, 0.388))),
    "mad-fuzzy-recall": dict(zip(_MAD, (0.298, 0.144, 0.357, 0.067, 0.069))),
    "mad-recall": dict(zip(_MAD, (0.941, 0.990, 1.0, 0.904, 0.808))),
    "mad-memorize": dict(zip(_MAD, (0.852, 0.894, 0.528, 0.895, 0.633))),
    "mad-noisy-recall": dict(zip(_MAD, (0.868, 0.986, 1.0, 0.901, 0.816))),
    "mad-copy": dict(zip(_MAD, (0.996, 0.930, 1.0, 0.863, 0.886))),
}
