package config

import (
	"maps"
	"os"
	"reflect"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"
)

// leaves gives all fields of both documents by their paths.
func leaves(v reflect.Value, document, path string, out map[string]reflect.Value) {
	if v.Kind() == reflect.Struct && !v.Addr().Type().Implements(marshaler) {
		for i := range v.NumField() {
			leaves(v.Field(i), document, fieldPath(path, v.Type().Field(i)), out)
		}
		return
	}
	out[document+path] = v
}

func all(c *Config) map[string]reflect.Value {
	out := map[string]reflect.Value{}
	leaves(reflect.ValueOf(&c.Proxy).Elem(), "", "", out)
	leaves(reflect.ValueOf(&c.Own).Elem(), ownPath, "", out)
	return out
}

// another makes a value of a field something else.
func another(t *testing.T, v reflect.Value) {
	t.Helper()
	switch v.Kind() {
	case reflect.String:
		v.SetString(v.String() + "x")
	case reflect.Bool:
		v.SetBool(!v.Bool())
	case reflect.Int32, reflect.Int64:
		v.SetInt(v.Int() + 1)
	case reflect.Uint32:
		v.SetUint(v.Uint() + 1)
	case reflect.Float32:
		v.SetFloat(v.Float() + 1)
	case reflect.Pointer:
		p := reflect.New(v.Type().Elem())
		if !v.IsNil() {
			p.Elem().Set(v.Elem())
		}
		another(t, p.Elem())
		v.Set(p)
	case reflect.Slice:
		v.Set(reflect.MakeSlice(v.Type(), v.Len()+1, v.Len()+1))
	case reflect.Map:
		v.Set(reflect.ValueOf(map[string]bool{AllowServiceExternalIPs: true}))
	case reflect.Struct:
		for i := range v.NumField() {
			if f := v.Field(i); f.CanSet() {
				another(t, f)
				return
			}
		}
		t.Fatalf("%v has nothing to change", v.Type())
	default:
		t.Fatalf("no other value for a %v", v.Type())
	}
}

// TestEveryFieldIsLiveOrReported: whatever field changes, it is taken up, or named as one that needs a restart and stays, or
// known to have no effect.
func TestEveryFieldIsLiveOrReported(t *testing.T) {
	old, err := from(t, proxyHead)
	if err != nil {
		t.Fatal(err)
	}
	known := all(old)
	for _, list := range []map[string]bool{live, idle, planes} {
		for name := range list {
			if _, ok := known[name]; !ok {
				t.Errorf("there is no field %s", name)
			}
		}
	}
	for name := range known {
		next, err := from(t, proxyHead)
		if err != nil {
			t.Fatal(err)
		}
		another(t, all(next)[name])
		u := old.Update(next)
		want, taken := []string{plain([]string{name})[0]}, all(u.Config)[name].Interface()
		switch {
		case live[name] && !idle[name]:
			if !slices.Equal(u.Changed, want) || u.Restart != nil || !reflect.DeepEqual(taken, all(next)[name].Interface()) {
				t.Errorf("%s is live, but: %+v", name, u)
			}
		case idle[name]:
			if u.Changed != nil || u.Restart != nil || u.Dataplane {
				t.Errorf("%s has no effect, but: %+v", name, u)
			}
		default:
			if !slices.Equal(u.Restart, want) || u.Changed != nil || u.Dataplane || !reflect.DeepEqual(taken, known[name].Interface()) {
				t.Errorf("%s needs a restart, but: %+v", name, u)
			}
		}
	}
}

// TestWhatFollowsIsSorted: a new field of Config must be put where it belongs.
func TestWhatFollowsIsSorted(t *testing.T) {
	follows := names("Proxy", "Own", "Mode", "Detect", "NodePort", "SyncPeriod", "MinSyncPeriod", "ResyncPeriod",
		"MasqueradeBit", "MasqueradeAll", "LocalhostPort", "Notes")
	for f := range reflect.TypeFor[Config]().Fields() {
		if follows[f.Name] == held[f.Name] {
			t.Errorf("Config.%s: does it follow from what is taken up live, or from what needs a restart (held)?", f.Name)
		}
	}
}

