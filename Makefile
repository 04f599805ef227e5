# make build    bin/fairlead, one static binary
# make demo     show it at work in network namespaces of its own (root); MODE=iptables picks the dataplane
# make test     everything: gofmt, go vet, the rooms, stories with real packets, a real API server; needs root
# make lint     gofmt and go vet
#
# make test-apiserver is the part of make test that takes long the first time: it builds kube-apiserver and etcd, once.
# make test-vm runs the tests that ask a kernel on Debian's, in QEMU; KERNEL=linux-image-6.12-cloud-amd64 takes another: see test/vm/README.md.
# make bench measures against kube-proxy: see bench/README.md.

# One set of flags for the program and its tests, so that each package is compiled once.
export CGO_ENABLED = 0
export GOFLAGS    := -trimpath $(GOFLAGS)

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo v0.0.0-dev)
MODE    ?= iptables
LDFLAGS  = -s -w -X fairlead/internal/cli.version=$(VERSION)

# What the tests and the demo run, and the Debian packages that have it.
PROGRAMS = iptables iptables-legacy nft ip conntrack ipset ps
PACKAGES = iptables nftables iproute2 conntrack ipset procps

# Real packets on a busy machine take their time: these packages run one after the other.
LAB = ./internal/lab ./internal/story ./internal/demo ./test/stories

# The guest of test/vm: its kernel's package, and what makes it. The kernel is fetched by the tests, and not installed.
KERNEL     ?= linux-image-cloud-amd64
VMPROGRAMS  = qemu-system-x86_64 busybox modprobe depmod xz ipvsadm
VMPACKAGES  = qemu-system-x86 busybox-static kmod xz-utils ipvsadm

.PHONY: build demo test test-unit test-lab test-apiserver test-vm bench lint deps deps-vm

build:
	go build -ldflags '$(LDFLAGS)' -o bin/fairlead ./cmd/fairlead

demo: deps build
	bin/fairlead demo --proxy-mode $(MODE)

test: deps lint test-unit test-lab test-apiserver

test-unit: deps build
	go test -timeout 15m $$(go list ./... | grep -vE '/(lab|story|demo|stories|vm)$$')

test-lab: deps build
	go test -p 1 -timeout 20m $(LAB)

test-apiserver: deps build
	cd test/apiserver && go run ./cmd/build testctl && \
	for m in iptables nftables; do FAIRLEAD_MODE=$$m go test -count=1 -timeout 10m -skip '^TestStories$$' . || exit 1; done && \
	go test -count=1 -timeout 15m -run '^TestStories$$' .

test-vm: deps-vm
	FAIRLEAD_VM_KERNEL=$(KERNEL) go test -tags vm -count=1 -timeout 40m ./test/vm

bench: deps build
	cd bench && go run . $(BENCH)

lint:
	@unformatted=$$(gofmt -l *.go cmd internal test examples bench); test -z "$$unformatted" || { echo "gofmt: $$unformatted"; exit 1; }
	go vet ./...
	go vet -tags vm ./test/vm

# $(call install,PROGRAMS,PACKAGES) sees to it that the programs are there.
define install
@missing=; for p in $(1); do command -v $$p >/dev/null || missing="$$missing $$p"; done; \
test -z "$$missing" && exit 0; \
if [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null; then \
	apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $(2) >/dev/null; \
else echo "missing:$$missing; install: $(2)"; exit 1; fi
endef

deps:
	$(call install,$(PROGRAMS),$(PACKAGES))

deps-vm: deps
	$(call install,$(VMPROGRAMS),$(VMPACKAGES))
	@apt-cache show $(KERNEL) >/dev/null 2>&1 || { test "$$(id -u)" = 0 && apt-get update -qq; } || { echo "apt knows no $(KERNEL): apt-get update"; exit 1; }
