"""The name of the cache in transformers: ``cache``, or ``past_key_values`` before transformers 5.24."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from typing import Any

from torch import Tensor
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

NAMES = ("cache", "past_key_values")
# The name in the installed transformers, by which generate() passes the cache on and outputs return it.
CACHE = next(name for name in NAMES if name in {field.name for field in fields(BaseModelOutputWithPast)})


def either_cache_name(name: str) -> Callable[[Callable[..., Any]], Any]:
    """Decorates a method that takes the cache as ``name``: callers may use either of NAMES.

    The signature shows the installed transformers' name, by which other libraries look for the cache.
    """

    def decorate(method: Callable[..., Any]) -> Any:
        @wraps(method)
        def call(*arguments: Any, **options: Any) -> Any:
            given = [options.pop(x) for x in NAMES if x in options]
            given = [cache for cache in given if cache is not None]
            if len(given) == 2:
                raise ValueError(
                    f"{', '.join(NAMES)}: got both, expected one: they are two names of one argument"
                )
            if given:
                options[name] = given[0]
            return method(*arguments, **options)

        signature = inspect.signature(method)
        renamed = [x.replace(name=CACHE) if x.name == name else x for x in signature.parameters.values()]
        call.__signature__ = signature.replace(parameters=renamed)  # type: ignore[attr-defined]
        return call

    return decorate


@dataclass
class BaseOutput(BaseModelOutputWithPast):
    """transformers' output, whose ``cache`` has this name in older versions too."""

    @classmethod
    def of(cls, last_hidden_state: Tensor, cache: Any) -> "BaseOutput":
        named: dict[str, Any] = {CACHE: cache}
        return cls(last_hidden_state=last_hidden_state, **named)


@dataclass
class CausalLMOutput(CausalLMOutputWithPast):
    """transformers' output, whose ``cache`` has this name in older versions too."""


if CACHE != "cache":
    for kind in (BaseOutput, CausalLMOutput):
        setattr(kind, NAMES[0], property(lambda output: getattr(output, CACHE)))
