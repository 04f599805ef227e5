// Package apiserver holds the tests in which the proxy meets a real kube-apiserver and etcd, and its packets meet real
// netfilter. It is a module of its own, so that the product never requires k8s.io/kubernetes.
package apiserver
