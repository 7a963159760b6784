# Everything sets itself up: a machine with python3 and make is enough.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format bench docs test-gpu bench-gpu

demo: .venv/ready
	$(BIN)/linrope demo

test: .venv/ready
	$(BIN)/python -m pytest -n auto --dist loadgroup

check: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

format: .venv/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: .venv/ready
	$(BIN)/linrope bench

# These two need a GPU, with PyTorch and Triton for it; they run the tree as it lies, uninstalled.
test-gpu:
	PYTHONPATH=.:kernels $(PYTHON) -m pytest tests/kernels --device cuda

bench-gpu:
	PYTHONPATH=.:kernels $(PYTHON) benchmarks/gpu.py

docs: .venv/ready
	$(BIN)/mkdocs build --strict

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv --clear .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@
