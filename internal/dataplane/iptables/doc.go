// Package iptables is the dataplane most clusters run: kube-proxy's own chains and names, in another shape.
//
// What differs from kube-proxy: KUBE-SERVICES and its like are trees of chains once there are many Services (tree.go), a
// change writes only the chains that it changes (apply.go), and with the nf_tables back end the rules go to the kernel by
// netlink, in one transaction over both tables and both families, without the iptables binary. The README draws the chains.
package iptables
