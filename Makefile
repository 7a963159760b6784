# Everything sets itself up: a machine with python3 and make is enough.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: demo test test-long test-lowest test-newest check format bench bench-docs bench-conditions docs native wheels test-fla test-dist test-sanitizers test-amx test-arm test-ptx gpu-run

demo: $(VENV)/ready native
	$(BIN)/linrope demo

test: $(VENV)/ready native
	$(BIN)/python -m pytest -n auto --dist loadgroup

# The tests marked long, which make test leaves out: four processes, most pairs of options, all kernels compiled.
test-long: $(VENV)/ready native
	$(BIN)/python -m pytest -n auto --dist loadgroup -m long

check: $(VENV)/ready docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest -q tests/test_layers.py

format: $(VENV)/ready
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: $(VENV)/ready native
	$(BIN)/linrope bench

# The tables of speed in README.md and on the page Benchmarks, measured anew: about an hour on a machine that does
# nothing else. Older results stay, and the pages have the newest.
FAMILIES := mamba2 granitemoehybrid nemotron_h qwen3_5
TODAY = $(shell date +%F)
RESULTS := benchmarks/results
DELTA_RULE = $(BIN)/python benchmarks/delta_rule.py --write $(RESULTS)/delta-rule
bench-docs: $(VENV)/ready native
	$(BIN)/linrope bench --threads 1 --max-length 16384 --decode-at 256,1024,4096,16384
	for family in $(FAMILIES); do $(BIN)/linrope bench --threads 1 --transformers $$family --lengths 512,2048 || exit 1; done
	$(BIN)/linrope bench --threads 1 --transformers kimi_linear
	$(DELTA_RULE)-$(TODAY).json
	$(DELTA_RULE)-8192-$(TODAY).json --rules gdn --tokens 8192
	$(DELTA_RULE)-avx2-$(TODAY).json --rules gdn --tokens 2048 --isa v3
	$(BIN)/python -m docs.tables

# The table of other conditions on the page Benchmarks, measured anew on a machine with two cores: about 20 minutes.
bench-conditions: $(VENV)/ready native
	for family in mamba2 granitemoehybrid qwen3_5; do for how in "--threads 1" "--threads 1 --dtype bfloat16" "--threads 2"; do \
	$(BIN)/linrope bench --transformers $$family $$how --lengths 512,2048 --out $(RESULTS)/epyc || exit 1; done; done
	$(BIN)/python -m docs.tables

# The native CPU library, from the sources as they are; on machines without kernels the other backends do.
native: $(VENV)/ready
	$(BIN)/python kernels/cpu/build.py --if-changed

# A source distribution, and wheels with the native library for five platforms, compiled by Zig. Prints what each was
# tested with here: its symbols, those of PyTorch's wheels (200 MB), and a program where it runs.
wheels: $(VENV)/ready
	$(PIP) ziglang lief
	rm -rf dist
	ZIG_GLOBAL_CACHE_DIR=$(CURDIR)/build/zig ZIG_LOCAL_CACHE_DIR=$(CURDIR)/build/zig $(BIN)/python -m tests.kernels.cpu.wheels dist

