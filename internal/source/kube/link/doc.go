// Package link is how requests reach the Kubernetes API, whatever changes on the way there: credentials, authorities, the
// kubeconfig, the address, the server behind it.
//
// A [Link] is an [net/http.RoundTripper]. The REST clients and the watches above it are made once and live as long as the
// program; below them the link replaces what it is made of, a [wire]: one set of settings, with its connections. So a new
// certificate costs each watch a request, with which it goes on where it was, and never a list.
//
// The rules:
//
//   - What the files say takes over when it is well-formed, valid now, and has been seen to work. Until then what there was
//     is used; both are tried, as long as it takes. (An authority that is taken out is the exception: no new connection
//     trusts it any more.)
//   - Files are read at a sign of the kernel, every ten seconds without one, and when the server refuses our credentials or
//     we its certificate; that request is asked once more if there was something new.
//   - A connection that is dead is noticed by a ping, a server that hangs by the pulse (see [Link.Run]), a watch that is
//     silent by the time. Each within a minute, also when no packet says so.
//   - A request that can't be sent goes to the next of the servers. The one that works stays in use.
//   - The Service kubernetes may be the way to the API and at the same time what the API tells us to make work. The link
//     remembers its endpoints and asks them directly when the Service fails.
package link
