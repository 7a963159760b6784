"""From text to tokens and back, token by token."""

import codecs
import reprlib
from collections.abc import Sequence
from typing import Any

# Tokens of the prompt on which the first generated token's text may depend, as a leading space does
_CONTEXT = 5
_LONGEST_CHARACTER = 8  # more tokens than this without a whole character are no text


def encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    """The text's tokens; special: with those that the tokenizer puts in front of a text. Without a tokenizer: bytes."""
    if tokenizer is None:
        return list(text.encode())
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=special)
    return tokens[:-1] if special and tokens[-1:] == [tokenizer.eos_token_id] else tokens


def check_tokens(name: str, x: object, vocab_size: int = 2**63) -> None:
    """Raises TypeError or ValueError unless x is a list of a model's tokens."""
    if not isinstance(x, list) or not all(type(token) is int for token in x):
        raise TypeError(
            f"{name}: got {reprlib.repr(x)}, expected a list of tokens, such as engine.encode(text)"
        )
    if x and not (min(x) >= 0 and max(x) < vocab_size):
        raise ValueError(f"{name}: got {reprlib.repr(x)}, expected tokens 0 .. {vocab_size - 1}")


class Decoder:
    """Turns tokens into the bytes of their text. A token whose text depends on the next ones waits for these.

    Only the tokens of the last piece of text and those after it are decoded again, so that the cost of a token does not
    grow with the text.

    Args:
        tokenizer: of transformers; None: tokens are bytes.
        before: the tokens before the first one.
    """

    def __init__(self, tokenizer: Any, before: Sequence[int]) -> None:
        self.tokenizer, self.tokens = tokenizer, list(before[-_CONTEXT:])
        self.old = len(self.tokens)  # how many of the tokens have given their text

    def add(self, tokens: list[int], last: bool) -> bytes:
        """Returns the bytes that these tokens add; last: with those of the tokens that wait."""
        if self.tokenizer is None:
            return bytes(tokens)
        self.tokens += tokens
        before, text = self._decode(self.tokens[: self.old]), self._decode(self.tokens)
        waiting = len(self.tokens) - self.old
        whole = len(text) > len(before) and not text.endswith("\ufffd")
        if not (whole or last or waiting > _LONGEST_CHARACTER):
            return b""
        self.tokens, self.old = self.tokens[self.old :], waiting
        return text[len(before) :].encode()

    def _decode(self, tokens: list[int]) -> str:
        text: str = self.tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text


class TextStream:
    """Turns bytes into text to send: whole characters, and nothing that may begin a stop sequence."""

    def __init__(self, stops: list[bytes]) -> None:
        self.stops, self.held = stops, b""
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, byte: int) -> tuple[str, bool]:
        """Returns the text that can be sent now, and whether a stop sequence ended it."""
        if not self.stops:
            return self.decoder.decode(bytes([byte])), False
        self.held += bytes([byte])
        if complete := [len(stop) for stop in self.stops if self.held.endswith(stop)]:
            self.held = self.held[: -max(complete)]
            return self.end(), True
        begun = (n for stop in self.stops for n in range(1, len(stop)) if self.held.endswith(stop[:n]))
        cut = len(self.held) - max(begun, default=0)
        ready, self.held = self.held[:cut], self.held[cut:]
        return self.decoder.decode(ready), False

    def end(self) -> str:
        """Returns the rest. Half a character becomes a replacement character."""
        return self.decoder.decode(self.held, final=True)
