# make build    bin/fairlead, one static binary
# make demo     show it at work in network namespaces of its own (root); MODE=iptables picks the dataplane
# make test     every test of the main module; needs root for namespaces and netfilter
# make lint     gofmt and go vet
#
# Longer: test-apiserver (a real kube-apiserver and etcd, built once: minutes), test-vm, bench.

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-dev)
MODE    ?= iptables
LDFLAGS  = -s -w -X fairlead/internal/cli.version=$(VERSION)

# What the tests and the demo run, and the Debian packages that have it.
PROGRAMS = iptables iptables-legacy nft ip conntrack ipset ps
PACKAGES = iptables nftables iproute2 conntrack ipset procps

.PHONY: build demo test test-apiserver test-vm bench lint deps

build:
	CGO_ENABLED=0 go build -trimpath -ldflags '$(LDFLAGS)' -o bin/fairlead ./cmd/fairlead

demo: deps build
	bin/fairlead demo --proxy-mode $(MODE)

test: deps lint build
	go test ./...

test-apiserver: deps build
	cd test/apiserver && go test -timeout 60m ./...

test-vm: build
	cd test/vm && go test -timeout 60m ./...

bench: deps build
	cd bench && go run . $(BENCH)

lint:
	@unformatted=$$(gofmt -l cmd internal test examples); test -z "$$unformatted" || { echo "gofmt: $$unformatted"; exit 1; }
	go vet ./...

deps:
	@missing=; for p in $(PROGRAMS); do command -v $$p >/dev/null || missing="$$missing $$p"; done; \
	test -z "$$missing" && exit 0; \
	if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
		apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(PACKAGES) >/dev/null; \
	else echo "missing:$$missing; install: $(PACKAGES)"; exit 1; fi
