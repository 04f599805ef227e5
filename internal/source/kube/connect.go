package kube

import "fairlead/internal/source/kube/link"

// Connection says where the API is and how to speak with it.
type Connection = link.Connection

// oneLine keeps the cause, and puts what it prints on one line.
func oneLine(err error) error { return link.OneLine(err) }
