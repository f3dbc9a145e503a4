# Everything a fresh machine needs: Python 3.11, gcc, git, make. `make demo` and `make test` do the rest.
PYTHON ?= python3
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help demo test exact chaos bench bench-long lint slurm views pictures clean

help:
	@echo "make demo   a real training run that spikes, rolls back and finishes, on this machine"
	@echo "make test   all tests, the ones on a real Slurm too"
	@echo "make exact  every combination of what must survive an interruption to the bit (SEED=n draws other moments)"
	@echo "make chaos  training runs under faults at random times on a real Slurm (SEED=n, COUNT=n faults, four a run)"
	@echo "make bench  what training, saving, recovering and supervising cost on this machine (under 20 minutes), into docs/benchmarks.md"
	@echo "make bench-long  fifty tiny runs that the detector is scored on, and thirty that fail without it or with it"
	@echo "make lint   ruff, mypy --strict, import-linter"

# `pip install torch` alone would bring several GB of CUDA; the constraints file pins what is tested.
.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	@touch $@

# An interrupted demo may have left its worker at work.
demo: .venv/ready
	@if [ -e runs/demo ]; then $(BIN)/higgsfield stop runs/demo >/dev/null || true; rm -rf runs/demo; fi
	$(BIN)/higgsfield run configs/demo.yaml

# Where we are root and find apt, the Debian packages of Slurm are installed; elsewhere their tests say what is missing.
slurm:
	@sh tests/install_slurm.sh

# The same for the browser that looks at the report and the terminal that shows the live view.
views:
	@sh tests/install_views.sh

# Five processes share the tests, file by file; each has a Slurm cluster of its own. Many tests wait for it.
test: .venv/ready slurm views
	HF_HUB_OFFLINE=1 $(BIN)/python -m pytest --numprocesses 5 --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

exact: .venv/ready
	HF_HUB_OFFLINE=1 HIGGSFIELD_EXACT=complete HIGGSFIELD_SEED=$(or $(SEED),1) $(BIN)/python -m pytest --numprocesses 2 \
		tests/trainer_room/test_exact.py tests/trainer_room/test_whole_saves.py $(PYTEST_ARGS)

# Two runs beside each other, two to three minutes each. Their journals and logs are in runs/chaos.
chaos: .venv/ready slurm
	HF_HUB_OFFLINE=1 $(BIN)/python -m tests.whole_room.chaos --count $(or $(COUNT),12) $(if $(SEED),--seed $(SEED)) \
		--keep runs/chaos

# The README's pictures, from a real run.
pictures: .venv/ready views
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.pictures

# Writes the tables of docs/benchmarks.md, one after the other: beside each other they would measure each other.
bench: .venv/ready
	HF_HUB_OFFLINE=1 $(BIN)/python -m benchmarks.page

# An hour: trains the runs of docs/detector.md anew, with other seeds where SHIFT=n says so, and scores all rules; then
# the runs that fail of docs/benchmarks.md.
bench-long: .venv/ready
	OMP_NUM_THREADS=1 $(BIN)/python -m benchmarks.curves runs/curves.jsonl.gz --shift $(or $(SHIFT),0)
	$(BIN)/python -m benchmarks.detectors --recorded runs/curves.jsonl.gz
	$(BIN)/python -m benchmarks.stability

lint: .venv/ready
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

clean:
	rm -rf .venv runs dist build .mypy_cache .ruff_cache .pytest_cache .hypothesis
