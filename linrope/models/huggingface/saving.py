"""What lies in a saved folder beside config and weights: how to load it, for people and for transformers."""

from pathlib import Path

CODE_FILE = "linrope_models.py"

# Transformers' Auto classes, and the class of linrope that each makes
AUTO_MAP = {
    "AutoConfig": "LinRopeConfig",
    "AutoModel": "LinRopeModel",
    "AutoModelForCausalLM": "LinRopeForCausalLM",
    "AutoModelForMaskedLM": "LinRopeForMaskedLM",
    "AutoModelForQuestionAnswering": "LinRopeForQuestionAnswering",
    "AutoModelForSequenceClassification": "LinRopeForSequenceClassification",
    "AutoModelForTokenClassification": "LinRopeForTokenClassification",
}

# The module that config.json's auto_map names: with trust_remote_code=True transformers imports it, and with
# it linrope, which has to be installed.
CODE = f'''"""Classes of this model: they are linrope's own, and nothing else is run from this folder."""

from linrope.models.huggingface import {", ".join(sorted(AUTO_MAP.values()))}
'''

_CARD = """---
library_name: transformers
tags: [linrope, linear-attention]
---
# {kind}

Linear attention with rotary position embedding on the feature maps (RoFormer eq. 19), by the package linrope,
which has to be installed with its extra `huggingface`:

```python
import linrope.models.huggingface  # registers the model with transformers' Auto classes
from transformers import {auto}

model = {auto}.from_pretrained("path of this folder")
```

Without that import `trust_remote_code=True` does the same: `{code}` names linrope's classes, no more.
"""


def auto_map() -> dict[str, str]:
    """As config.json has it."""
    return {auto: f"{CODE_FILE.removesuffix('.py')}.{name}" for auto, name in AUTO_MAP.items()}


def write_beside(folder: Path, kind: str) -> None:
    """Writes the module, and the model card where there is none yet."""
    (folder / CODE_FILE).write_text(CODE)
    card = folder / "README.md"
    if not card.exists():
        auto = next((auto for auto, name in AUTO_MAP.items() if name == kind), "AutoModel")
        card.write_text(_CARD.format(kind=kind, auto=auto, code=CODE_FILE))
