package dir

import (
	"fmt"
	"strings"
	"testing"
)

// big is a file of n Services, each with a slice of 4 endpoints.
func big(n int) string {
	var b strings.Builder
	for i := range n {
		b.WriteString(web(fmt.Sprintf("s-%d", i), fmt.Sprintf("10.%d.%d.%d", 96+i>>16, i>>8&255, i&255)))
		fmt.Fprintf(&b, "---\napiVersion: discovery.k8s.io/v1\nkind: EndpointSlice\nmetadata: {name: s-%d, labels: {kubernetes.io/service-name: s-%[1]d}}\naddressType: IPv4\nports: [{port: 8080}]\nendpoints:\n", i)
		for e := range 4 {
			fmt.Fprintf(&b, "- {addresses: [10.%d.%d.%d], nodeName: n%d}\n", 128+e, i>>8&255, i&255, e)
		}
	}
	return b.String()
}

// A first reading: the cost is that of YAML.
func BenchmarkRead(b *testing.B) {
	text := []byte(big(1000))
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		merge(map[string]*file{"f.yaml": read(b, new(file), text)})
	}
}

// One endpoint of one slice changes in a big file: one document is read, the rest is split and hashed.
func BenchmarkEdit(b *testing.B) {
	text := big(5000)
	other := []byte(strings.Replace(text, "10.128.10.10]", "10.131.255.255]", 1))
	f := read(b, new(file), []byte(text))
	b.SetBytes(int64(len(text)))
	for i := 0; b.Loop(); i++ {
		now := other
		if i%2 == 1 {
			now = []byte(text)
		}
		merge(map[string]*file{"f.yaml": read(b, f, now)})
	}
}

func read(b *testing.B, f *file, text []byte) *file {
	if problems := f.read("f.yaml", text); len(problems) > 0 {
		b.Fatal(problems)
	}
	return f
}
