package nftables

import "fairlead/internal/kernel"

// conn is the kernel's nf_tables, as [kernel.NFNetlink] speaks to it.
type conn interface {
	Commit(*kernel.NFBatch) error
	Dump(typ uint16, family uint8, attrs []byte, each func(kernel.NFMessage) error) error
	Get(typ uint16, family uint8, attrs []byte) (kernel.NFMessage, error)
	Close() error
}

var _ conn = (*kernel.NFNetlink)(nil)
