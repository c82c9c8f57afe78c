# The whole set-up: `make demo` or `make test` on a machine with Python 3.11+ and make.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.PHONY: demo test unit check protos identity losslessness bench bench-sampling bench-target bench-drafts report-block \
	loadtest churn churn-short chaos chaos-toy chaos-short soak soak-short overload saturation audit audit-database clean

demo: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/python scripts/demo.py

# Two workers with a thread each: what a machine of two cores is fastest with.
test: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	TANDEM_REQUIRE_MODEL=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2

# No model files, no processes of the whole system, the short form of what is marked slow.
unit: $(READY)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 -m "not model and not slow" --ignore tests/e2e --ignore tests/clients

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

protos: $(READY)
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python scripts/generate_stubs.py

# The identity tests in full; writes docs/reports/identity.md.
identity: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/python -m tests.e2e.identity --out docs/reports/identity.md

# Chi-square over 100,000 tokens of every policy and kind of drafts, up to an hour; writes docs/reports/losslessness.md.
# One part: ONLY=toy, ONLY=real:block ...; what a broken-off run has done is kept: RESUME=--resume goes on from there.
# AGAIN=--again repeats the cells of ONLY with other seeds, which explains a failure and does not undo it.
losslessness: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	GRPC_VERBOSITY=ERROR $(BIN)/python -m tests.losslessness --json docs/reports/losslessness.json \
		--out docs/reports/losslessness.md --only "$(ONLY)" $(RESUME) $(AGAIN)

# The engine against a bare forward; writes docs/reports/engine.md. The long spin of waiting threads is what the bare
# forward is fastest with; services use a short one (engine/__init__.py).
bench: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	GOMP_SPINCOUNT=300000 $(BIN)/tandem bench engine --threads 2 --out docs/reports/engine.md

# What `block` gains over `rejection`, computed exactly; writes docs/reports/block_policy.md.
report-block: $(READY)
	$(BIN)/python -m tests.sampling.block_gain --out docs/reports/block_policy.md

# What sampling costs beside a forward; writes docs/reports/sampling_cost.md.
bench-sampling: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/tandem bench sampling --out docs/reports/sampling_cost.md

# The target service against the bare engine, six minutes; writes docs/reports/target_throughput.md.
bench-target: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	GRPC_VERBOSITY=ERROR $(BIN)/tandem bench target --out docs/reports/target_throughput.md

# What trained drafts cost, what they are worth on recorded answers, and what they save, with one thread a service;
# writes docs/reports/draft_cost_{eagle,mtp,draft_model}.md, acceptance.{md,json}, speculation.md and speculation_k2.md.
bench-drafts: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/tandem bench draft --proposer eagle --head smollm2-135m-eagle --threads 2 --out docs/reports/draft_cost_eagle.md
	$(BIN)/tandem bench draft --proposer mtp --head smollm2-135m-mtp --threads 2 --out docs/reports/draft_cost_mtp.md
	$(BIN)/tandem bench draft --proposer draft_model --head smollm2-135m-shallow --threads 2 \
		--out docs/reports/draft_cost_draft_model.md
	$(BIN)/python -m tests.acceptance.report
	GRPC_VERBOSITY=ERROR $(BIN)/python -m loadtest.speculation --proposer eagle --head smollm2-135m-eagle \
		--out docs/reports/speculation.md
	GRPC_VERBOSITY=ERROR $(BIN)/python -m loadtest.speculation --proposer eagle --head smollm2-135m-eagle --drafts 2 \
		--out docs/reports/speculation_k2.md

# Locust for 20 seconds against `tandem up`.
loadtest: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/python -m loadtest --seconds 20 --users 4

# 64 clients with cancels and deadlines on a small pool, five minutes; writes docs/reports/churn.md.
churn: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/python -m loadtest.churn --out docs/reports/churn.md

churn-short: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	$(BIN)/python -m loadtest.churn --seconds 60 --requests 24

# 16 streams on two targets and two draft services, real model and processes, while 60 faults or more strike them, three
# minutes; writes docs/reports/chaos.md. Then the toy engine: 200 streams, 3,000 faults; writes docs/reports/chaos_toy.md.
chaos: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	GRPC_VERBOSITY=NONE $(BIN)/python -m loadtest.chaos --out docs/reports/chaos.md

chaos-toy: $(READY)
	GRPC_VERBOSITY=NONE $(BIN)/python -m loadtest.chaos --toy hashed:vocab=512,seed=3,blocks=4000 --targets 3 --drafts 5 \
		--streams 200 --requests 60 --seconds 60 --faults 3000 --gap 0.05 --out docs/reports/chaos_toy.md

chaos-short: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	GRPC_VERBOSITY=NONE $(BIN)/python -m loadtest.chaos --seconds 60 --faults 15

# 30 minutes of users that come and go, on the real model and on a toy engine at the same time; writes
# docs/reports/soak.md and its plots. The short form has one cycle of a minute, too short to judge memory by.
soak: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	GRPC_VERBOSITY=NONE $(BIN)/python -m loadtest.soak --out docs/reports/soak.md

soak-short: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	GRPC_VERBOSITY=NONE $(BIN)/python -m loadtest.soak --cycles 1 --cycle-seconds 60 --requests 6

# Four times the capacity of a toy engine whose steps take 50 ms; writes docs/reports/overload.md.
overload: $(READY)
	GRPC_VERBOSITY=NONE $(BIN)/python -m loadtest.overload --toy hashed:vocab=512,seed=3,delay_ms=50 \
		--out docs/reports/overload.md

# Tokens a second of 1 to 64 users with drafts and without; writes docs/reports/saturation.md.
saturation: $(READY)
	$(BIN)/tandem models pull smollm2-135m
	GRPC_VERBOSITY=ERROR $(BIN)/python -m loadtest.saturation --out docs/reports/saturation.md

# Every pinned version against the database of known vulnerabilities; fails as well when one cannot be looked up there.
AUDIT := $(BIN)/pip-audit --strict --disable-pip --no-deps --progress-spinner off
audit: $(READY)
	$(AUDIT) --requirement constraints.txt

# Whether that database answers: it must know what everybody knows about an old version.
audit-database: $(READY)
	@echo "jinja2==2.10" | $(AUDIT) --format json --requirement /dev/stdin 2>/dev/null | grep -q CVE-2019-10906

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints.txt --editable ".[engine,hf,load,dev]"
	touch $@
