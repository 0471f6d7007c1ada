# `make demo` does everything on a fresh machine with Python 3.10 or newer, and `make test` with 3.11 or newer.

PYTHON ?= python3
PYTHON_OF_CORE ?= python3.12
VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module when it is first imported. To compile all of torch and transformers takes a minute more.
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check -c constraints.txt
SOURCES := megaconv loaders savers formats megatron_lite

# Tests start many processes: each would compile all of the source again where an environment forbids to keep the result.
unexport PYTHONDONTWRITEBYTECODE

INTERPRETED := tests/trainer/state_space/test_triton_kernels.py tests/trainer/parallel/test_flash_kernels.py
COMPILED := tests/trainer/state_space/test_compiled_kernels.py
ON_GPU := tests/trainer/gpu tests/trainer/parallel/test_context.py

TRUST_SEED ?= 1
TRUST_JOBS ?= 2

.PHONY: demo demo-train speedrun test test-fast test-slow test-core test-kernels explore test-gpu benchmark-gpu trust check docs benchmark clean

demo: $(VENV)/.installed
	$(BIN)/megaconv demo

demo-train: $(VENV)/.tested
	PYTHON=$(BIN)/python examples/finetune.sh

speedrun: $(VENV)/.tested
	PYTHON=$(CURDIR)/$(BIN)/python examples/speedrun.sh

# The checks run beside the tests, which often wait for each other.
test: $(VENV)/.tested
	$(MAKE) --no-print-directory --jobs 2 check test-fast

# Many tests wait for processes that they start: three at a time keep two cores busy.
test-fast: $(VENV)/.tested
	$(BIN)/python -m pytest -n 3 -m "not slow and not gpu"

test-slow: $(VENV)/.tested
	$(BIN)/python -m pytest -n 2 -m slow

# The newest megatron-core needs Python 3.12. Everything that is compared with core is compared with that release here.
test-core: $(VENV)/.of_core
	PYTHONPATH=$(CURDIR) $(VENV)/core/bin/python -m pytest -n 2 -m "oracle and not slow and not gpu"

# Kernels of packages that need a GPU: computed on a CPU by Triton's interpreter, then compiled for an H100.
test-kernels: $(VENV)/.interpreted
	TRITON_INTERPRET=1 PYTHONPATH=$(VENV)/kernels $(BIN)/python -m pytest -n 2 $(INTERPRETED)
	TRITON_CACHE_DIR=$(VENV)/compiled PYTHONPATH=$(VENV)/kernels $(BIN)/python -m pytest -n 2 $(COMPILED)

explore: $(VENV)/.tested
	$(BIN)/python -m pytest -n 2 -m "hypothesis and not slow and not gpu" --hypothesis-profile=explore

test-gpu: $(VENV)/.on_gpu
	$(VENV)/gpu/bin/python -m tests.trainer.gpu
	$(VENV)/gpu/bin/python -m pytest -m gpu -v -rs $(ON_GPU)

benchmark-gpu: $(VENV)/.on_gpu
	$(VENV)/gpu/bin/python benchmarks/trainer.py gpu

trust: $(VENV)/.tested
	$(BIN)/python -m tests.trust --seed $(TRUST_SEED) --jobs $(TRUST_JOBS) --report trust.json \
	  --kills 2000 --faults 10000 --mutations 20000 --foreign 2000 --seals 4000 --patches 4000 --requests 5000 --pickles 2500 --archives 1500 --files 1500 --moving 500 \
	  --fuzz 1000000 --ranks 100 --trainer 50
	$(BIN)/python -m tests.stores.attacks --seed $(TRUST_SEED) --kills 500 --faults 5000 --races 200

check: $(VENV)/.tested
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .
	$(BIN)/mypy
	$(BIN)/vermin --quiet --no-tips --eval-annotations --target=3.10- $(SOURCES)
	$(BIN)/python docs/plain_english.py

docs: $(VENV)/.documented
	$(BIN)/python docs/build_site.py build/docs

benchmark: $(VENV)/.tested
	$(BIN)/python benchmarks/convert.py
	$(BIN)/python benchmarks/trainer.py single
	$(BIN)/python benchmarks/trainer.py parallel

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e .
	touch $@

# Not after .installed: the package would be built and its dependencies looked up twice.
$(VENV)/.tested: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) -e ".[test,oracle,data,train,zarr,serve,retrieval]"
	touch $(VENV)/.installed $@

$(VENV)/.of_core: pyproject.toml constraints.txt
	$(PYTHON_OF_CORE) -m venv $(VENV)/core
	grep -v megatron-core constraints.txt > $(VENV)/core/constraints.txt
	$(VENV)/core/bin/python -m pip install --quiet --no-compile -c $(VENV)/core/constraints.txt \
	  megatron-core==0.19.2 -e ".[test,oracle,data,train,zarr,serve,retrieval]"
	touch $@

# The machine's own torch is used, because it fits the GPU's driver, and its flash-attn, transformer-engine and megatron-core.
# PYTHON may belong to a virtual environment, whose packages are no system packages.
ITS_PACKAGES := import sysconfig; print(sysconfig.get_path('purelib'))
$(VENV)/.on_gpu: pyproject.toml
	$(PYTHON) -m venv --system-site-packages $(VENV)/gpu
	$(PYTHON) -c "$(ITS_PACKAGES)" > "$$($(VENV)/gpu/bin/python -c "$(ITS_PACKAGES)")/of_the_machine.pth"
	$(VENV)/gpu/bin/python -m pip install --quiet --no-compile pytest hypothesis h5py -e ".[train,data,images]"
	touch $@

# mamba_ssm and flash_attn have Python too. What they would compile with CUDA isn't needed.
# amd-aiter has FlashAttention's kernels in Triton, and the source of other kernels in 170 MB of aiter_meta.
$(VENV)/.interpreted: $(VENV)/.tested
	$(PIP) --no-deps --target $(VENV)/kernels triton==3.9.0 fla-core==0.6.0 einops==0.8.2
	$(PIP) setuptools wheel ninja packaging
	MAMBA_SKIP_CUDA_BUILD=TRUE MAMBA_FORCE_BUILD=TRUE \
	  $(PIP) --no-deps --no-build-isolation --target $(VENV)/kernels mamba-ssm==2.3.2.post1
	FLASH_ATTENTION_SKIP_CUDA_BUILD=TRUE FLASH_ATTENTION_FORCE_BUILD=TRUE \
	  $(PIP) --no-deps --no-build-isolation --target $(VENV)/kernels flash-attn==2.8.3.post2
	$(PIP) --no-deps --target $(VENV)/kernels amd-aiter==0.1.7.post2.dev18
	rm -rf $(VENV)/kernels/aiter_meta
	touch $@

$(VENV)/.documented: $(VENV)/.installed
	$(PIP) -e ".[docs]"
	touch $@

clean:
	rm -rf $(VENV)
