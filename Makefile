# GPU=auto|cuda|off   CUDA if nvcc and a GPU are found, always, or never
# AMX=auto|on|off     AMX if a probe shows that it works, always, or never
# FILES=DIR           use the wheels and the source distribution in DIR, and no network
PYTHON ?= python3
GPU ?=
AMX ?=
CUDA_ARCH ?=
BENCH ?=
SERVE ?=
FILES ?=
SECONDS ?= 600

TOOL := $(PYTHON) patches/tool.py $(if $(FILES),--files "$(FILES)")
FLAGS := $(if $(GPU),--gpu $(GPU)) $(if $(AMX),--amx $(AMX)) \
         $(if $(CUDA_ARCH),--cuda-arch $(CUDA_ARCH))
IN_ENV = "$$($(TOOL) python)"
# lm_eval takes 600 MB, the server's clients 140 MB. CI installs and tests them. Elsewhere they are
# tested if they are installed.
TEST_EXTRAS := dev,convert$(if $(CI),$(shell echo ,eval,clients))

# Two processes. Each file runs in one of them, in the order of the files, so long files start
# early.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder

.PHONY: help build wheel chat serve test test-all check bench docs patches-verify patches-refresh cuda-check gpu-check clean fuzz

help:
	@echo 'make build            set everything up: environment, patched llama.cpp, moe-edge'
	@echo 'make chat             the same, then chat with the demo model'
	@echo 'make serve            the same, then serve it (SERVE="-m MODEL --ram 12GiB")'
	@echo 'make wheel            dist/moe_edge-*.whl, whose users need no compiler'
	@echo 'make test             the same, then run the tests'
	@echo 'make test-all         the same, then the tests that make test skips'
	@echo 'make check            ruff, mypy, the English of code, docs and patches'
	@echo 'make bench            the benchmark (BENCH="--routing zipf --json" passes options)'
	@echo 'make docs             write the generated parts of the documents'
	@echo 'make patches-verify   check the patch series'
	@echo 'make patches-refresh  rewrite the patches (TREE=DIR: from an edited llama.cpp)'
	@echo 'make cuda-check       compile CUDA objects (FULL=1: the library); needs nvcc, no GPU'
	@echo 'make gpu-check        all checks on a GPU; writes gpu-report.md (PART=engine, STEP=TEXT)'
	@echo 'make fuzz             read damaged files for ten minutes (SECONDS=N)'
	@echo 'make clean            remove .venv and tool caches'

build:
	@$(TOOL) setup $(FLAGS)

wheel:
	@$(TOOL) wheel $(if $(GPU),--gpu $(GPU)) $(if $(CUDA_ARCH),--cuda-arch "$(CUDA_ARCH)")

chat:
	@$(TOOL) setup --prebuilt $(FLAGS) >&2
	@exec $(IN_ENV) -m orchestrator chat

serve:
	@$(TOOL) setup --prebuilt $(FLAGS) >&2
	@exec $(IN_ENV) -m orchestrator serve $(SERVE)

test:
	@$(TOOL) setup --extras $(TEST_EXTRAS) $(FLAGS)
	@$(IN_ENV) -m pytest -m 'not rest' $(WORKERS)

test-all: test
	@$(IN_ENV) -m pytest -m rest $(WORKERS)

check:
	@$(TOOL) setup --extras dev $(FLAGS)
	@$(IN_ENV) -m ruff check .
	@$(IN_ENV) -m mypy
	@$(IN_ENV) tests/contract/prose.py
	@$(TOOL) verify --fetch
	@$(IN_ENV) -m pytest -q -m 'not rest' tests/contract --ignore tests/contract/test_build.py

bench:
	@$(TOOL) setup $(FLAGS)
	@exec $(IN_ENV) -m orchestrator bench $(BENCH)

docs:
	@$(TOOL) setup --extras dev $(FLAGS)
	@$(IN_ENV) tests/contract/generated.py

patches-verify:
	@$(TOOL) verify --fetch

patches-refresh:
	@$(TOOL) refresh $(if $(TREE),--tree $(TREE))

cuda-check:
	@$(TOOL) cuda-check $(if $(CUDA_ARCH),--cuda-arch $(CUDA_ARCH)) $(if $(FULL),--full)

# On a GPU, the part table3 runs no tests.
gpu-check:
	@$(TOOL) setup $(if $(filter table3,$(PART)$(EMULATED)),,--extras test) $(if $(EMULATED),,--gpu cuda) $(FLAGS)
	@exec $(IN_ENV) -m orchestrator gpu-check $(if $(PART),--part $(PART)) \
	    $(if $(STEP),--step "$(STEP)") $(if $(REPORT),--report "$(REPORT)") $(if $(EMULATED),--emulated)

fuzz:
	@$(TOOL) setup --extras dev $(FLAGS)
	@$(IN_ENV) tests/fuzz/long.py --seconds $(SECONDS)

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
