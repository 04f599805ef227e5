// Package kernel is the only room with system calls, netlink and exec. It knows nothing of the model: namespaces, netfilter
// messages and transactions, connection tracking, old iptables tables, sysctls, and programs to run.
package kernel
