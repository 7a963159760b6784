"""The fixtures with which the tests of the commands run one."""

from tests.cli.conftest import refused as refused
from tests.cli.conftest import run as run
from tests.cli.conftest import text as text
