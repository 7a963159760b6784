"""Files in a saved folder that tell people and transformers how to load it."""

from pathlib import Path

CODE_FILE = "linrope_models.py"

# Transformers' Auto classes, and linrope's class for each.
AUTO_MAP = {
    "AutoConfig": "LinRopeConfig",
    "AutoModel": "LinRopeModel",
    "AutoModelForCausalLM": "LinRopeForCausalLM",
    "AutoModelForMaskedLM": "LinRopeForMaskedLM",
    "AutoModelForQuestionAnswering": "LinRopeForQuestionAnswering",
    "AutoModelForSequenceClassification": "LinRopeForSequenceClassification",
    "AutoModelForTokenClassification": "LinRopeForTokenClassification",
}

# The module that auto_map in config.json names. With trust_remote_code=True transformers imports it, and with
# it linrope, which must be installed.
CODE = f'''"""The classes of this model, imported from linrope. No other code of this folder is run."""

from linrope.models.huggingface import {", ".join(sorted(AUTO_MAP.values()))}
'''

_CARD = """---
library_name: transformers
tags: [linrope, linear-attention]
---
# {kind}

Linear attention with rotary position embedding on the feature maps (RoFormer eq. 19). It requires the package
linrope with its extra `huggingface`:

```python
import linrope.models.huggingface  # registers the model with transformers' Auto classes
from transformers import {auto}

model = {auto}.from_pretrained("path of this folder")
```

`trust_remote_code=True` does the same without that import: `{code}` only names linrope's classes.
"""


def auto_map() -> dict[str, str]:
    """The entry ``auto_map`` of config.json."""
    return {auto: f"{CODE_FILE.removesuffix('.py')}.{name}" for auto, name in AUTO_MAP.items()}


def write_beside(folder: Path, kind: str) -> None:
    """Writes the module, and a model card unless the folder has one."""
    (folder / CODE_FILE).write_text(CODE)
    card = folder / "README.md"
    if not card.exists():
        auto = next((auto for auto, name in AUTO_MAP.items() if name == kind), "AutoModel")
        card.write_text(_CARD.format(kind=kind, auto=auto, code=CODE_FILE))
