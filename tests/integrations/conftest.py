"""What all tests of this folder share."""

from collections.abc import Iterator

import pytest
import transformers
from packaging.version import Version

from linrope.integrations import transformers as linrope_transformers
from linrope.integrations.transformers import families


@pytest.fixture(autouse=True)
def put_back() -> Iterator[None]:
    transformers.logging.set_verbosity_error()  # its fallback says that it is slow
    yield
    linrope_transformers.disable()
    families.say_once.cache_clear()


@pytest.fixture
def falcon_h1_has_a_cache() -> bool:
    """False: the installed transformers' own Falcon-H1 with a cache raises."""
    return Version(transformers.__version__) >= Version("5.23")
