# Two targets do everything: `make demo` and `make test`. Each installs what it lacks and says so.
GO  ?= go
BIN := bin/ferry

.PHONY: demo test build deps bench lint interop peers fuzz clean

demo: build
	@$(BIN) demo $(if $(IMAGES),--images "$(IMAGES)") $(if $(PLANES),--planes "$(PLANES)")

build: deps
	@$(GO) build -trimpath -o $(BIN) ./cmd/ferry

# RERUN, which CI sets, runs tests that failed once more, alone, and lists them; without it a test that fails once has failed.
RERUN ?=

test: deps
	@bad=$$(gofmt -l $$(git ls-files '*.go' 2>/dev/null || find . -name '*.go')); \
	  if [ -n "$$bad" ]; then echo "gofmt: $$bad"; exit 1; fi
	@$(GO) vet ./...
	@$(GO) tool gotestsum --format pkgname --format-hide-empty-pkg $(RERUN) --packages ./... -- -race -timeout 15m

# The suite against the real peers (vLLM, NIXL, vLLM-Omni, torch): several GB of wheels, into a venv outside the tree that is kept.
PEERS := ./interop/... ./nixl/... ./transfer/nixl/... ./tensor/... ./stage/...
interop: deps peers
	@PEERS_PYTHON="$$(interop/peers/setup.sh | tail -n 1)" \
	  $(GO) tool gotestsum --format pkgname --hide-summary skipped $(RERUN) --packages "$(PEERS)" -- -race -count 1 -timeout 30m

peers:
	@interop/peers/setup.sh

# Ratios against a limit or a peer measured in the same run; see bench/README.md.
bench: deps
	@bench/run

lint: deps
	@$(GO) run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.5.0 run ./...

# Ten seconds a fuzz target; FUZZTIME=10m for longer.
FUZZTIME ?= 10s
fuzz: deps
	@scripts/fuzz $(FUZZTIME)

deps:
	@scripts/deps

clean:
	rm -rf bin
