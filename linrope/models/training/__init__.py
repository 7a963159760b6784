"""Trains a LanguageModel: texts, packed batches, steps, checkpoints, evaluation by position.

Everything that a step does is a function of (config, corpus, processes, step), so that a run resumed from a
checkpoint ends with the same bits as an uninterrupted run.
"""

from linrope.models.checkpoint_folders import checkpoints, latest_checkpoint
from linrope.models.training.config import TrainingConfig
from linrope.models.training.corpus import Corpus, Text
from linrope.models.training.evaluation import bits_by_position
from linrope.models.training.packing import pack
from linrope.models.training.trainer import Trainer

__all__ = [
    "Corpus",
    "Text",
    "Trainer",
    "TrainingConfig",
    "bits_by_position",
    "checkpoints",
    "latest_checkpoint",
    "pack",
]
