package main

import (
	"fmt"
	"slices"
	"strings"
)

// step is a part of a program's turn. Each line of the table belongs to one.
type step string

const (
	stepCold    step = "cold"    // always, and first
	stepSettle  step = "settle"  // memory, and the cost of doing nothing
	stepChanges step = "changes" // of endpoints, through the API
	stepConnect step = "connect" // what a connection costs
	stepRestart step = "restart" // with a change through the API meanwhile
	stepClean   step = "clean"   // always, and last
)

// steps are those that are done between the cold start and the clean-up, in this order.
type steps []step

var allSteps = steps{stepSettle, stepChanges, stepConnect, stepRestart}

func (s steps) String() string {
	words := make([]string, len(s))
	for i, one := range s {
		words[i] = string(one)
	}
	return strings.Join(words, ",")
}

// has tells whether a step is done.
func (s steps) has(one step) bool {
	return one == stepCold || one == stepClean || slices.Contains(s, one)
}

func (s steps) without(some ...step) steps {
	return slices.DeleteFunc(slices.Clone(s), func(one step) bool { return slices.Contains(some, one) })
}

// set takes a user's list; whatever its order, ours stays.
func (s *steps) set(text string) error {
	var wanted []step
	for word := range strings.SplitSeq(text, ",") {
		if !slices.Contains(allSteps, step(word)) {
			return fmt.Errorf("want some of %s", allSteps)
		}
		wanted = append(wanted, step(word))
	}
	*s = slices.DeleteFunc(slices.Clone(allSteps), func(one step) bool { return !slices.Contains(wanted, one) })
	return nil
}
