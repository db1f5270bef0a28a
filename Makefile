# Two commands work from a bare clone: `make quickstart` and `make test`. Each installs first what is missing for it.

PYTHON := $(shell for p in python3 python3.11 python3.12 python3.13; do \
	$$p -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# The fast tests share the cores, one thread each; an engine wants them all. Each core gets whole files, so that what a
# file makes once is made once.
FAST := OMP_NUM_THREADS=1 $(PYTEST) -q -n auto --maxprocesses 8 --dist worksteal

.PHONY: help install newest quickstart lint types fast check test test-all verify mutants gpu-contract docs browser sandbox

help:  ## what there is to make
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

install: set-standard  ## .venv with the tested versions, for the GPU or the CPU, whichever this machine has

# run: what a run imports; standard: and trackers; test: and what tests need. Each adds what is missing
set-%:
ifeq ($(PYTHON),)
	@echo "FeynRL needs Python 3.11, 3.12 or 3.13, and neither python3 nor python3.11 to python3.13 is one" >&2; exit 1
else
	@$(PYTHON) tools/install.py $*
endif

SEED ?= 0
quickstart: set-run  ## a tiny model from random weights: supervised warm-up, then GRPO to mastery of addition
	$(BIN)/python -m data_prep.tiny_model --out models/quickstart --hidden-size 128 --heads 4 --seed $(SEED)
	$(BIN)/python -m data_prep.arithmetic --out data/quickstart --max 49 --padded --train 475 --eval 200 \
		--sft 600 --copies 24 --wrong-share 0.66 --seed $(SEED)
	$(BIN)/python main_sl.py --config configs/quickstart_sft.yaml seed=$(SEED)
	$(BIN)/python main_rl.py --config configs/quickstart.yaml seed=$(SEED) $$($(BIN)/python -m tools.placement)

lint: set-test  ## ruff, formatting included
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: set-test  ## pyright, strict on algs/ core/ data_feeds/
	$(BIN)/pyright

fast: set-test  # the tests without an engine
	$(FAST)

check: lint  ## lint, types and the fast tests: about seven minutes
	$(MAKE) --no-print-directory -j 2 types fast

test: fast  ## the fast tests, and one real run of each kind
	$(PYTEST) -q -m "usual and not verify"

# two runs of pytest, since each lists all tests first, half a minute of a core: what one core suffices for, and the rest
test-all: set-test  ## the other slow tests, too
	$(FAST) -m "(one_core or not slow) and not verify and not gpu"
	$(PYTEST) -q -m "(slow and not one_core or gpu) and not verify" --durations=30

verify: set-test  ## long evidence runs, the planted bugs of `make mutants` among them
	$(PYTEST) -q -m verify --timeout 3600

ONLY ?=
mutants: set-test  ## plant bugs one at a time, of a list and then drawn by rule, and name those that no test notices; ONLY=algs/ for some of the list, SEED=1 for others by rule
	$(BIN)/python tools/mutants.py --only '$(ONLY)'
	$(BIN)/python -m tools.drawn_mutants --seeds $(SEED)

newest:  ## the fast and the slow tests with the newest versions of everything, in a new .venv-newest
	@$(PYTHON) tools/install.py --newest
	.venv-newest/bin/python -m pytest -q -m "not verify"

gpu-contract:  ## what GPU runs use of vLLM, torch, DeepSpeed and NCCL, with the GPU builds and without a GPU (9 GB)
	@$(PYTHON) tools/gpu_contract.py

docs:  ## the documentation as a site, in site/; a broken link is an error
	@test -x .venv-docs/bin/python || $(PYTHON) -m venv .venv-docs
	@.venv-docs/bin/python -m pip install --quiet --disable-pip-version-check $$($(PYTHON) -c \
		"import tomllib; print(*tomllib.load(open('pyproject.toml', 'rb'))['project']['optional-dependencies']['docs'])")
	NO_MKDOCS_2_WARNING=1 .venv-docs/bin/mkdocs build --strict

# Debian's and Ubuntu's apt, as root, is the only way tried; nothing fails where it is not there
browser:  ## Chromium for the tests of the run page, where this user may install it; elsewhere those tests are skipped
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do command -v $$name >/dev/null && exit 0; done; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends chromium >/dev/null; \
	then echo "[browser] installed chromium"; \
	else echo "[browser] chromium cannot be installed here: the tests of the run page in a browser will be skipped"; fi

sandbox:  ## bubblewrap for code that is run (47 KB), where this user may install it; elsewhere its tests are skipped
	@command -v bwrap >/dev/null && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null \
		&& apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends bubblewrap >/dev/null; \
	then echo "[sandbox] installed bubblewrap"; \
	else echo "[sandbox] bubblewrap cannot be installed here: the tests of code that is run will be skipped"; fi
