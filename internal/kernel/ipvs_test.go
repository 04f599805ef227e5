package kernel

import (
	"net/netip"
	"testing"
)

// What is written of a virtual server and a destination is read as it was.
func TestIPVSAttributes(t *testing.T) {
	first := func(b []byte) []byte {
		for _, v := range Attrs(b) {
			return v
		}
		return nil
	}
	for _, want := range []VirtualServer{
		{Mark: 0xfa100001},
		{V6: true, Mark: 7},
		{Addr: netip.MustParseAddrPort("10.96.0.1:80"), Proto: 6},
		{V6: true, Addr: netip.MustParseAddrPort("[fd00:96::1]:53"), Proto: 17},
	} {
		how := VirtualServerSettings{Scheduler: "wlc", Flags: IPVSPersistent | IPVSSched3, Timeout: 10800}
		got, gotHow := cutServer(first(appendServer(nil, want, &how)))
		if got != want || gotHow != how {
			t.Errorf("%v %+v is read as %v %+v", want, how, got, gotHow)
		}
	}
	for _, want := range []Destination{
		{Addr: netip.MustParseAddrPort("10.244.1.2:8080"), Weight: 1},
		{Addr: netip.MustParseAddrPort("[fd00:244::2]:65535"), Weight: 1 << 15},
	} {
		if got := cutDestination(first(appendDestination(nil, want, true)), false); got != want {
			t.Errorf("%+v is read as %+v", want, got)
		}
	}
}

// A test on a real kernel can make any write fail.
func TestAskFault(t *testing.T) {
	defer AskFault(nil)
	for when, want := range map[string]int{"": 1, "before": 0, "after": 1} {
		AskFault(func() string { return when })
		done := 0
		err := TryFault(func() error { done++; return nil })
		if done != want || (err == nil) != (when == "") {
			t.Errorf("%q: done %d times, %v", when, done, err)
		}
	}
}
