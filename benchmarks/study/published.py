"""What others published on their tasks, in per cent, and which of our models is of that kind."""

# Mamba-3, arXiv 2603.15569: parity, modular arithmetic without and with brackets; trained on up to 40 tokens, tested on
# 40 to 256; scaled accuracies
TRACKING = {
    "block-unrotated": ("Mamba-3 without rotation", (2.3, 1.5, 0.7)),
    "block-all-rotated": ("Mamba-3 with RoPE", (1.6, 20.7, 2.6)),
    "block-selective-add": ("Mamba-3", (100.0, 98.5, 87.8)),
    "block-tied-2-unrotated": ("Gated DeltaNet, b in (0, 2)", (100.0, 99.3, 93.5)),
}
# MAD, arXiv 2403.17844, and DeltaNet, arXiv 2406.06484: compression, fuzzy recall, recall, memorization, noisy recall,
# selective copying. MetaLA, arXiv 2411.10741, by its mean alone
MAD = {
    "transformer": (51.6, 29.8, 94.1, 85.2, 86.8, 99.6),
    "Multihead Hyena": (44.8, 14.4, 99.0, 89.4, 98.6, 93.0),
    "DeltaNet": (42.2, 35.7, 100.0, 52.8, 100.0, 100.0),
    "Mamba": (52.7, 6.7, 90.4, 89.5, 90.1, 86.3),
    "GLA": (38.8, 6.9, 80.8, 63.3, 81.6, 88.6),
}
METALA_MEAN = 74.0
NANO_GPT = 1.88  # nats per character, over 20 random batches of the validation part: nanoGPT's README
