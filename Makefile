# Set-up and daily commands. Everything is installed into .venv, once; `make` alone lists what there is.

PYTHON ?= python3
# Two workers: the suite also starts processes of its own. `make test PYTEST_FLAGS=-x` runs in one.
PYTEST_FLAGS ?= -n 2 --dist loadgroup
SEEDS ?= 500
FIRST ?= 0
SECONDS ?= 600
MINUTES ?= 10
CHAOS_FLAGS ?=
ENGINE_TESTS ?=

VENV := .venv
RUN := $(VENV)/bin
STAMP := $(VENV)/.installed
# -qq: a word only when something fails.
PIP := $(RUN)/python -m pip --disable-pip-version-check install -qq -c constraints.txt

# For `make browser`.
AXE := $(VENV)/axe/package/axe.min.js
AXE_SHA256 := 20c09fe157a8a34a30e241aaa1fcdade657734f08ab379ecfbeb7d45cc46e878

.DEFAULT_GOAL := help
.PHONY: help demo test engines browser lint check package docs sim chaos fuzz floods clean

help:
	@echo "make demo          train on handwritten digits with three nodes, and compare with one process"
	@echo "make test          run the tests         (PYTEST_FLAGS='-x -k word' to choose)"
	@echo "make engines       install Ray and run the tests on real clusters  (ENGINE_TESTS=tests/engines/ray for some)"
	@echo "make lint          formatting, ruff and mypy"
	@echo "make check         lint, then the tests"
	@echo "make package       build wheel and sdist in dist/, and try the wheel in a clean environment"
	@echo "make docs          write docs/errors.md anew from src/w5xde/explanations"
	@echo "make sim SEEDS=N   run N seeds of the simulator  (FIRST=S starts at seed S)"
	@echo "make chaos         kill and freeze processes for SECONDS=600, and audit  (CHAOS_FLAGS='--seed 1')"
	@echo "make fuzz          feed every decoder bad bytes for MINUTES=10; what fails, the tests try first"
	@echo "                   (guided by coverage, if  .venv/bin/pip install -e '.[fuzz]'  has atheris for it)"
	@echo "make floods        a run under slow-loris, idle connections and 1,000 connects a second; about five minutes"
	@echo "make browser       try the page in Chromium, which it installs first (Debian or Ubuntu, as root)"
	@echo "make clean         remove .venv, builds and caches; runs/ stays, it is yours"

demo: $(STAMP)
	@$(RUN)/w5xde demo

test: $(STAMP)
	$(RUN)/python -m pytest -q $(PYTEST_FLAGS)

# One at a time: each test has a cluster, or a share of one, and kills parts of it.
engines: $(STAMP)
	@$(PIP) -e ".[ray,bench-engines]"
	@folders="$(ENGINE_TESTS)"; [ -n "$$folders" ] || folders=$$(tests/engines/install.sh) || exit 1; \
		$(RUN)/python -m pytest -q --timeout 600 $$folders

lint: $(STAMP)
	$(RUN)/ruff format --check
	$(RUN)/ruff check
	$(RUN)/mypy

# One after the other, also under `make -j`: what is cheap to know comes first.
check:
	@$(MAKE) --no-print-directory lint
	@$(MAKE) --no-print-directory test

package: $(STAMP)
	@$(RUN)/python -m tests.packaging

docs: $(STAMP)
	$(RUN)/python -m w5xde.explanations > docs/errors.md

sim: $(STAMP)
	$(RUN)/python -m tests.sim --seeds $(SEEDS) --first $(FIRST)

chaos: $(STAMP)
	$(RUN)/python -m w5xde.chaos --seconds $(SECONDS) $(CHAOS_FLAGS)

fuzz: $(STAMP)
	$(RUN)/python -m tests.security --minutes $(MINUTES)

floods: $(STAMP)
	$(RUN)/python -m tests.security.floods

# Debian's two packages come from one source, so that they fit. Selenium's own list of dependencies is left out.
browser: $(STAMP) $(AXE)
	@command -v chromium chromedriver >/dev/null || { apt-get update -qq && \
		apt-get install -qq -y --no-install-recommends chromium chromium-driver >/dev/null; }
	@$(PIP) --no-deps selenium
	@$(PIP) trio trio-websocket websocket-client urllib3 certifi
	$(RUN)/python -m pytest -q tests/browser

# The checks of accessibility, as npm has them.
$(AXE):
	@mkdir -p $(VENV)/axe
	@cd $(VENV)/axe && tar xzf "$$(npm pack --silent axe-core@4.14.0)"
	@echo "$(AXE_SHA256)  $(AXE)" | sha256sum --check --quiet || { rm $(AXE); exit 1; }

# The stamp is written last, so an installation that was interrupted is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "w5xde needs Python 3.11 or newer, and '$(PYTHON)' is not ($$($(PYTHON) --version 2>&1))." >&2; \
		echo "Name another one, for example: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "'$(PYTHON)' cannot make virtual environments. On Debian or Ubuntu: apt install python3-venv" >&2; \
		exit 1; }
	@# An environment that is broken or older than Python 3.11 is made anew.
	@$(RUN)/python -c 'import pip, sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		$(PYTHON) -m venv --clear $(VENV)
	@echo "Installing PyTorch into $(VENV) (once; a large download, it may take minutes) ..."
	@# Alone and first: with the exact version, so that nothing else decides which build comes.
	@$(PIP) torch
	@echo "Installing w5xde and its tools into $(VENV) ..."
	@$(PIP) -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis .fuzz
	find src tests examples -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
