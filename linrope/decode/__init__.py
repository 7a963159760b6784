"""Decoding: steps of a model that are checked once, before the first token, and what is built on them."""

from linrope.decode.attention_step import prepare_attention
from linrope.decode.engine import Engine
from linrope.decode.generation import generate
from linrope.decode.preparation import prepare, why_not
from linrope.decode.request import Generation

__all__ = ["Engine", "Generation", "generate", "prepare", "prepare_attention", "why_not"]