func TestUpdate(t *testing.T) {
	const before = proxyHead + "mode: iptables\nfeatureGates: {KubeProxyNFTablesLocalhostNodePorts: false}\n---\n" + ownHead + "controlSocket: /a\n"
	for _, tc := range []struct {
		name, after string
		want        Update
		effect      func(*Config) any
		is          any
	}{
		{"nothing", before, Update{}, func(c *Config) any { return c.Mode }, "iptables"},
		{"a comment", "# a comment\n" + before, Update{}, func(c *Config) any { return c.Own.ControlSocket }, "/a"},
		{"mode, and what nftables has as default", proxyHead + "mode: nftables\nfeatureGates: {KubeProxyNFTablesLocalhostNodePorts: false}\n---\n" + ownHead + "controlSocket: /a\n",
			Update{Changed: []string{"mode", "nodePortAddresses"}, Dataplane: true}, func(c *Config) any { return []any{c.Mode, c.NodePort.Primary} }, []any{"nftables", true}},
		{"the bit of this mode", before + "---\n", Update{}, func(c *Config) any { return c.MasqueradeBit }, 14},
		{"restart only", proxyHead + "mode: iptables\nhealthzBindAddress: 127.0.0.9:1\nhostnameOverride: n2\nfeatureGates: {}\n---\n" + ownHead + "controlSocket: /b\n",
			Update{Restart: []string{"featureGates", "healthzBindAddress", "controlSocket"}},
			func(c *Config) any { return []any{c.Node, c.Healthz, c.NoRelay, len(c.Gates), c.Own.ControlSocket} }, []any{"n1", "0.0.0.0:10256", true, 1, "/a"}},
		{"both", proxyHead + "mode: iptables\nfeatureGates: {KubeProxyNFTablesLocalhostNodePorts: false}\nbindAddress: 192.0.2.1\niptables: {masqueradeBit: 3, minSyncPeriod: 7s}\n",
			Update{Changed: []string{"iptables.masqueradeBit", "iptables.minSyncPeriod"}, Restart: []string{"bindAddress", "controlSocket"}, Dataplane: true},
			func(c *Config) any { return []any{c.MasqueradeBit, c.MinSyncPeriod, c.Proxy.BindAddress} }, []any{3, 7 * time.Second, "0.0.0.0"}},
		{"the bit of another mode", proxyHead + "mode: iptables\nfeatureGates: {KubeProxyNFTablesLocalhostNodePorts: false}\nnftables: {masqueradeBit: 3}\n---\n" + ownHead + "controlSocket: /a\n",
			Update{Changed: []string{"nftables.masqueradeBit"}}, func(c *Config) any { return c.MasqueradeBit }, 14},
	} {
		t.Run(tc.name, func(t *testing.T) {
			old, err := from(t, before)
			if err != nil {
				t.Fatal(err)
			}
			next, err := from(t, tc.after)
			if err != nil {
				t.Fatal(err)
			}
			u := old.Update(next)
			if got := tc.effect(u.Config); !reflect.DeepEqual(got, tc.is) {
				t.Errorf("in effect: %v, want %v", got, tc.is)
			}
			u.Config = nil
			if diff := cmp.Diff(tc.want, u); diff != "" {
				t.Errorf("-want +got:\n%s", diff)
			}
		})
	}
}

// TestReadAgain: reading again what did not change gives the same, whatever was asked in between.
func TestReadAgain(t *testing.T) {
	for _, args := range [][]string{
		nil, {"--proxy-mode=nftables"}, {"--healthz-bind-address=", "--metrics-port=0"}, {"--cluster-cidr=10.0.0.0/8", "--masquerade-all", "--vmodule=a=3"},
		{"--config=F"}, {"--config=F", "--proxy-mode=nftables", "--healthz-bind-address=", "--vmodule=a=3"},
	} {
		t.Chdir(t.TempDir())
		if err := os.WriteFile("F", []byte(proxyHead+"logging: {vmodule: [{filePattern: b, verbosity: 1}]}\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		o, fs := NewOptions(), pflag.NewFlagSet("run", pflag.ContinueOnError)
		o.AddFlags(fs)
		if err := fs.Parse(append(args, "--hostname-override=n1")); err != nil {
			t.Fatal(err)
		}
		read := func(mode string) *Config {
			c, err := o.For(mode)
			if err != nil {
				t.Fatalf("%v: %v", args, err)
			}
			return c
		}
		first, nft := read(""), read("nftables")
		if nft.Mode != "nftables" || !nft.NodePort.Primary {
			t.Errorf("%v: asked for nftables, got %s, %+v", args, nft.Mode, nft.NodePort)
		}
		for range 3 {
			if again := read(""); !reflect.DeepEqual(first, again) {
				t.Errorf("%v: read again:\n%s", args, cmp.Diff(first.Proxy, again.Proxy))
			}
			if again := read("nftables"); !reflect.DeepEqual(nft, again) {
				t.Errorf("%v: asked again for nftables:\n%s", args, cmp.Diff(nft.Proxy, again.Proxy))
			}
		}
	}
}

func TestPlanesAreLive(t *testing.T) {
	for name := range planes {
		if !live[name] {
			t.Errorf("%s is no live field", name)
		}
	}
	for _, name := range slices.Sorted(maps.Keys(live)) {
		if idle[name] {
			t.Errorf("%s is live and has no effect", name)
		}
	}
	if got := Live(); !slices.Contains(got, "resyncPeriod") || !slices.Contains(got, "mode") {
		t.Errorf("Live: %v", got)
	}
}