# Installs the wheel for this machine in a fresh environment of PYTHON (make test-dist PYTHON=python3.13) beside a release
# of PyTorch (RELEASE='==2.11.*'), as a user would, and runs tests of the source distribution there. They find no linrope
# but the wheel's. Also builds a wheel from the source distribution.
TRIED := build/dist
RELEASE := >=2.11
TORCH := --torch-backend cpu
test-dist: wheels
	rm -rf $(TRIED) && mkdir -p $(TRIED)/tree
	$(PYTHON) -m venv $(TRIED)/venv
	$(TRIED)/venv/bin/python -m pip install -q uv
	$(TRIED)/venv/bin/uv pip install -q --python $(TRIED)/venv/bin/python $(TORCH) "torch$(RELEASE)"
	$(TRIED)/venv/bin/python -m pip install -q "$$(ls dist/*manylinux*$$(uname -m).whl)[cli]" "pytest<9.2" hypothesis
	tar -xzf dist/*.tar.gz -C $(TRIED)/tree --strip-components=1
	$(BIN)/python -m pip wheel -q --no-deps -w $(TRIED) $(TRIED)/tree
	rm -r $(TRIED)/tree/linrope
	cd $(TRIED)/tree && ../venv/bin/linrope env && ../venv/bin/linrope check && \
	../venv/bin/python -m pytest -q -o pythonpath=. \
	tests/layer/test_attention.py tests/models/test_language_model.py tests/cli/test_app.py

# make test in an environment of its own, with the lowest releases that pyproject.toml allows of the dependencies that a
# user installs. Old releases beside new ones raise DeprecationWarnings, which are ignored. TORCH= (empty) installs
# PyTorch from the package index, which is the build for CUDA.
LOWEST := build/lowest
EXTRAS := --extra cli --extra export --extra huggingface --extra serve --extra train --extra triton
test-lowest:
	$(PYTHON) -m venv --clear $(LOWEST)
	$(LOWEST)/bin/python -m pip install -q uv
	$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python $(TORCH) --resolution lowest-direct \
	-r pyproject.toml $(EXTRAS)
	$(LOWEST)/bin/uv pip install -q --python $(LOWEST)/bin/python hatchling hypothesis openai "pytest<9.2" pytest-xdist pip
	$(LOWEST)/bin/python kernels/cpu/build.py
	PYTHONPATH=$(CURDIR):$(CURDIR)/kernels $(LOWEST)/bin/python -m pytest -n auto --dist loadgroup -W ignore::DeprecationWarning

# make test with what pip installs today: pyproject.toml's ranges and no constraints. It tests all families of transformers'
# models in full, of which make test takes one for each set of functions. TESTS= names the tests to run. A failure ends with the releases that differ from constraints.txt. PyTorch may be a build for CUDA, of some gigabytes.
NEWEST := build/newest
TESTS :=
test-newest:
	$(PYTHON) -m venv --clear $(NEWEST)
	$(NEWEST)/bin/python -m pip install --quiet --disable-pip-version-check -e '.[dev]'
	$(NEWEST)/bin/python kernels/cpu/build.py --if-changed
	TEST_FAMILIES=all $(NEWEST)/bin/python -m pytest -n auto --dist loadgroup $(TESTS)

# linrope.integrations.fla beside fla's own signatures and naive functions. fla lies in a folder of its own: where it is
# installed, transformers calls its Triton kernels even on a CPU, and raises.
FLA := build/fla
test-fla: $(VENV)/ready native
	$(BIN)/python -m pip install -q --no-deps --upgrade --target $(FLA) -c constraints.txt fla-core
	PYTHONPATH=$(FLA) $(BIN)/python -m pytest -q tests/integrations/test_fla.py tests/benchmarks/test_gpu_steps.py \
	-k "test_fla or stand_ins"

# Looks for reads and writes out of bounds and for undefined behaviour, in a copy of the tree with a library of its own.
# Python itself is not built for this, so both run times (GCC's) are loaded before it, and leaks are not looked for. What
# they report goes to file descriptor 2, which pytest must leave open. One test limits memory, which they do not bear.
SANITIZED := build/sanitized
test-sanitizers: $(VENV)/ready
	rm -rf $(SANITIZED) && mkdir -p $(SANITIZED)
	cp -r conftest.py pyproject.toml kernels linrope tests $(SANITIZED)
	$(BIN)/python $(SANITIZED)/kernels/cpu/build.py --sanitize $(SANITIZED)/linrope/lib
	cd $(SANITIZED) && test -f linrope/lib/liblinrope_native.so && \
	LD_PRELOAD="$$(c++ -print-file-name=libasan.so):$$(c++ -print-file-name=libstdc++.so)" \
	ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=halt_on_error=1:print_stacktrace=1 \
	$(CURDIR)/$(BIN)/python -m pytest -q --capture=sys tests/kernels/cpu tests/backends -k "cpu or native" \
	--deselect tests/kernels/cpu/test_memory.py

# The kernels that use AMX, in a copy of the tree with a library of its own, whose tile instructions are emulated. Requires
# AVX-512.
EMULATED := build/amx
test-amx: $(VENV)/ready
	rm -rf $(EMULATED) && mkdir -p $(EMULATED)
	cp -r conftest.py pyproject.toml kernels linrope tests $(EMULATED)
	$(BIN)/python $(EMULATED)/tests/kernels/cpu/emulated_amx.py $(EMULATED)/linrope/lib
	cd $(EMULATED) && $(CURDIR)/$(BIN)/python -m pytest -q --instruction-set amx tests/kernels/cpu tests/backends \
	-k "amx or (native and (bfloat16 or float16))"

# The native library on ARM, compiled by a cross compiler, with an ARM Python and PyTorch in QEMU: tests/kernels/cpu/arm.py
# makes them once. The tests left out compile with PyTorch, are slow there, or limit memory, which QEMU does not do. The
# warning is PyTorch's own about bfloat16.
ARM := build/arm
test-arm: $(VENV)/ready
	$(BIN)/python tests/kernels/cpu/arm.py $(ARM)
	rm -rf $(ARM)/tree && mkdir -p $(ARM)/tree
	cp -r conftest.py pyproject.toml kernels linrope tests $(ARM)/tree
	cd $(ARM)/tree && CXX=aarch64-linux-gnu-g++ ../python kernels/cpu/build.py && test -f linrope/lib/liblinrope_native.so && \
	../python -m pytest -q tests/kernels/cpu tests/backends -k "cpu or native" \
	-W "ignore:mkldnn_matmul failed:UserWarning" \
	--deselect tests/backends/test_compile.py --deselect tests/backends/test_transforms.py \
	--deselect tests/kernels/cpu/test_memory.py

# The whole table of tiles, compiled and run by the emulator of tests/kernels/ptx, a table of the errors, and the
# emulator's own tests.
test-ptx: $(VENV)/ready
	$(BIN)/python -m pytest -n auto -m ptx -rP tests/kernels/test_ptx.py tests/kernels/test_ptx_emulator.py tests/kernels/test_compile.py

# Tests and benchmarks on a GPU, step by step; the tree runs as it lies, uninstalled. make gpu-run ARGS=--help lists the
# options. DRY=1 runs all code in small sizes on a CPU, and compiles most kernels, with the releases that ran on a GPU.
GPU := build/gpu
gpu-run: $(if $(DRY),$(GPU)/ready)
	PYTHONPATH=.:kernels $(if $(DRY),$(GPU)/bin/python,$(PYTHON)) -m benchmarks.gpu $(if $(DRY),--dry-run) $(ARGS)
	$(if $(DRY),PYTHONPATH=.:kernels $(GPU)/bin/python tests/kernels/launch_without_gpu.py 90 few layer delta)

$(GPU)/ready: benchmarks/gpu/requirements.txt
	$(PYTHON) -m venv --clear $(GPU)
	$(GPU)/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	touch $@

# The site, in site/. Warnings are errors.
docs: $(VENV)/ready
	$(BIN)/python docs/build.py

# A folder that make did not create is left alone. A machine without a compiler gets one.
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
$(VENV)/ready: pyproject.toml constraints.txt hatch_build.py
	@test ! -e $(VENV) || test -e $(VENV)/ready || test -e $(VENV)/made-by-make || { \
	echo "$(VENV) exists, and make did not make it: rename it, or name another folder: make VENV=build/venv" >&2; exit 1; }
	$(PYTHON) -m venv --clear $(VENV)
	touch $(VENV)/made-by-make
	$(PIP) hatchling $$($(BIN)/python kernels/cpu/build.py --requirements)
	$(PIP) --no-build-isolation -e '.[dev]'
	touch $@
